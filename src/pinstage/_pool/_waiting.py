"""The owners of a pool's leases, their quotas, and requests that wait."""

from __future__ import annotations

import _thread
import numbers
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._sizes import round_up

POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the first in line. A release wakes it at once. Finished events and freed views
wake no thread, so it looks again by itself."""

GIVE_UP_SECONDS = 0.2
"""Poll interval of the other threads for giving up."""


@dataclass(slots=True, eq=False)
class Account:
    """One owner, and its quota."""

    name: str
    min_bytes: int = 0
    """Bytes that no other owner may have; 0 for no guarantee."""
    max_bytes: int | None = None
    """Bytes that it may have; None for no limit but the pool's cap."""
    waits: int = 0
    """Number of its requests that waited."""
    wait_seconds: float = 0.0


NOTHING: Counter[Account | None] = Counter()
"""Bytes that owners have where all slabs are idle."""


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
        self[name] = account = Account(name)
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
        self.have_quotas = any(a.min_bytes or a.max_bytes is not None for a in self.values())

    def room(
        self, account: Account, whole: int, busy: Counter[Account | None] = NOTHING, ahead: Sequence[Waiter] = ()
    ) -> int:
        """Return the size of the largest slab that an owner may take now; below 1 for none.

        First come, first served, within what quotas allow:

        1. no request gets bytes guaranteed to another owner, used or not;
        2. no owner gets more than its own limit;
        3. behind a request of the same owner one waits;
        4. one who waits because of its own limit is passed over: its own owner has what it waits for;
        5. behind any other one gets its guaranteed bytes, since they are no other's; and no more.

        Args:
            account: of who asks.
            whole: bytes that all of them may have.
            busy: bytes that each owner has. `NOTHING` finds the largest slab that `account` can ever have.
            ahead: who has waited longer.
        """
        room = whole - busy[account] - sum(max(busy[a], a.min_bytes) for a in self.values() if a is not account)
        if account.max_bytes is not None:
            room = min(room, account.max_bytes - busy[account])
        for request in ahead:
            other = request.account
            if other is account:
                return 0
            needed = busy[other] + round_up(request.nbytes, self._granularity)
            if other.max_bytes is None or needed <= other.max_bytes:  # else its own limit holds it back
                room = min(room, account.min_bytes - busy[account])
        return room // self._granularity * self._granularity


class _ThisThread(threading.local):
    gives_up: Callable[[], bool] | None = None


this_thread = _ThisThread()


def give_up_waiting_if(condition: Callable[[], bool]) -> None:
    """Let later waits of this thread time out when a condition becomes true: their slab isn't wanted any longer."""
    this_thread.gives_up = condition


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
