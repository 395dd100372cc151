"""The pool's errors. Each has the current numbers and a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

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

E = TypeVar("E", bound=PoolError)


class Figures(NamedTuple):
    """Where a pool's bytes are."""

    held_bytes: int
    leased_bytes: int
    in_flight_bytes: int
    viewed_bytes: int
    """The bytes in flight that have live views."""
    held_for_good_bytes: int
    max_bytes: int
    reason: str
    cap: Callable[[int], str]
    """Returns the argument for a cap under which this pool may hold some bytes."""

    def __str__(self) -> str:
        viewed, for_good = format_bytes(self.viewed_bytes), format_bytes(self.held_for_good_bytes)
        return (
            f"held {format_bytes(self.held_bytes)} of max_bytes {format_bytes(self.max_bytes)} "
            f"({self.reason}), leased {format_bytes(self.leased_bytes)}, in flight "
            f"{format_bytes(self.in_flight_bytes)}"
            + (f" ({viewed} in live views)" if self.viewed_bytes else "")
            + (f", {for_good} of these held for good" if self.held_for_good_bytes else "")
        )

    def error(self, kind: type[E], nbytes: int, text: str) -> E:
        """Return an error with these figures. They take the place of ``{}`` in its text."""
        named = {
            name: getattr(self, name)
            for name in ("held_bytes", "leased_bytes", "in_flight_bytes", "max_bytes")
        }
        return kind(text.replace("{}", str(self)), requested_bytes=nbytes, **named)


def closed(figures: Figures, user: str | None) -> PoolClosedError:
    if user is None:
        return figures.error(PoolClosedError, 0, "pool is closed: {}; make a new SlabPool")
    return figures.error(
        PoolClosedError, 0, f"{user.lower()} is closed: its pool {{}}; make a new {user}"
    )


def never_fits(
    figures: Figures, nbytes: int, account: Account | None = None, largest: int = 0
) -> BudgetExceededError:
    quotas, remedy = "", f"pass {figures.cap(nbytes * 9 // 8)} or more, or ask for less"
    if account is not None:
        quotas = f"quotas leave {account.name!r} at most {format_bytes(largest)}, "
        remedy = "raise max_bytes, change set_quota(), or ask for less"
    text = f"request can never fit: requested {format_bytes(nbytes)}, {quotas}{{}}; {remedy}"
    return figures.error(BudgetExceededError, nbytes, text)


def never_free(figures: Figures, nbytes: int) -> BudgetExceededError:
    text = (
        f"request doesn't fit beside slabs held for good: requested {format_bytes(nbytes)}, {{}}; "
        "close handles of frozen modules and drop these modules, or pass "
        f"{figures.cap(figures.held_for_good_bytes + nbytes * 9 // 8)} or more"
    )
    return figures.error(BudgetExceededError, nbytes, text)


def reserve_does_not_fit(figures: Figures, capacity: int, missing: int) -> BudgetExceededError:
    text = (
        f"reserve does not fit: {missing} slabs of {format_bytes(capacity)} are missing, {{}}; "
        "release leases, trim() idle slabs, or pass "
        f"{figures.cap(figures.held_bytes + missing * capacity)}"
    )
    return figures.error(BudgetExceededError, missing * capacity, text)


def timed_out(
    figures: Figures, nbytes: int, timeout: float | None, others: int
) -> AcquireTimeoutError:
    text = (
        f"no slab came free within {timeout} s: requested {format_bytes(nbytes)}, {{}}, {others} "
        "other waiters; release leases sooner, wait longer, or pass "
        f"{figures.cap(figures.held_bytes + nbytes * 9 // 8)}"
    )
    return figures.error(AcquireTimeoutError, nbytes, text)


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


def refused(figures: Figures, nbytes: int, refusal: Refusal) -> MemoryError:
    return MemoryError(
        f"memory was refused before: requested {format_bytes(nbytes)}, {figures}; {refusal.reason}"
    )


def frozen(figures: Figures, nbytes: int, largest: int) -> PoolFrozenError:
    text = (
        f"pool is frozen and would have to allocate: requested {format_bytes(nbytes)}, largest "
        f"slab {format_bytes(largest)}, {{}}; reserve() all that is needed before freeze()"
    )
    return figures.error(PoolFrozenError, nbytes, text)


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
