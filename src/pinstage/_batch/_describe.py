"""A batch taken apart: its leaves, its structure, and the offset table.

`_describe_leaf` describes a leaf in Python, and can describe any leaf. The extension describes the
usual leaves itself (plain tensors on the right device, plain arrays, objects of types that hold no
tensor), and calls it for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _native
from .._compat.views import check_has_memory, check_is_plain, has_no_memory, is_dual
from .._steps import step
from ..errors import LayoutError
from ._arrays import Stack
from ._leaves import ATOM_TYPES, WRAPPERS, OnHost, Whole, is_atom, unwrapped
from ._nodes import is_container, moves_as_a_whole
from ._refusals import (
    check_yields_no_batches,
    hides_tensor,
    tensor_over,
    too_large,
    unknown_classes,
)
from ._rows import Rows, gathered, stack_of
from ._structure import Structure, walk
from ._table import CODES, MOST_DIMS, RowKind, Table


class Keeping:
    """Which leaves of a stager's or a loader's batches stay on the host.

    Args:
        keep: their paths, or paths of containers of them, as in errors and `Slot`; or a function of
            path and leaf.
        may_miss: whether paths may lead to nothing in the first batch. In later ones they may.

    Attributes:
        says: the function; None for paths.
        paths: the paths; none for a function.

    Raises:
        TypeError: `keep` is neither.
    """

    def __init__(
        self, keep: Iterable[str] | Callable[[str, Any], object], *, may_miss: bool = False
    ) -> None:
        self.says: Callable[[str, Any], object] | None = keep if callable(keep) else None
        self.paths: tuple[str, ...] = ()
        if not callable(keep):
            given: Any = [keep] if isinstance(keep, str) else keep
            self.paths = tuple(given) if isinstance(given, Iterable) else (given,)
            if not all(isinstance(path, str) for path in self.paths):
                raise TypeError(
                    f"keep_on_host takes paths or a function of path and leaf: {keep!r}; a path is "
                    "\"['lengths']\""
                )
        self._may_miss = may_miss
        self._last: tuple[Structure | None, list[str], list[int]] = None, [], []

    def apply(self, leaves: list[Any], structure: Structure) -> None:
        """Wrap the leaves of a batch that stay on the host.

        Raises:
            LayoutError: one of the paths leads to nothing in the first batch, and none may.
        """
        known, paths, kept = self._last
        if known is not structure:
            paths = structure.paths()
            kept = [index for index, path in enumerate(paths) if _is_in(path, self.paths)]
            if known is None and not self._may_miss:
                for path in self.missing_in(structure):
                    raise LayoutError(
                        f"keep_on_host={path!r} leads to nothing in this batch; its leaves are at "
                        f"{some_paths(structure)}",
                        path,
                    )
            self._last = structure, paths, kept
        if self.says is not None:
            kept = [
                index
                for index, leaf in enumerate(leaves)
                if type(leaf) is not OnHost and self.says(paths[index], unwrapped(leaf))
            ]
        for index in kept:
            where = partial(paths.__getitem__, index)
            leaves[index] = OnHost(gathered(unwrapped(leaves[index]), where))

    def missing_in(self, structure: Structure) -> list[str]:
        """Return the paths that lead to nothing in a batch of this structure."""
        paths = structure.paths()
        return [kept for kept in self.paths if not any(_is_in(path, [kept]) for path in paths)]


def some_paths(structure: Structure) -> str:
    """Return the first paths of a structure's leaves, for a message."""
    first, more = structure.paths()[:8], structure.paths()[8:]
    return ", ".join(first) + (", ..." if more else "")


def _is_in(path: str, containers: Iterable[str]) -> bool:
    return any(
        path.startswith(container) and path[len(container) :][:1] in ("", "[", ".")
        for container in containers
    )


_DLPACK = {"cpu": 1, "cuda": 2}


@lru_cache(maxsize=16)
def dlpack_device(device: torch.device) -> tuple[int, int]:
    """Return DLPack's numbers for a device, which the extension uses."""
    return _DLPACK[device.type], device.index or 0


_CPU = torch.device("cpu")

_MOST_BYTES = 2**61
"""With larger leaves, the sums in a table could overflow."""


class Described(NamedTuple):
    """The description of a leaf."""

    kind: RowKind
    """`RowKind.RAW` also for a leaf that may be strided."""
    dtype: int = 0
    """The dtype's code."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """In elements."""
    source: torch.Tensor | None = None
    """The tensor to read, kept alive until it is packed."""
    address: int = 0
    """The address of the source."""


class FindLocked(NamedTuple):
    """Leaves that are page-locked are to be found."""

    cut: Callable[[int, int], Sequence[tuple[int, int]]]
    """Cuts memory, given as address and bytes, where chunks of a region end; returns the offsets at
    which pieces begin and end. None if it isn't in a region."""
    each: bool
    """Whether each large leaf is asked. If not, and none of the first three is page-locked, no
    other is."""


class Parts(NamedTuple):
    """A batch taken apart."""

    structure: Structure
    """The containers of the batch."""
    leaves: list[Any]
    """Their contents. Tensors that torch conjugates or negates lazily are replaced by others that
    have the values, and `Rows` by their stack, or by their tensor.
    """
    table: Table
    """A row for each leaf."""
    sources: bytes
    """A row for each leaf: the address to read from, and its stride if it is strided."""
    kept: list[torch.Tensor]
    """Tensors to keep alive beside the leaves, because `sources` has their addresses."""
    stacks: dict[int, Stack]
    """By row, the leaves that have no source: `pack` and `start_packing` read their samples."""
    locked: bytes = b""
    """The pieces of `RowKind.LOCKED` leaves, as the extension writes them."""

    def lenders(self) -> list[Any]:
        """Return the leaves that are copied from where they are."""
        return [self.leaves[i] for i in self.table.positions(RowKind.LOCKED)]

    def unlocked(self) -> Parts:
        """Return the same batch with all of these leaves packed."""
        return describe(self.leaves, self.structure, _CPU)

    def others(self) -> list[Any]:
        """Return the leaves that aren't in the slab: those that aren't tensors, and those moved by
        ``.to()``.
        """
        if not self.table.others and not self.table.moved:
            return []
        leaves, positions = self.leaves, self.table.positions(RowKind.OTHER, RowKind.MOVED)
        return [leaf.obj if type(leaf := leaves[i]) in WRAPPERS else leaf for i in positions]


def take_apart(
    tree: Any,
    device: torch.device = _CPU,
    keeping: Keeping | None = None,
    walked: tuple[list[Any], Structure] | None = None,
    locked: FindLocked | None = None,
) -> Parts:
    """Take a tree apart and describe its leaves.

    Args:
        tree: containers with anything in them.
        device: tensors on this device can be packed; others are `RowKind.MOVED`.
        keeping: says which leaves stay as they are.
        walked: the result of `walk` for the tree, if it is known.
        locked: how page-locked leaves are found; None packs them.

    Raises:
        IndexError: `Rows` have an index out of range.
        LayoutError: an object that holds tensors isn't a known container, an array cannot become a
            tensor, a tensor has no memory, or the tree refers to itself, or is a loader or an
            iterator.
    """
    while True:
        if walked is None:
            with step("walk"):
                walked = walk(tree)
        leaves, structure = walked
        if keeping is not None:
            keeping.apply(leaves, structure)
        try:
            with step("describe"):
                return describe(leaves, structure, device, locked=locked)
        except IsContainer:
            walked = None  # a class was registered after its objects were met as leaves


def describe(
    leaves: list[Any],
    structure: Structure,
    device: torch.device,
    *,
    arrays: bool = True,
    locked: FindLocked | None = None,
) -> Parts:
    """Describe the leaves of a tree; see `take_apart`.

    Args:
        leaves: of the tree. Some are replaced; see `Parts.leaves`.
        structure: of the tree.
        device: tensors on this device can be packed.
        arrays: whether numpy arrays count as tensors, and whether `Rows` become stacks.
        locked: how page-locked leaves are found; None packs them.

    Raises:
        IsContainer: a leaf has become a container; walk again.
        IndexError, LayoutError: as `take_apart`.
    """
    computed: dict[int, torch.Tensor | Stack] = {}
    copies: dict[Any, Any] = {}

    def plainly(leaf: Any, index: int) -> Described | Stack:
        if type(leaf) is Rows:
            path = partial(structure.path, index)
            made = stack_of(leaf, copies, path) if arrays else gathered(leaf, path)
            computed[id(leaf)] = made
            if isinstance(made, Stack):
                return made
            return _describe_tensor(structure, device, made, index)
        described = _describe_leaf(leaves, structure, device, arrays, index)
        source = described.source
        if source is not None and source is not leaf and isinstance(leaf, torch.Tensor):
            computed[id(leaf)] = source
        return described

    cut, each = (None, False) if locked is None else locked
    figures, sources, kept, stacks, pieces = _native.core.describe(
        leaves, ATOM_TYPES, plainly, dlpack_device(device), arrays, cut, each
    )
    if computed:
        leaves[:] = [computed.get(id(leaf), leaf) for leaf in leaves]
    # `tuple.__new__` is faster than the constructors of these classes, which are Python functions.
    table = tuple.__new__(Table, figures)
    return tuple.__new__(Parts, (structure, leaves, table, sources, kept, stacks, pieces))


class IsContainer(Exception):  # noqa: N818 - a signal, which never reaches a user
    """A leaf is of a class that has become a container."""


def _describe_leaf(
    leaves: list[Any],
    structure: Structure,
    device: torch.device,
    arrays: bool,
    index: int,
) -> Described:
    """Describe the leaf at an index.

    The cases: a tensor, packed or moved; a numeric array, which becomes a tensor; an object that
    holds no tensor, by its type or after a search, and stays as it is; an object that moves by its
    own ``.to()``; and errors.
    """
    leaf = leaves[index]
    cls = type(leaf)
    if cls is Whole:
        return Described(RowKind.MOVED)
    if issubclass(cls, torch.Tensor):
        return _describe_tensor(structure, device, leaf, index)
    if is_atom(cls):
        return Described(RowKind.OTHER)
    if issubclass(cls, np.ndarray) and arrays:
        tensor = tensor_over(structure, leaf, index)
        if tensor is not None:
            return _describe_plain(structure, tensor, index)
    if is_container(cls):
        raise IsContainer
    check_yields_no_batches(structure, leaf, index)
    if hides_tensor(structure, leaf, index):
        if is_container(cls, look_again=True):
            raise IsContainer
        if moves_as_a_whole(cls):
            return Described(RowKind.MOVED)
        raise unknown_classes(leaves, structure, index)
    return Described(RowKind.OTHER)


def _describe_tensor(
    structure: Structure, device: torch.device, tensor: torch.Tensor, index: int
) -> Described:
    """Describe how a tensor is sent: by its bytes if it is plain, on the device, and not part of a
    graph.
    """
    # A list of cases.
    if (
        type(tensor) is not torch.Tensor
        or tensor.device != device
        or tensor.is_nested
        or tensor.dtype not in CODES
        or tensor.ndim > MOST_DIMS
        or tensor.requires_grad
        or is_dual(tensor)
        or has_no_memory(tensor)
    ):
        return Described(RowKind.MOVED)
    check_has_memory(tensor, partial(structure.path, index))
    return _describe_plain(structure, tensor, index)


def _describe_plain(structure: Structure, tensor: torch.Tensor, index: int) -> Described:
    """Describe a tensor that is packed."""
    shape = tuple(tensor.shape)
    if math.prod(shape) * tensor.itemsize >= _MOST_BYTES:
        raise too_large(structure, tensor, index)
    if tensor.is_conj() or tensor.is_neg():  # lazily: its bytes aren't its values
        value = tensor.resolve_conj().resolve_neg()
        check_is_plain(value)
        # As strided tensors are packed.
        tensor = value if value.stride() == tensor.stride() else value.contiguous()
    return Described(
        RowKind.RAW, CODES[tensor.dtype], shape, tensor.stride(), tensor, tensor.data_ptr()
    )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor, in elements."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape and stride fills its memory without gaps or overlaps,
    in any order.
    """
    expected = 1
    for distance, size in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] != 1):
        if distance != expected:
            return False
        expected *= size
    return True
