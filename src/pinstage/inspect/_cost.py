"""What pinstage takes to stage a batch in a training loop: measured here, or a reference.

``pinstage doctor`` measures it on a GPU, and keeps it in a file of the user's cache directory. ``pinstage trace`` and
``pinstage audit`` take it for such a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pinstage as ps

from ._report import clean

KEPT = "pinstage/costs.json"
_BATCHES, _ROUNDS = 8, 5
_SMALL, _MANY, _LARGE = (4, 8192), (512, 64), (8, 1 << 20)  # leaves, and float32 elements of each: all take a slab
_LAYERS, _WIDTH, _WIDTH_ON_CPU = 20, 1024, 32  # of the step between two batches: about 1 ms on a large GPU


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes a second."""

    fixed_seconds: float  # to stage any batch, whatever is in it
    leaf_seconds: float  # for each leaf
    bytes_per_second: float  # of the bytes: packing and copying overlap
    source: str

    def seconds(self, leaves: int, nbytes: int, bus: float) -> float:
        """Return how long it takes to stage a batch, over a bus of so many bytes a second."""
        return self.fixed_seconds + leaves * self.leaf_seconds + nbytes / min(self.bytes_per_second, bus)


REFERENCE = Cost(250e-6, 0.7e-6, 42e9, source="an H200 with 16 cores")
"""A leaf: by pinstage doctor on one H200; on that of tests/traces/loops it found 0.95 us. The bytes: 16 leaves of
16 MiB in benchmarks/results/staging.json. The fixed part is fitted to an earlier recording of those loops of
tests/traces/loops that are not kept out: 0.2 ms fit best, and a promise errs on the low side. It takes less than 0.1 ms
where batches are staged one after the other, without a training step between them, and least up to 64 KiB."""


def cost_of(device_name: str | None) -> Cost:
    """Return what was measured here on such a GPU, else the reference."""
    return cost_from(_read().get(device_name or ""))


def cost_from(found: Any) -> Cost:
    """Return a cost that was written down, or the reference if it's none, of another version, or impossible."""
    try:
        cost = Cost(**found)
        figures: list[Any] = [cost.fixed_seconds, cost.leaf_seconds, cost.bytes_per_second]
        if all(0 < figure <= sys.float_info.max for figure in figures):
            return dataclasses.replace(cost, source=clean(cost.source))
    except (AttributeError, TypeError):
        pass
    return REFERENCE


def keep(device_name: str, cost: Cost) -> Path:
    """Write down what was measured on a GPU; return the file.

    Raises:
        OSError: the file cannot be written.
    """
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read() | {device_name: dataclasses.asdict(cost)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(known, file, indent=2)
    Path(file.name).replace(path)  # whole or not at all, whoever else writes
    return path


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / KEPT


def _read() -> dict[str, Any]:
    try:
        known = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, not ours, or no home directory
        return {}
    return known if isinstance(known, dict) else {}


def measure_cost(device: torch.device) -> Cost:
    """Measure it, with a step of a small model between two batches; about a second.

    Args:
        device: where to; ``"cpu"`` runs the same code, for tests.
    """
    with ps.Stager(device) as stager:
        small, many, large = (_stage_seconds(stager, device, *shape) for shape in (_SMALL, _MANY, _LARGE))
    leaf = max(many - small, 1e-9) / (_MANY[0] - _SMALL[0])
    fixed = max(small - _SMALL[0] * leaf, 1e-6)
    rate = _LARGE[0] * _LARGE[1] * 4 / max(large - fixed - _LARGE[0] * leaf, 1e-6)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return Cost(fixed, leaf, rate, f"{where}, by pinstage doctor on {time.strftime('%Y-%m-%d')}")


def _stage_seconds(stager: ps.Stager, device: torch.device, leaves: int, elements: int) -> float:
    """Return the median until a batch is on the device; ragged batches, in turn."""
    batches = [{f"leaf{i}": torch.ones(elements + (i + shift) % 7) for i in range(leaves)} for shift in range(_BATCHES)]
    width = _WIDTH if device.type == "cuda" else _WIDTH_ON_CPU
    weights = torch.eye(width, device=device)
    took: list[float] = []
    for batch in batches * _ROUNDS:
        hidden = weights
        for _ in range(_LAYERS):
            hidden = torch.relu(hidden @ weights)
        hidden.mean().item()
        began = time.perf_counter()
        transfer = stager.stage(batch)
        transfer.get()
        transfer.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[_BATCHES:])
