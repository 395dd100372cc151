"""The pool's errors. Each has the current numbers and a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from .._sizes import format_bytes
from ..errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    ForkedPoolError,
    PoolClosedError,
    PoolError,
    PoolFrozenError,
)
from ._waiting import Account


class Refusal(NamedTuple):
    """The platform refused more memory."""

    reason: str
    """The platform's message, and the remedy."""
    total: int
    """Bytes that the pool would have held."""
    held: int
    """Bytes that it held."""
    until: float
    """The time from which growing is tried again, by `time.monotonic`."""


class Figures(NamedTuple):
    """Where a pool's bytes are."""

    of: dict[str, int]
    """Bytes by part, as in `PoolState.parts`."""
    max_bytes: int
    reason: str
    """Where the cap comes from, and what limited the pool besides it at the last check."""
    cap: Callable[[int], str]
    """Returns the argument for a cap under which this pool may hold some bytes."""

    def __str__(self) -> str:
        of = {part: format_bytes(nbytes) for part, nbytes in self.of.items()}
        viewed, for_good = self.of["viewed"], self.of["held_for_good"]
        return (
            f"held {of['held']} of max_bytes {format_bytes(self.max_bytes)} ({self.reason}), "
            f"leased {of['leased']}, in flight {of['in_flight']}"
            + (f" ({of['viewed']} in live views)" if viewed else "")
            + (f", {of['held_for_good']} of these held for good" if for_good else "")
        )

    def error(self, kind: type[PoolError], nbytes: int, text: str) -> PoolError:
        return kind(
            text,
            requested_bytes=nbytes,
            held_bytes=self.of["held"],
            leased_bytes=self.of["leased"],
            in_flight_bytes=self.of["in_flight"],
            max_bytes=self.max_bytes,
        )

    def closed(self, user: str | None) -> PoolError:
        text = f"pool is closed: {self}; make a new SlabPool"
        if user is not None:
            text = f"{user.lower()} is closed: its pool {self}; make a new {user}"
        return self.error(PoolClosedError, 0, text)

    def never_fits(
        self, nbytes: int, account: Account | None = None, largest: int = 0
    ) -> PoolError:
        quotas, remedy = "", f"pass {self.cap(nbytes * 9 // 8)} or more, or ask for less"
        if account is not None:
            quotas = f"quotas leave {account.name!r} at most {format_bytes(largest)}, "
            remedy = "raise max_bytes, change set_quota(), or ask for less"
        return self.error(
            BudgetExceededError,
            nbytes,
            f"request can never fit: requested {format_bytes(nbytes)}, {quotas}{self}; {remedy}",
        )

    def never_free(self, nbytes: int) -> PoolError:
        return self.error(
            BudgetExceededError,
            nbytes,
            f"request doesn't fit beside slabs held for good: requested {format_bytes(nbytes)}, "
            f"{self}; close handles of frozen modules and drop these modules, or pass "
            f"{self.cap(self.of['held_for_good'] + nbytes * 9 // 8)} or more",
        )

    def reserve_does_not_fit(self, capacity: int, missing: int) -> PoolError:
        return self.error(
            BudgetExceededError,
            missing * capacity,
            f"reserve does not fit: {missing} slabs of {format_bytes(capacity)} are missing, "
            f"{self}; release leases, trim() idle slabs, or pass "
            f"{self.cap(self.of['held'] + missing * capacity)}",
        )

    def timed_out(self, nbytes: int, timeout: float | None, others: int) -> PoolError:
        return self.error(
            AcquireTimeoutError,
            nbytes,
            f"no slab came free within {timeout} s: requested {format_bytes(nbytes)}, {self}, "
            f"{others} other waiters; release leases sooner, wait longer, or pass "
            f"{self.cap(self.of['held'] + nbytes * 9 // 8)}",
        )

    def refused(self, nbytes: int, refusal: Refusal) -> MemoryError:
        return MemoryError(
            f"memory was refused before: requested {format_bytes(nbytes)}, {self}; {refusal.reason}"
        )

    def frozen(self, nbytes: int, largest: int) -> PoolError:
        return self.error(
            PoolFrozenError,
            nbytes,
            f"pool is frozen and would have to allocate: requested {format_bytes(nbytes)}, largest "
            f"slab {format_bytes(largest)}, {self}; reserve() all that is needed before freeze()",
        )


def forked() -> ForkedPoolError:
    return ForkedPoolError(
        f"pool belongs to the parent of process {os.getpid()}: page-locked memory does not survive "
        "fork; make a SlabPool in the child, or use pinstage in the main process only"
    )


def entered_again() -> PoolError:
    """Return the error for a call that a finaliser makes in the middle of another call of the same
    thread.
    """
    return PoolError(
        "pool was called in the middle of a call of the same thread: by a finaliser, such as the "
        "end of a generator; a finaliser may release() leases and close() the pool, nothing else"
    )
