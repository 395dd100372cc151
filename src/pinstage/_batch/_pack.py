"""A batch's bytes into a slab, by the calling thread."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from .. import _native
from .._compat.views import check_is_plain
from ._describe import Parts
from ._table import RowKind
from ._views import view_of


class HostSlab(Protocol):
    """Host memory that batches are packed into: a lease."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def data_ptr(self) -> int:
        """Return its address."""
        ...

    def tensor(self) -> torch.Tensor:
        """Return it as a uint8 tensor."""
        ...


def pack(parts: Parts, slab: torch.Tensor | HostSlab, skip: list[int] | None = None) -> None:
    """Write all packed leaves to their places. Padding is set to zero.

    Args:
        parts: of a batch whose leaves are as they were when it was taken apart.
        slab: uint8 ``[>= parts.table.nbytes]`` on the CPU. Of a lease a tensor is made only where one is needed, since
            that takes longer than to pack a few leaves.
        skip: leaves that somebody else writes.
    """
    if parts.has_lazy:
        compute_lazy_leaves(parts, slab)
    skipped = None if skip is None else np.bincount(skip, minlength=len(parts.leaves)).astype(np.uint8).tobytes()
    _native.core.pack(parts.table.data, parts.sources, slab.data_ptr(), slab.nbytes, skipped)


def compute_lazy_leaves(parts: Parts, slab: torch.Tensor | HostSlab) -> None:
    """Write those leaves to their places whose value torch has to compute."""
    slab = slab if isinstance(slab, torch.Tensor) else slab.tensor()
    for index in parts.table.positions(RowKind.LAZY):
        place = view_of(parts.table.rows[index], slab)
        check_is_plain(place)
        place.copy_(parts.leaves[index])
