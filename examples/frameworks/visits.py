"""Shared parts of the programs in this folder: small nested data, a model, options and reports."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, default_collate

Batch = dict[str, Any]
CODES = 6
"""Codes per visit; shorter lists are padded with 0."""


class Visits(Dataset[Batch]):
    """Samples that are nested dictionaries of tensors, determined by their index."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        codes = torch.zeros(CODES, dtype=torch.int64)
        codes[: 1 + index % CODES] = torch.randint(1, 50, (1 + index % CODES,), generator=generator)
        measured = {
            "signal": torch.randn(16, generator=generator),
            "age": torch.rand((), generator=generator),
        }
        return {
            "index": index,
            "measured": measured,
            "codes": codes,
            "labels": torch.rand((), generator=generator),
        }


def collate(samples: list[Batch]) -> Batch:
    """Stack samples; at module level, so that workers can be spawned."""
    batch: Batch = default_collate(samples)
    return batch


class Model(nn.Module):
    """Predicts how long a visit takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 8, mode="sum")
        self.layers = nn.Sequential(
            nn.Linear(16 + 1 + 8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        )

    def forward(
        self, measured: Batch, codes: torch.Tensor, labels: torch.Tensor, **others: object
    ) -> torch.Tensor:
        """Return the loss, float32 `[]`, of the parts of a batch."""
        del others
        inputs = torch.cat(
            [measured["signal"], measured["age"].unsqueeze(1), self.embedding(codes)], dim=1
        )
        return nn.functional.mse_loss(self.layers(inputs).squeeze(1), labels)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with each of its tensors on a device: one `.to()` each, the plain way."""
    if isinstance(batch, dict):
        return {name: moved(part, device) for name, part in batch.items()}
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch


@contextmanager
def ranks() -> Iterator[tuple[int, int, torch.device]]:
    """Join torchrun's processes, if there are any; yield the rank, the number of ranks and the
    device.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield rank, count, device
    finally:
        if count > 1:
            dist.destroy_process_group()


def options(description: str, *ways: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--way", choices=[*ways, "plain"], default=ways[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-bytes", default="auto", help="cap on page-locked memory")
    parser.add_argument("--out", type=Path, help="a folder for the report of each rank, as JSON")
    return parser


def report(out: Path | None, rank: int, **found: Any) -> None:
    """Print a rank's results, and save them."""
    print(f"rank {rank}: {found}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"rank{rank}.json").write_text(json.dumps(found))
