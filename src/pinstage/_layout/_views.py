"""Tensors over a slab, from the offset table."""

from __future__ import annotations

from typing import Any

import torch

from .. import _native
from .._torch import check_is_plain
from ._dtypes import ALIGNMENT, DTYPES
from ._table import PACKED, RowKind, Table


def cut(table: Table, slab: torch.Tensor, others: list[Any]) -> list[Any]:
    """Make all leaves of a batch, in its order. Copies nothing; the views keep the slab's memory alive.

    All views share the slab's storage, so `torch.Tensor.record_stream` of one is that of all. Each has a version
    counter of its own: an in-place change of one does not make autograd refuse another.

    Args:
        table: the offset table.
        slab: uint8 ``[>= table.nbytes]``, on any device, starting at a multiple of `ALIGNMENT` bytes.
        others: what stands for the leaves that do not live in the slab, in order.
    """
    size = slab.numel()
    if size < table.nbytes:
        raise ValueError(f"the slab is too small: {size} bytes for a layout of {table.nbytes}")
    if len(others) != table.others + table.moved:
        raise ValueError(
            f"others has the wrong length: {len(others)} for {table.others + table.moved} leaves that do not live in "
            "the slab; pass layout.others(batch)"
        )
    if size % ALIGNMENT:
        slab, size = slab[: table.nbytes], table.nbytes
    if _native.core is not None and type(slab) is torch.Tensor:
        leaves: list[Any] | None = _native.core.cut(table.data, slab, size, others)
        if leaves is not None:
            return leaves
    return _cut_plainly(table, slab, others)


def _cut_plainly(table: Table, slab: torch.Tensor, others: list[Any]) -> list[Any]:
    bases = [slab.view(dtype) if dtype and table.dtypes >> code & 1 else None for code, dtype in enumerate(DTYPES)]
    for base in bases:
        if base is not None:
            check_is_plain(base)
    left = iter(others)
    leaves: list[Any] = []
    for offset, _, kind, dtype, ndim, shape, stride in table.entries():
        if kind in PACKED:
            base = bases[dtype]
            assert base is not None
            start = base.storage_offset() + offset // base.itemsize
            # Not `as_strided`, whose views share one version counter.
            view = torch.empty(0, dtype=base.dtype, device=base.device)
            leaves.append(view.set_(base.untyped_storage(), start, shape[:ndim], stride[:ndim]))
        else:
            leaves.append(leaves[offset] if kind == RowKind.ALIAS else next(left))
    return leaves


def view_of(row: Any, slab: torch.Tensor) -> torch.Tensor:
    """Return the place of one packed leaf, a row of `Table.rows`, as a view of a slab."""
    dtype, offset, ndim = DTYPES[row["dtype"]], int(row["offset"]), int(row["ndim"])
    assert dtype is not None
    place = slab[offset : offset + int(row["nbytes"])].view(dtype)
    return place.as_strided(row["shape"][:ndim].tolist(), row["stride"][:ndim].tolist())
