"""The line of those who wait for a slab."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from ._slab import Inbox

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the waiter whose turn it is. A release wakes it at once; an event that gets done and a
view that dies wake nobody (finalisers do no more than one call of C), so it looks again by itself."""


class Line:
    """Waiters, first come first served.

    Each waits on a bell of its own, a lock: an interrupt may leave a `threading.Event` locked forever, and a
    `SimpleQueue` may take a short time-out for none at all (it waits on when the rest of the time is below zero).

    Args:
        inbox: has the bells.

    Attributes:
        waits: how many waited.
        seconds: that they waited in all.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.waits = 0
        self.seconds = 0.0
        self._bells = inbox.bells
        self._inbox = inbox

    def ring_all(self) -> None:
        """Let all look again."""
        for bell in list(self._bells):
            with contextlib.suppress(RuntimeError):  # rung already
                bell.release()

    def wait(self, attempt: Callable[[bool], Any], timeout: float | None, timed_out: Callable[[int], Exception]) -> Any:
        """Wait until an attempt brings something, and return that. Blocks.

        Args:
            attempt: called with whether it is the caller's turn. What it raises ends the wait.
            timeout: seconds; None waits forever.
            timed_out: returns what is raised then; called with how many others wait.
        """
        start = time.monotonic()
        bell = threading.Lock()
        bell.acquire()
        pause, longest_pause = _POLL_SECONDS
        try:
            self._bells.append(bell)
            self.waits += 1
            while True:
                my_turn = self._bells[0] is bell
                found = attempt(my_turn)
                if found is not None:
                    return found
                left = threading.TIMEOUT_MAX if timeout is None else timeout - (time.monotonic() - start)
                if left <= 0:
                    raise timed_out(len(self._bells) - 1)
                bell.acquire(timeout=min(left, pause if my_turn else threading.TIMEOUT_MAX))
                if my_turn:
                    pause = min(2 * pause, longest_pause)
        finally:
            if bell in self._bells:  # not, if an interrupt came before it was; the next line is one call of C
                self._bells.remove(bell)
            self._inbox.ring()
            self.seconds += time.monotonic() - start
