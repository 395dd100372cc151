"""A batch's bytes into a slab, by the calling thread."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from .. import _native
from .._torch import check_is_plain
from ._describe import Described, Parts
from ._dtypes import INTEGERS
from ._table import PACKED, RowKind
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
        skip: leaves that somebody else writes, rising.
    """
    if parts.has_lazy:
        compute_lazy_leaves(parts, slab)
    if isinstance(parts.sources, bytes):
        _native.core.pack(parts.table.data, parts.sources, slab.data_ptr(), slab.nbytes, skip)
    else:
        _pack_plainly(parts, _tensor_of(slab), frozenset(skip or ()))


def _tensor_of(slab: torch.Tensor | HostSlab) -> torch.Tensor:
    return slab if isinstance(slab, torch.Tensor) else slab.tensor()


def compute_lazy_leaves(parts: Parts, slab: torch.Tensor | HostSlab) -> None:
    """Write those leaves to their places whose value torch has to compute."""
    slab = _tensor_of(slab)
    for index in parts.table.positions(RowKind.LAZY):
        place = view_of(parts.table.rows[index], slab)
        check_is_plain(place)
        place.copy_(parts.leaves[index])


def _pack_plainly(parts: Parts, slab: torch.Tensor, skip: frozenset[int]) -> None:
    base, end = slab.data_ptr(), 0
    offsets = parts.table.rows["offset"].tolist()
    for index in parts.table.by_offset(*PACKED):
        offset, found = offsets[index], parts.sources[index]
        ctypes.memset(base + end, 0, offset - end)
        if index in skip:
            pass
        elif found.kind is RowKind.RAW:
            ctypes.memmove(base + offset, found.address, found.nbytes)
        elif found.kind is RowKind.STRIDED:
            _copy_elements(found, slab[offset : offset + found.nbytes])
        end = offset + found.nbytes
    ctypes.memset(base + end, 0, parts.table.nbytes - end)


def _copy_elements(found: Described, target: torch.Tensor) -> None:
    """Copy a strided leaf as integers: a copy of bools would make them 0 or 1, and some dtypes have none."""
    assert found.source is not None
    check_is_plain(target)
    source, size = found.source.detach(), found.source.itemsize
    if source.data_ptr() % size:  # torch's loops want elements at multiples of their size: complex128 crashes elsewhere
        start, steps = source.storage_offset() * size, [step * size for step in source.stride()]
        of_bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        of_bytes.set_(source.untyped_storage(), start, (*source.shape, size), (*steps, 1))
        target.view(of_bytes.shape).copy_(of_bytes)
        return
    integer = INTEGERS.get(source.itemsize, source.dtype)
    target.view(integer).view(source.shape).copy_(source.view(integer))
