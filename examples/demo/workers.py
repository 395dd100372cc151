"""Times that loaders need to pass many small tensors between processes, real on a CPU too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from torch.utils.data import DataLoader

import pinstage as ps
from demo.batch import RaggedBatch

HOURS = 8
ROUNDS = 5
MOST_BATCHES = 10


def batch_milliseconds(batches: Sequence[RaggedBatch]) -> dict[str, float]:
    """Return the median time per batch of three loaders, which load the same hours' weather."""
    hours: Any = [sample.weather for batch in batches for sample in batch.samples]
    hours = hours[: HOURS * MOST_BATCHES]
    alone: dict[str, Any] = {"batch_size": HOURS, "collate_fn": list}
    workers = alone | {"num_workers": 2, "persistent_workers": True}
    with ps.DataLoader(hours, **workers, device="cpu") as ours:
        loaders = {
            "torch's DataLoader": DataLoader(hours, **workers),
            "ps.DataLoader": ours,
            "torch without workers": DataLoader(hours, **alone),
        }
        for loader in loaders.values():
            _seconds(loader)  # starts the workers
        rounds = [{name: _seconds(loaders[name]) for name in loaders} for _ in range(ROUNDS)]
    return {
        name: median(seconds[name] for seconds in rounds) / len(loaders[name]) * 1e3
        for name in loaders
    }


def _seconds(loader: Iterable[object]) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start
