"""The line of those who wait for a slab."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the waiter whose turn it is. A release wakes it at once; an event that gets done and a
view that dies wake nobody (finalisers take no lock), so it looks again by itself."""


class WaitingLine:
    """Waiters, first come first served.

    Args:
        lock: the pool's.

    Attributes:
        waiters: all of them, the one whose turn it is first. Read and changed under the lock.
        waits: how many there were.
        seconds: that they waited in all.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.waiters: deque[threading.Event] = deque()
        self.waits = 0
        self.seconds = 0.0
        self._lock = lock

    def wake_first(self) -> None:
        """Let the first one look again; under the lock."""
        if self.waiters:
            self.waiters[0].set()

    def wake_all(self) -> None:
        """Let all look again; under the lock."""
        for waiter in self.waiters:
            waiter.set()

    def wait(self, attempt: Callable[[bool], bool], timeout: float | None, too_late: Callable[[], Exception]) -> None:
        """Wait until an attempt succeeds; blocks without the lock.

        Args:
            attempt: called under the lock, with whether it is the caller's turn; says whether it succeeded. What it
                raises ends the wait.
            timeout: seconds; None waits for ever.
            too_late: returns what is raised then; called under the lock.
        """
        start = time.monotonic()
        waiter = threading.Event()
        pause, longest_pause = _POLL_SECONDS
        try:
            with self._lock:
                self.waiters.append(waiter)
                self.waits += 1
            while True:
                with self._lock:
                    my_turn = self.waiters[0] is waiter
                    if attempt(my_turn):
                        return
                    waiter.clear()
                    left = None if timeout is None else timeout - (time.monotonic() - start)
                    if left is not None and left <= 0:
                        raise too_late()
                if my_turn:
                    waiter.wait(pause if left is None else min(pause, left))
                    pause = min(2 * pause, longest_pause)
                else:
                    waiter.wait(left if left is None else min(left, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                if waiter in self.waiters:  # not, if an interrupt came before it was
                    self.waiters.remove(waiter)
                self.seconds += time.monotonic() - start
                self.wake_first()
