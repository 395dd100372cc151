"""How bytes get from leaves to their places: the moves that packing is made of.

Many small leaves are gathered by one system call, ``process_vm_writev`` on the own process, which takes a list of
fragments and lets other threads run: 0.12 us a leaf of 256 bytes on the reference machine, against 0.56 us for a call
of memmove on each. Where the system does not allow it (another system, a sandbox) each leaf is a memmove. Large leaves
are
anyway: memmove is twice as fast there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from ._table import Table

_MEMMOVE_FRAGMENT_BYTES = 512 * 1024
"""Fragments of this size on average are moved by memmove, one call each."""

_FEW_FRAGMENTS = 16
"""Up to so many fragments cost less by memmove than the system call and its preparation (20 us)."""

_IOV_MAX = 1024
"""Fragments that one call takes (UIO_MAXIOV of Linux)."""

_ZEROS = ctypes.create_string_buffer(4096)  # what padding is filled with
_ZEROS_ADDRESS = ctypes.addressof(_ZEROS)

memmove: Callable[[int, int, int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""memmove(to, from, nbytes); lets other threads run meanwhile."""

_Addresses = npt.NDArray[np.int64]


def _find_writev() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


class Moves:
    """The moves that fill one slab with the raw leaves of one batch. May be used by several threads at once.

    Args:
        table: the offset table.
        tensors: as the table describes them; the caller keeps them alive and unchanged until the last move.
        slab: uint8 ``[>= table.nbytes]`` on the CPU.
    """

    writev = _find_writev()
    """``process_vm_writev``, or None from the time that the system refused it."""

    def __init__(self, table: Table, tensors: list[torch.Tensor], slab: torch.Tensor) -> None:
        self._base = slab.data_ptr()
        self._table = table
        self._tensors = tensors
        self._slab = slab
        addresses = (
            list(map(torch.Tensor.data_ptr, itemgetter(*table.raw)(tensors)))
            if len(table.raw) > 1
            else [tensors[position].data_ptr() for position in table.raw]
        )
        self._addresses = addresses

    def gather(self) -> None:
        """Copy the leaves whose bytes are not their value as they lie: strided, expanded, lazily conjugated."""
        table = self._table
        for position in table.gathered:
            dtype, shape = table.columns.dtypes[position], table.columns.shapes[position]
            offset, source = table.offsets[position], self._tensors[position]
            if dtype.itemsize == 1:  # copy_ has no kernels for int1 to int7 and their like
                dtype, source = torch.uint8, source.view(torch.uint8)
            target = self._slab[offset : offset + source.numel() * dtype.itemsize].view(dtype)
            target.as_strided(shape, table.stride_of(position)).copy_(source)

    def everything(self) -> None:
        """Move all raw leaves."""
        table = self._table
        if len(self._addresses) <= _FEW_FRAGMENTS or self.writev is None:
            for address, offset, nbytes in zip(self._addresses, table.raw_offsets, table.raw_nbytes, strict=True):
                memmove(self._base + offset, address, nbytes)
        else:
            self.prepare()
            self.range(0, table.raw_end)

    def prepare(self) -> None:
        """Make the list of fragments; needed before `range`, once."""
        fragments = self._table.fragments
        vector = np.empty((len(fragments.nbytes), 2), dtype=np.int64)  # struct iovec: address, length
        vector[:, 0] = _ZEROS_ADDRESS
        vector[fragments.leaves, 0] = self._addresses
        vector[:, 1] = fragments.nbytes
        self._vector = vector

    def range(self, start: int, stop: int) -> None:
        """Move what belongs between two offsets of the slab, wherever leaves begin and end.

        Args:
            start: first byte.
            stop: the byte behind the last one, at most ``table.raw_end``.
        """
        if start >= stop:
            return
        starts = self._table.fragments.starts
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        vector = self._vector[first:last].copy()
        cut = start - int(starts[first])
        vector[0, 0] += cut
        vector[0, 1] -= cut
        vector[-1, 1] -= int(starts[last]) - stop
        writev = self.writev
        if writev is None or stop - start >= len(vector) * _MEMMOVE_FRAGMENT_BYTES:
            self._memmove_each(vector, start)
            return
        target = self._base + start
        for low in range(0, len(vector), _IOV_MAX):
            part = vector[low : low + _IOV_MAX]
            nbytes = int(part[:, 1].sum())
            if not _write_vector(writev, part, target, nbytes):
                Moves.writev = None
                self._memmove_each(vector[low:], target - self._base)
                return
            target += nbytes

    def _memmove_each(self, vector: _Addresses, offset: int) -> None:
        target = self._base + offset
        for address, nbytes in vector.tolist():
            memmove(target, address, nbytes)
            target += nbytes


def _write_vector(writev: Callable[..., int], fragments: _Addresses, target: int, nbytes: int) -> bool:
    """Gather fragments at an address by one system call; say whether all arrived."""
    remote = np.array([target, nbytes], dtype=np.int64)
    written = writev(os.getpid(), fragments.ctypes.data, len(fragments), remote.ctypes.data, 1, 0)
    return bool(written == nbytes)
