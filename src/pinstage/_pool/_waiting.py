"""The line of those who wait for a slab."""

from __future__ import annotations

import contextlib
import numbers
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._accounts import Accounts, Waiter
from ._slab import Inbox

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the waiter whose turn it is. A release wakes it at once; an event that gets done and a
view that dies wake nobody (finalisers do no more than one call of C), so it looks again by itself."""

_GIVE_UP_SECONDS = 0.2
"""How often a waiter whose turn it is not looks whether its thread gives up."""


class _Here(threading.local):
    gives_up: Callable[[], bool] | None = None


_here = _Here()


def give_up_waiting_if(condition: Callable[[], bool]) -> None:
    """Have all later waits of this thread time out when a condition becomes true: nobody wants their slab any more."""
    _here.gives_up = condition


def check_timeout(timeout: object) -> None:
    """See that a timeout is a number of seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a number of seconds: {timeout!r}; pass such a number, or None to wait forever")
    if timeout < 0:
        raise ValueError(f"timeout must not be negative: {timeout}; 0 does not wait, None waits forever")


class Line:
    """Waiters, first come first served.

    Each looks for itself, with those before it in mind. What comes back wakes the first; where there are shares, which
    may let another one pass, each who finds nothing wakes the next.
    """

    def __init__(self, inbox: Inbox, accounts: Accounts) -> None:
        self.waits = 0
        self.seconds = 0.0
        self._inbox = inbox
        self._accounts = accounts

    def ring_all(self) -> None:
        """Let all look again."""
        for waiter in list(self._inbox.line):
            with contextlib.suppress(RuntimeError):  # rung already
                waiter.ring()

    def wait(
        self,
        me: Waiter,
        attempt: Callable[[Sequence[Waiter]], Any],
        timeout: float | None,
        timed_out: Callable[[int], Exception],
    ) -> Any:
        """Wait until an attempt brings something, and return that. Blocks.

        Args:
            me: who waits.
            attempt: called with those who have waited longer. What it raises ends the wait.
            timeout: seconds; None waits forever.
            timed_out: returns what is raised then; called with how many others wait.
        """
        start = time.monotonic()
        line = self._inbox.line
        pause, longest_pause = _POLL_SECONDS
        gives_up = _here.gives_up
        longest_in_line = threading.TIMEOUT_MAX if gives_up is None else _GIVE_UP_SECONDS
        try:
            line.append(me)
            self.waits += 1
            me.account.waits += 1
            while True:
                ahead = list(line)
                place = ahead.index(me)
                behind = ahead[place + 1 :]
                del ahead[place:]
                found = attempt(ahead)
                if found is not None:
                    return found
                if self._accounts.are_shared and behind:
                    with contextlib.suppress(RuntimeError):
                        behind[0].ring()
                left = threading.TIMEOUT_MAX if timeout is None else timeout - (time.monotonic() - start)
                if left <= 0 or (gives_up is not None and gives_up()):
                    raise timed_out(len(line) - 1)
                me.hear(timeout=min(left, longest_in_line if ahead else pause))
                if not ahead:
                    pause = min(2 * pause, longest_pause)
        finally:
            if me in line:  # not, if an interrupt came before it was; the next line is one call of C
                line.remove(me)
            self._inbox.ring()
            seconds = time.monotonic() - start
            self.seconds += seconds
            me.account.wait_seconds += seconds
