"""The owners of a pool's leases, their quotas, and the line of requests that wait."""

from __future__ import annotations

import _thread
import contextlib
import numbers
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._sizes import round_up

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the first in line. A release wakes it at once. Finished events and freed views
wake no thread, so it looks again by itself."""

_GIVE_UP_SECONDS = 0.2
"""Poll interval of the other threads for giving up."""


@dataclass(slots=True, eq=False)
class Account:
    """The bytes of one owner, and its quota."""

    name: str
    largest: int = 0
    """The largest slab that it can ever get."""
    busy_bytes: int = 0
    """Of its slabs, leased and in flight, and of those that are being allocated for it; as of the last `room`."""
    min_bytes: int = 0
    """Bytes that no other owner may have; 0 for no guarantee."""
    max_bytes: int | None = None
    """Bytes that it may have; None for no limit but the pool's cap."""
    waits: int = 0
    """Number of its requests that waited."""
    wait_seconds: float = 0.0


class Waiter:
    """A waiting request. `sleep` waits until `wake`, which raises RuntimeError if the last wake-up is still unheard.

    The wake-up is the release of a lock: an interrupt may leave a `threading.Event` locked forever, and a `SimpleQueue`
    may take a short time-out for none at all (it waits on when the rest of the time is below zero).
    """

    __slots__ = ("account", "nbytes", "sleep", "wake")

    def __init__(self, account: Account, nbytes: int) -> None:
        wakeup = _thread.allocate_lock()
        wakeup.acquire()
        self.account = account
        self.nbytes = nbytes
        self.wake = wakeup.release
        self.sleep = wakeup.acquire


def check_owner(name: object) -> None:
    """See that an owner is a name.

    Raises:
        ValueError: it isn't text, or is empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"owner must be a name: {name!r}; pass text such as 'checkpoint', or leave it out")


class Accounts(dict[str, Account]):
    """The accounts of a pool, by owner; opened when they are first asked for. All is called under the pool's lock."""

    def __init__(self, max_bytes: int, granularity: int) -> None:
        super().__init__()
        self.have_quotas = False  # else `room` needn't be asked
        self._max_bytes = max_bytes
        self._granularity = granularity

    def __missing__(self, name: Any) -> Account:
        check_owner(name)
        account = Account(name)
        account.largest = self.largest(account, self._max_bytes)
        self[name] = account
        return account

    def set_quota(self, name: str, min_bytes: int, max_bytes: int | None) -> None:
        """Set an owner's quota in place of its earlier one.

        Raises:
            ValueError: not a name, a guarantee above the limit, a limit of 0, or guarantees above the cap.
        """
        if max_bytes is not None and not max(1, min_bytes) <= max_bytes:
            raise ValueError(
                f"quota of {name!r} is impossible: min_bytes={min_bytes}, max_bytes={max_bytes}; pass "
                "min_bytes <= max_bytes, and max_bytes >= 1"
            )
        min_bytes = round_up(min_bytes, self._granularity)
        guaranteed = min_bytes + sum(a.min_bytes for a in self.values() if a.name != name)
        if guaranteed > self._max_bytes:
            raise ValueError(
                f"quotas do not fit: {guaranteed} bytes would be guaranteed in all, max_bytes is {self._max_bytes}; "
                "guarantee less, or raise max_bytes"
            )
        account = self[name]
        account.min_bytes, account.max_bytes = min_bytes, max_bytes
        everyone = self.values()
        self.have_quotas = any(a.min_bytes or a.max_bytes is not None for a in everyone)
        for each in everyone:
            each.largest = self.largest(each, self._max_bytes)

    def largest(self, account: Account, whole: int) -> int:
        """Return the largest slab that an owner can ever get of a whole: when nothing is in use."""
        most = whole - sum(a.min_bytes for a in self.values() if a is not account)
        if account.max_bytes is not None:
            most = min(most, account.max_bytes)
        return most // self._granularity * self._granularity

    def room(self, account: Account, ahead: Sequence[Waiter], whole: int) -> int:
        """Return the size of the largest slab that an owner may take now; below 1 for none.

        First come, first served, within what quotas allow:

        1. no request gets bytes guaranteed to another owner, used or not;
        2. no owner gets more than its own limit;
        3. behind a request of the same owner one waits;
        4. one who waits because of its own limit is passed over: its own owner has what it waits for;
        5. behind any other one gets its guaranteed bytes, since they are no other's; and no more.

        Args:
            account: of who asks.
            ahead: who has waited longer.
            whole: bytes that all of them may have.
        """
        busy = account.busy_bytes
        room = whole - busy - sum(max(a.busy_bytes, a.min_bytes) for a in self.values() if a is not account)
        if account.max_bytes is not None:
            room = min(room, account.max_bytes - busy)
        for request in ahead:
            if request.account is account:
                return 0
            if not self._is_held_back(request):
                room = min(room, account.min_bytes - busy)
        return room // self._granularity * self._granularity

    def _is_held_back(self, request: Waiter) -> bool:
        """Say whether a request waits because of its own owner's limit."""
        account = request.account
        if account.max_bytes is None:
            return False
        return account.busy_bytes + round_up(request.nbytes, self._granularity) > account.max_bytes


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


class WaitQueue:
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
