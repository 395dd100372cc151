"""What the pool says when it refuses: each error with the numbers of the moment, and with what to do."""

from __future__ import annotations

import os
from typing import NamedTuple

from .._sizes import format_bytes, size_to_paste
from ..errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    ForkedPoolError,
    PoolClosedError,
    PoolError,
    PoolFrozenError,
)
from ._accounts import Account


class Figures(NamedTuple):
    """Where a pool's bytes are."""

    held: int
    leased: int
    in_flight: int
    max_bytes: int
    reason: str
    others: int | None
    """What other pools hold of the `HostBudget`; None if the pool's own cap is lower than that leaves."""

    def __str__(self) -> str:
        return (
            f"held {format_bytes(self.held)} of max_bytes {format_bytes(self.max_bytes)} ({self.reason}), leased "
            f"{format_bytes(self.leased)}, in flight {format_bytes(self.in_flight)}"
        )

    def cap(self, nbytes: int) -> str:
        """Return how to write a cap under which this pool may hold so many bytes."""
        if self.others is None:
            return f'max_bytes="{size_to_paste(nbytes)}"'
        return f'budget=HostBudget("{size_to_paste(nbytes + self.others)}", ...)'

    def numbers(self, nbytes: int) -> dict[str, int]:
        return {
            "requested_bytes": nbytes,
            "held_bytes": self.held,
            "leased_bytes": self.leased,
            "in_flight_bytes": self.in_flight,
            "max_bytes": self.max_bytes,
        }


def closed(figures: Figures, user: str | None) -> PoolClosedError:
    if user is None:
        return PoolClosedError(f"pool is closed: {figures}; make a new SlabPool", **figures.numbers(0))
    return PoolClosedError(f"{user.lower()} is closed: its pool {figures}; make a new {user}", **figures.numbers(0))


def never_fits(figures: Figures, nbytes: int, account: Account | None = None) -> BudgetExceededError:
    if account is not None:
        quotas = f"quotas leave {account.name!r} at most {format_bytes(account.largest)}, "
        remedy = "raise max_bytes, change set_quota(), or ask for less"
    else:
        quotas, remedy = "", f"pass {figures.cap(nbytes * 9 // 8)} or more, or ask for less"
    return BudgetExceededError(
        f"request can never fit: requested {format_bytes(nbytes)}, {quotas}{figures}; {remedy}",
        **figures.numbers(nbytes),
    )


def reserve_does_not_fit(figures: Figures, capacity: int, missing: int) -> BudgetExceededError:
    return BudgetExceededError(
        f"reserve does not fit: {missing} slabs of {format_bytes(capacity)} are missing, {figures}; release leases, "
        f"trim() idle slabs, or pass {figures.cap(figures.held + missing * capacity)}",
        **figures.numbers(missing * capacity),
    )


def timed_out(figures: Figures, nbytes: int, timeout: float | None, others: int) -> AcquireTimeoutError:
    return AcquireTimeoutError(
        f"no slab came free within {timeout} s: requested {format_bytes(nbytes)}, {figures}, {others} other waiters; "
        f"release leases sooner, wait longer, or pass {figures.cap(figures.held + nbytes * 9 // 8)}",
        **figures.numbers(nbytes),
    )


class Refusal(NamedTuple):
    """The platform would not give more memory."""

    reason: str
    """What it said, and what to do."""
    total: int
    """Bytes that the pool would have held."""
    held: int
    """Bytes that it did hold."""
    until: float
    """When growing is tried again, by `time.monotonic`."""


def refused(figures: Figures, nbytes: int, refusal: Refusal) -> MemoryError:
    return MemoryError(f"memory was refused before: requested {format_bytes(nbytes)}, {figures}; {refusal.reason}")


def frozen(figures: Figures, nbytes: int, largest: int) -> PoolFrozenError:
    return PoolFrozenError(
        f"pool is frozen and would have to allocate: requested {format_bytes(nbytes)}, largest slab "
        f"{format_bytes(largest)}, {figures}; reserve() all that is needed before freeze()",
        **figures.numbers(nbytes),
    )


def forked() -> ForkedPoolError:
    return ForkedPoolError(
        f"pool belongs to the parent of process {os.getpid()}: page-locked memory does not survive fork; make a "
        "SlabPool in the child, or use pinstage in the main process only"
    )


def entered_again() -> PoolError:
    """Return the error of a call from a finaliser in the middle of another call of the same thread."""
    return PoolError(
        "pool is in the middle of a call of this very thread: a finaliser, such as the end of a generator, called it "
        "again; a finaliser may release() leases and close() the pool, nothing else"
    )
