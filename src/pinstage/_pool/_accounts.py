"""Who of a pool's users has how much, how much each may have, and who waits."""

from __future__ import annotations

import _thread
from collections.abc import Sequence
from typing import Any

from .._sizes import round_up


class Account:
    """What one owner has, and the share that it was given.

    Attributes:
        name: of the owner.
        busy_bytes: of its slabs, leased and in flight, and of those that are being allocated for it; as of the last
            `PoolState.room`.
        at_least: bytes that no other owner may have; 0 for no guarantee.
        at_most: bytes that it may have; None for no bound but the pool's cap.
        largest: the largest slab that it can ever get.
        waits: how many of its requests waited.
        wait_seconds: that they waited in all.
    """

    __slots__ = ("at_least", "at_most", "busy_bytes", "largest", "name", "wait_seconds", "waits")

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy_bytes = self.at_least = self.largest = self.waits = 0
        self.at_most: int | None = None
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
        ValueError: it is no text, or empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"owner must be a name: {name!r}; pass text such as 'checkpoint', or leave it out")


class Accounts(dict[str, Account]):
    """The accounts of a pool, by owner; opened when they are first asked for. All is called under the pool's lock."""

    def __init__(self, max_bytes: int, granularity: int) -> None:
        super().__init__()
        self.are_shared = False  # whether any owner has a guarantee or a bound; else nobody need ask for `room`
        self._max_bytes = max_bytes
        self._granularity = granularity

    def __missing__(self, name: Any) -> Account:
        check_owner(name)
        account = Account(name)
        account.largest = self.largest(account, self._max_bytes)
        self[name] = account
        return account

    def share(self, name: str, at_least: int, at_most: int | None) -> None:
        """Give an owner a share, in the place of what it had.

        Raises:
            ValueError: not a name, a guarantee above the bound, no bytes, or guarantees above the cap.
        """
        if at_most is not None and not max(1, at_least) <= at_most:
            raise ValueError(
                f"share of {name!r} is impossible: at_least={at_least}, at_most={at_most}; pass "
                "at_least <= at_most, and at_most >= 1"
            )
        at_least = round_up(at_least, self._granularity)
        guaranteed = at_least + sum(a.at_least for a in self.values() if a.name != name)
        if guaranteed > self._max_bytes:
            raise ValueError(
                f"shares do not fit: {guaranteed} bytes would be guaranteed in all, max_bytes is {self._max_bytes}; "
                "guarantee less, or raise max_bytes"
            )
        account = self[name]
        account.at_least, account.at_most = at_least, at_most
        everyone = self.values()
        self.are_shared = any(a.at_least or a.at_most is not None for a in everyone)
        for each in everyone:
            each.largest = self.largest(each, self._max_bytes)

    def largest(self, account: Account, whole: int) -> int:
        """Return the largest slab that an owner can ever get of a whole: when nothing is in use."""
        most = whole - sum(a.at_least for a in self.values() if a is not account)
        if account.at_most is not None:
            most = min(most, account.at_most)
        return most // self._granularity * self._granularity

    def room(self, account: Account, ahead: Sequence[Waiter], whole: int) -> int:
        """Return the size of the largest slab that an owner may take now; below 1 for none.

        First come, first served, within what shares allow:

        1. nobody gets what is guaranteed to another owner, used by that or not;
        2. nobody gets more than its own bound;
        3. behind a request of the same owner one waits;
        4. one who waits because of its own bound is passed over: its own owner has what it waits for;
        5. behind any other one gets what is guaranteed to one, since nobody else may have that; and no more.

        Args:
            account: of who asks.
            ahead: who has waited longer.
            whole: bytes that all of them may have.
        """
        busy = account.busy_bytes
        room = whole - busy - sum(max(a.busy_bytes, a.at_least) for a in self.values() if a is not account)
        if account.at_most is not None:
            room = min(room, account.at_most - busy)
        for request in ahead:
            if request.account is account:
                return 0
            if not self._is_held_back(request):
                room = min(room, account.at_least - busy)
        return room // self._granularity * self._granularity

    def _is_held_back(self, request: Waiter) -> bool:
        """Say whether a request waits because of its own owner's bound."""
        account = request.account
        if account.at_most is None:
            return False
        return account.busy_bytes + round_up(request.nbytes, self._granularity) > account.at_most
