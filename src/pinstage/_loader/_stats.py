"""The counters of a loader, and which side is the bottleneck."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .._pool import PoolStats
from .._sizes import count, format_bytes
from .._stage import Transfer, sizes_of

_SMALL = 1 / 10
"""If the loop waited for less than this share of its time, it is the bottleneck itself. Of the
workers' time, the share of waiting for slabs above which more workers wouldn't help."""

_LARGE = 1 / 3
"""If the loop waited for this share of its time or more, the loader is the bottleneck. If this
share of the batches found no slab, `max_bytes` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """The counters of a `DataLoader`, over all its iterators."""

    batches: int
    """Batches sent to the device."""
    copies: int
    """Host-to-device copies issued for them: one per block, and several for a large block."""
    packed_bytes: int
    """Bytes of the tensors and arrays in these copies."""
    fallback_batches: int
    """Batches that found no slab under the cap. They were sent from pageable memory, or through the
    workers' queue.
    """
    passthrough_leaves: int
    """Tensors that cannot be packed. Each was sent by its own ``.to()``."""
    batch_wait_seconds: float
    """Seconds that the main process waited for workers. Without workers: the seconds that loading
    took. The first batch of each pass, which starts workers and makes slabs, doesn't count.
    """
    slab_wait_seconds: float
    """Seconds that workers waited for slabs, summed over the workers."""
    elapsed_seconds: float
    """Seconds of all passes, each from its first batch to its latest one. The end of a pass, which
    ends workers, doesn't count.
    """
    num_workers: int
    pool: PoolStats | None
    """The pool's counters; None before the first iterator."""

    @property
    def bottleneck(self) -> str:
        """One sentence that says which side holds up the loop, if one does."""
        if not self.batches:
            return "Nothing was loaded yet."
        waited, total = self.batch_wait_seconds, self.elapsed_seconds
        if self.fallback_batches >= _LARGE * self.batches:
            fewer = ", or use fewer workers" if self.num_workers else ""
            return (
                f"max_bytes is the bottleneck: {self.fallback_batches} of {self.batches} batches "
                f"found no slab and were sent from pageable memory; raise max_bytes{fewer}."
            )
        if not total:
            return (
                "Loading was not timed: the first batch of a pass does not count, nor do batches "
                "of another loader."
            )
        what = "waiting for workers" if self.num_workers else "loading"
        times = f"{what} took {waited:.2f} s of {total:.2f} s"
        if waited < _SMALL * total:
            return f"The loop is the bottleneck: {times}."
        if waited < _LARGE * total:
            return f"Neither side is the bottleneck: {times}."
        if self.num_workers == 0:
            return f"Loading is the bottleneck: {times} in the main process; use num_workers."
        if self.slab_wait_seconds > _SMALL * total * self.num_workers and self._was_full():
            return (
                f"max_bytes is the bottleneck: {times}, and these waited for slabs "
                f"{self.slab_wait_seconds:.2f} s; raise max_bytes."
            )
        return f"The workers are the bottleneck: {times}; use more, or a faster dataset."

    def _was_full(self) -> bool:
        """Whether one more slab would have exceeded the cap. If not, workers only waited while
        slabs were made.
        """
        pool = self.pool
        return (
            pool is None
            or pool.peak_held_bytes * (1 + 1 / max(pool.peak_held_slabs, 1)) > pool.max_bytes
        )

    def __str__(self) -> str:
        """Return one line for a log."""
        pool = ""
        if self.pool:
            held, most = format_bytes(self.pool.held_bytes), format_bytes(self.pool.max_bytes)
            pool = f"; pool {held} of {most}"
        sent = f"{format_bytes(self.packed_bytes)} in {count(self.copies, 'copy', 'copies')}"
        return (
            f"{count(self.batches, 'batch', 'batches')}, {sent} in {self.elapsed_seconds:.3f} s, "
            f"{self.batch_wait_seconds:.3f} s waiting for a batch; {self.fallback_batches:,} "
            f"without a slab{pool}"
        )


class Counters:
    """The counters behind `LoaderStats`. Any thread may count."""

    def __init__(self) -> None:
        self.batches = self.copies = self.packed_bytes = self.fallback_batches = (
            self.passthrough_leaves
        ) = 0
        self.batch_wait_seconds = self.slab_wait_seconds = self.elapsed_seconds = 0.0
        self.largest_fallback = 0
        """Bytes of the largest batch that found no slab."""
        self.has_warned = False
        """Whether a warning has reported that no batch found a slab."""
        self._lock = threading.RLock()  # a finaliser may read batches, too

    def count(self, transfer: Transfer, *, fallback: bool, slab_wait_seconds: float = 0.0) -> None:
        with self._lock:
            self.batches += 1
            self.copies += transfer.copies
            self.packed_bytes += sizes_of(transfer).payload_bytes
            self.fallback_batches += fallback
            if fallback:
                self.largest_fallback = max(self.largest_fallback, transfer.nbytes)
            self.passthrough_leaves += transfer.passthrough_leaves
            self.slab_wait_seconds += slab_wait_seconds

    def snapshot(self, num_workers: int, pool: PoolStats | None) -> LoaderStats:
        counted = {
            name: value for name, value in vars(self).items() if name in LoaderStats.__slots__
        }
        return LoaderStats(num_workers=num_workers, pool=pool, **counted)
