"""Counters of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._sizes import count, format_bytes
from ._slab import PoolState, by_owner, total


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerStats:
    """Bytes of one owner of a pool's leases. Idle slabs belong to no owner."""

    held_bytes: int
    """Bytes of slabs that the owner keeps from others: leased, or in flight."""
    leased_bytes: int
    """Bytes of slabs that it has leased."""
    in_flight_bytes: int
    """Bytes of slabs that it released, but whose event is not done or which still have live
    views.
    """
    available_bytes: int
    """Bytes that it may lease in addition: neither in use by others, nor guaranteed to them. Idle
    slabs count.
    """
    min_bytes: int
    """Bytes that are guaranteed to it by `SlabPool.set_quota`; 0 for none."""
    max_bytes: int | None
    """Bytes that it may hold by `SlabPool.set_quota`; None for no limit but the cap."""
    waits: int
    """The number of its requests that had to wait."""
    wait_seconds: float
    """The total time that its requests waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A consistent snapshot of a pool.

    Bytes are capacities of slabs. Always ``held = free + leased + in_flight`` and ``held <=
    max_bytes``. A slab that is just being allocated counts against the cap, but not here yet. A
    slab that is being freed counts as held and free until it is gone.
    """

    held_bytes: int
    """Bytes of all slabs of the pool, idle ones included: what the cap limits."""
    pinned_bytes: int
    """The page-locked part of `held_bytes`. The rest is pageable: workers' slabs where the platform
    refuses to page-lock them, or all of `PageableMemory`.
    """
    leased_bytes: int
    """Bytes of slabs with a lease."""
    in_flight_bytes: int
    """Bytes of released slabs whose event is not done, or which still have live views."""
    free_bytes: int
    """Bytes of idle slabs."""
    held_for_good_bytes: int
    """Bytes of slabs whose release isn't expected: slabs of frozen modules, until their handles are
    closed and the modules are freed. A request that doesn't fit beside them fails at once.
    """
    max_bytes: int
    """The cap."""
    max_bytes_reason: str
    """Where the cap comes from."""
    held_slabs: int
    leased_slabs: int
    in_flight_slabs: int
    free_slabs: int

    peak_held_bytes: int
    """The most bytes that were held at once."""
    peak_held_slabs: int
    total_held_bytes: int
    """Bytes of all slabs that the pool ever allocated."""
    total_held_slabs: int

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
    owners: Mapping[str, OwnerStats] = field(hash=False)
    """Bytes by owner: the name given to `SlabPool.acquire`."""

    def __str__(self) -> str:
        """Return one line for a log."""
        return (
            f"held {format_bytes(self.held_bytes)} of {format_bytes(self.max_bytes)}, leased "
            f"{format_bytes(self.leased_bytes)}, in flight {format_bytes(self.in_flight_bytes)}; "
            f"{self.hits:,} hits, {count(self.misses, 'miss', 'misses')}, "
            f"{count(self.trims, 'trim')}, waited {self.wait_seconds:.3f} s in "
            f"{count(self.waits, 'request')}"
        )


def snapshot(state: PoolState) -> PoolStats:
    """Check all slabs, and return the counters. Call it under the pool's lock."""
    state.scan()
    parts, accounts = state.parts(), state.accounts.values()
    whole, busy = state.whole(), state.busy()
    leased, in_flight = by_owner(parts["leased"]), by_owner(parts["in_flight"])
    sizes = {f"{part}_bytes": total(slabs) for part, slabs in parts.items() if part != "viewed"}
    counts = {f"{part}_slabs": len(parts[part]) for part in ("held", "leased", "in_flight", "free")}
    return PoolStats(
        **sizes,
        **counts,
        **{
            name: getattr(state, name) for name in PoolStats.__annotations__ if hasattr(state, name)
        },
        max_bytes_reason=state.figures().reason,
        pinned_bytes=total(filter(state.is_pinned, parts["held"])),
        trims=state.total_held_slabs - counts["held_slabs"],
        waits=sum(account.waits for account in accounts),
        wait_seconds=sum((account.wait_seconds for account in accounts), 0.0),
        owners={
            account.name: OwnerStats(
                held_bytes=leased[account] + in_flight[account],
                leased_bytes=leased[account],
                in_flight_bytes=in_flight[account],
                available_bytes=max(0, state.accounts.room(account, whole, busy)),
                min_bytes=account.min_bytes,
                max_bytes=account.max_bytes,
                waits=account.waits,
                wait_seconds=account.wait_seconds,
            )
            for account in accounts
        },
    )
