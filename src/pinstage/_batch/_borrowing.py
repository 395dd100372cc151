"""Leaves that are page-locked already: they travel from where they lie, and are not packed again."""

from __future__ import annotations

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

    leaves: list[tuple[int, int]]
    """Row and address of each of them."""
    lenders: list[Any]
    """Their tensors and arrays: to be kept until the copies are done."""
    rest: Parts
    """What is packed; its table says where in the host slab, which has no room for the others."""


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Say whether CUDA can copy from a tensor's memory without the host: torch's, a lease of ours, or registered."""
    return tensor.is_pinned()


def borrow(parts: Parts) -> Borrowed | None:
    """Find the leaves of a batch that need no packing; None if there are none.

    These are dense, of `BORROW_FROM_BYTES` and more, and page-locked.
    """
    rows = parts.table.rows.copy()
    leaves, lenders = [], []
    for index in np.flatnonzero((rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= BORROW_FROM_BYTES)).tolist():
        leaf = parts.leaves[index]
        tensor = leaf if isinstance(leaf, torch.Tensor) else from_array(leaf)
        if tensor is not None and is_page_locked(tensor):
            leaves.append((index, tensor.data_ptr()))
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
