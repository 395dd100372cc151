"""The owners of a pool's leases, their quotas, and time-outs."""

from __future__ import annotations

import math
import numbers
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._sizes import round_up


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


NOBODY = Account("")
"""The account of requests that lease nothing."""


def check_owner(name: object) -> None:
    """Check that an owner is a name.

    Raises:
        ValueError: it isn't text, or is empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"owner must be a name: {name!r}; pass text such as 'checkpoint', or leave it out"
        )


class Accounts(dict[str, Account]):
    """The accounts of a pool, by owner, created on first use. Call all methods under the pool's
    lock.
    """

    def __init__(self, max_bytes: int, granularity: int) -> None:
        self.have_quotas = False  # else `room` needn't be called
        self._max_bytes = max_bytes
        self._granularity = granularity

    def __missing__(self, name: Any) -> Account:
        check_owner(name)
        self[name] = account = Account(name)
        return account

    def set_quota(self, name: str, min_bytes: int, max_bytes: int | None) -> None:
        """Set an owner's quota, which replaces an earlier one.

        Raises:
            ValueError: not a name, a guarantee above the limit, or guarantees above the cap.
        """
        if max_bytes is not None and min_bytes > max_bytes:
            raise ValueError(
                f"quota of {name!r} is impossible: min_bytes={min_bytes}, max_bytes={max_bytes}; "
                "pass min_bytes <= max_bytes"
            )
        min_bytes = round_up(min_bytes, self._granularity)
        guaranteed = min_bytes + sum(a.min_bytes for a in self.values() if a.name != name)
        if guaranteed > self._max_bytes:
            raise ValueError(
                f"quotas do not fit: {guaranteed} bytes would be guaranteed in all, max_bytes is "
                f"{self._max_bytes}; guarantee less, or raise max_bytes"
            )
        account = self[name]
        account.min_bytes, account.max_bytes = min_bytes, max_bytes
        self.have_quotas = any(a.min_bytes or a.max_bytes is not None for a in self.values())

    def room(
        self,
        account: Account,
        whole: int,
        busy: Counter[Account],
        ahead: Sequence[Any] = (),
    ) -> int:
        """Return the size of the largest slab that an owner may take now; below 1 for none.

        First come, first served, within what quotas allow:

        1. no request gets bytes guaranteed to another owner, used or not;
        2. no owner gets more than its own limit;
        3. a request waits behind an earlier request of the same owner;
        4. an earlier request is passed over if its owner's limit holds it back: that owner has what
           it waits for;
        5. behind any other request, an owner gets its guaranteed bytes, which no other owner may
           have, and no more.

        Args:
            account: the owner that asks.
            whole: bytes that all owners together may have.
            busy: bytes that each owner has. Without any, this is the largest slab that `account`
                can ever have.
            ahead: the requests that have waited longer.
        """
        room = (
            whole
            - busy[account]
            - sum(max(busy[a], a.min_bytes) for a in self.values() if a is not account)
        )
        if account.max_bytes is not None:
            room = min(room, account.max_bytes - busy[account])
        for request in ahead:
            other = request.account
            if other is account:
                return 0
            needed = busy[other] + round_up(request.nbytes, self._granularity)
            # Else its own limit holds it back.
            if other.max_bytes is None or needed <= other.max_bytes:
                room = min(room, account.min_bytes - busy[account])
        return room // self._granularity * self._granularity


class _ThisThread(threading.local):
    def gives_up(self) -> bool:
        return False


this_thread = _ThisThread()


def give_up_waiting_if(condition: Callable[[], bool]) -> None:
    """Let later waits of this thread time out once a condition is true, because their slab isn't
    wanted any longer.
    """
    this_thread.gives_up = condition  # type: ignore[method-assign]


def check_timeout(timeout: object) -> None:
    """Check that a timeout is a number of seconds.

    Raises:
        TypeError: it isn't a number.
        ValueError: it is negative or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(
            f"timeout is a number of seconds: {timeout!r}; pass such a number, or None to wait "
            "forever"
        )
    if timeout < 0 or math.isnan(timeout):
        raise ValueError(
            f"timeout must be 0 or more: {timeout}; 0 does not wait, None waits forever"
        )
