"""Trains on a pipeline of torchdata.nodes, staged by its last node; can stop in the middle and
resume.

    python examples/frameworks/train_nodes.py
    python examples/frameworks/train_nodes.py --way plain                    # same losses
    python examples/frameworks/train_nodes.py --steps 5 --checkpoint /tmp/c  # stops after 5 ...
    python examples/frameworks/train_nodes.py --checkpoint /tmp/c            # ... resumes
    torchrun --nproc-per-node 2 examples/frameworks/train_nodes.py
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler
from torchdata.nodes import Batcher, Loader, ParallelMapper, SamplerWrapper
from visits import Model, Visits, collate, moved, options, ranks, report

import pinstage as ps
from pinstage.integrations.torchdata import Stage


def main() -> None:
    """Run one rank."""
    parser = options("Trains on a pipeline of torchdata.nodes.", "pinstage")
    parser.add_argument("--steps", type=int, help="stop this run after this many steps")
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to save to")
    arguments = parser.parse_args()
    with ranks() as (rank, count, device):
        torch.manual_seed(0)
        model: nn.Module = Model().to(device)
        if count > 1:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        dataset = Visits(64)
        sampler = DistributedSampler(dataset, num_replicas=count, rank=rank)
        node: Any = ParallelMapper(
            SamplerWrapper(sampler), dataset.__getitem__, num_workers=2, method="thread"
        )
        node = ParallelMapper(Batcher(node, 4), collate, num_workers=1, method="thread")
        stager = ps.Stager(device, max_bytes=arguments.max_bytes)
        if arguments.way == "pinstage":
            node = Stage(node, stager)
        loader: Any = Loader(node, restart_on_stop_iteration=False)

        epoch = 0
        saved = None if arguments.checkpoint is None else arguments.checkpoint / f"rank{rank}.pt"
        if saved is not None and saved.exists():
            state = torch.load(saved)
            epoch = state["epoch"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            torch.set_rng_state(state["random"])

        losses, samples = [], []
        while epoch < arguments.epochs:
            left = None if arguments.steps is None else arguments.steps - len(losses)
            for yielded in itertools.islice(loader, left):
                batch = yielded if arguments.way == "pinstage" else moved(yielded, device)
                optimizer.zero_grad()
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                samples.append(batch["index"].tolist())
            if len(losses) == arguments.steps:
                break
            epoch += 1
        if saved is not None:
            saved.parent.mkdir(exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            torch.save(state | {"epoch": epoch, "random": torch.get_rng_state()}, saved)
        report(arguments.out, rank, losses=losses, samples=samples, batches=stager.stats().batches)
        stager.close()


if __name__ == "__main__":
    main()
