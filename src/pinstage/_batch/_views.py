"""Tensors over a slab, from the offset table."""

from __future__ import annotations

from typing import Any

import torch

from ._blocks import Sharing, make_blocks
from ._dtypes import ALIGNMENT, DTYPES
from ._table import Table


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
        slab = slab[: table.nbytes]
    return make_blocks(table, Sharing.ONE, slab.device, slab).leaves(others)


def view_of(row: Any, slab: torch.Tensor) -> torch.Tensor:
    """Return the place of one packed leaf, a row of `Table.rows`, as a view of a slab."""
    dtype, offset, ndim = DTYPES[row["dtype"]], int(row["offset"]), int(row["ndim"])
    assert dtype is not None
    place = slab[offset : offset + int(row["nbytes"])].view(dtype)
    return place.as_strided(row["shape"][:ndim].tolist(), row["stride"][:ndim].tolist())
