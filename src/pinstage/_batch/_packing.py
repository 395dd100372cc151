"""A batch's bytes into a slab quickly: by several threads, and in chunks that travel while the next one is packed."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import _native
from .._host import usable_cpus
from ._describe import Parts
from ._pack import HostSlab, compute_lazy_leaves, pack

MOST_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took as long with 8, 10 and 12 on the reference machine."""

PARALLEL_FROM_BYTES = 1024 * 1024
"""Below this size a second thread gains nothing: it takes 0.05 ms until one that sleeps is at work."""

REUSE_FROM_BYTES = 32 * 1024 * 1024
"""A smaller batch is packed before places are free again: 8 leaves of 1 MiB took 13% longer."""


def most_threads(threads: int | Literal["auto"]) -> int:
    """Return how many threads may pack a batch, the calling one included.

    Args:
        threads: as many as the user says; "auto" takes the usable CPUs, at most `MOST_THREADS`.

    Raises:
        TypeError: `threads` is neither an int nor "auto".
        ValueError: it is less than 1.
    """
    if threads == "auto":
        return min(usable_cpus(), MOST_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(
            f'pack_threads is a number of CPU threads: {threads!r}; pass an int, or "auto" for the usable CPUs'
        )
    if threads < 1:
        raise ValueError(f"pack_threads must be at least 1: {threads}; 1 packs in the calling thread")
    return threads


def reuses_places(parts: Parts) -> bool:
    """Say whether chunks of a batch are packed where earlier ones lay that have travelled.

    The caches still have these lines, so less goes to memory and back. That gains only where a CPU can move a line to
    the last of its caches (CLDEMOTE): the bus reads slowly what lies in the near ones of a dozen CPUs. Leaves that
    torch computes lie in their own places before a job begins.
    """
    return parts.table.nbytes >= REUSE_FROM_BYTES and not parts.has_lazy and bool(_native.core.demotes)


def start_packing(parts: Parts, slab: torch.Tensor | HostSlab, threads: int, *, reuses: bool = False) -> Any:
    """Pack a batch, or begin to: a large one is packed by threads of the extension, which take no part in Python.

    Args:
        parts: of the batch.
        slab: uint8 ``[>= parts.table.nbytes]`` on the CPU; a tensor or a lease.
        threads: how many at most, the calling one included; see `most_threads`.
        reuses: whether places are reused; see `reuses_places`.

    Returns:
        None if all bytes are in the slab. Else a job, a context manager: its threads begin when the block is entered,
        and the leaves have to stay as they are, and the slab to be there, until its end. ``ends`` says where each chunk
        ends, in bytes of the batch, rising, and ``wait(chunk)`` returns when a chunk is complete; the calling thread
        helps, and answers Ctrl-C meanwhile. Then ``place(chunk)`` says where in the slab it begins: where it does in
        the batch, or where an earlier one did, for which ``reuse(chunk)`` was called.
    """
    if parts.table.nbytes < PARALLEL_FROM_BYTES:
        pack(parts, slab)
        return None
    if parts.has_lazy:
        compute_lazy_leaves(parts, slab)
    owner = parts, slab
    return _native.core.Job(parts.table.data, parts.sources, slab.data_ptr(), slab.nbytes, owner, threads, reuses)
