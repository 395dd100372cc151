"""A batch's bytes into a slab quickly: by several threads, and in chunks that travel while the next one is packed."""

from __future__ import annotations

import torch

from .._host import usable_cpus
from .._layout import Parts, compute_lazy_leaves, pack
from .. import _native

MOST_THREADS = 12
"""More threads gained nothing: 300 leaves of 1 MiB took as long with 8, 10 and 12 on the reference machine."""

PARALLEL_FROM_BYTES = 1024 * 1024
"""Below this size a second thread gains nothing: it takes 0.05 ms until one that sleeps is at work."""


def most_threads(threads: int | None) -> int:
    """Return how many threads may pack a batch, the calling one included.

    Args:
        threads: as many as the user says; None takes the usable cpus, at most `MOST_THREADS`.

    Raises:
        ValueError: `threads` is less than 1.
    """
    if threads is None:
        return min(usable_cpus(), MOST_THREADS)
    if threads < 1:
        raise ValueError(f"threads must be at least 1: {threads}; 1 packs in the calling thread")
    return threads


class Packing:
    """One batch on its way into a slab. Threads of the extension pack it, and take no part in Python; the calling one
    helps.

    The leaves have to stay as they are, and the slab to be there, until the end of the block::

        with Packing(parts, slab, threads) as packing:
            for chunk, end in enumerate(packing.ends):
                packing.wait(chunk)
                ...  # all bytes before `end` are in the slab

    Args:
        parts: of the batch.
        slab: uint8 ``[>= parts.table.nbytes]`` on the CPU.
        threads: at the most, the calling one included; see `most_threads`.

    Attributes:
        ends: where each chunk ends, in bytes, rising; the last one ``parts.table.nbytes``.
    """

    def __init__(self, parts: Parts, slab: torch.Tensor, threads: int) -> None:
        self._parts = parts
        self._slab = slab
        nbytes = parts.table.nbytes
        self._job = None
        self.ends: tuple[int, ...] = (nbytes,)
        if threads > 1 and nbytes >= PARALLEL_FROM_BYTES and isinstance(parts.sources, bytes):
            compute_lazy_leaves(parts, slab)
            self._job = _native.core.Job(parts.table.data, parts.sources, slab.data_ptr(), slab.numel(), threads)
            self.ends = self._job.ends

    def wait(self, chunk: int) -> None:
        """Return when a chunk is complete. Ctrl-C is answered meanwhile."""
        if self._job is None:
            pack(self._parts, self._slab)
        else:
            self._job.wait(chunk)

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, *raised: object) -> None:
        """Return when no thread touches the slab any more; what nobody has begun is left out."""
        if self._job is not None:
            self._job.close()
