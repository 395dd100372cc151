"""Time loops whose batches are produced ahead of them.

Workers make the steps of a loop uneven: it takes the batches that are ready, and then waits. The
median of such steps is one of two times, and neither is the loop's. So the figure is the total time
over the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from comparison.harness import Outcome, ok

PREFETCH_FACTOR = 2
"""Batches that each worker holds ready; torch's default."""
FEWEST = 4
"""The fewest untimed steps, and the fewest timed ones, however long they take."""
SETTLED = 2000
"""Untimed steps after which timing starts, even before `settle_seconds` have passed."""


class LoopTimer:
    """Measures the seconds per step of a loop, and the share of them in which the device was idle.

    A step lasts from the end of the step before to its own end, so it includes the wait for its
    batch. On a GPU the ends are events of the current stream. Nothing waits for them before the
    last one: in a pause, workers would get ahead.

    Args:
        device: the device of the loop.
        workers: the worker processes. Each holds `PREFETCH_FACTOR` batches ready. As many steps are
            untimed.
        repeats: the timed steps, or as many as batches are ready, if that is more.
        seconds: the untimed steps and the timed ones end after this time each, once they are
            `FEWEST`.
        settle_seconds: the first steps are untimed at least for this time, in which a loader
            page-locks its memory.
    """

    def __init__(
        self,
        device: torch.device,
        workers: int,
        *,
        repeats: int = FEWEST,
        seconds: float = math.inf,
        settle_seconds: float = 0.0,
    ) -> None:
        ready = PREFETCH_FACTOR * workers
        self._device = device
        self._untimed = max(ready, FEWEST)
        self._timed = max(ready, repeats)
        self._seconds = seconds
        self._settle_seconds = settle_seconds
        self._done = 0
        self._since = 0.0  # when the first step began, then when timing started
        # Of the last untimed step and all timed ones.
        self._marks: list[tuple[Any, Any]] = []

    @property
    def steps(self) -> int:
        """The most steps that the loop takes."""
        untimed = max(self._untimed, SETTLED) if self._settle_seconds else self._untimed
        return untimed + self._timed

    @property
    def timing(self) -> bool:
        """Whether the current step is timed."""
        return bool(self._marks)

    def begin(self) -> None:
        """Call this when a step's batch has arrived."""
        if not self._done:
            self._since = perf_counter()
        self._begun = self._mark()

    def end(self) -> bool:
        """Call this after a step. Return whether the loop has to go on."""
        passed = perf_counter() - self._since
        self._done += 1
        if self.timing:
            self._marks.append((self._begun, self._mark()))
            return not self._are_enough(len(self._marks) - 1, self._timed, passed)
        settled = passed >= self._settle_seconds or self._done >= SETTLED
        if settled and self._are_enough(self._done, self._untimed, passed):
            self._since = perf_counter()
            self._marks.append((self._begun, self._mark()))
        return True

    def _are_enough(self, steps: int, wanted: int, passed: float) -> bool:
        return steps >= wanted or (steps >= FEWEST and passed > self._seconds)

    def run(self, batches: Iterable[Any], step: Callable[[Any], Any]) -> None:
        """Take a step with each batch, until enough steps are timed."""
        for batch in batches:
            self.begin()
            step(batch)
            if not self.end():
                break

    def outcome(self, *said: str) -> Outcome:
        """Return the seconds per step as the only sample. Waits for the device.

        Args:
            said: more for the row's detail.

        Raises:
            RuntimeError: the loop ended before a step was timed.
        """
        timed = len(self._marks) - 1
        if timed < 1:
            raise RuntimeError(f"the loop ended after {self._done} steps, before timing started")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        total = self._between(self._marks[0][1], self._marks[-1][1])
        gaps = [self._between(end, begin) for (_, end), (begin, _) in pairwise(self._marks)]
        idle = f"GPU idle {sum(gaps) / total:.1%} of {timed} timed steps"
        return ok([total / timed], "; ".join([idle, *said]))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        if self._device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3
