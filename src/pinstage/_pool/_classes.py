"""Size classes: how a request is rounded, and how large a slab may serve it."""

from __future__ import annotations

from functools import lru_cache

from .._sizes import round_up

CLASSES_PER_DOUBLING = 8
"""Eight steps from one power of two to the next, so rounding adds less than 1/8 to any request.
torch's own host allocator rounds to powers of two, which turns 129.5 MB into 256 MB
(pytorch#150517)."""

SMALL_SLAB_BYTES = 1024 * 1024
"""Below this size, another slab costs less than waste: one slab of each smaller class takes about
12 MiB in all.
"""

REUSE_FACTOR = 2
"""From `SMALL_SLAB_BYTES` on, an idle slab of up to this many times its class serves a request
before the pool grows: pinning another gigabyte because a batch is 20% smaller would waste more."""


@lru_cache(maxsize=4096)
def size_class(nbytes: int, granularity: int = 1) -> int:
    """Round a request up to its size class.

    That is at most 12.5% above `nbytes`, rounded up to a multiple of `granularity`, the unit of the
    memory.
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - CLASSES_PER_DOUBLING.bit_length())
    return round_up(round_up(nbytes, step), granularity)


@lru_cache(maxsize=4096)
def reuse_limit(nbytes: int, granularity: int = 1) -> int:
    """Return the size of the largest idle slab that serves a request before the pool grows.

    For small classes, at most 12.5% of that slab is waste; from `SMALL_SLAB_BYTES` on, it is
    `REUSE_FACTOR` times the class.
    """
    capacity = size_class(nbytes, granularity)
    if capacity < SMALL_SLAB_BYTES:
        return max(capacity, nbytes * 8 // 7)
    return REUSE_FACTOR * capacity
