"""The steps of staging, as torch's profiler shows them and as `profile` times them.

A step costs next to nothing while neither looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _native
from ._torch import is_profiling

if TYPE_CHECKING:
    from types import TracebackType

NOTHING: AbstractContextManager[Any] = _native.core.Nothing()
"""A context that does nothing, again and again."""
_timed: dict[int, StepTimes] = {}  # by thread


def profile() -> StepTimes:
    """Time the steps of pinstage in this thread while a block runs.

    ::

        with ps.profile() as steps:
            for batch in batches:
                train_step(stager.to_device(batch))
        print(steps)

    torch's profiler shows the same steps as ranges, named ``pinstage.walk`` and so on.
    """
    return StepTimes()


@dataclass(slots=True)
class StepTime:
    """The calls and the time of one step."""

    calls: int = 0
    seconds: float = 0.0


class StepTimes:
    """Time spent in each step, by the clock of the host; see `profile`.

    ``stage``, ``hand_over`` and ``fetch`` are whole calls, the others are parts of these: ``walk`` takes a batch apart,
    ``describe`` finds its offset table, ``acquire`` takes a slab, ``pack`` moves bytes (and issues the copies of a
    batch below 1 MiB), ``gather`` moves bytes on a device, ``copy`` issues copies, ``views`` makes the tensors of a
    batch, ``unflatten`` puts the batch together, ``wait`` waits
    for copies to the host, ``loader.wait`` for a loader's workers.
    """

    def __init__(self) -> None:
        self._times: dict[str, StepTime] = {}
        self._before: StepTimes | None = None

    @property
    def times(self) -> dict[str, StepTime]:
        """Each step that ran, in the order in which they first ended."""
        return self._times

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return calls and seconds of each step, for programs."""
        return {name: {"calls": found.calls, "seconds": found.seconds} for name, found in self._times.items()}

    def __enter__(self) -> StepTimes:
        thread = threading.get_ident()
        self._before = _timed.get(thread)
        _timed[thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = threading.get_ident()
        if self._before is None:
            _timed.pop(thread, None)
        else:
            _timed[thread] = self._before

    def _add(self, name: str, seconds: float) -> None:
        found = self._times.setdefault(name, StepTime())
        found.calls += 1
        found.seconds += seconds

    def __str__(self) -> str:
        lines = [f"{'step':<12}{'calls':>10}{'ms':>12}{'us a call':>12}"]
        for name, found in self._times.items():
            each = found.seconds / found.calls * 1e6
            lines.append(f"{name:<12}{found.calls:>10}{found.seconds * 1e3:>12.3f}{each:>12.1f}")
        return "\n".join(lines)


class _Step:
    __slots__ = ("_began", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name
        self._range: Any = torch.profiler.record_function(f"pinstage.{name}") if is_profiling() else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *raised: Any) -> None:
        seconds = time.perf_counter() - self._began
        if self._range is not None:
            self._range.__exit__(*raised)
        times = _timed.get(threading.get_ident())
        if times is not None:
            times._add(self._name, seconds)


step: Callable[[str], AbstractContextManager[Any]] = _native.core.steps(_timed, is_profiling, _Step, NOTHING)
"""Returns the context of one step, by its name. Its range in a profile is ``pinstage.<name>``."""
