"""Trains on shards that webdataset reads: in a `ps.DataLoader`, or in a `WebLoader` that ends in
`Stager.prefetch`.

    python examples/frameworks/train_webdataset.py
    python examples/frameworks/train_webdataset.py --way prefetch  # same losses
    python examples/frameworks/train_webdataset.py --way plain
    torchrun --nproc-per-node 2 examples/frameworks/train_webdataset.py
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch import nn
from visits import CODES, Batch, Model, Visits, moved, options, ranks, report

import pinstage as ps


def write(folder: Path, shards: int = 4, samples: int = 16) -> str:
    """Write shards, and return their URL pattern for webdataset."""
    for shard in range(shards):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as file:
            for index in range(shard * samples, (shard + 1) * samples):
                sample = Visits()[index]
                numbers = {
                    "codes.npy": sample["codes"].numpy(),
                    "signal.npy": sample["measured"]["signal"].numpy(),
                }
                rest = np.array([sample["measured"]["age"], sample["labels"]], dtype=np.float32)
                file.write(
                    {"__key__": f"{index:04}", "index.cls": index, "rest.npy": rest, **numbers}
                )
    return str(folder / f"{{0..{shards - 1}}}.tar")


def nested(sample: dict[str, Any]) -> Batch:
    """Return a sample in the form that `visits` uses."""
    age, label = torch.tensor(sample["rest.npy"])
    codes = torch.tensor(sample["codes.npy"])
    assert len(codes) == CODES
    measured = {"signal": torch.tensor(sample["signal.npy"]), "age": age}
    return {"index": sample["index.cls"], "measured": measured, "codes": codes, "labels": label}


def main() -> None:
    """Run one rank."""
    parser = options("Trains on shards that webdataset reads.", "pinstage", "prefetch")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with ranks() as (rank, count, device), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model: nn.Module = Model().to(device)
        if count > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        urls = write(Path(folder))
        dataset = wds.WebDataset(
            urls, nodesplitter=wds.split_by_node, shardshuffle=False, empty_check=False
        )
        dataset = (
            dataset.decode()
            .map(nested)
            .shuffle(16, seed=0)
            .batched(4, torch.utils.data.default_collate)
        )
        settings = {"batch_size": None, "num_workers": arguments.workers}
        staged: Any = None
        if arguments.way == "pinstage":  # workers pack
            loader = staged = ps.DataLoader(
                dataset, **settings, device=device, max_bytes=arguments.max_bytes
            )
        else:
            loader = wds.WebLoader(dataset, **settings)
        if arguments.way == "prefetch":  # a thread packs
            staged = ps.Stager(device, max_bytes=arguments.max_bytes)
            loader = loader.compose(partial(staged.prefetch, background=True))

        losses, samples = [], []
        for _ in range(arguments.epochs):
            for yielded in loader:
                batch = moved(yielded, device) if arguments.way == "plain" else yielded
                optimizer.zero_grad()
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                samples.append(batch["index"].tolist())
        batches = 0 if staged is None else staged.stats().batches
        report(arguments.out, rank, losses=losses, samples=samples, batches=batches)
        if staged is not None:
            staged.close()


if __name__ == "__main__":
    main()
