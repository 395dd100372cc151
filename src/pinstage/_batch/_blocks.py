"""The leaves of a batch on a device: tensors of their own, or views of shared blocks.

`make_blocks` makes these tensors from the offset table: by torch's C shim, or by torch's public
functions where the shim can't be used, such as in a mode. A block is one tensor and one range of
the host slab, so it is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, TypeAlias

import torch

from pinstage._native import _core

from .._compat.views import check_is_plain, view_of
from ._describe import dlpack_device
from ._leaves import ATOM_TYPES, WRAPPERS
from ._table import ALIGNMENT, DTYPES, Table

Blocks = _core.Blocks

OwnStorage: TypeAlias = Literal["auto"] | bool

OWN_LEAVES = 8
"""In batches of at most this many leaves, each leaf has its own tensor by default. That costs 1 us
per leaf; 16 leaves of 64 KiB take as long as one tensor and one copy."""


Matched: TypeAlias = tuple[dict[tuple[int, int], list[int]], list[int]]
"""Which leaves torch can copy by one call for many; see `match`."""


class Sharing(IntEnum):
    """Which leaves share device memory."""

    ONE = 0
    """All: the device has one slab, as the host has."""
    SHARED = 1
    """Leaves of one block of the offset table."""
    EACH = 2
    """None: each has a tensor of its own."""


def sharing_of(own_storage: OwnStorage, leaves: int) -> Sharing:
    """Decide which leaves of a batch share device memory.

    True gives each leaf its own tensor, False makes one slab. "auto" gives each leaf of a batch of
    few leaves its own tensor, and makes blocks in others, where only leaves of 4 MiB and more have
    their own (see ``place_rows`` in ``_native/table.c``).
    """
    if own_storage == "auto":
        return Sharing.EACH if leaves <= OWN_LEAVES else Sharing.SHARED
    return Sharing.EACH if own_storage else Sharing.ONE


def check_own_storage(own_storage: object) -> OwnStorage:
    """Return the option if it is valid.

    Raises:
        ValueError: it is neither "auto" nor a bool.
    """
    if isinstance(own_storage, bool) or own_storage == "auto":
        return own_storage
    raise ValueError(f"own_storage must be 'auto', True or False: {own_storage!r}")


def make_blocks(
    table: Table, sharing: Sharing, device: torch.device, slab: torch.Tensor | None = None
) -> Blocks:
    """Make the tensors of a batch, on torch's current stream.

    Args:
        table: the offset table.
        sharing: which leaves share memory.
        device: the tensors' device; a CUDA device needs an index.
        slab: uint8 ``[>= table.nbytes]``: the one tensor to use, starting at a multiple of
            `ALIGNMENT` bytes.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    if slab is not None and type(slab) is not torch.Tensor:
        check_is_plain(slab)
    is_cuda, index = int(device.type == "cuda"), device.index or 0
    return Blocks.of(table.data, sharing, is_cuda, index, slab, _empty, _view)


def _empty(
    code: int, shape: tuple[int, ...], stride: tuple[int, ...], is_cuda: int, index: int
) -> torch.Tensor:
    device = torch.device("cuda", index) if is_cuda else torch.device("cpu")
    made = torch.empty_strided(shape, stride, dtype=DTYPES[code], device=device)
    check_is_plain(made)
    return made


def view_at(
    slab: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a view of a slab, or of any tensor's storage, from a byte behind its first element
    on.
    """
    begin = int(slab.storage_offset()) * slab.itemsize + start
    return view_of(slab.untyped_storage(), begin, dtype, shape, stride)


def _view(
    slab: torch.Tensor, code: int, start: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    dtype: Any = DTYPES[code]
    return view_at(slab, start, dtype, shape, stride)


def match(
    leaves: list[Any], existing: list[Any], table: Table | None, device: torch.device
) -> Matched:
    """Look for leaves that torch can copy into existing tensors by one call for many.

    Args:
        leaves: the leaves of a batch.
        existing: the objects in their places. Leaves that stay as they are replace these.
        table: the leaves' table; None if they weren't described.
        device: where existing tensors have to be.

    Returns:
        Numbers of leaves that are packed, by the codes of their dtype and of their destination's.
        These destinations are plain, have memory, and have the shape and the strides of the packed
        leaf. Then the numbers of all other leaves that are, or without a table may be, tensors.
    """
    data = None if table is None else table.data
    return _core.match(leaves, existing, data, (ATOM_TYPES, WRAPPERS), *dlpack_device(device))


def cut(table: Table, slab: torch.Tensor, others: list[Any]) -> list[Any]:
    """Make all leaves of a batch, in its order. Copies nothing; the views keep the slab's memory
    alive.

    All views share the slab's storage, so `torch.Tensor.record_stream` of one counts for all. Each
    has a version counter of its own: an in-place change of one does not make autograd refuse
    another.

    Args:
        table: the offset table.
        slab: uint8 ``[>= table.nbytes]``, on any device, starting at a multiple of `ALIGNMENT`
            bytes.
        others: the values of the leaves that are not in the slab, in order.
    """
    size = slab.numel()
    if size < table.nbytes:
        raise ValueError(f"the slab is too small: {size} bytes for a layout of {table.nbytes}")
    if len(others) != table.others + table.moved:
        raise ValueError(
            f"others has the wrong length: {len(others)} for {table.others + table.moved} leaves "
            "that do not live in the slab; pass layout.others(batch)"
        )
    if size % ALIGNMENT:
        slab = slab[: table.nbytes]
    return make_blocks(table, Sharing.ONE, slab.device, slab).leaves(others)
