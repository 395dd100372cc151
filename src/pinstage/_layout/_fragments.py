"""A slab as a list of fragments, in pieces that are moved and chunks that travel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 1024 * 1024
"""What one call moves, about: 100 us of one thread, long against the 5 to 10 us in which the interpreter lock goes from
thread to thread, short enough that a dozen threads end at about the same time. 512 MiB in one leaf took 13.9 ms with
pieces of this size and 14.8 with four times as much (benchmarks/NOTES.md)."""

LARGE_FRAGMENT_BYTES = 512 * 1024
"""From here on a fragment is moved by memmove: twice as fast as the system call, which in turn has no cost for each
fragment. Single thread on the reference machine: 300 fragments of 1 MiB 52 against 67 ms; 1000 of 16 KiB 1.8 against
1.5 ms; 1000 of 256 bytes 0.56 against 0.12 ms."""

VECTOR_LENGTH = 1024
"""Fragments that one system call takes (UIO_MAXIOV of Linux)."""


FIRST_CHUNK_BYTES = 2 * 1024 * 1024
"""The first chunk: the bus has nothing to do until it is in. No chunk is smaller."""

CHUNK_BYTES = 8 * 1024 * 1024
"""Less is one chunk: it would not arrive sooner. Each chunk is twice as large as the one before it, up to this size; in
a very large batch, up to its size by `CHUNKS`."""

CHUNKS = 32
"""1/32 of a large copy is not hidden behind the packing; more chunks would only cost calls."""


class Part(NamedTuple):
    """A large leaf, or a part of it: what one memmove moves."""

    offset: int
    """Where in the slab it goes."""
    nbytes: int
    leaf: int
    """Which of the leaves."""
    cut: int
    """Where in that leaf the part starts."""


class Gathering(NamedTuple):
    """Small leaves and padding: what one system call moves."""

    offset: int
    """Where in the slab they go."""
    nbytes: int
    first: int
    """The first fragment."""
    fragments: int
    """How many."""


class Rows(NamedTuple):
    """A strided leaf, or some rows of it: what has to be copied element by element."""

    offset: int
    """Where in the slab they go."""
    nbytes: int
    position: int
    """Which of the tensors."""
    rows: tuple[slice, ...]
    """Which part of it, as an index; empty for all of it."""


Piece = Part | Gathering | Rows


class Strided(NamedTuple):
    """A leaf that has to be copied element by element."""

    offset: int
    """Where in the slab it goes."""
    nbytes: int
    position: int
    """Which of the tensors."""
    shape: tuple[int, ...]
    """``()`` if it is not to be cut."""


class Chunk(NamedTuple):
    """Consecutive pieces that travel together."""

    pieces: int
    """How many."""
    end: int
    """Where in the slab they end."""


class Fragments:
    """Leaves, and the padding between them, from 0 to the end of the raw part, without gaps; then strided leaves.

    Args:
        offsets: where each raw leaf starts, in bytes, rising.
        nbytes: their sizes, none 0.
        end: the end of the raw part.
        strided: what lies behind it, in order of offsets; none of 0 bytes.

    Attributes:
        nbytes: int64 ``[n]``: the size of each fragment of the raw part.
        leaves: int64: which fragments are the leaves; the others are padding.
        pieces: all of it, in order of offsets.
        chunks: all pieces, in order.
        gathers: whether any of the pieces is a `Gathering`.
    """

    __slots__ = ("chunks", "gathers", "leaves", "nbytes", "pieces")

    def __init__(self, offsets: list[int], nbytes: list[int], end: int, strided: Sequence[Strided] = ()) -> None:
        sizes = np.empty(2 * len(offsets), dtype=np.int64)
        sizes[::2] = nbytes
        sizes[1::2] = np.diff(np.array([*offsets, end], dtype=np.int64)) - sizes[::2]  # padding behind each leaf
        present = sizes > 0
        self.leaves = (np.cumsum(present) - 1)[::2]
        self.nbytes = sizes[present]
        self.pieces = _cut(self.nbytes, self.leaves) if len(self.nbytes) else []
        self.gathers = any(type(piece) is Gathering for piece in self.pieces)
        for leaf in strided:
            self.pieces.extend(_rows(leaf))
            end = leaf.offset + leaf.nbytes
        self.chunks = _cut_into_chunks(self.pieces, end)


def _cut(nbytes: npt.NDArray[np.int64], leaves: npt.NDArray[np.int64]) -> list[Piece]:
    """Cut large fragments, and put the others together, to pieces."""
    starts = np.concatenate([[0], np.cumsum(nbytes)])
    pieces: list[Piece] = []
    low = 0
    for large in [*np.flatnonzero(nbytes >= LARGE_FRAGMENT_BYTES).tolist(), len(nbytes)]:
        if low < large:
            marks = np.arange(starts[low], starts[large], PIECE_BYTES)
            by_bytes = np.searchsorted(starts[low:large], marks) + low
            edges = np.union1d(by_bytes, np.arange(low, large, VECTOR_LENGTH))
            for first, stop in itertools.pairwise([*edges[edges < large].tolist(), large]):
                start = int(starts[first])
                pieces.append(Gathering(start, int(starts[stop]) - start, first, stop - first))
        if large < len(nbytes):
            start, size = int(starts[large]), int(nbytes[large])
            leaf = int(np.searchsorted(leaves, large))
            cuts = range(0, size, PIECE_BYTES)
            pieces.extend(Part(start + cut, min(PIECE_BYTES, size - cut), leaf, cut) for cut in cuts)
        low = large + 1
    return pieces


def _rows(leaf: Strided) -> Iterator[Rows]:
    """Cut a strided leaf along its first dimension that has more than one row."""
    dimension, count = next(((d, size) for d, size in enumerate(leaf.shape) if size > 1), (0, 1))
    parts = max(1, min(count, leaf.nbytes // PIECE_BYTES))
    row = leaf.nbytes // count
    for first, stop in itertools.pairwise(count * part // parts for part in range(parts + 1)):
        rows = (*[slice(None)] * dimension, slice(first, stop)) if parts > 1 else ()
        yield Rows(leaf.offset + first * row, (stop - first) * row, leaf.position, rows)


def _cut_into_chunks(pieces: list[Piece], nbytes: int) -> list[Chunk]:
    """Cut pieces into chunks, the first of about `FIRST_CHUNK_BYTES`, the later ones larger."""
    largest = max(CHUNK_BYTES, nbytes // CHUNKS)
    chunks: list[Chunk] = []
    taken, size = 0, FIRST_CHUNK_BYTES
    due = size if nbytes >= CHUNK_BYTES else nbytes
    for index, piece in enumerate(pieces, 1):
        end = piece.offset + piece.nbytes
        if (end >= due and nbytes - end >= FIRST_CHUNK_BYTES) or index == len(pieces):
            chunks.append(Chunk(index - taken, end))
            taken, size = index, min(2 * size, largest)
            due = end + size
    return chunks
