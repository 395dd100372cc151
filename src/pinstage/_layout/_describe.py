"""A batch taken apart: its leaves, its structure, and the offset table.

`_describe_leaf` says what a leaf is, in Python, and is right everywhere. The extension says the same of the leaves that
are usual (plain tensors on the right device, plain arrays, what holds no tensor), and asks here about all others.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _native
from .._steps import step
from .._torch import check_is_plain, has_no_memory, is_dual, may_be_dual
from .._tree import (
    ATOM_TYPES,
    KINDS,
    Kind,
    Structure,
    from_array,
    holds_tensor,
    is_container_by_now,
    learn_containers,
    walk,
)
from ..errors import LayoutError
from ._dtypes import ALIGNMENT, CODES
from ._table import RowKind, Table, table_of_rows

_DLPACK = {"cpu": 1, "cuda": 2}
"""Kinds of devices by DLPack's numbers, as the extension knows them."""

_CPU = torch.device("cpu")

_AMBIGUOUS_FROM = 4
"""Dimensions from which a shape has more than one memory format (channels last)."""


class Described(NamedTuple):
    """What there is to know of a leaf."""

    kind: RowKind
    dtype: int = 0
    """Its code."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """In the slab, in elements."""
    nbytes: int = 0
    source: torch.Tensor | None = None
    """What is read, and kept until then."""
    address: int = 0
    """Of the source."""
    source_stride: tuple[int, ...] = ()
    """Of the source, in elements."""


class Parts(NamedTuple):
    """A batch taken apart."""

    structure: Structure
    """Which containers it is made of."""
    leaves: list[Any]
    """What is in them."""
    table: Table
    """A row for each leaf."""
    sources: Any
    """What is read: of the extension a buffer of addresses, else the `Described` of each leaf."""
    kept: list[torch.Tensor]
    """What has to stay alive for that beside the leaves."""
    has_lazy: bool
    """Whether torch has to compute some of the values."""

    def others(self) -> list[Any]:
        """Return the leaves that do not live in the slab: those that are no tensors, and those moved by ``.to()``."""
        if not self.table.others and not self.table.moved:
            return []
        return [self.leaves[i] for i in self.table.positions(RowKind.OTHER, RowKind.MOVED)]


def take_apart(tree: Any, device: torch.device = _CPU) -> Parts:
    """Take a tree apart and describe its leaves.

    Args:
        tree: containers with anything in them.
        device: where tensors are that can be packed; others are `RowKind.MOVED`.

    Raises:
        LayoutError: an object that holds tensors is no known container, an array cannot become a tensor, a tensor has
            no memory, or the tree refers to itself.
    """
    while True:
        with step("walk"):
            leaves, structure = walk(tree)
        try:
            with step("describe"):
                return describe(leaves, structure, device)
        except IsContainer:
            continue  # somebody made a class known since its objects were met as leaves


def describe(leaves: list[Any], structure: Structure, device: torch.device, *, arrays: bool = True) -> Parts:
    """Describe the leaves of a tree; see `take_apart`.

    Args:
        leaves: of the tree.
        structure: of the tree.
        device: where tensors are that can be packed.
        arrays: whether numpy arrays count as tensors; else they are no tensors.

    Raises:
        IsContainer: a leaf is none; walk again.
        LayoutError: as `take_apart`.
    """
    plainly = partial(_describe_leaf, structure, device, arrays)
    core = _native.core
    if core is None:
        return _described(leaves, structure, list(map(plainly, leaves, range(len(leaves)))))
    figures, *found = core.describe(leaves, ATOM_TYPES, plainly, *_dlpack_device(device), arrays)
    # Not by their classes, whose constructors are functions of Python.
    return tuple.__new__(Parts, (structure, leaves, tuple.__new__(Table, figures), *found))


def _described(leaves: list[Any], structure: Structure, described: list[Described]) -> Parts:
    """Place leaves in a slab, one behind the other, each at a multiple of `ALIGNMENT` bytes."""
    rows: list[tuple[Any, ...]] = []
    first: dict[int, int] = {}
    end = dtypes = 0
    for index, (leaf, found) in enumerate(zip(leaves, described, strict=True)):
        same = index if found.kind is RowKind.OTHER else first.setdefault(id(leaf), index)
        if same != index:
            rows.append((same, 0, RowKind.ALIAS, 0, 0, (), ()))
        elif found.source is None:
            rows.append((-1, 0, found.kind, found.dtype, 0, (), ()))
        else:
            shape, stride = found.shape, found.stride
            rows.append((end, found.nbytes, found.kind, found.dtype, len(shape), shape, stride))
            end += -(-found.nbytes // ALIGNMENT) * ALIGNMENT
            dtypes |= 1 << found.dtype
    has_lazy = any(found.kind is RowKind.LAZY for found in described)
    return Parts(structure, leaves, table_of_rows(rows, end, dtypes), described, [], has_lazy)


@lru_cache
def _dlpack_device(device: torch.device) -> tuple[int, int]:
    return _DLPACK[device.type], device.index or 0


class IsContainer(Exception):  # noqa: N818 - it tells, and never reaches a user
    """A leaf is of a class that has become a container."""


def _describe_leaf(structure: Structure, device: torch.device, arrays: bool, leaf: Any, index: int) -> Described:
    """Say what a leaf is.

    The cases: a tensor, packed or moved; a numeric array, which becomes a tensor; what holds no tensor, by its type or
    after a search, and stays as it is; and errors.
    """
    kind = KINDS[type(leaf)]
    if kind is Kind.TENSOR:
        return _describe_tensor(structure, device, leaf, index)
    if kind is Kind.ATOM:
        return Described(RowKind.OTHER)
    if kind is Kind.ARRAY and arrays:
        tensor = _tensor_over(structure, leaf, index)
        if tensor is not None:
            return _describe_plain(tensor)
    if kind is Kind.OPAQUE and learn_containers({type(leaf)}):
        raise IsContainer
    if _hides_tensor(structure, leaf, index):
        if is_container_by_now(type(leaf)):
            raise IsContainer
        raise _unknown(structure, leaf, index)
    return Described(RowKind.OTHER)


def _describe_tensor(structure: Structure, device: torch.device, tensor: torch.Tensor, index: int) -> Described:
    """Say how a tensor travels: by its bytes if it is plain, dense, in its place, and no part of autograd's graph."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.device != device
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.dtype not in CODES
        or tensor.requires_grad
        or (may_be_dual() and is_dual(tensor))
    ):
        return Described(RowKind.MOVED)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of torch.func: inside of vmap, say
        return Described(RowKind.MOVED)
    if tensor.numel():
        if has_no_memory(tensor):
            return Described(RowKind.MOVED)
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        needed = int(tensor.storage_offset() + reach) * tensor.itemsize
        if storage.nbytes() < needed or not tensor.data_ptr():
            raise _without_memory(structure, tensor, needed, index)
    return _describe_plain(tensor)


def _tensor_over(structure: Structure, array: np.ndarray[Any, Any], index: int) -> torch.Tensor | None:
    try:
        tensor = from_array(array)
    except TypeError as error:
        path = structure.path(index)
        raise LayoutError(
            f"batch{path} cannot be staged: numpy {type(array).__name__} {array.dtype} {list(array.shape)}: {error}; "
            "convert it to a dtype that torch has",
            path,
        ) from error
    if tensor is not None:
        check_is_plain(tensor)
    return tensor


def _hides_tensor(structure: Structure, leaf: Any, index: int) -> bool:
    try:
        return holds_tensor(leaf)
    except OverflowError as error:
        path, name = structure.path(index), type(leaf).__qualname__
        raise LayoutError(
            f"batch{path} is no known container and too large to be searched for tensors: {name}, {error}; make it "
            f"known with pinstage.register_node({name})",
            path,
        ) from error


def _unknown(structure: Structure, leaf: Any, index: int) -> LayoutError:
    path, name = structure.path(index), type(leaf).__qualname__
    if isinstance(leaf, np.ndarray | set | frozenset):
        return LayoutError(f"batch{path} holds tensors in {name}, which cannot be staged; use a list", path)
    return LayoutError(
        f"batch{path} holds tensors and is no known container: {type(leaf).__module__}.{name}; make it known with "
        f"pinstage.register_node({name}), or register_node({name}, flatten, unflatten), or give it tree_flatten and "
        "tree_unflatten",
        path,
    )


def _without_memory(structure: Structure, tensor: torch.Tensor, needed: int, index: int) -> LayoutError:
    path = structure.path(index)
    return LayoutError(
        f"batch{path} has not the memory for its shape: {needed} bytes of {list(tensor.shape)} in a storage of "
        f"{tensor.untyped_storage().nbytes()}; it was freed or cut by resize_() of its storage: stage it before, or "
        "fill it again",
        path,
    )


def _describe_plain(tensor: torch.Tensor) -> Described:
    """Describe a tensor that is packed."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    kind, slab_stride = RowKind.RAW, stride
    if not tensor.numel() or (tensor.is_contiguous() and len(shape) < _AMBIGUOUS_FROM):
        slab_stride = contiguous_stride(shape)
    elif not dense_stride(shape, stride):
        kind, slab_stride = RowKind.STRIDED, contiguous_stride(shape)
    if tensor.is_conj() or tensor.is_neg():
        kind = RowKind.LAZY
    return Described(kind, CODES[tensor.dtype], shape, slab_stride, tensor.nbytes, tensor, tensor.data_ptr(), stride)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor, in elements."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Say whether a tensor of this shape and stride fills its memory without gaps or overlaps, in any order."""
    expected = 1
    for distance, size in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] != 1):
        if distance != expected:
            return False
        expected *= size
    return True
