"""Leaves that are page-locked already: they travel from where they lie, and are not packed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ._describe import Parts
from ._dtypes import ALIGNMENT
from ._leaves import from_array
from ._table import PACKED, RowKind

BORROW_FROM_BYTES = 256 * 1024
"""Below this size to pack a leaf takes less time than to ask whether it is page-locked and to copy it by itself."""


class Borrowed(NamedTuple):
    """A batch of which some leaves are not packed."""

    leaves: list[tuple[int, int, int, int]]
    """Ranges of their bytes: row, where the range begins and ends in the leaf, and the address of its first byte."""
    lenders: list[Any]
    """Their tensors and arrays: to be kept until the copies are done."""
    rest: Parts
    """What is packed; its table says where in the host slab, which has no room for the others."""


def borrow(parts: Parts, pieces_of: Callable[[torch.Tensor], list[tuple[int, int]]]) -> Borrowed | None:
    """Find the leaves of a batch that need no packing; None if there are none.

    These are dense, of `BORROW_FROM_BYTES` and more, and page-locked.

    Args:
        parts: of the batch.
        pieces_of: returns the ranges in which a tensor's memory can be copied; none if it isn't page-locked.
    """
    rows = parts.table.rows.copy()
    leaves, lenders = [], []
    for index in np.flatnonzero((rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= BORROW_FROM_BYTES)).tolist():
        leaf = parts.leaves[index]
        tensor = leaf if isinstance(leaf, torch.Tensor) else from_array(leaf)
        if tensor is not None and (pieces := pieces_of(tensor)):
            address = tensor.data_ptr()
            leaves += [(index, start, end, address + start) for start, end in pieces]
            lenders.append(tensor)
            rows["kind"][index] = RowKind.MOVED
    if not leaves:
        return None
    end = 0
    for index in parts.table.by_offset(*PACKED):
        if rows["kind"][index] != RowKind.MOVED:
            rows["offset"][index] = end
            end += -(-int(rows["nbytes"][index]) // ALIGNMENT) * ALIGNMENT
    rest = Parts(
        parts.structure, parts.leaves, parts.table.moved_to(rows, end), parts.sources, parts.kept, parts.has_lazy
    )
    return Borrowed(leaves, lenders, rest)
