"""Size classes: how a request is rounded, and how large a slab may serve it."""

from __future__ import annotations

CLASSES_PER_DOUBLING = 8
"""Eight steps from one power of two to the next, so rounding adds less than 1/8 to any request. torch's own host
allocator rounds to powers of two, which turns 129.5 MB into 256 MB (pytorch#150517)."""

REUSE_FACTOR = 2
"""An idle slab serves a request of a smaller class, instead of the pool growing, up to this many times that class.
Without the bound a stream of small requests would keep the large slabs busy; without reuse every new batch size would
pin more."""


def size_class(nbytes: int, granularity: int = 1) -> int:
    """Round a request up to its size class.

    Args:
        nbytes: bytes asked for, at least 1.
        granularity: allocation unit of the memory resource in bytes (a page for page-locked kinds).

    Returns:
        The class in bytes: at most 12.5% above `nbytes`, or up to the next multiple of `granularity` where that is
            more.
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - CLASSES_PER_DOUBLING.bit_length())
    rounded = -(-nbytes // step) * step
    return -(-rounded // granularity) * granularity
