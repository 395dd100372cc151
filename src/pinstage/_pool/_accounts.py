"""Each owner's bytes and quota, and the waiting requests."""

from __future__ import annotations

import _thread
from collections.abc import Sequence
from typing import Any

from .._sizes import round_up


class Account:
    """The bytes of one owner, and its quota.

    Attributes:
        name: of the owner.
        busy_bytes: of its slabs, leased and in flight, and of those that are being allocated for it; as of the last
            `PoolState.room`.
        min_bytes: bytes that no other owner may have; 0 for no guarantee.
        max_bytes: bytes that it may have; None for no limit but the pool's cap.
        largest: the largest slab that it can ever get.
        waits: how many of its requests waited.
        wait_seconds: that they waited in all.
    """

    __slots__ = ("busy_bytes", "largest", "max_bytes", "min_bytes", "name", "wait_seconds", "waits")

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy_bytes = self.min_bytes = self.largest = self.waits = 0
        self.max_bytes: int | None = None
        self.wait_seconds = 0.0


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
