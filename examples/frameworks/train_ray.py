"""Trains with Ray: a dataset that Ray Data reads, in the workers of a `TorchTrainer`, on this
machine or many.

    python examples/frameworks/train_ray.py               # two workers
    python examples/frameworks/train_ray.py --way plain   # Ray's own way, same losses
    python examples/frameworks/train_ray.py --way loader  # torch's loader instead of Ray Data
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.data import DataContext
from ray.data.collate_fn import NumpyBatchCollateFn
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader
from visits import Batch, Model, Visits, collate, moved, options, report

from pinstage.integrations.ray import StageBatches


class Nested(NumpyBatchCollateFn):
    """Makes nested batches from the columns."""

    def __call__(self, batch: dict[str, np.ndarray]) -> Batch:
        """Return a batch as `visits.collate` would."""
        return {
            "index": torch.tensor(batch["index"]),
            "measured": {
                "signal": torch.tensor(batch["signal"]),
                "age": torch.tensor(batch["age"]),
            },
            "codes": torch.tensor(batch["codes"]),
            "labels": torch.tensor(batch["labels"]),
        }


def batches_of(way: str, stage: StageBatches, epoch: int) -> Iterator[Batch]:
    """Yield one epoch of this worker's batches on its device."""
    device = get_device()
    if way in ("pinstage", "plain"):  # batches from Ray Data
        shard = ray.train.get_dataset_shard("train")
        if way == "pinstage":
            yield from stage.iter_torch_batches(shard, batch_size=4, collate_fn=Nested())
        else:
            for batch in shard.iter_torch_batches(batch_size=4, collate_fn=Nested()):
                yield moved(batch, device)
        return
    loader: Any = DataLoader(Visits(64), 4, shuffle=True, collate_fn=collate)
    loader = prepare_data_loader(loader, move_to_device=False)
    loader.sampler.set_epoch(epoch)
    for batch in stage.stager.prefetch(loader) if way == "loader" else loader:
        yield moved(batch, device)


def train(config: dict[str, Any]) -> None:
    """Train in each way; runs in each worker."""
    rank = ray.train.get_context().get_world_rank()
    for way in config["ways"]:
        stage = copy.copy(config["stage"])
        torch.manual_seed(0)
        model = prepare_model(Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, samples = [], []
        for epoch in range(config["epochs"]):
            for batch in batches_of(way, stage, epoch):
                optimizer.zero_grad()
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                samples.append(batch["index"].tolist())
        out = None if config["out"] is None else config["out"] / way
        report(out, rank, losses=losses, samples=samples, batches=stage.stats().batches)


def rows(samples: int) -> list[dict[str, Any]]:
    """Return the samples, flat, as rows of a table."""
    found = []
    for index in range(samples):
        sample = Visits()[index]
        measured = {name: np.asarray(part) for name, part in sample["measured"].items()}
        found.append(
            {
                "index": index,
                "codes": sample["codes"].numpy(),
                "labels": sample["labels"].numpy(),
                **measured,
            }
        )
    return found


@contextmanager
def cluster() -> Iterator[None]:
    """Run a small cluster on this machine."""
    found = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=3,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": found}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def fit(ways: list[str], epochs: int, max_bytes: int | str, out: Path | None) -> None:
    """Train on the running cluster."""
    # Otherwise each run splits differently.
    DataContext.get_current().execution_options.preserve_order = True
    settings = {
        "ways": ways,
        "epochs": epochs,
        "out": out,
        "stage": StageBatches(max_bytes=max_bytes),
    }
    TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        datasets={"train": ray.data.from_items(rows(64), override_num_blocks=4)},
    ).fit()


def main() -> None:
    """Train in one way."""
    arguments = options("Trains with Ray.", "pinstage", "loader", "plain-loader").parse_args()
    with cluster():
        fit([arguments.way], arguments.epochs, arguments.max_bytes, arguments.out)


if __name__ == "__main__":
    main()
