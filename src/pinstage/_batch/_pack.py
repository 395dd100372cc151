"""Packing a batch into a slab by threads, in chunks that are sent one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch

from .. import _native
from .._host import usable_cpus
from ._arrays import as_tensor
from ._blocks import Blocks
from ._describe import Parts, take_apart
from ._gather import flat
from ._table import RowKind


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
        slab: at least ``parts.table.slab_bytes`` bytes.
    """
    _native.core.pack(parts.table.data, parts.sources, slab.data_ptr(), slab.nbytes, parts.stacks)


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
    return parts.table.slab_bytes >= REUSE_FROM_BYTES and bool(_native.core.demotes)


def start_packing(parts: Parts, slab: HostSlab, threads: int, *, reuses: bool = False) -> Any:
    """Pack a batch, or begin to: a large batch is packed by threads of the extension, which run no
    Python code.

    Args:
        parts: the batch.
        slab: at least ``parts.table.slab_bytes`` bytes.
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
    if parts.table.slab_bytes + more_work < PARALLEL_FROM_BYTES:
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
        parts.stacks,
    )


def pack_by_threads(parts: Parts, slab: HostSlab, threads: int) -> None:
    """Pack a batch, as `start_packing` does, and wait until all bytes are in the slab."""
    job = start_packing(parts, slab, threads)
    if job is not None:
        with job:
            for chunk in range(len(job.ends)):
                job.wait(chunk)


def unpack(blocks: Blocks, host: int, extent: tuple[int, int], threads: int) -> None:
    """Copy bytes of a host slab to the tensors of blocks on the CPU.

    Args:
        blocks: the tensors.
        host: the address of the slab's first byte, or where it would be.
        extent: the first byte, and the byte behind the last one.
        threads: the number of threads at most, the calling one included.
    """
    start, end = extent
    blocks.unpack(host, start, end, threads if end - start >= PARALLEL_FROM_BYTES else 1)


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
