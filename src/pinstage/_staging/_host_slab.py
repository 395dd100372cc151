"""The wait for a host slab, which must not be for ever: what holds the slabs may be held by the thread that waits."""

from __future__ import annotations

from .._errors import AcquireTimeoutError
from .._pool import Lease, SlabPool


def acquire(pool: SlabPool, nbytes: int, timeout: float | None) -> Lease:
    """Lease a slab for a call of the stager's.

    Raises:
        AcquireTimeoutError: no slab came free in time; a note says what may hold them.
    """
    try:
        return pool.acquire(nbytes, timeout=timeout)
    except AcquireTimeoutError as error:
        error.add_note(
            "results of Stager.to_host() hold their slabs until their tensors die: drop them sooner, or pass copy=True"
        )
        raise
