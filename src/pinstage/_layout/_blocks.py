"""Where the leaves of a batch live on a device: tensors of their own, or blocks that leaves of one dtype share.

`make_blocks` makes these tensors from the offset table: in the extension, or, where that can't, by torch's public
functions. A block is one tensor and one range of the host slab, so it is one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .. import _native
from .._torch import check_is_plain
from ._dtypes import ALIGNMENT, DTYPES
from ._table import PACKED, RowKind, Table

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

    def copy_leaves(self, leaves: list[tuple[int, int]], stream: int) -> int:
        """Send whole leaves, by row and address, from page-locked memory of their own; the result is that of `copy`."""
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


Send: TypeAlias = Callable[[torch.Tensor, int, int, int, int], None]
"""Copies to a uint8 tensor, from an offset of it on, from an address, a number of bytes, on a stream."""


class PlainBlocks:
    """`Blocks` by torch's public functions."""

    def __init__(
        self, table: Table, sharing: Sharing, device: torch.device, send: Send, slab: torch.Tensor | None = None
    ) -> None:
        self._table, self._send = table, send
        self._entries = list(table.entries())
        self._block_of: dict[int, int] = {}
        self._starts: list[int] = []
        self._own: set[int] = set()
        self.tensors: list[torch.Tensor] = []
        blocks: list[list[int]] = []
        for index in table.by_offset(*PACKED):
            row = self._entries[index]
            before = self._entries[blocks[-1][-1]] if blocks else None
            is_alike = before is not None and (row[3], row[5]) == (before[3], before[5])
            if before is None or sharing is Sharing.EACH or (sharing is Sharing.SHARED and not is_alike):
                blocks.append([])
            blocks[-1].append(index)
            self._block_of[index] = len(blocks) - 1
        for number, members in enumerate(blocks):
            offset, _, _, code, ndim, _, shape, stride = self._entries[members[0]]
            dtype = DTYPES[code]
            end = max(self._entries[index][0] + self._entries[index][1] for index in members)
            if slab is not None:
                made = slab
            elif sharing is Sharing.ONE:
                made = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
            elif len(members) == 1:
                made = torch.empty_strided(shape[:ndim], stride[:ndim], dtype=dtype, device=device)
                self._own.add(number)
            else:
                assert dtype is not None
                made = torch.empty((end - offset) // dtype.itemsize, dtype=dtype, device=device)
            if type(made) is not torch.Tensor:
                check_is_plain(made)
            self.tensors.append(made)
            self._starts.append(0 if sharing is Sharing.ONE or slab is not None else offset)
        self._host = self._entries

    def __len__(self) -> int:
        return len(self.tensors)

    def packed_as(self, table: bytes) -> None:
        """See `Blocks`."""
        self._host = list(Table(table, 0, 0, 0, 0, 0, 0).entries())

    def copy(self, host: int, start: int, end: int, stream: int, is_page_locked: bool) -> int:  # noqa: ARG002
        """See `Blocks`."""
        runs: list[tuple[int, int, int, int]] = []  # start and end in the host slab, block, place in it
        here = [i for i in sorted(self._block_of, key=lambda i: self._host[i][:2]) if self._host[i][2] in PACKED]
        for index in here:
            offset, nbytes = self._host[index][:2]
            block = self._block_of[index]
            place = self._entries[index][0] - self._starts[block]
            before = runs[-1] if runs else None
            if (
                before
                and before[2] == block
                and 0 <= offset - before[1] < ALIGNMENT
                and place - before[3] == offset - before[0]
            ):
                runs[-1] = (before[0], offset + nbytes, block, before[3])
                continue
            if nbytes:
                runs.append((offset, offset + nbytes, block, place))
        copies = 0
        for first, last, block, place in runs:
            begin, stop = max(first, start), min(last, end)
            if begin < stop:
                self._send(_bytes_of(self.tensors[block]), place + begin - first, host + begin, stop - begin, stream)
                copies += 1
        return copies

    def copy_leaves(self, leaves: list[tuple[int, int]], stream: int) -> int:
        """See `Blocks`."""
        for index, address in leaves:
            block = self._block_of[index]
            offset, nbytes = self._entries[index][:2]
            if nbytes:
                self._send(_bytes_of(self.tensors[block]), offset - self._starts[block], address, nbytes, stream)
        return len(leaves)

    def fill(self, sources: bytes, stream: int) -> int:
        """See `Blocks`; the extension has packed no leaves where these blocks are used."""
        raise NotImplementedError

    def pack_and_copy(self, sources: bytes, host: int, stream: int, is_page_locked: bool) -> int:
        """See `fill`."""
        raise NotImplementedError

    def leaves(self, others: list[Any]) -> list[Any]:
        """See `Blocks`."""
        left = iter(others)
        leaves: list[Any] = []
        for index, (offset, _, kind, code, ndim, _, shape, stride) in enumerate(self._entries):
            if kind == RowKind.ALIAS:
                leaves.append(leaves[offset])
            elif kind not in PACKED:
                leaves.append(next(left))
            elif (block := self._block_of[index]) in self._own:
                leaves.append(self.tensors[block])
            else:
                place = offset - self._starts[block]
                leaves.append(_view(self.tensors[block], DTYPES[code], place, shape[:ndim], stride[:ndim]))
        return leaves


def _view(tensor: torch.Tensor, dtype: Any, place: int, shape: list[int], stride: list[int]) -> torch.Tensor:
    """Make a view from a place on, in bytes. Not by ``as_strided``, whose views share one version counter."""
    start = tensor.storage_offset() * tensor.itemsize + place
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    if type(view) is not torch.Tensor:
        check_is_plain(view)
    return view.set_(tensor.untyped_storage(), start // dtype.itemsize, shape, stride)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _view(tensor, torch.uint8, 0, [tensor.numel() * tensor.itemsize], [1])


def make_blocks(
    table: Table, sharing: Sharing, device: torch.device, send: Send, slab: torch.Tensor | None = None
) -> Blocks:
    """Make the tensors of a batch, on torch's current stream.

    Args:
        table: the offset table.
        sharing: which leaves share memory.
        device: where; a CUDA device has an index.
        send: copies, where the extension does not.
        slab: uint8 ``[>= table.nbytes]``: the one tensor to be used, starting at a multiple of `ALIGNMENT` bytes.

    Raises:
        torch.OutOfMemoryError: there is no room for them.
    """
    core = _native.core
    if core is not None and (slab is None or type(slab) is torch.Tensor):
        given = () if slab is None else (slab,)
        try:
            made: Blocks | None = core.Blocks.of(
                table.data, sharing, int(device.type == "cuda"), device.index or 0, *given
            )
        except MemoryError:
            made = None  # torch's own functions raise the error that users know
        if made is not None:
            return made
    return PlainBlocks(table, sharing, device, send, slab)
