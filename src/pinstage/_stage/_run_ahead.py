"""The bound on how far the host runs ahead of the device."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from .._pool import Fence

RUN_AHEAD = 3
"""Number of batches whose work may be queued on the device. Two keep it busy; a third evens out the
host's delays.
"""


def check_depth(depth: int) -> None:
    """Check a number of batches to be staged ahead.

    Raises:
        TypeError: it isn't an int.
        ValueError: it is negative.
    """
    if not isinstance(depth, int):
        raise TypeError(f"depth must be an int: {depth!r}; it is the number of batches ahead")
    if depth < 0:
        raise ValueError(f"depth must not be negative: {depth}; 0 sends nothing ahead")


class RunAhead:
    """Keeps a loop that never waits for the device from queueing work, and so taking device memory,
    without end.

    Args:
        most: number of batches whose work may be queued on each stream.

    Raises:
        TypeError: `most` isn't an int.
        ValueError: `most` is less than 1.
    """

    def __init__(self, most: int = RUN_AHEAD) -> None:
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(
                f"run_ahead must be an int or None: {most!r}; it is a number of batches"
            )
        if most < 1:
            raise ValueError(f"run_ahead must be at least 1: {most}; None sets no bound")
        self._most = most
        # By stream, batch by batch.
        self._used: defaultdict[Any, deque[Fence | None]] = defaultdict(deque)

    def bound(self, event: Fence | None, stream: Any = None) -> None:
        """Wait until a stream has only the work of the last `most` batches to do. Called once for
        each batch.

        Args:
            event: an event behind the work of this batch, or of earlier ones; None for a device
                without streams.
            stream: the consumer's stream.
        """
        used = self._used[stream]
        used.append(event)
        if len(used) > self._most:
            event = used.popleft()
            if event is not None and not event.query():  # `query` keeps the interpreter lock
                event.synchronize()

    def forget(self) -> None:
        """Begin again with other batches."""
        self._used.clear()
