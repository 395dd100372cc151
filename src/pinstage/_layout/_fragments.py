"""The raw part of a slab as a list of fragments, and the pieces in which these are moved."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1024 * 1024
"""What one call moves of small fragments, about: 100 us of one thread, long against the 5 to 10 us in which the
interpreter lock goes from thread to thread, short enough that a dozen threads end at about the same time."""

LARGE_PIECE_BYTES = 4 * 1024 * 1024
"""What one call moves of a large fragment at the most."""

LARGE_FRAGMENT_BYTES = 512 * 1024
"""From here on a fragment is moved by memmove: twice as fast as the system call, which in turn has no cost for each
fragment. Single thread on the reference machine: 300 fragments of 1 MiB 52 against 67 ms; 1000 of 16 KiB 1.8 against
1.5 ms; 1000 of 256 bytes 0.56 against 0.12 ms."""

VECTOR_LENGTH = 1024
"""Fragments that one system call takes (UIO_MAXIOV of Linux)."""


class Piece(NamedTuple):
    """What one call moves."""

    offset: int
    """Where in the slab it goes."""
    nbytes: int
    first: int
    """The first fragment."""
    whole: int
    """How many whole fragments; 0 for a part of the large fragment `first`."""
    cut: int
    """Where in that fragment the part starts."""


class Fragments:
    """Leaves, and the padding between them, from 0 to the end of the raw part, without gaps.

    Args:
        offsets: where each leaf starts, in bytes, rising.
        nbytes: their sizes, none 0.
        end: the end of the raw part.

    Attributes:
        nbytes: int64 ``[n]``: the size of each fragment.
        leaves: int64: which fragments are the leaves; the others are padding.
        pieces: all of it, in order of offsets.
    """

    __slots__ = ("leaves", "nbytes", "pieces")

    def __init__(self, offsets: list[int], nbytes: list[int], end: int) -> None:
        sizes = np.empty(2 * len(offsets), dtype=np.int64)
        sizes[::2] = nbytes
        sizes[1::2] = np.diff(np.array([*offsets, end], dtype=np.int64)) - sizes[::2]  # padding behind each leaf
        present = sizes > 0
        self.leaves = (np.cumsum(present) - 1)[::2]
        self.nbytes = sizes[present]
        self.pieces = _cut(self.nbytes)


def _cut(nbytes: npt.NDArray[np.int64]) -> list[Piece]:
    """Cut large fragments, and put the others together, to pieces."""
    starts = np.concatenate([[0], np.cumsum(nbytes)])
    pieces = []
    low = 0
    for large in [*np.flatnonzero(nbytes >= LARGE_FRAGMENT_BYTES).tolist(), len(nbytes)]:
        if low < large:
            marks = np.arange(starts[low], starts[large], PIECE_BYTES)
            by_bytes = np.searchsorted(starts[low:large], marks) + low
            edges = np.union1d(by_bytes, np.arange(low, large, VECTOR_LENGTH))
            for first, stop in itertools.pairwise([*edges[edges < large].tolist(), large]):
                start = int(starts[first])
                pieces.append(Piece(start, int(starts[stop]) - start, first, stop - first, 0))
        if large < len(nbytes):
            start, size = int(starts[large]), int(nbytes[large])
            cuts = range(0, size, LARGE_PIECE_BYTES)
            pieces.extend(Piece(start + cut, min(LARGE_PIECE_BYTES, size - cut), large, 0, cut) for cut in cuts)
        low = large + 1
    return pieces
