"""How bytes get from leaves to their places: the moves that packing is made of.

Many small leaves are gathered by one system call, ``process_vm_writev`` on the own process, which takes a list of
fragments and lets other threads run meanwhile. Where the system does not allow it (another system, a sandbox) each of
them is a memmove. Large leaves are anyway.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from operator import itemgetter

import numpy as np
import torch

from ._fragments import Piece
from ._table import Table

_FEW_LEAVES = 16
"""Up to so many leaves cost less by one memmove each than the list of fragments and the system call (20 us)."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IOVEC_BYTES = 16  # struct iovec: address and length, 8 bytes each
_ZEROS = ctypes.create_string_buffer(4096)  # what padding is filled with

memmove: Callable[[int, int, int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""memmove(to, from, nbytes); lets other threads run meanwhile."""


def _find_writev() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


class Moves:
    """The moves that fill one slab with the leaves of one batch.

    Args:
        table: the offset table.
        tensors: as the table describes them; the caller keeps them alive and unchanged until the last move.
        slab: uint8 ``[>= table.nbytes]`` on the CPU.
    """

    writev = _find_writev()
    """``process_vm_writev``, or None from the time that the system refused it."""

    def __init__(self, table: Table, tensors: list[torch.Tensor], slab: torch.Tensor) -> None:
        self._table = table
        self._tensors = tensors
        self._slab = slab
        self._base = slab.data_ptr()
        chosen = itemgetter(*table.raw)(tensors) if len(table.raw) > 1 else [tensors[i] for i in table.raw]
        self._addresses = list(map(torch.Tensor.data_ptr, chosen))
        if 0 in self._addresses:
            raise ValueError("a tensor has no memory: a zero tensor of forward-mode AD; pass tensor.clone()")

    def everything(self) -> None:
        """Move all leaves, in the calling thread."""
        self.gather()
        if len(self._addresses) <= _FEW_LEAVES:
            for address, offset, nbytes in zip(
                self._addresses, self._table.raw_offsets, self._table.raw_nbytes, strict=True
            ):
                memmove(self._base + offset, address, nbytes)
        else:
            for piece in self.pieces():
                self.move(piece)

    def gather(self) -> None:
        """Copy the leaves whose bytes are not their value as they lie: strided, expanded, lazily conjugated."""
        table = self._table
        for position in table.gathered:
            dtype, shape = table.columns.dtypes[position], table.columns.shapes[position]
            offset, source = table.offsets[position], self._tensors[position]
            if position not in table.columns.lazy and dtype.itemsize in _INTEGERS:
                # As integers: a copy of bools makes them 0 or 1, and copy_ has no kernels for int1 to int7.
                dtype = _INTEGERS[dtype.itemsize]
                source = source.view(dtype)
            target = self._slab[offset : offset + source.numel() * dtype.itemsize].view(dtype)
            target.as_strided(shape, table.stride_of(position)).copy_(source)

    def pieces(self) -> list[Piece]:
        """Return what `move` has to be called with, in any order, to move all leaves but the gathered ones."""
        fragments = self._table.fragments
        vector = np.empty((len(fragments.nbytes), 2), dtype=np.int64)
        vector[:, 0] = ctypes.addressof(_ZEROS)
        vector[fragments.leaves, 0] = self._addresses
        vector[:, 1] = fragments.nbytes
        self._vector = vector
        self._vector_address = vector.ctypes.data
        return fragments.pieces

    def move(self, piece: Piece) -> None:
        """Move one piece. May be called by several threads at once."""
        offset, nbytes, first, whole, cut = piece
        target = self._base + offset
        if not whole:
            memmove(target, int(self._vector[first, 0]) + cut, nbytes)
        elif self.writev is None or not self._write(target, nbytes, first, whole):
            for address, size in self._vector[first : first + whole].tolist():
                memmove(target, address, size)
                target += size

    def copy(self, piece: Piece) -> None:
        """Move a piece of a large leaf as `move` does, by torch's own threads, which the calling thread waits for."""
        offset, nbytes, first, _, cut = piece
        leaf = int(np.searchsorted(self._table.fragments.leaves, first))
        tensor = self._tensors[self._table.raw[leaf]]
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._slab[offset : offset + nbytes].copy_(flat[cut : cut + nbytes])

    def _write(self, target: int, nbytes: int, first: int, count: int) -> bool:
        """Gather fragments at an address by one system call; say whether all arrived."""
        into = (ctypes.c_size_t * 2)(target, nbytes)
        fragments = self._vector_address + first * _IOVEC_BYTES
        writev = Moves.writev  # once: another thread may find out meanwhile that the system refuses it
        if writev is not None and writev(os.getpid(), fragments, count, into, 1, 0) == nbytes:
            return True
        Moves.writev = None
        return False
