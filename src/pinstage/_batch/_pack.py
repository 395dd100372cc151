"""Packing a batch into a slab by threads, in chunks that are sent one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from .. import _native
from .._host import usable_cpus
from ._arrays import as_tensor
from ._describe import Parts, take_apart
from ._gather import flat
from ._table import RowKind, lay_out


class HostSlab(Protocol):
    """Host memory that batches are packed into: a lease, or a uint8 tensor on the CPU."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def data_ptr(self) -> int:
        """Return its address."""


def pack(parts: Parts, slab: HostSlab) -> None:
    """Write all packed leaves to their places. Padding is set to zero.

    Args:
        parts: a batch, whose leaves have not changed since it was taken apart.
        slab: at least ``parts.table.nbytes`` bytes.
    """
    _native.core.pack(
        parts.table.data, parts.sources, slab.data_ptr(), slab.nbytes, _found_samples(parts)
    )


def _found_samples(parts: Parts) -> dict[int, object]:
    return {row: stack.found for row, stack in parts.stacks.items()}


MOST_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took as long with 8, 10 and 12 on the reference
machine.
"""

PARALLEL_FROM_BYTES = 1024 * 1024
"""Below this size a second thread gains nothing: waking a sleeping one takes 0.05 ms."""

REUSE_FROM_BYTES = 32 * 1024 * 1024
"""A smaller batch is packed before places are free again: 8 leaves of 1 MiB took 13% longer with
reuse.
"""


def most_threads(threads: int | Literal["auto"]) -> int:
    """Return how many threads may pack a batch, the calling one included.

    Args:
        threads: their number; "auto" takes the usable CPUs, at most `MOST_THREADS`.

    Raises:
        TypeError: `threads` is neither an int nor "auto".
        ValueError: it is less than 1.
    """
    if threads == "auto":
        return min(usable_cpus(), MOST_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(
            f"pack_threads is a number of CPU threads: {threads!r}; pass an int, or 'auto' for the "
            "usable CPUs"
        )
    if threads < 1:
        raise ValueError(
            f"pack_threads must be at least 1: {threads}; 1 packs in the calling thread"
        )
    return threads


def reuses_places(parts: Parts) -> bool:
    """Return whether chunks of a batch are packed into the places of earlier chunks that have been
    copied.

    The caches still have these lines, so less goes to memory and back. That only helps if the CPU
    can move a line to its last cache (CLDEMOTE): the bus reads slowly from the near caches of a
    dozen CPUs.
    """
    return parts.table.nbytes >= REUSE_FROM_BYTES and bool(_native.core.demotes)


def start_packing(parts: Parts, slab: HostSlab, threads: int, *, reuses: bool = False) -> Any:
    """Pack a batch, or begin to: a large batch is packed by threads of the extension, which run no
    Python code.

    Args:
        parts: the batch.
        slab: at least ``parts.table.nbytes`` bytes.
        threads: their number at most, the calling one included; see `most_threads`.
        reuses: whether places are reused; see `reuses_places`.

    Returns:
        None if all bytes are in the slab. Else a job, which is a context manager. Its threads begin
        when the block is entered. Until the block ends, the leaves must not change, and the slab
        must exist. ``ends`` has the end of each chunk, in bytes of the batch, ascending.
        ``wait(chunk)`` returns when a chunk is complete; the calling thread helps, and answers
        Ctrl-C meanwhile. Then ``place(chunk)`` returns where the chunk begins in the slab: at its
        place in the batch, or at that of an earlier chunk, for which ``reuse(chunk)`` was called.
    """
    more_work = sum(stack.more_work for stack in parts.stacks.values())
    if parts.table.nbytes + more_work < PARALLEL_FROM_BYTES:
        pack(parts, slab)
        return None
    owner = parts, slab
    return _native.core.Job(
        parts.table.data,
        parts.sources,
        slab.data_ptr(),
        slab.nbytes,
        owner,
        threads,
        reuses,
        _found_samples(parts),
    )


def pack_by_threads(parts: Parts, slab: HostSlab, threads: int) -> None:
    """Pack a batch, as `start_packing` does, and wait until all bytes are in the slab."""
    job = start_packing(parts, slab, threads)
    if job is not None:
        with job:
            for chunk in range(len(job.ends)):
                job.wait(chunk)


def windows(parts: Parts, most: int) -> Iterator[tuple[int, list[Any]]]:
    """Cut a batch into windows of its slab, for a slab that is smaller than the batch.

    Args:
        parts: the batch.
        most: the most bytes of a window; a multiple of `ALIGNMENT`.

    Yields:
        The first byte of each window in the batch's slab, and its leaves. Taken apart, they have
        the same places behind that byte. A leaf of more than `most` bytes is cut into ranges of its
        bytes.
    """
    places = dict(parts.table.places())
    start = 0
    leaves: list[Any] = []
    for index in parts.table.by_offset():
        offset, nbytes, *_ = places[index]
        if leaves and offset + nbytes - start > most:
            yield start, leaves
            leaves = []
        if nbytes > most:
            dense = _dense_bytes(parts, index)
            for at in range(0, nbytes, most):
                yield offset + at, [dense[at : at + most]]
            continue
        start = start if leaves else offset
        leaves.append(parts.leaves[index])
    if leaves:
        yield start, leaves


def _dense_bytes(parts: Parts, index: int) -> torch.Tensor:
    """Return the bytes of a leaf as they are in a slab; a copy of them if the leaf is strided."""
    leaf = parts.leaves[index]
    if parts.table.rows["kind"][index] == RowKind.STRIDED:
        alone = take_apart([leaf])
        memory = torch.empty(alone.table.nbytes, dtype=torch.uint8, device="cpu")
        pack(alone, memory)
        return memory[: alone.table.payload_bytes]
    return flat(as_tensor(leaf)).view(torch.uint8)


BORROW_FROM_BYTES = 256 * 1024
"""Below this size, packing a leaf takes less time than checking whether it is page-locked and
copying it by itself.
"""


class Borrowed(NamedTuple):
    """A batch with leaves that are not packed, but copied from where they are."""

    leaves: list[tuple[int, int, int, int]]
    """Byte ranges of these leaves: row, start and end in the leaf, and the address of the first
    byte.
    """
    lenders: list[Any]
    """The tensors of these leaves, to be kept alive until the copies are done."""
    rest: Parts
    """The packed leaves, with their places in a host slab that has no room for the others."""


def borrow(
    parts: Parts, pieces_of: Callable[[torch.Tensor], list[tuple[int, int]]]
) -> Borrowed | None:
    """Find the leaves of a batch that need no packing; None if there are none.

    These leaves are dense, page-locked, and have at least `BORROW_FROM_BYTES`.

    Args:
        parts: the batch.
        pieces_of: returns the ranges in which a tensor's memory can be copied; none if it isn't
            page-locked.
    """
    table = parts.table
    rows, leaves, lenders = table.rows.copy(), [], {}
    is_large = (rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= BORROW_FROM_BYTES)
    for index in np.flatnonzero(is_large).tolist():
        tensor = as_tensor(parts.leaves[index])
        if pieces := pieces_of(tensor):
            address = tensor.data_ptr()
            leaves += [(index, start, end, address + start) for start, end in pieces]
            lenders[index] = tensor
    if not lenders:
        return None
    rows["kind"][list(lenders)] = RowKind.MOVED
    end = lay_out(rows, [index for index in table.by_offset() if index not in lenders])
    rest = parts._replace(table=table.moved_to(rows, end))
    return Borrowed(leaves, list(lenders.values()), rest)
