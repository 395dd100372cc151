"""The bound on how far the host runs ahead of the device."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from .._pool import Fence

RUN_AHEAD = 3
"""Number of batches whose work may be queued on the device. Two keep it busy; a third evens out the
host's delays.
"""


def check_depth(depth: int) -> int:
    """Check a number of batches to be staged ahead, and return it.

    Raises:
        TypeError: it isn't an int.
        ValueError: it is negative.
    """
    if not isinstance(depth, int):
        raise TypeError(f"depth must be an int: {depth!r}; it is the number of batches ahead")
    if depth < 0:
        raise ValueError(f"depth must not be negative: {depth}; 0 sends nothing ahead")
    return depth


def check_run_ahead(run_ahead: int | None) -> int | None:
    """Check the number of batches that the host may be ahead of the device, and return it; None if
    there is no bound.

    Raises:
        TypeError: it is neither an int nor None.
        ValueError: it is less than 1.
    """
    if run_ahead is not None and (isinstance(run_ahead, bool) or not isinstance(run_ahead, int)):
        raise TypeError(
            f"run_ahead must be an int or None: {run_ahead!r}; it is a number of batches"
        )
    if run_ahead is not None and run_ahead < 1:
        raise ValueError(f"run_ahead must be at least 1: {run_ahead}; None sets no bound")
    return run_ahead


class RunAhead:
    """Keeps a loop that never waits for the device from queueing work, and so taking device memory,
    without end.

    Args:
        most: number of batches whose work may be queued on each stream.
    """

    def __init__(self, most: int = RUN_AHEAD) -> None:
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
