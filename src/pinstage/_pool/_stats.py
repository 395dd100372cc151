"""Counters of the pool: integers kept up to date at each transition, never recomputed by a scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._sizes import count, format_bytes, table_text


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerStats:
    """What one owner of a pool's leases has. Idle slabs belong to no owner."""

    held_bytes: int
    """Bytes of slabs that the owner keeps from others: leased, or in flight."""
    leased_bytes: int
    """Bytes of slabs in its hands."""
    in_flight_bytes: int
    """Bytes of slabs that it released whose event is not done or of which a view is alive."""
    available_bytes: int
    """What it may lease beyond that: neither in use by others, nor guaranteed to them. Idle slabs count."""
    at_least: int
    """Bytes that are guaranteed to it, by `SlabPool.share`; 0 for none."""
    at_most: int | None
    """Bytes that it may hold, by `SlabPool.share`; None for no bound but the cap."""
    waits: int
    """Its requests that had to wait."""
    wait_seconds: float
    """Time that they waited, in all."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PoolStats:
    """A consistent snapshot of a pool's counters.

    Held, leased, in flight and free each have current, ``peak_`` and ``total_`` values, in bytes (capacities) and in
    slabs. ``total_`` counts every entry into the state since the pool was made. Always ``held = free + leased +
    in_flight`` and ``held <= max_bytes``. A slab that is just being allocated counts against the cap, but not here yet.
    One that is being freed counts as held and free until it is gone.
    """

    held_bytes: int
    """Bytes of all slabs of the pool, idle ones included: what the cap limits."""
    leased_bytes: int
    """Bytes of slabs with a lease."""
    in_flight_bytes: int
    """Bytes of released slabs whose event is not done or of which a view is alive."""
    free_bytes: int
    """Bytes of idle slabs."""
    max_bytes: int
    """The cap."""
    max_bytes_reason: str
    """Where the cap comes from."""
    requested_bytes: int
    """What the holders of the current leases asked for; ``leased_bytes`` minus this is rounding."""

    held_slabs: int
    leased_slabs: int
    in_flight_slabs: int
    free_slabs: int

    peak_held_bytes: int
    peak_leased_bytes: int
    peak_in_flight_bytes: int
    peak_free_bytes: int
    peak_held_slabs: int
    peak_leased_slabs: int
    peak_in_flight_slabs: int
    peak_free_slabs: int

    total_held_bytes: int
    total_leased_bytes: int
    total_in_flight_bytes: int
    total_free_bytes: int
    total_requested_bytes: int
    total_held_slabs: int
    total_leased_slabs: int
    total_in_flight_slabs: int
    total_free_slabs: int

    hits: int
    """Leases served by a slab that was already there."""
    misses: int
    """Leases that needed an allocation."""
    waits: int
    """Requests that had to wait."""
    wait_seconds: float
    """Time spent waiting, summed over all requests."""
    trims: int
    """Idle slabs given back to the system."""
    recovered: int
    """Slabs found again that an interrupt had lost."""
    owners: Mapping[str, OwnerStats] = field(hash=False)
    """Who holds what, by the name given to `SlabPool.acquire`."""

    @property
    def rounding_waste(self) -> float:
        """Share of all leased bytes that nobody asked for, from 0.0 to 1.0."""
        if not self.total_leased_bytes:
            return 0.0
        return 1.0 - self.total_requested_bytes / self.total_leased_bytes

    def __repr__(self) -> str:
        rows = []
        for state in ("held", "leased", "in_flight", "free"):
            now, peak = (format_bytes(getattr(self, f"{prefix}{state}_bytes")) for prefix in ("", "peak_"))
            slabs = count(getattr(self, f"{state}_slabs"), "slab")
            rows.append((state.replace("_", " "), f"{now} in {slabs}, at most {peak}"))
        return table_text(
            "PoolStats",
            [
                ("max_bytes", f"{format_bytes(self.max_bytes)} ({self.max_bytes_reason})"),
                *rows,
                ("hits, misses", f"{self.hits:,}, {self.misses:,}"),
                ("waits", f"{self.waits:,}, {self.wait_seconds:.3f} s"),
                ("trims, recovered", f"{self.trims:,}, {self.recovered:,}"),
                ("rounding_waste", f"{self.rounding_waste:.1%}"),
            ],
        )
