"""Counters of a stager."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass

from .._pool import PoolStats
from .._sizes import count, format_bytes

_MOST_TALLIES = 1000
"""The most batches that are added up later; see `StagerCounters.add`."""

_NO_TALLY = (0,) * 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerStats:
    """Counters of a stager, and its pool's statistics."""

    batches: int
    """Batches staged. Each group of `load_weights` counts."""
    copies: int
    """Host-to-device copies of packed leaves: one per block, and several for a large block."""
    blocks: int
    """Device tensors made for packed leaves: one per leaf with its own tensor, and one per shared
    block.
    """
    packed_leaves: int
    """Tensors and arrays that were packed. A leaf that a batch repeats counts once."""
    packed_bytes: int
    """Bytes of the packed leaves."""
    padding_bytes: int
    """Alignment bytes sent with the packed leaves."""
    passthrough_leaves: int
    """Tensors, and objects with a ``to()`` method, that were moved by their own ``.to()``."""
    fallback_batches: int
    """Batches and fetches that used a smaller slab, or pageable memory, because page-locking was
    refused.
    """
    fetches: int
    """Calls of `fetch` and `to_host`."""
    fetch_copies: int
    """Device-to-host copies issued by these calls."""
    fetched_bytes: int
    """Bytes of the device-to-host copies, padding included."""
    pool: PoolStats
    """The pool's counters."""

    def __str__(self) -> str:
        """Return one line for a log."""
        sent = f"{format_bytes(self.packed_bytes)} in {count(self.copies, 'copy', 'copies')}"
        fetched = (
            f"{format_bytes(self.fetched_bytes)} in {count(self.fetch_copies, 'copy', 'copies')}"
        )
        return (
            f"{count(self.batches, 'batch', 'batches')}, {sent}; "
            f"{count(self.fetches, 'fetch', 'fetches')}, {fetched}; pool "
            f"{format_bytes(self.pool.held_bytes)} of {format_bytes(self.pool.max_bytes)}, waited "
            f"{self.pool.wait_seconds:.3f} s"
        )


class StagerCounters:
    """Counts the batches and fetches of a stager, by the names of `StagerStats`. May be used by
    several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may ask for the stats in the middle of them
        self._totals: Counter[str] = Counter()
        self._tallies: deque[tuple[int, ...]] = deque()  # of batches that aren't in the totals yet

    @property
    def batches(self) -> int:
        """Batches so far. Takes no lock, and may miss some that are being added up."""
        return self._totals["batches"] + len(self._tallies)

    def add(self, *tally: int) -> None:
        """Count a batch: its copies and blocks; bytes, payload and packed leaves of its table;
        leaves moved alone.
        """
        self._tallies.append(tally)  # unlike the totals, this needs no lock
        if len(self._tallies) >= _MOST_TALLIES:
            self.totals()

    def add_fetch(self, copies: int, nbytes: int) -> None:
        """Count a fetch."""
        with self._lock:
            self._totals.update(fetches=1, fetch_copies=copies, fetched_bytes=nbytes)

    def totals(self) -> Counter[str]:
        """Add up, and return a copy of the totals."""
        tallies = []
        with self._lock:
            while self._tallies:
                tallies.append(self._tallies.popleft())
            sums = map(sum, zip(_NO_TALLY, *tallies, strict=True))
            copies, blocks, nbytes, payload, packed, passthrough = sums
            self._totals.update(
                batches=len(tallies),
                copies=copies,
                blocks=blocks,
                packed_leaves=packed,
                packed_bytes=payload,
                padding_bytes=nbytes - payload,
                passthrough_leaves=passthrough,
            )
            return self._totals.copy()
