"""What the pool says when it refuses: each error with the numbers of the moment, and with what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .._errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    ForkedPoolError,
    PoolClosedError,
    PoolFrozenError,
)
from .._sizes import format_bytes

if TYPE_CHECKING:
    from ._holdings import Holdings


def closed(holdings: Holdings) -> PoolClosedError:
    """Return the error of a request to a closed pool."""
    return PoolClosedError(f"pool is closed: {text(holdings)}; make a new SlabPool")


def never_fits(holdings: Holdings, nbytes: int) -> BudgetExceededError:
    """Return the error of a request that is larger than the cap."""
    return BudgetExceededError(
        f"request can never fit: requested {format_bytes(nbytes)}, {text(holdings)}; raise max_bytes or ask for less",
        **_numbers(holdings, nbytes),
    )


def reserve_does_not_fit(holdings: Holdings, capacity: int, missing: int) -> BudgetExceededError:
    """Return the error of a reservation for which there is no room now."""
    return BudgetExceededError(
        f"reserve does not fit: {missing} slabs of {format_bytes(capacity)} are missing, {text(holdings)}; release "
        "leases, trim() idle slabs, or raise max_bytes",
        **_numbers(holdings, missing * capacity),
    )


def too_late(holdings: Holdings, nbytes: int, timeout: float | None, others: int) -> AcquireTimeoutError:
    """Return the error of a request for which nothing came free in time."""
    return AcquireTimeoutError(
        f"no slab came free within {timeout} s: requested {format_bytes(nbytes)}, {text(holdings)}, {others} other "
        "waiters; release leases sooner, wait longer, or raise max_bytes",
        **_numbers(holdings, nbytes),
    )


def frozen(holdings: Holdings, nbytes: int) -> PoolFrozenError:
    """Return the error of a request that a frozen pool would have to allocate for."""
    return PoolFrozenError(
        f"pool is frozen and would have to allocate: requested {format_bytes(nbytes)}, largest slab "
        f"{format_bytes(holdings.largest_held)}, {text(holdings)}; reserve() all that is needed before freeze()",
        **_numbers(holdings, nbytes),
    )


def forked() -> ForkedPoolError:
    """Return the error of any use in a forked child."""
    return ForkedPoolError(
        f"pool belongs to the parent of process {os.getpid()}: page-locked memory does not survive fork; make a "
        "SlabPool in the child, or use pinstage in the main process only"
    )


def text(holdings: Holdings) -> str:
    """Say where the bytes are."""
    return (
        f"held {format_bytes(holdings.held.bytes)} of max_bytes {format_bytes(holdings.max_bytes)} "
        f"({holdings.reason}), leased {format_bytes(holdings.leased.bytes)}, in flight "
        f"{format_bytes(holdings.flying.bytes)}"
    )


def _numbers(holdings: Holdings, nbytes: int) -> dict[str, int]:
    return {
        "requested_bytes": nbytes,
        "held_bytes": holdings.held.bytes,
        "leased_bytes": holdings.leased.bytes,
        "in_flight_bytes": holdings.flying.bytes,
        "max_bytes": holdings.max_bytes,
    }
