"""What the pool holds and has promised, and what is decided about it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from . import _refusals
from ._classes import reuse_limit, size_class
from ._idle import IdleSlabs
from ._stats import Meter, PoolStats

if TYPE_CHECKING:
    from ._lease import Event, Slab
    from ._waiting import WaitingLine


class Growth(NamedTuple):
    """Slow work decided under the lock: free the victims, then allocate."""

    capacity: int
    victims: list[Slab]
    reserved: int


class Holdings:
    """The budget and the slabs: idle, leased, in flight.

    All methods are called under the pool's lock, and none does slow work: they decide, count, and return what is to be
    done outside of the lock.

    Args:
        max_bytes: the cap.
        reason: how it came about.
        granularity: of the memory.
        line: is told when a slab becomes idle.

    Attributes:
        largest: the largest slab that the cap allows.
        returns: slabs whose last view or forgotten lease has died; written by finalisers, without the lock.
    """

    def __init__(self, max_bytes: int, reason: str, granularity: int, line: WaitingLine) -> None:
        self.max_bytes = max_bytes
        self.reason = reason
        self.largest = max_bytes // granularity * granularity
        self.closed = False
        self.frozen = False
        self.returns: deque[Slab] = deque()
        self._granularity = granularity
        self._line = line

        self._idle = IdleSlabs()
        self._in_flight: list[Slab] = []  # views dead, event not seen done
        self._slabs_by_capacity: dict[int, int] = {}
        self.held, self.leased, self.flying, self._free = Meter(), Meter(), Meter(), self._idle.meter
        self._reserved_bytes = 0  # promised to allocations under way
        self._requested_bytes = self._total_requested_bytes = 0
        self._hits = self._misses = self._trims = 0

    # -- decisions

    def decide(self, nbytes: int) -> Slab | Growth | None:
        """Serve a request from what is there, or plan how to grow, or return None: wait.

        Raises:
            PoolFrozenError: the pool would have to allocate, and is frozen.
        """
        if self.returns:
            self.settle_returns()
        capacity = min(size_class(nbytes, self._granularity), self.largest)
        limit = reuse_limit(nbytes, capacity)
        slab = self._idle.take(nbytes, limit)
        if slab is None and self._in_flight and self.poll_events():
            slab = self._idle.take(nbytes, limit)
        if slab is None:
            shortfall = capacity - self._headroom()
            if shortfall <= 0 and not self.frozen:
                return self._plan_growth(capacity, [])
            slab = self._idle.take(nbytes, self.largest)
        if slab is not None:
            self._hits += 1
            self._lease_out(slab, nbytes)
            return slab
        if self.frozen:
            if not any(size >= nbytes for size in self._slabs_by_capacity):
                raise _refusals.frozen(self, nbytes)
        elif shortfall <= self._idle.bytes:
            return self._plan_growth(capacity, self._idle.pick_victims(shortfall))
        return None

    def plan_reserve(self, nbytes: int, count: int) -> tuple[int, int]:
        """Promise room for the slabs that are missing for `count` leases at once.

        Returns:
            The capacity of each, and how many.

        Raises:
            PoolFrozenError: some are missing, and the pool is frozen.
            BudgetExceededError: there is no room for them.
        """
        self.look()
        capacity = min(size_class(nbytes, self._granularity), self.largest)
        missing = max(0, count - self._idle.count(nbytes, reuse_limit(nbytes, capacity)))
        if missing:
            if self.frozen:
                raise _refusals.frozen(self, nbytes)
            if missing * capacity > self._headroom():
                raise _refusals.reserve_does_not_fit(self, capacity, missing)
            self._reserved_bytes += missing * capacity
        return capacity, missing

    def victims_down_to(self, nbytes: int) -> list[Slab]:
        """Choose the idle slabs to free, so that at most `nbytes` are held."""
        self.look()
        being_freed = self._free.bytes - self._idle.bytes
        return self._idle.pick_victims(self.held.bytes - being_freed - nbytes)

    def all_idle(self) -> list[Slab]:
        """Choose all idle slabs to be freed."""
        return self._idle.pick_victims(self.held.bytes)

    def _headroom(self) -> int:
        return self.max_bytes - self.held.bytes - self._reserved_bytes

    def _plan_growth(self, capacity: int, victims: list[Slab]) -> Growth:
        # Victims stay counted as held until they are freed, so that the cap holds at every moment.
        reserved = max(0, capacity - sum(slab.capacity for slab in victims))
        self._reserved_bytes += reserved
        return Growth(capacity, victims, reserved)

    # -- what slow work has come to

    def unreserve(self, nbytes: int) -> None:
        """Take back a promise that came to nothing."""
        self._reserved_bytes -= nbytes
        self._line.wake_first()

    def grown(self, slab: Slab, promised: int, nbytes: int) -> None:
        """Take in a slab that was allocated for a request, and lease it out."""
        self._reserved_bytes -= promised
        self._adopt(slab)
        self._misses += 1
        self._lease_out(slab, nbytes)
        self._line.wake_first()

    def reserved(self, slabs: list[Slab], promised: int) -> None:
        """Take in slabs that were allocated for nobody yet."""
        self._reserved_bytes -= promised
        for slab in slabs:
            self._adopt(slab)
            self.make_idle(slab)

    def discarded(self, freed: list[Slab], kept: list[Slab], promise: int) -> None:
        """Take note of victims that were freed, and of those that were not reached; promise bytes to an allocation."""
        for slab in freed:
            self._forget(slab)
            self._trims += 1
        for slab in kept:
            self._free.leave(slab.capacity)
            self.make_idle(slab)
        self._reserved_bytes += promise
        self._line.wake_first()

    def _adopt(self, slab: Slab) -> None:
        capacity = slab.capacity
        self.held.enter(capacity)
        self._slabs_by_capacity[capacity] = self._slabs_by_capacity.get(capacity, 0) + 1
        self._idle.learn(capacity)

    def _forget(self, slab: Slab) -> None:
        capacity = slab.capacity
        self.held.leave(capacity)
        self._free.leave(capacity)
        self._slabs_by_capacity[capacity] -= 1
        if not self._slabs_by_capacity[capacity]:
            del self._slabs_by_capacity[capacity]
            self._idle.unlearn(capacity)

    # -- from state to state

    def _lease_out(self, slab: Slab, nbytes: int) -> None:
        slab.requested = nbytes
        self.leased.enter(slab.capacity)
        self._requested_bytes += nbytes
        self._total_requested_bytes += nbytes

    def end_lease(self, slab: Slab) -> None:
        """Count a slab out of the leased ones."""
        self._requested_bytes -= slab.requested
        slab.requested = 0
        self.leased.leave(slab.capacity)

    def make_idle(self, slab: Slab) -> None:
        """Let a slab be used again."""
        self._idle.put(slab)
        if self._line.waiters:
            self._line.wake_first()

    def wait_for_views(self, slab: Slab) -> None:
        """Keep a slab until its last view has died; then it is in `returns`."""
        self.flying.enter(slab.capacity)

    def wait_for_event(self, slab: Slab) -> None:
        """Keep a slab without views until its event is done."""
        self.flying.enter(slab.capacity)
        self._in_flight.append(slab)

    def look(self) -> None:
        """Make idle what has come back meanwhile."""
        self.settle_returns()
        self.poll_events()

    def settle_returns(self) -> None:
        """Take in the slabs whose last view or forgotten lease has died."""
        while self.returns:
            slab = self.returns.popleft()
            if slab.requested:  # a forgotten lease; a released one has been counted out already
                self.end_lease(slab)
                if slab.event is None:
                    self.make_idle(slab)
                else:
                    self.wait_for_event(slab)
            elif slab.event is None:
                self.flying.leave(slab.capacity)
                self.make_idle(slab)
            else:
                self._in_flight.append(slab)

    def poll_events(self) -> bool:
        """Make those slabs idle whose event is done; say whether there were any."""
        # All are asked before any is moved: a query that raises, as CUDA's does after a failed kernel, changes nothing.
        done = [slab.event is None or slab.event.query() for slab in self._in_flight]
        if True not in done:
            return False
        asked, self._in_flight = self._in_flight, []
        for slab, landed in zip(asked, done, strict=True):
            if landed:
                self.flying.leave(slab.capacity)
                self.make_idle(slab)
            else:
                self._in_flight.append(slab)
        return True

    def pending(self) -> list[Event]:
        """Return the events that slabs in flight wait for."""
        return [slab.event for slab in self._in_flight if slab.event is not None]

    # -- what there is

    @property
    def largest_held(self) -> int:
        """Capacity of the largest slab."""
        return max(self._slabs_by_capacity, default=0)

    def snapshot(self) -> PoolStats:
        """Return all counters."""
        return PoolStats(
            **self.held.figures("held"),
            **self.leased.figures("leased"),
            **self.flying.figures("in_flight"),
            **self._free.figures("free"),
            max_bytes=self.max_bytes,
            max_bytes_reason=self.reason,
            requested_bytes=self._requested_bytes,
            total_requested_bytes=self._total_requested_bytes,
            hits=self._hits,
            misses=self._misses,
            waits=self._line.waits,
            wait_seconds=self._line.seconds,
            trims=self._trims,
        )
