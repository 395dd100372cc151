"""Trains with Ray: a dataset that Ray Data reads, in the workers of a `TorchTrainer`, on this machine or many.

    python examples/frameworks/train_ray.py                                   # two workers
    python examples/frameworks/train_ray.py --way plain                       # Ray's own way, same losses
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.data import DataContext
from ray.data.collate_fn import NumpyBatchCollateFn
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from visits import Batch, Model, Visits, collate, moved, options, report

from pinstage.integrations.ray import StageBatches


class Nested(NumpyBatchCollateFn):
    """Makes nested batches of the columns."""

    def __call__(self, batch: dict[str, np.ndarray]) -> Batch:
        """Return a batch as `visits.collate` would."""
        return {
            "index": torch.tensor(batch["index"]),
            "measured": {"signal": torch.tensor(batch["signal"]), "age": torch.tensor(batch["age"])},
            "codes": torch.tensor(batch["codes"]),
            "labels": torch.tensor(batch["labels"]),
        }


def train(config: dict[str, Any]) -> None:
    """Train; runs in each worker."""
    torch.manual_seed(0)
    device, shard = get_device(), ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage: StageBatches = config["stage"]
    losses, samples = [], []
    for _ in range(config["epochs"]):
        if config["way"] == "pinstage":
            batches = stage.iter_torch_batches(shard, batch_size=4, collate_fn=Nested())
        else:
            batches = (moved(batch, device) for batch in shard.iter_torch_batches(batch_size=4, collate_fn=Nested()))
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            samples.append(batch["index"].tolist())
    staged = stage.stats().batches
    report(config["out"], rank, losses=losses, samples=samples, batches=staged, pid=os.getpid())


def rows(samples: int) -> list[dict[str, Any]]:
    """Return the samples, flat, as rows of a table."""
    found = []
    for index in range(samples):
        sample = Visits()[index]
        measured = {name: np.asarray(part) for name, part in sample["measured"].items()}
        found.append({"index": index, "codes": sample["codes"].numpy(), "labels": sample["labels"].numpy(), **measured})
    return found


def main() -> None:
    """Start a cluster of this machine, train on it, and end it."""
    arguments = options("Trains with Ray.", "pinstage").parse_args()
    here = str(Path(__file__).parent)
    ray.init(
        num_cpus=3, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}},
    )  # fmt: skip
    try:
        DataContext.get_current().execution_options.preserve_order = True  # else which worker has what is left to chance
        settings = {"way": arguments.way, "epochs": arguments.epochs, "out": arguments.out}
        trainer = TorchTrainer(
            train,
            train_loop_config=settings | {"stage": StageBatches(max_bytes=arguments.max_bytes)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            datasets={"train": ray.data.from_items(rows(64), override_num_blocks=4)},
        )
        trainer.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
