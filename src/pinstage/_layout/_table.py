"""The offset table: computed from dtypes, shapes and strides, used to place leaves and to cut a slab into views.

Order in the slab: first the leaves whose memory is copied as it lies, then those that have to be gathered; in each part
leaves of one dtype side by side (a *run*), and in a run those with the same shape after the first dimension, so that
one split makes all their views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import torch

from ._fragments import Fragments, Strided
from ._leaves import ALIGNMENT, QUANTIZED, contiguous_stride, dense_stride, packable

_ROW_GROUP = 4
"""Leaves that share dtype and trailing shape before they get a run of their own: a run costs a few views, which a
single reshape of each leaf is cheaper than."""

_MAX_ROW_PADDING = 64
"""Bytes of padding that a leaf in a run of rows may get. Padding comes in whole rows there."""

_AMBIGUOUS_FROM = 4
"""Dimensions from which a shape has more than one memory format (channels last)."""

Picker = Callable[[list[Any]], Sequence[Any]] | None
"""Takes items out of a list; None takes all, in order."""

Place = Literal["cpu", "cuda"]
"""The type of the device that a table's tensors are on."""

_IS_THERE = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}
_layout, _requires_grad = attrgetter("layout"), attrgetter("requires_grad")
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_contiguous, _is_conj, _is_neg = torch.Tensor.is_contiguous, torch.Tensor.is_conj, torch.Tensor.is_neg


class Columns(NamedTuple):
    """What the table needs to know of a batch's tensors. Two batches with equal columns look alike."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    """``()`` for a tensor that is not packed: some kinds, nested ones say, cannot tell it."""
    strides: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Position and stride of each tensor whose stride is not that of its shape."""
    lazy: tuple[int, ...] = ()
    """Positions of the tensors whose bytes are not their value as they lie (lazy conjugation or negation)."""
    passthrough: tuple[int, ...] = ()
    """Positions of the tensors that are not packed."""


def columns_of(tensors: list[torch.Tensor], place: Place = "cpu") -> Columns:
    """Describe tensors. Takes a third of a microsecond for each if all are plain and contiguous, the usual case.

    Args:
        tensors: of any kind.
        place: where those are that can be packed.
    """
    dtypes = tuple(map(_dtype, tensors))
    distinct = set(dtypes)
    try:
        if (
            {torch.Tensor}.issuperset(map(type, tensors))  # first: a subclass may answer in its own way, or not at all
            and all(map(_is_contiguous, tensors))
            and all(map(_IS_THERE[place], tensors))
            and not any(map(_requires_grad, tensors))
            and not any(map(_is_neg, tensors))
            and not (any(dtype.is_complex for dtype in distinct) and any(map(_is_conj, tensors)))
            and {torch.strided}.issuperset(map(_layout, tensors))
            and QUANTIZED.isdisjoint(distinct)
        ):
            shapes = tuple(map(_shape, tensors))
            if max(map(len, shapes), default=0) < _AMBIGUOUS_FROM:
                return Columns(dtypes, shapes)
            return Columns(dtypes, shapes, _own_strides(tensors, shapes))
    except RuntimeError:  # sparse and nested tensors have no such answers
        pass
    packed = [packable(tensor, place) for tensor in tensors]
    plain = [tensor if is_packed else None for tensor, is_packed in zip(tensors, packed, strict=True)]
    shapes = tuple(() if tensor is None else tuple(tensor.shape) for tensor in plain)
    lazy = tuple(position for position, tensor in enumerate(plain) if tensor is not None and _is_lazy(tensor))
    passthrough = tuple(position for position, tensor in enumerate(plain) if tensor is None)
    return Columns(dtypes, shapes, _own_strides(plain, shapes), lazy, passthrough)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _own_strides(
    tensors: Sequence[torch.Tensor | None], shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return position and stride of the tensors that are not contiguous, and of those that could be taken for another.

    With a dimension of size 1 a channels-last tensor is contiguous as well, and kernels choose by the stride it has.
    """
    strides = []
    for position, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if tensor is not None:
            ambiguous = len(shape) >= _AMBIGUOUS_FROM and 1 in shape and 0 not in shape
            if not tensor.is_contiguous() or (ambiguous and tensor.stride() != contiguous_stride(shape)):
                strides.append((position, tensor.stride()))
    return tuple(strides)


class Run:
    """Neighbours in the slab that one dtype view and one split turn into tensors."""

    __slots__ = ("dtype", "folded", "members", "nbytes", "padding", "picked", "raw", "sizes", "trailing")

    def __init__(self, dtype: torch.dtype, trailing: tuple[int, ...], *, raw: bool) -> None:
        self.dtype = dtype
        self.trailing = trailing
        self.raw = raw
        self.nbytes = 0
        self.sizes: list[int] = []  # rows of each leaf, and of the padding behind it where there is some
        self.members: list[int] = []  # whose rows these are: the position of a tensor, -1 for padding
        self.picked: Picker = None  # takes the members out of all tensors
        self.padding: list[int] = []  # which of them are padding
        self.folded: list[int] = []  # which of them are not as flat as they lie in the run


class Table:
    """Where each tensor of a batch lives. Immutable once built, shared between batches that look alike.

    Attributes:
        columns: what it was computed from.
        nbytes: bytes of the slab that are used, padding included; a multiple of `ALIGNMENT`.
        payload_bytes: bytes of the packed tensors alone.
        offsets: where each tensor starts, in bytes; -1 for one that is not packed.
        raw: positions of the tensors whose memory is copied as it lies, in order of their offsets; none is empty.
        raw_offsets: where these start, in bytes.
        raw_nbytes: their sizes in bytes.
        raw_end: offset behind the last of them; what follows is gathered.
        gathered: positions of the tensors that are read element by element.
        met: how often batches of this table were taken apart; `Recall` counts.
    """

    __slots__ = (
        "__weakref__",
        "_fragments",
        "_picked",
        "_pieces",
        "_places",
        "_reshapes",
        "_run_bytes",
        "_runs",
        "_strides",
        "columns",
        "gathered",
        "met",
        "nbytes",
        "offsets",
        "payload_bytes",
        "raw",
        "raw_end",
        "raw_nbytes",
        "raw_offsets",
    )

    def __init__(self, columns: Columns) -> None:
        count = len(columns.dtypes)
        self.columns = columns
        self.met = 0
        self.offsets = [-1] * count
        self.raw: list[int] = []
        self.raw_offsets: list[int] = []
        self.raw_nbytes: list[int] = []
        self.nbytes = self.payload_bytes = 0
        self._fragments: Fragments | None = None
        self._pieces = 0
        self._places = [-1] * count  # index of each tensor among the pieces of all runs
        self._reshapes: list[tuple[int, tuple[int, ...], tuple[int, ...] | None]] = []
        self._runs: list[Run] = []

        shapes = columns.shapes
        dense = {position: dense_stride(shapes[position], stride) for position, stride in columns.strides}
        self._strides = {position: stride for position, stride in columns.strides if dense[position]}
        self.gathered = sorted({*columns.lazy, *(position for position, is_dense in dense.items() if not is_dense)})
        left_out = {*self.gathered, *columns.passthrough}
        self._place([position for position in range(count) if position not in left_out], raw=True)
        self.raw_end = self.nbytes
        self._place(self.gathered, raw=False)

        self._run_bytes = [run.nbytes for run in self._runs]
        for index, position in enumerate(columns.passthrough):
            self._places[position] = self._pieces + index
        self._picked = picker(self._places, self._pieces + len(columns.passthrough))
        for run in self._runs:
            run.picked = picker(run.members, count)

    @property
    def fragments(self) -> Fragments:
        """The slab as a list of fragments. Computed once."""
        if self._fragments is None:
            strided = sorted(filter(attrgetter("nbytes"), map(self._strided, self.gathered)))
            self._fragments = Fragments(self.raw_offsets, self.raw_nbytes, self.raw_end, strided)
        return self._fragments

    def _strided(self, position: int) -> Strided:
        dtype, shape = self.columns.dtypes[position], self.columns.shapes[position]
        nbytes = dtype.itemsize * math.prod(shape)
        return Strided(self.offsets[position], nbytes, position, () if position in self.columns.lazy else shape)

    def _place(self, positions: list[int], *, raw: bool) -> None:
        shapes = self.columns.shapes
        for (dtype, trailing), members in self._groups(positions).items():
            row = dtype.itemsize * math.prod(trailing or ())
            run = Run(dtype, trailing or (), raw=raw)
            sizes, piece = run.sizes, self._pieces
            start = offset = self.nbytes
            for position in members:
                shape = shapes[position]
                nbytes = dtype.itemsize * math.prod(shape)
                self.offsets[position] = offset
                self._places[position] = piece
                if raw and nbytes:
                    self.raw.append(position)
                    self.raw_offsets.append(offset)
                    self.raw_nbytes.append(nbytes)
                if trailing is None:
                    stride = self._strides.get(position)
                    if len(shape) != 1 or stride is not None:
                        self._reshapes.append((piece, shape, stride))
                        run.folded.append(len(sizes))
                sizes.append(nbytes // row)
                run.members.append(position)
                piece += 1
                self.payload_bytes += nbytes
                offset += nbytes
                if offset % ALIGNMENT:
                    padding = _padding_rows(offset, row)
                    run.padding.append(len(run.members))
                    run.members.append(-1)
                    sizes.append(padding)
                    piece += 1
                    offset += padding * row
            run.nbytes = offset - start
            self.nbytes, self._pieces = offset, piece
            self._runs.append(run)

    def _groups(self, positions: list[int]) -> dict[tuple[torch.dtype, tuple[int, ...] | None], list[int]]:
        """Group positions by dtype and trailing shape; by dtype alone (None) where rows do not pay or do not go."""
        dtypes, shapes, strides = self.columns.dtypes, self.columns.shapes, self._strides
        by_shape: dict[tuple[torch.dtype, tuple[int, ...] | None], list[int]] = {}
        for position in positions:
            shape = shapes[position]
            trailing = shape[1:] if len(shape) > 1 and position not in strides else None
            by_shape.setdefault((dtypes[position], trailing), []).append(position)
        groups: dict[tuple[torch.dtype, tuple[int, ...] | None], list[int]] = {}
        for (dtype, trailing), members in by_shape.items():
            if trailing is not None:
                row = dtype.itemsize * math.prod(trailing)
                worst_padding = row * (ALIGNMENT // math.gcd(row, ALIGNMENT) - 1)
                if not row or len(members) < _ROW_GROUP or worst_padding > _MAX_ROW_PADDING:
                    trailing = None  # noqa: PLW2901 - the other group
            groups.setdefault((dtype, trailing), []).extend(members)
        return groups

    def describe(self, position: int) -> str:
        """Say in words what a tensor looks like."""
        name = str(self.columns.dtypes[position]).removeprefix("torch.")
        if position in self.columns.passthrough:
            return f"a tensor of {name} that cannot be packed"
        strides = dict(self.columns.strides)
        stride = f" with stride {list(strides[position])}" if position in strides else ""
        lazy = ", lazily conjugated or negated" if position in self.columns.lazy else ""
        return f"{name} {list(self.columns.shapes[position])}{stride}{lazy}"

    def stride_of(self, position: int) -> tuple[int, ...]:
        """Return the stride that a packed tensor has in the slab, in elements."""
        if position in self._strides:
            return self._strides[position]
        return contiguous_stride(self.columns.shapes[position])

    def runs(self, slab: torch.Tensor) -> list[tuple[Run, torch.Tensor]]:
        """Cut a slab into its runs; each comes with its rows: a tensor ``[rows, *trailing]`` of the run's dtype."""
        if not self._runs:
            return []
        cut = []
        used = slab if slab.numel() == self.nbytes else slab[: self.nbytes]
        for run, raw in zip(self._runs, _split(used, self._run_bytes), strict=True):
            typed = raw.view(run.dtype)
            cut.append((run, typed.view(-1, *run.trailing) if run.trailing else typed))
        return cut

    def views(self, slab: torch.Tensor, others: Sequence[Any]) -> list[Any]:
        """Cut a slab into tensors.

        ``unsafe_split`` rather than ``split``: each leaf has a version counter of its own, so an in-place change of one
        does not make autograd refuse another, as it would not had each been moved by its own ``.to()``.

        Args:
            slab: uint8 ``[>= nbytes]``, on any device, starting at a multiple of `ALIGNMENT` bytes.
            others: results for the tensors that are not packed, in order.

        Returns:
            One tensor for each that the table describes.
        """
        pieces: list[Any] = []
        if self._runs:
            for run, rows in self.runs(slab):
                pieces.extend(_split(rows, run.sizes))
            for piece, shape, stride in self._reshapes:
                flat = pieces[piece]
                pieces[piece] = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
        pieces.extend(others)
        return pick(pieces, self._picked)


def picker(positions: list[int], count: int) -> Picker:
    """Return what `pick` needs to take some of `count` items in the order of `positions`."""
    if positions == list(range(count)):
        return None
    if len(positions) < 2:
        return lambda items: [items[position] for position in positions]
    return itemgetter(*positions)


def pick(items: list[Any], picked: Picker) -> list[Any]:
    """Take items out of a list; the list itself where it is all of them in order."""
    return items if picked is None else list(picked(items))


def _padding_rows(offset: int, row: int) -> int:
    """Return how many rows of `row` bytes bring `offset` to a multiple of `ALIGNMENT`."""
    rows = 1
    while (offset + rows * row) % ALIGNMENT:
        rows += 1
    return rows


def _split(tensor: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return torch.unsafe_split_with_sizes(tensor, sizes) if len(sizes) > 1 else (tensor,)
