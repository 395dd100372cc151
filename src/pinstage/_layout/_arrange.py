"""In which order tensors lie in a slab, and in which pieces it is cut again.

Leaves of one dtype lie side by side (a *run*), those with the same shape after the first dimension in a run of their
own, so that one split makes all their views. Ragged batches are arranged anew each time, on their way to the device:
hence column by column rather than tensor by tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from operator import itemgetter, not_
from typing import NamedTuple

import torch

from ._leaves import ALIGNMENT

_ROW_GROUP = 4
"""Leaves that share dtype and trailing shape before they get a run of their own: a run costs a few views, which a
single reshape of each leaf is cheaper than."""

_MAX_ROW_PADDING = 64
"""Bytes of padding that a leaf in a run of rows may get. Padding comes in whole rows there."""

Shape = tuple[int, ...]

RunKind = tuple[torch.dtype, Shape | None]
"""What the members of a run share: dtype, and the shape of a row; None where they lie flat and a row is an element."""

RunKinds = dict[RunKind, list[int]]
"""Positions of the tensors of each run."""

_first = itemgetter(0)
_BEHIND_FIRST = slice(1, None)


class Run:
    """Neighbours in the slab that one dtype view and one split turn into tensors.

    Args:
        kind: what they share.
        nbytes: of all of them, padding included.
        sizes: rows of each piece: of each tensor, and of the padding behind it where there is some.
        positions: of the tensors among those of the batch.
        pieces: which piece each of them is, of the pieces of all runs.
        first: the number of the run's first piece.
        raw: whether the tensors' memory is copied as it lies.
    """

    __slots__ = ("_first", "_members", "_pieces", "_positions", "dtype", "nbytes", "raw", "sizes", "trailing")

    def __init__(
        self,
        kind: RunKind,
        nbytes: int,
        sizes: list[int],
        positions: Sequence[int],
        pieces: Sequence[int],
        first: int,
        *,
        raw: bool,
    ) -> None:
        self.dtype, self.trailing = kind[0], kind[1] or ()
        self.nbytes = nbytes
        self.sizes = sizes
        self.raw = raw
        self._positions, self._pieces, self._first = positions, pieces, first
        self._members: Members | None = None

    def members(self, shapes: Sequence[Shape]) -> Members:
        """Return which tensors the pieces are. Computed once; only gathering on a device asks.

        Args:
            shapes: of all tensors of the batch.
        """
        if self._members is None:
            positions = [-1] * len(self.sizes)
            for position, piece in zip(self._positions, self._pieces, strict=True):
                positions[piece - self._first] = position
            padding = [index for index, position in enumerate(positions) if position < 0]
            is_flat = [bool(self.trailing) or position < 0 or len(shapes[position]) == 1 for position in positions]
            self._members = Members(positions, padding, list(compress(range(len(positions)), map(not_, is_flat))))
        return self._members


class Members(NamedTuple):
    """What the pieces of a run are."""

    positions: list[int]
    """The tensor that each is; -1 for padding."""
    padding: list[int]
    """Which are padding."""
    folded: list[int]
    """Which are not as flat as they lie in the run."""


def kinds_of(
    dtypes: Sequence[torch.dtype], shapes: Sequence[Shape], positions: Iterable[int], permuted: Container[int]
) -> RunKinds:
    """Group tensors to runs.

    Args:
        dtypes: of all tensors of a batch.
        shapes: of all tensors of a batch.
        positions: which of them.
        permuted: positions of those that cannot lie in rows, because they have a stride of their own.
    """
    groups: defaultdict[RunKind, list[int]] = defaultdict(list)
    for position in positions:
        shape = shapes[position]
        # Not shape[1:], which takes four times as long where it is a torch.Size.
        rows = tuple.__getitem__(shape, _BEHIND_FIRST) if len(shape) > 1 and position not in permuted else None
        groups[dtypes[position], rows].append(position)
    kinds: RunKinds = {}
    for (dtype, rows), members in groups.items():
        pays = rows is not None and _pays(dtype.itemsize * math.prod(rows), len(members))
        kinds.setdefault((dtype, rows if pays else None), []).extend(members)
    return kinds


class Arrangement:
    """Tensors one behind the other: columns with a row for each, in the order of the slab.

    Args:
        shapes: of all tensors of a batch.
        strides: by position, where a tensor keeps one of its own.

    Attributes:
        positions: of the tensors among those of the batch.
        offsets: where they start, in bytes.
        nbytes: their sizes.
        pieces: which of all pieces each of them is.
        runs: which make up the slab.
        reshapes: piece, shape and stride of those that are not as flat as they lie.
        count: of pieces.
        end: behind the last run, in bytes; a multiple of `ALIGNMENT`.
    """

    def __init__(self, shapes: Sequence[Shape], strides: Mapping[int, Shape]) -> None:
        self._shapes, self._strides = shapes, strides
        self.positions: list[int] = []
        self.offsets: list[int] = []
        self.nbytes: list[int] = []
        self.pieces: list[int] = []
        self.runs: list[Run] = []
        self.reshapes: list[tuple[int, Shape, Shape | None]] = []
        self.count = self.end = 0

    def not_empty(self) -> tuple[list[int], list[int], list[int]]:
        """Return positions, offsets and sizes of the tensors that have any bytes."""
        if 0 not in self.nbytes:
            return self.positions.copy(), self.offsets.copy(), self.nbytes.copy()
        positions, offsets = compress(self.positions, self.nbytes), compress(self.offsets, self.nbytes)
        return list(positions), list(offsets), list(filter(None, self.nbytes))

    def add(self, kind: RunKind, members: list[int], *, raw: bool) -> None:
        """Put a run behind those that are there.

        Args:
            kind: of the run.
            members: positions of its tensors.
            raw: whether their memory is copied as it lies.
        """
        dtype, trailing = kind
        shapes = [self._shapes[position] for position in members]
        row = dtype.itemsize * math.prod(trailing or ())
        rows = list(map(math.prod if trailing is None else _first, shapes))
        nbytes = [own * row for own in rows] if row > 1 else rows
        unit = _unit(row)
        padding = [-own % unit for own in rows] if unit > 1 else []
        first = self.count
        sizes, steps = rows, nbytes
        pieces: Sequence[int] = range(first, first + len(rows))
        if any(padding):
            sizes, pieces = [], []
            for own, behind in zip(rows, padding, strict=True):
                pieces.append(first + len(sizes))
                sizes.append(own)
                if behind:
                    sizes.append(behind)
            steps = [(own + behind) * row for own, behind in zip(rows, padding, strict=True)]
        *offsets, end = accumulate(steps, initial=self.end)
        self.runs.append(Run(kind, end - self.end, sizes, members, pieces, first, raw=raw))
        self.positions += members
        self.offsets += offsets
        self.nbytes += nbytes
        self.pieces += pieces
        self.count, self.end = first + len(sizes), end
        if trailing is None:
            self.reshapes += [
                (piece, shape, self._strides.get(position))
                for piece, shape, position in zip(pieces, shapes, members, strict=True)
                if len(shape) != 1
            ]


def _unit(row: int) -> int:
    """Return how many rows of so many bytes are a multiple of `ALIGNMENT`."""
    return ALIGNMENT // math.gcd(row, ALIGNMENT)


def _pays(row: int, members: int) -> bool:
    """Say whether so many tensors get a run of rows of so many bytes."""
    return row > 0 and members >= _ROW_GROUP and (_unit(row) - 1) * row <= _MAX_ROW_PADDING
