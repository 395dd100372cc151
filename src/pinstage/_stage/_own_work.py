"""The share of a pass over a loader in which the main process reads and packs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")

_LARGE_SHARE = 0.2
"""The share of a pass from which on it is worth letting workers pack."""

_LEAST_SECONDS = 0.02
"""Less work than this isn't worth a change of the program, whatever its share of a short pass."""


class OwnWork:
    """The time that a pass spends on reading and packing in this process, after its first batch.

    Only CPU time of the reading thread counts, so waiting for workers doesn't. The first batch
    doesn't count either: it starts workers and page-locks slabs.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.seconds = 0.0
        self._began = time.perf_counter()

    def timed(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that does the same, and counts its CPU time."""

        def call(*args: object) -> R:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - began

        return call

    def too_much(self) -> str | None:
        """Return the work and the time of the pass until now, in words; None if it is a small part
        of it.
        """
        total = time.perf_counter() - self._began
        if self.seconds < _LEAST_SECONDS or self.seconds <= _LARGE_SHARE * total:
            return None
        return f"{self.seconds:.2f} s of a pass of {total:.2f} s"
