"""Leaves that are page-locked already: they travel from where they lie, and are not packed again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from .._layout import ALIGNMENT, PACKED, Parts, RowKind
from .._tree import from_array

BORROW_FROM_BYTES = 256 * 1024
"""Below this size to pack a leaf takes less time than to ask whether it is page-locked and to copy it by itself."""


class Loan(NamedTuple):
    """A leaf that is copied from where it lies."""

    address: int
    start: int
    """Its first byte in the device slab."""
    nbytes: int


class Run(NamedTuple):
    """Bytes that lie side by side in the host slab and in the device slab."""

    start: int
    """In the host slab."""
    end: int
    shift: int
    """How many bytes later the device slab has them."""


class Borrowed(NamedTuple):
    """A batch of which some leaves are not packed."""

    loans: list[Loan]
    lenders: list[Any]
    """Their tensors and arrays: to be kept until the copies are done."""
    rest: Parts
    """What is packed; its table says where in the host slab, which has no room for the others."""
    runs: list[Run]
    """The host slab, in the order of its bytes."""


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Say whether CUDA can copy from a tensor's memory without the host: torch's, a lease of ours, or registered."""
    return tensor.is_pinned()


def borrow(parts: Parts) -> Borrowed | None:
    """Find the leaves of a batch that need no packing; None if there are none.

    These are dense, of `BORROW_FROM_BYTES` and more, and page-locked.
    """
    rows = parts.table.rows.copy()
    loans, lenders = [], []
    for index in np.flatnonzero((rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= BORROW_FROM_BYTES)).tolist():
        leaf = parts.leaves[index]
        tensor = leaf if isinstance(leaf, torch.Tensor) else from_array(leaf)
        if tensor is not None and is_page_locked(tensor):
            loans.append(Loan(tensor.data_ptr(), int(rows["offset"][index]), int(rows["nbytes"][index])))
            lenders.append(tensor)
            rows["kind"][index] = RowKind.MOVED
    if not loans:
        return None
    runs: list[Run] = []
    end = 0
    for index in np.flatnonzero(np.isin(rows["kind"], PACKED)).tolist():
        there, nbytes = int(rows["offset"][index]), -(-int(rows["nbytes"][index]) // ALIGNMENT) * ALIGNMENT
        if runs and runs[-1].shift == there - end:
            runs[-1] = Run(runs[-1].start, end + nbytes, runs[-1].shift)
        elif nbytes:
            runs.append(Run(end, end + nbytes, there - end))
        rows["offset"][index] = end
        end += nbytes
    rest = Parts(
        parts.structure, parts.leaves, parts.table.moved_to(rows, end), parts.sources, parts.kept, parts.has_lazy
    )
    return Borrowed(loans, lenders, rest, runs)
