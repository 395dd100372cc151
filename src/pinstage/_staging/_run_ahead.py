"""How far the host may run ahead of the device."""

from __future__ import annotations

from collections import deque

from .._pool import Fence
from ._device import Target

RUN_AHEAD = 3
"""Batches whose work the device may have before it: with two it is never idle, one more evens out the host's delays."""


def check_depth(depth: int) -> int:
    """Return a number of batches to be staged ahead.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.
    """
    if not isinstance(depth, int):
        raise TypeError(f"depth must be an int: {depth!r}; it is the number of batches ahead")
    if depth < 0:
        raise ValueError(f"depth must not be negative: {depth}; 0 sends nothing ahead")
    return depth


class RunAhead:
    """Keeps a loop that never waits for the device from queueing work, and so taking device memory, without end.

    Args:
        target: the device.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._used: deque[Fence | None] = deque()  # what the consumer's streams had to do, batch by batch

    def bound(self) -> None:
        """Wait until the device has no more to do than the last `RUN_AHEAD` batches; called once for each batch."""
        self._used.append(self._target.record(self._target.consumer(None)))
        if len(self._used) > RUN_AHEAD:
            event = self._used.popleft()
            if event is not None and not event.query():  # asking lets go of no interpreter lock
                event.synchronize()

    def forget(self) -> None:
        """Begin again with other batches."""
        self._used.clear()
