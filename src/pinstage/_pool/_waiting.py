"""The line of requests that wait for a slab."""

from __future__ import annotations

import contextlib
import numbers
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ._accounts import Accounts, Waiter

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the first in line. A release wakes it at once. Finished events and freed views
wake no thread, so it looks again by itself."""

_GIVE_UP_SECONDS = 0.2
"""Poll interval of the other threads for giving up."""


class _Here(threading.local):
    gives_up: Callable[[], bool] | None = None


_here = _Here()


def give_up_waiting_if(condition: Callable[[], bool]) -> None:
    """Let later waits of this thread time out when a condition becomes true: their slab isn't wanted any longer."""
    _here.gives_up = condition


def check_timeout(timeout: object) -> None:
    """See that a timeout is a number of seconds.

    Raises:
        TypeError: it isn't a number.
        ValueError: it is negative.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a number of seconds: {timeout!r}; pass such a number, or None to wait forever")
    if timeout < 0:
        raise ValueError(f"timeout must not be negative: {timeout}; 0 does not wait, None waits forever")


class Line:
    """Waiters, first come first served.

    Each looks for itself, with those before it in mind. A release wakes the first; where there are quotas, which may
    let another one pass, each that finds nothing wakes the next.

    Attributes:
        waiters: ordered by age, the oldest first.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.waiters: deque[Waiter] = deque()

    def wake_first(self) -> None:
        """Let the first look again. Finalisers call this."""
        try:  # noqa: SIM105 - contextlib.suppress is Python, where an interrupt may come
            self.waiters[0].wake()
        except (IndexError, RuntimeError):
            pass  # no thread waits, or it is awake

    def wake_all(self) -> None:
        """Let all look again."""
        for waiter in list(self.waiters):
            with contextlib.suppress(RuntimeError):
                waiter.wake()

    def wait(
        self,
        me: Waiter,
        attempt: Callable[[Waiter, Sequence[Waiter]], Any],
        timeout: float | None,
        timed_out: Callable[[int], Exception],
    ) -> Any:
        """Wait until an attempt brings something, and return that. Blocks.

        Args:
            me: who waits.
            attempt: called with `me` and those who have waited longer. Its exception ends the wait.
            timeout: seconds; None waits forever.
            timed_out: returns the exception to raise then; called with how many others wait.
        """
        start, waits = time.monotonic(), 0
        waiters = self.waiters
        pause, longest_pause = _POLL_SECONDS
        gives_up = _here.gives_up
        longest_in_line = threading.TIMEOUT_MAX if gives_up is None else _GIVE_UP_SECONDS
        try:
            waiters.append(me)
            while True:
                ahead = list(waiters)
                place = ahead.index(me)
                behind = ahead[place + 1 :]
                del ahead[place:]
                found = attempt(me, ahead)
                if found is not None:
                    return found
                if not waits:
                    waits = 1
                    me.account.waits += 1
                if self._accounts.have_quotas and behind:
                    with contextlib.suppress(RuntimeError):
                        behind[0].wake()
                left = threading.TIMEOUT_MAX if timeout is None else timeout - (time.monotonic() - start)
                if left <= 0 or (gives_up is not None and gives_up()):
                    raise timed_out(len(waiters) - 1)
                me.sleep(timeout=min(left, longest_in_line if ahead else pause))
                if not ahead:
                    pause = min(2 * pause, longest_pause)
        finally:
            if me in waiters:  # not, if an interrupt came before it was; the next line is one call of C
                waiters.remove(me)
            self.wake_first()
            me.account.wait_seconds += waits * (time.monotonic() - start)
