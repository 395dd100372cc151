"""The offset table: computed from dtypes, shapes and strides, used to place leaves and to cut a slab into views.

Order in the slab: first the leaves whose memory is copied as it lies, then those that have to be gathered, each part
arranged in runs (`_arrange`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import torch

from ._arrange import Arrangement, Run, RunKinds, kinds_of
from ._fragments import Fragments, Strided
from ._leaves import QUANTIZED, contiguous_stride, dense_stride, packable

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


def columns_of(tensors: list[torch.Tensor], place: Place = "cpu", unsure: list[torch.Tensor] | None = None) -> Columns:
    """Describe tensors. Takes a third of a microsecond for each if all are plain and contiguous, the usual case.

    Args:
        tensors: of any kind.
        place: where those are that can be packed.
        unsure: those that may be of any kind; the others are known to be plain, contiguous and there. None: all.
    """
    dtypes = tuple(map(_dtype, tensors))
    distinct = set(dtypes)
    if unsure is None:
        unsure = tensors
    try:
        if (
            {torch.Tensor}.issuperset(map(type, tensors))  # first: a subclass may answer in its own way, or not at all
            and all(map(_is_contiguous, unsure))
            and all(map(_IS_THERE[place], unsure))
            and not any(map(_requires_grad, unsure))
            and not any(map(_is_neg, unsure))
            and not (any(dtype.is_complex for dtype in distinct) and any(map(_is_conj, unsure)))
            and {torch.strided}.issuperset(map(_layout, unsure))
            and QUANTIZED.isdisjoint(distinct)
        ):
            return columns_of_plain(tensors, dtypes)
    except RuntimeError:  # sparse and nested tensors have no such answers
        pass
    packed = [packable(tensor, place) for tensor in tensors]
    plain = [tensor if is_packed else None for tensor, is_packed in zip(tensors, packed, strict=True)]
    shapes = tuple(() if tensor is None else tuple(tensor.shape) for tensor in plain)
    lazy = tuple(position for position, tensor in enumerate(plain) if tensor is not None and _is_lazy(tensor))
    passthrough = tuple(position for position, tensor in enumerate(plain) if tensor is None)
    return Columns(dtypes, shapes, _own_strides(plain, shapes), lazy, passthrough)


def columns_of_plain(tensors: list[torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> Columns:
    """Describe tensors that are contiguous and as plain as tensors are, if their dtypes are known."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    # Equal shapes once, because the garbage collector walks each of them.
    shapes = tuple([known.setdefault(shape, shape) for shape in map(_shape, tensors)])
    if max(map(len, known), default=0) < _AMBIGUOUS_FROM:
        return Columns(dtypes, shapes)
    return Columns(dtypes, shapes, _own_strides(tensors, shapes))


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


class Table:
    """Where each tensor of a batch lives. Immutable once built, shared between batches that look alike.

    Args:
        columns: what it is computed from.
        kinds: the runs of the tensors whose memory is copied as it lies, if these are known.

    Attributes:
        columns: what it was computed from.
        kinds: the runs of the tensors whose memory is copied as it lies.
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
        "_reshapes",
        "_run_bytes",
        "_runs",
        "_strides",
        "columns",
        "gathered",
        "kinds",
        "met",
        "nbytes",
        "offsets",
        "payload_bytes",
        "raw",
        "raw_end",
        "raw_nbytes",
        "raw_offsets",
    )

    def __init__(self, columns: Columns, kinds: RunKinds | None = None) -> None:
        count = len(columns.dtypes)
        self.columns = columns
        self.met = 0
        dense = {position: dense_stride(columns.shapes[position], stride) for position, stride in columns.strides}
        self._strides = {position: stride for position, stride in columns.strides if dense[position]}
        self.gathered = sorted({*columns.lazy, *(position for position, is_dense in dense.items() if not is_dense)})
        left_out = {*self.gathered, *columns.passthrough}

        slab = Arrangement(columns.shapes, self._strides)
        if kinds is None:
            positions = range(count)
            kinds = self._kinds(filterfalse(left_out.__contains__, positions) if left_out else positions)
        self.kinds = kinds
        for kind, members in self.kinds.items():
            slab.add(kind, members, raw=True)
        self.raw, self.raw_offsets, self.raw_nbytes = slab.not_empty()
        self.raw_end = slab.end
        for kind, members in self._kinds(self.gathered).items():
            slab.add(kind, members, raw=False)
        self.nbytes, self.payload_bytes = slab.end, sum(slab.nbytes)

        self.offsets, pieces = [-1] * count, [-1] * count
        for position, offset, piece in zip(slab.positions, slab.offsets, slab.pieces, strict=True):
            self.offsets[position], pieces[position] = offset, piece
        for piece, position in enumerate(columns.passthrough, slab.count):
            pieces[position] = piece
        self._fragments: Fragments | None = None
        self._picked = picker(pieces, slab.count + len(columns.passthrough))
        self._reshapes = slab.reshapes
        self._runs = slab.runs
        self._run_bytes = [run.nbytes for run in slab.runs]

    def _kinds(self, positions: Iterable[int]) -> RunKinds:
        return kinds_of(self.columns.dtypes, self.columns.shapes, positions, self._strides)

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


def _split(tensor: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return torch.unsafe_split_with_sizes(tensor, sizes) if len(sizes) > 1 else (tensor,)
