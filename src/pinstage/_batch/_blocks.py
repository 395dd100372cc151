"""Where the leaves of a batch live on a device: tensors of their own, or blocks that leaves of one dtype share.

`make_blocks` makes these tensors from the offset table: in the extension, or, where that can't, by torch's public
functions. A block is one tensor and one range of the host slab, so it is one copy.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .. import _native
from .._compat.views import check_is_plain
from ._dtypes import DTYPES
from ._table import Table

OwnStorage: TypeAlias = Literal["auto"] | bool

OWN_LEAVES = 8
"""Batches of at most this many leaves give each a tensor of its own by default. It costs 1 us per leaf; 16 leaves of
64 KiB take as long as one tensor and one copy do."""


class Sharing(IntEnum):
    """Which leaves share device memory."""

    ONE = 0
    """All: the device has one slab, as the host has."""
    SHARED = 1
    """Those of one block of the offset table."""
    EACH = 2
    """None: each has a tensor of its own."""


def sharing_of(own_storage: OwnStorage, leaves: int) -> Sharing:
    """Decide which leaves of a batch share device memory.

    The cases: as the user says, each leaf its own or one slab; else own tensors in a batch of few leaves, and blocks in
    others, where only leaves of 4 MiB and more have their own (see ``place_rows`` in ``_native/table.c``).
    """
    if own_storage == "auto":
        return Sharing.EACH if leaves <= OWN_LEAVES else Sharing.SHARED
    return Sharing.EACH if own_storage else Sharing.ONE


def check_own_storage(own_storage: object) -> OwnStorage:
    """Return the option.

    Raises:
        ValueError: it is neither "auto" nor a bool.
    """
    if isinstance(own_storage, bool) or own_storage == "auto":
        return own_storage
    raise ValueError(f"own_storage must be 'auto', True or False: {own_storage!r}")


class Blocks(Protocol):
    """The tensors of one batch."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """One for each block."""
        ...

    def __len__(self) -> int: ...

    def packed_as(self, table: bytes) -> None:
        """Note that the host slab has other places, and perhaps not all of the leaves."""
        ...

    def copy(self, host: int, start: int, end: int, stream: int, is_page_locked: bool) -> int:
        """Send bytes `start` to `end` of a host slab that begins at address `host`.

        Returns:
            The number of copies; CUDA's error as a negative number.
        """
        ...

    def pack_and_copy(self, sources: bytes, host: int, stream: int, is_page_locked: bool) -> int:
        """Pack all leaves into a host slab at address `host` and send them; the result is that of `copy`."""
        ...

    def copy_leaves(self, leaves: list[tuple[int, int, int, int]], stream: int) -> int:
        """Send ranges of leaves from page-locked memory of their own; the result is that of `copy`.

        Args:
            leaves: the row, where the range begins and ends in the leaf, and the address of its first byte.
            stream: that copies.
        """
        ...

    def fill(self, sources: bytes, stream: int) -> int:
        """Pack leaves, of at most 64 KiB, into ordinary memory and send them from there; the result is that of `copy`.

        What was packed has been read when the call returns.
        """
        ...

    def leaves(self, others: list[Any]) -> list[Any]:
        """Return all leaves of the batch, in its order.

        Args:
            others: what stands for the leaves that are not packed, in order.
        """
        ...


def make_blocks(table: Table, sharing: Sharing, device: torch.device, slab: torch.Tensor | None = None) -> Blocks:
    """Make the tensors of a batch, on torch's current stream.

    Args:
        table: the offset table.
        sharing: which leaves share memory.
        device: where; a CUDA device has an index.
        slab: uint8 ``[>= table.nbytes]``: the one tensor to be used, starting at a multiple of `ALIGNMENT` bytes.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    is_cuda, index = int(device.type == "cuda"), device.index or 0
    made: Blocks | None = _native.core.Blocks.of(table.data, sharing, is_cuda, index, slab)
    return make_publicly(table, sharing, device, slab) if made is None else made


def make_publicly(table: Table, sharing: Sharing, device: torch.device, slab: torch.Tensor | None = None) -> Blocks:
    """Do what `make_blocks` does by torch's public functions: in a mode, say, or where there is no memory."""
    if slab is not None:
        check_is_plain(slab)
    is_cuda, index = int(device.type == "cuda"), device.index or 0
    made: Blocks = _native.core.Blocks.of(table.data, sharing, is_cuda, index, slab, partial(_empty, device), _view)
    return made


def _empty(device: torch.device, code: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty_strided(shape, stride, dtype=DTYPES[code], device=device)
    check_is_plain(made)
    return made


def _view(tensor: torch.Tensor, code: int, place: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Make a view from a place on, in bytes. Not by ``as_strided``, whose views share one version counter."""
    view = torch.empty(0, dtype=DTYPES[code], device=tensor.device)
    check_is_plain(view)
    start = tensor.storage_offset() * tensor.itemsize + place
    return view.set_(tensor.untyped_storage(), start // view.itemsize, shape, stride)
