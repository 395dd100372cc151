"""The wait for a host slab, which must not be for ever: what holds the slabs may be held by the thread that waits."""

from __future__ import annotations

from .._errors import AcquireTimeoutError
from .._pool import Lease, SlabPool
from .._sizes import format_bytes


def acquire(pool: SlabPool, nbytes: int, timeout: float | None, call: str) -> Lease:
    """Lease a slab for a call of the stager's.

    Raises:
        AcquireTimeoutError: no slab came free in time; the message says what may hold them.
    """
    try:
        return pool.acquire(nbytes, timeout=timeout)
    except AcquireTimeoutError as error:
        raise AcquireTimeoutError(
            f"no host slab of {format_bytes(nbytes)} for {call}(): {error}; results of to_host() hold their slabs "
            "until their tensors die: drop them sooner, or pass copy=True",
            requested_bytes=error.requested_bytes,
            held_bytes=error.held_bytes,
            leased_bytes=error.leased_bytes,
            in_flight_bytes=error.in_flight_bytes,
            max_bytes=error.max_bytes,
        ) from error
