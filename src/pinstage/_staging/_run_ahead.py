"""How far the host may run ahead of the device."""

from __future__ import annotations

from collections import deque

from .._pool import Event
from ._targets import Target

RUN_AHEAD = 3
"""Batches whose work the device may have before it: with two it is never idle, one more evens out the host's delays."""


class RunAhead:
    """Keeps a loop that never waits for the device from queueing work, and so taking device memory, without end.

    Args:
        target: the device.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._used: deque[Event | None] = deque()  # what the consumer's streams had to do, batch by batch

    def bound(self) -> None:
        """Wait until the device has no more to do than the last `RUN_AHEAD` batches; called once for each batch."""
        self._used.append(self._target.record_current())
        if len(self._used) > RUN_AHEAD:
            event = self._used.popleft()
            if event is not None and not event.query():  # asking lets go of no interpreter lock
                event.synchronize()

    def forget(self) -> None:
        """Begin again with other batches."""
        self._used.clear()
