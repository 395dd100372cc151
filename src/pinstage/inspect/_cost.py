"""What pinstage takes to stage a batch, and what the profiler adds to each event: measured here, or a reference.

``pinstage doctor`` measures both on a GPU, and keeps them in a file of the user's cache directory. ``pinstage trace``
takes them for traces of such a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pinstage as ps

KEPT = "pinstage/costs.json"
_BATCHES, _ROUNDS = 8, 5
_SMALL, _MANY, _LARGE = (4, 256), (512, 64), (8, 1 << 20)  # leaves, and float32 elements of each
_CALLS = 300


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes a second."""

    fixed_seconds: float  # to stage any batch, whatever is in it
    leaf_seconds: float  # for each leaf
    pack_bytes_per_second: float  # of the bytes, until the call returns
    slab_bytes_per_second: float  # of the bytes, until they are on the device: packing and copying overlap
    op_seconds: float  # that the profiler adds to each operator or range that it records
    call_seconds: float  # that it adds to each call of CUDA
    source: str

    def host_seconds(self, leaves: int, nbytes: int) -> float:
        """Return how long the calling thread is busy with a batch."""
        return self.fixed_seconds + leaves * self.leaf_seconds + nbytes / self.pack_bytes_per_second

    def total_seconds(self, leaves: int, nbytes: int, bus: float) -> float:
        """Return how long it takes until a batch is on the device, over a bus of so many bytes a second."""
        slowest = min(self.pack_bytes_per_second, self.slab_bytes_per_second, bus)
        return self.fixed_seconds + leaves * self.leaf_seconds + nbytes / slowest


REFERENCE = Cost(
    fixed_seconds=52e-6,
    leaf_seconds=0.9e-6,
    pack_bytes_per_second=45e9,
    slab_bytes_per_second=32e9,
    op_seconds=0.45e-6,
    call_seconds=2.0e-6,
    source="an H200 with 16 cores",
)
"""Staging: from benchmarks/results/staging.json (commit 14f1610), its batches of 4 to 1,000 leaves and of 38 MiB. The
profiler: what makes the steps of tests/traces/naive and pinstage as long as those without it, in times.json."""


def cost_of(device_name: str | None) -> Cost:
    """Return what was measured here on such a GPU, else the reference."""
    found = _read().get(device_name or "")
    try:
        return REFERENCE if found is None else Cost(**found)
    except TypeError:  # a file of another version
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


def measure_cost(device: torch.device, count_events: Callable[[Path], tuple[int, int]]) -> Cost:
    """Measure it; about two seconds. The profiler comes last: what it puts into the driver may stay there.

    Args:
        device: where to; ``"cpu"`` runs the same code, for tests.
        count_events: says how many operators and calls of CUDA a trace has on the host.
    """
    with ps.Stager(device) as stager:
        small, many, large = (_stage_seconds(stager, *shape) for shape in (_SMALL, _MANY, _LARGE))
    leaf = max(many[0] - small[0], 0.0) / (_MANY[0] - _SMALL[0])
    fixed = max(small[1] - _SMALL[0] * leaf, 1e-6)
    nbytes = _LARGE[0] * _LARGE[1] * 4
    pack, slab = (nbytes / max(seconds - fixed - _LARGE[0] * leaf, 1e-6) for seconds in large)
    op, call = _profiler_seconds(device, count_events)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return Cost(fixed, leaf, pack, slab, op, call, f"{where}, by pinstage doctor on {time.strftime('%Y-%m-%d')}")


def _stage_seconds(stager: ps.Stager, leaves: int, elements: int) -> tuple[float, float]:
    """Return the medians until the call returns, and until the bytes are there; ragged batches, in turn."""
    batches = [{f"leaf{i}": torch.ones(elements + (i + shift) % 7) for i in range(leaves)} for shift in range(_BATCHES)]
    took: list[tuple[float, float]] = []
    for batch in batches * _ROUNDS:
        began = time.perf_counter()
        transfer = stager.stage(batch)
        transfer.get()
        returned = time.perf_counter()
        transfer.synchronize()
        took.append((returned - began, time.perf_counter() - began))
    host, total = zip(*took[_BATCHES:], strict=True)
    return statistics.median(host), statistics.median(total)


def _profiler_seconds(device: torch.device, count_events: Callable[[Path], tuple[int, int]]) -> tuple[float, float]:
    """Return what the profiler adds to each operator, and to each call of CUDA."""
    tiny = torch.ones(8)
    loops: list[Callable[[], Any]] = [tiny.clone, lambda: tiny.to(device, copy=True)]
    plain = [min(_seconds_of(loop) for _ in range(5)) for loop in loops]
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + [kinds.CUDA] * (device.type == "cuda")
    found: list[tuple[float, int, int]] = []
    for loop, without in zip(loops, plain, strict=True):
        with torch.profiler.profile(activities=activities) as profiler:
            added = min(_seconds_of(loop) for _ in range(5)) - without
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            ops, calls = count_events(path)
        found.append((max(added, 0.0), ops // 5, calls // 5))
    (added, ops, _), (more, more_ops, calls) = found
    op = added / max(ops, 1)
    return op, max(more - more_ops * op, 0.0) / calls if calls else REFERENCE.call_seconds


def _seconds_of(loop: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        loop()
    return time.perf_counter() - began
