"""The steps of staging, which torch's profiler shows and `step_times` times.

The overhead is negligible while neither is in use.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import _native
from ._compat.calls import is_profiling

NOTHING: AbstractContextManager[Any] = _native.core.Nothing()
"""A reusable context that does nothing."""
_open: dict[StepTimes, None] = {}
"""The open blocks of `step_times`, in the order in which they began."""
_lock = threading.RLock()  # a finaliser may end a step, too


def step_times() -> StepTimes:
    """Time the steps of pinstage while a block runs, in all threads of this process.

    ```python
    with ps.inspect.step_times() as steps:
        for batch in stager.prefetch(source):
            train_step(batch)
    print(steps)
    ```

    Blocks may overlap; each counts all steps that end while it runs. Steps in worker processes
    aren't counted. torch's profiler shows the same steps as ranges, named ``pinstage.walk`` and so
    on.
    """
    return StepTimes()


@dataclass(slots=True)
class StepTime:
    """The calls and the time of one step."""

    calls: int = 0
    seconds: float = 0.0
    """Summed over threads, so it may exceed the time that the block took."""


class StepTimes:
    """Time spent in each step, by the host's clock; see `step_times`.

    ``stage``, ``hand_over`` and ``fetch`` are whole calls, the others are parts of these: ``walk``
    takes a batch apart, ``describe`` finds its offset table, ``acquire`` takes a slab, ``pack``
    moves bytes (and issues the copies of a batch below 1 MiB), ``gather`` moves bytes on a device,
    ``copy`` issues copies, ``views`` makes the tensors of a batch, ``unflatten`` puts the batch
    together, ``wait`` waits for copies to the host, ``loader.wait`` for a loader's workers.
    """

    def __init__(self) -> None:
        self.times: dict[str, StepTime] = {}
        """The steps that ran, in the order in which they first ended."""

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return calls and seconds of each step, for programs."""
        with _lock:
            return {name: asdict(step_time) for name, step_time in self.times.items()}

    def __enter__(self) -> StepTimes:
        _open[self] = None
        return self

    def __exit__(self, *raised: object) -> None:
        _open.pop(self, None)

    def __str__(self) -> str:
        lines = [f"{'step':<12}{'calls':>10}{'ms':>12}{'us per call':>12}"]
        for name, step_time in self.to_dict().items():
            calls, seconds = step_time["calls"], step_time["seconds"]
            each = seconds / calls * 1e6
            lines.append(f"{name:<12}{calls:>10}{seconds * 1e3:>12.3f}{each:>12.1f}")
        return "\n".join(lines)


class _Step:
    __slots__ = ("_began", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name
        self._range: Any = NOTHING
        if is_profiling():
            self._range = torch.profiler.record_function(f"pinstage.{name}")

    def __enter__(self) -> None:
        self._range.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *raised: Any) -> None:
        seconds = time.perf_counter() - self._began
        self._range.__exit__(*raised)
        with _lock:
            for block in list(_open):
                step_time = block.times.setdefault(self._name, StepTime())
                step_time.calls += 1
                step_time.seconds += seconds


def step(name: str) -> AbstractContextManager[Any]:
    """Return the context of one step. Its range in a profile is ``pinstage.<name>``."""
    return _Step(name) if _open or is_profiling() else NOTHING
