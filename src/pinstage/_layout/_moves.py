"""How bytes get from leaves to their places: the moves that packing is made of.

Many small leaves are gathered by one system call, ``process_vm_writev`` on the own process, which takes a list of
fragments and lets other threads run meanwhile. Where the system does not allow it (another system, a sandbox) each of
them is a memmove. Large leaves are anyway. Strided leaves are copied by numpy, which uses the calling thread alone and
lets others run; torch would start threads of its own (see `_packing`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from operator import itemgetter

import numpy as np
import torch

from ._fragments import Gathering, Part, Piece, Rows
from ._gather import INTEGERS, copy_elements
from ._table import Table

_FEW_LEAVES = 16
"""Up to so many leaves cost less by one memmove each than the list of fragments and the system call (20 us)."""

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
        if len(self._addresses) <= _FEW_LEAVES:
            self.only(self._table.raw)
        else:
            for piece in self.pieces():
                self.move(piece)

    def only(self, positions: Collection[int]) -> None:
        """Move the leaves at some positions, and all strided ones, in the calling thread."""
        table = self._table
        for position, address, offset, nbytes in zip(
            table.raw, self._addresses, table.raw_offsets, table.raw_nbytes, strict=True
        ):
            if position in positions:
                memmove(self._base + offset, address, nbytes)
        for position in table.gathered:
            self._copy_rows(position)

    def pieces(self) -> list[Piece]:
        """Return what `move` has to be called with, in any order, to move all leaves."""
        fragments = self._table.fragments
        if fragments.gathers:
            vector = np.empty((len(fragments.nbytes), 2), dtype=np.int64)
            vector[:, 0] = ctypes.addressof(_ZEROS)
            vector[fragments.leaves, 0] = self._addresses
            vector[:, 1] = fragments.nbytes
            self._vector = vector
            self._vector_address = vector.ctypes.data
        return fragments.pieces

    def move(self, piece: Piece) -> None:
        """Move one piece. May be called by several threads at once."""
        if type(piece) is Part:
            offset, nbytes, leaf, cut = piece
            memmove(self._base + offset, self._addresses[leaf] + cut, nbytes)
        elif type(piece) is Rows:
            self._copy_rows(piece.position, piece.rows)
        elif type(piece) is Gathering:
            self._gather(*piece)

    def _copy_rows(self, position: int, rows: tuple[slice, ...] = ()) -> None:
        """Copy a strided leaf, or some of its rows."""
        table, source = self._table, self._tensors[position]
        dtype = table.columns.dtypes[position]
        if position in table.columns.lazy:
            copy_elements(table, position, source, self._slab)
            return
        # As integers: bits count, and numpy does not have all dtypes. It has the only one of 16 bytes, complex128.
        array = source.view(INTEGERS.get(dtype.itemsize, dtype)).numpy()
        offset = table.offsets[position]
        target = self._slab[offset : offset + array.nbytes].numpy().view(array.dtype).reshape(array.shape)
        np.copyto(target[rows], array[rows])

    def _gather(self, offset: int, nbytes: int, first: int, count: int) -> None:
        target = self._base + offset
        if self.writev is None or not self._write(target, nbytes, first, count):
            for address, size in self._vector[first : first + count].tolist():
                memmove(target, address, size)
                target += size

    def _write(self, target: int, nbytes: int, first: int, count: int) -> bool:
        """Gather fragments at an address by one system call; say whether all arrived."""
        into = (ctypes.c_size_t * 2)(target, nbytes)
        fragments = self._vector_address + first * _IOVEC_BYTES
        writev = Moves.writev  # once: another thread may find out meanwhile that the system refuses it
        if writev is not None and writev(os.getpid(), fragments, count, into, 1, 0) == nbytes:
            return True
        Moves.writev = None
        return False
