"""The pool: every decision is taken in one function under the lock; slow work is done outside it."""

from __future__ import annotations

import os
import sys
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from .._errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    ForkedPoolError,
    PoolClosedError,
    PoolFrozenError,
)
from .._memory import MemoryResource, cap_bytes, default_memory, format_bytes, parse_bytes
from .._steps import step
from ._classes import reuse_limit, size_class
from ._lease import Event, Lease, Slab
from ._stats import Meter, PoolStats

if TYPE_CHECKING:
    from types import TracebackType

_POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the waiter whose turn it is. A release wakes it at once; an event that gets done and a
view that dies wake nobody (finalisers take no lock), so it looks again by itself."""

_fork_generation = 0


def _count_fork() -> None:
    global _fork_generation  # noqa: PLW0603 - one number for the process, written by the fork hook alone
    _fork_generation += 1


os.register_at_fork(after_in_child=_count_fork)


class _Growth(NamedTuple):
    """Slow work decided under the lock: free the victims, then allocate."""

    capacity: int
    victims: list[Slab]
    reserved: int


class SlabPool:
    """A thread-safe pool of host slabs in size classes, under a hard cap.

    Args:
        memory: where slabs come from; `default_memory()` if None: page-locked where CUDA is usable, else pageable.
        max_bytes: cap on the bytes held, idle slabs included: an int; text such as ``"2GiB"``; ``"8GiB/node"``, a cap
            for this host, of which each of torchrun's local ranks takes an equal part; or ``"auto"`` for a share of
            what this process may pin. `PoolStats.max_bytes_reason` says how the number came about.

    Raises:
        ValueError: `max_bytes` is not a positive size, or there is no telling how many ranks this host has.

    Requests are rounded to size classes with eight steps to a doubling, at most 12.5% (and to whole pages where memory
    is page-locked). A request is served, in this order: by an idle slab of which at most 12.5% is waste, or, from 1 MiB
    on, of at most twice its class; by growing; at the cap by any larger idle slab; by trimming idle slabs, least
    recently used first; by waiting, first come first served.

    All methods may be called from any thread. After ``fork`` the child's copy refuses to work.
    """

    def __init__(self, memory: MemoryResource | None = None, *, max_bytes: int | str = "auto") -> None:
        self._max_bytes, self._max_bytes_reason = cap_bytes(max_bytes)
        if self._max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
        self._memory: MemoryResource = default_memory() if memory is None else memory
        self._granularity = self._memory.granularity
        self._largest = self._max_bytes // self._granularity * self._granularity
        self._generation = _fork_generation
        self._lock = threading.Lock()
        self._closed = False
        self._frozen = False

        self._idle: dict[int, deque[Slab]] = {}  # by capacity; most recently used at the right
        self._capacities: list[int] = []  # the keys of _idle, sorted
        self._recency: OrderedDict[Slab, None] = OrderedDict()  # all idle slabs; least recently used first
        self._in_flight: list[Slab] = []  # views dead, event not seen done
        self._returns: deque[Slab] = deque()  # written by finalisers, without the lock
        self._waiters: deque[threading.Event] = deque()
        self._slabs_by_capacity: dict[int, int] = {}

        self._held, self._leased, self._flying, self._free = Meter(), Meter(), Meter(), Meter()
        self._idle_bytes = 0  # like _free.bytes, less what is being freed right now
        self._reserved_bytes = 0  # promised to allocations under way
        self._requested_bytes = self._total_requested_bytes = 0
        self._hits = self._misses = self._waits = self._trims = 0
        self._wait_seconds = 0.0

    # -- the public verbs

    @property
    def memory(self) -> MemoryResource:
        """The memory resource that slabs come from."""
        return self._memory

    @property
    def max_bytes(self) -> int:
        """The cap in bytes."""
        return self._max_bytes

    @property
    def frozen(self) -> bool:
        """Whether the pool refuses to allocate."""
        return self._frozen

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def acquire(self, nbytes: int | str, *, timeout: float | None = None) -> Lease:
        """Lease a slab of at least `nbytes`.

        Blocks only at the cap, until another lease is released or an event is done, first come first served. It may
        also take the time of an allocation when the pool grows, and of freeing when idle slabs have to make room (CUDA
        waits for the device then); `reserve` beforehand avoids both.

        Args:
            nbytes: bytes needed, at least 1; text such as ``"4MiB"`` is accepted.
            timeout: seconds to wait at the most; 0 does not wait, None waits for ever.

        Raises:
            BudgetExceededError: more than `max_bytes`; it can never fit.
            AcquireTimeoutError: nothing came free in time.
            PoolFrozenError: the pool is frozen and has no slab as large.
            PoolClosedError: the pool is closed, or was closed while this call waited.
            ForkedPoolError: called in a forked child.
        """
        if type(nbytes) is not int:
            nbytes = parse_bytes(nbytes)
        if nbytes <= 0:
            raise ValueError(f"nbytes must be at least 1: {nbytes}; a batch without bytes needs no slab")
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must not be negative: {timeout}; 0 does not wait, None waits for ever")
        if self._generation != _fork_generation:
            self._check_process()
        with step("acquire"):
            with self._lock:
                if self._closed or nbytes > self._largest:
                    self._check_request(nbytes)
                found = None if self._waiters else self._decide(nbytes)
            if found is None:
                found = self._wait(nbytes, timeout)
            return found if type(found) is Lease else self._grow(nbytes, found)  # type: ignore[arg-type]

    def reserve(self, nbytes: int | str, *, count: int = 1) -> None:
        """Allocate now, so that `count` leases of `nbytes` at once need no allocation later.

        Idle slabs that would serve such a request count. Takes the time of the allocations.

        Raises:
            BudgetExceededError: the missing slabs do not fit under the cap beside what is held; nothing was allocated.
            PoolFrozenError: slabs are missing and the pool is frozen.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        nbytes = parse_bytes(nbytes)
        if nbytes <= 0 or count < 0:
            raise ValueError(f"reserve needs sizes: nbytes={nbytes}, count={count}; pass nbytes >= 1 and count >= 0")
        self._check_process()
        with self._lock:
            self._check_request(nbytes)
            self._settle_returns()
            self._poll_events()
            capacity = self._class_of(nbytes)
            limit = reuse_limit(nbytes, capacity)
            first = bisect_left(self._capacities, nbytes)
            fitting = (size for size in self._capacities[first:] if size <= limit)
            missing = count - sum(len(self._idle[size]) for size in fitting)
            if missing <= 0:
                return
            if self._frozen:
                raise self._frozen_error(nbytes)
            needed = missing * capacity
            if needed > self._headroom():
                raise BudgetExceededError(
                    f"reserve does not fit: {missing} slabs of {format_bytes(capacity)} are missing, "
                    f"{self._numbers_text()}; release leases, trim() idle slabs, or raise max_bytes",
                    **self._numbers(needed),
                )
            self._reserved_bytes += needed
        made: list[Slab] = []
        try:
            while len(made) < missing:
                made.append(Slab(self._memory.allocate(capacity)))
        except BaseException:
            try:
                for slab in made:
                    self._memory.deallocate(slab.block)
            finally:
                self._unreserve(needed)  # only now: the cap counts what is not freed yet
            raise
        with self._lock:
            self._reserved_bytes -= needed
            for slab in made:
                self._adopt(slab)
                self._make_idle(slab)
        self._free_idle_if_closed()

    def trim(self, to_bytes: int | str = 0) -> int:
        """Give idle slabs back to the system, least recently used first, until at most `to_bytes` are held.

        Blocks: freeing page-locked memory makes CUDA wait for the device, so call it outside the hot path.

        Returns:
            Bytes given back.

        Raises:
            ForkedPoolError: called in a forked child.
        """
        target = parse_bytes(to_bytes)
        self._check_process()
        with self._lock:
            self._settle_returns()
            self._poll_events()
            being_freed = self._free.bytes - self._idle_bytes
            victims = self._pick_victims(self._held.bytes - being_freed - target)
        self._discard(victims)
        return sum(slab.capacity for slab in victims)

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state allocates nothing."""
        self._check_process()
        with self._lock:
            self._frozen = True

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab still leased, or with a living view, is freed when its lease is
        released, or by a later `close` or `stats`: a leak before a dangling pointer. May be called again. In a forked
        child it does nothing.
        """
        if self._forked():
            return
        with self._lock:
            self._closed = True
            for waiter in self._waiters:
                waiter.set()
            self._settle_returns()
            pending = [slab.event for slab in self._in_flight]
        for event in pending:
            if event is not None:
                event.synchronize()
        self.trim()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters. Does not block; looks at events first."""
        self._check_process()
        with self._lock:
            self._settle_returns()
            self._poll_events()
            held, leased, flying, free = self._held, self._leased, self._flying, self._free
            snapshot = PoolStats(
                held_bytes=held.bytes,
                leased_bytes=leased.bytes,
                in_flight_bytes=flying.bytes,
                free_bytes=free.bytes,
                max_bytes=self._max_bytes,
                max_bytes_reason=self._max_bytes_reason,
                requested_bytes=self._requested_bytes,
                held_slabs=held.slabs,
                leased_slabs=leased.slabs,
                in_flight_slabs=flying.slabs,
                free_slabs=free.slabs,
                peak_held_bytes=held.peak_bytes,
                peak_leased_bytes=leased.peak_bytes,
                peak_in_flight_bytes=flying.peak_bytes,
                peak_free_bytes=free.peak_bytes,
                peak_held_slabs=held.peak_slabs,
                peak_leased_slabs=leased.peak_slabs,
                peak_in_flight_slabs=flying.peak_slabs,
                peak_free_slabs=free.peak_slabs,
                total_held_bytes=held.total_bytes,
                total_leased_bytes=leased.total_bytes,
                total_in_flight_bytes=flying.total_bytes,
                total_free_bytes=free.total_bytes,
                total_requested_bytes=self._total_requested_bytes,
                total_held_slabs=held.total_slabs,
                total_leased_slabs=leased.total_slabs,
                total_in_flight_slabs=flying.total_slabs,
                total_free_slabs=free.total_slabs,
                hits=self._hits,
                misses=self._misses,
                waits=self._waits,
                wait_seconds=self._wait_seconds,
                trims=self._trims,
            )
        self._free_idle_if_closed()
        return snapshot

    # -- decisions, all under the lock

    def _decide(self, nbytes: int) -> Lease | _Growth | None:
        """Serve a request from what is there, or plan how to grow, or return None: wait."""
        if self._returns:
            self._settle_returns()
        capacity = self._class_of(nbytes)
        limit = reuse_limit(nbytes, capacity)
        slab = self._take_idle(nbytes, limit)
        if slab is None and self._in_flight and self._poll_events():
            slab = self._take_idle(nbytes, limit)
        if slab is None:
            shortfall = capacity - self._headroom()
            if shortfall <= 0 and not self._frozen:
                return self._plan_growth(capacity, [])
            slab = self._take_idle(nbytes, self._largest)
        if slab is not None:
            self._hits += 1
            return self._lease_out(slab, nbytes)
        if self._frozen:
            if not any(size >= nbytes for size in self._slabs_by_capacity):
                raise self._frozen_error(nbytes)
        elif shortfall <= self._idle_bytes:
            return self._plan_growth(capacity, self._pick_victims(shortfall))
        return None

    def _class_of(self, nbytes: int) -> int:
        return min(size_class(nbytes, self._granularity), self._largest)

    def _headroom(self) -> int:
        return self._max_bytes - self._held.bytes - self._reserved_bytes

    def _take_idle(self, nbytes: int, bound: int) -> Slab | None:
        capacities = self._capacities
        for position in range(bisect_left(capacities, nbytes), len(capacities)):
            capacity = capacities[position]
            if capacity > bound:
                return None
            if stack := self._idle[capacity]:
                slab = stack.pop()
                del self._recency[slab]
                self._idle_bytes -= capacity
                self._free.leave(capacity)
                return slab
        return None

    def _lease_out(self, slab: Slab, nbytes: int) -> Lease:
        slab.requested = nbytes
        self._leased.enter(slab.capacity)
        self._requested_bytes += nbytes
        self._total_requested_bytes += nbytes
        return Lease(self, slab, nbytes)

    def _plan_growth(self, capacity: int, victims: list[Slab]) -> _Growth:
        # Victims stay counted as held until they are freed, so that the cap holds at every moment.
        reserved = max(0, capacity - sum(slab.capacity for slab in victims))
        self._reserved_bytes += reserved
        return _Growth(capacity, victims, reserved)

    def _pick_victims(self, nbytes: int) -> list[Slab]:
        victims = []
        while nbytes > 0 and self._recency:
            slab, _ = self._recency.popitem(last=False)
            self._idle[slab.capacity].popleft()  # each class is in the same order as _recency
            self._idle_bytes -= slab.capacity
            nbytes -= slab.capacity
            victims.append(slab)
        return victims

    def _adopt(self, slab: Slab) -> None:
        capacity = slab.capacity
        self._held.enter(capacity)
        self._slabs_by_capacity[capacity] = self._slabs_by_capacity.get(capacity, 0) + 1
        if capacity not in self._idle:
            self._idle[capacity] = deque()
            insort(self._capacities, capacity)

    def _forget(self, slab: Slab) -> None:
        capacity = slab.capacity
        self._held.leave(capacity)
        self._free.leave(capacity)
        self._slabs_by_capacity[capacity] -= 1
        if not self._slabs_by_capacity[capacity]:
            del self._slabs_by_capacity[capacity], self._idle[capacity]
            self._capacities.remove(capacity)

    def _make_idle(self, slab: Slab) -> None:
        slab.event = None
        self._idle[slab.capacity].append(slab)
        self._recency[slab] = None
        self._idle_bytes += slab.capacity
        self._free.enter(slab.capacity)
        if self._waiters:
            self._waiters[0].set()

    def _end_lease(self, slab: Slab) -> None:
        self._requested_bytes -= slab.requested
        slab.requested = 0
        self._leased.leave(slab.capacity)

    def _settle_returns(self) -> None:
        """Take in the slabs whose last view or forgotten lease has died."""
        while self._returns:
            slab = self._returns.popleft()
            if slab.requested:  # a forgotten lease; a released one has been counted out already
                self._end_lease(slab)
                self._make_idle(slab)
            elif slab.event is None:
                self._flying.leave(slab.capacity)
                self._make_idle(slab)
            else:
                self._in_flight.append(slab)

    def _poll_events(self) -> bool:
        """Make those slabs idle whose event is done; say whether there were any."""
        # All are asked before any is moved: a query that raises, as CUDA's does after a failed kernel, changes nothing.
        done = [slab.event is None or slab.event.query() for slab in self._in_flight]
        if True not in done:
            return False
        asked, self._in_flight = self._in_flight, []
        for slab, landed in zip(asked, done, strict=True):
            if landed:
                self._flying.leave(slab.capacity)
                self._make_idle(slab)
            else:
                self._in_flight.append(slab)
        return True

    def _release(self, lease: Lease, after: Event | None) -> None:
        if self._generation != _fork_generation:
            self._check_process()
        with self._lock:
            slab = lease._take_slab()
            self._end_lease(slab)
            slab.event = after
            had_views = lease._exporter is not None
            lease._exporter = None  # the exporter ends here unless a view is alive, and puts the slab into _returns
            if had_views and self._returns:
                last = self._returns.pop()
                if last is slab:
                    had_views = False
                else:  # from a finaliser of another thread
                    self._returns.append(last)
            if had_views:
                self._flying.enter(slab.capacity)
            elif after is None:
                self._make_idle(slab)
            else:
                self._flying.enter(slab.capacity)
                self._in_flight.append(slab)
        self._free_idle_if_closed()

    # -- slow work, outside the lock

    def _grow(self, nbytes: int, growth: _Growth) -> Lease:
        outstanding = growth.reserved
        try:
            if growth.victims:
                # The room the victims leave is promised to this allocation before anyone else can see it.
                outstanding = self._discard(growth.victims, promise=growth.capacity - growth.reserved) + growth.reserved
            slab = Slab(self._memory.allocate(growth.capacity))
        except BaseException:
            self._unreserve(outstanding)
            raise
        with self._lock:
            self._reserved_bytes -= outstanding
            self._adopt(slab)
            self._misses += 1
            lease = self._lease_out(slab, nbytes)
            if self._waiters:
                self._waiters[0].set()
        if self._closed:
            lease.release()
            self._check_open()
        return lease

    def _unreserve(self, nbytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= nbytes
            if self._waiters:
                self._waiters[0].set()

    def _discard(self, victims: list[Slab], *, promise: int = 0) -> int:
        """Free slabs that are out of the idle lists already; put back what could not be reached because of an error.

        Returns:
            Bytes added to the reservation: `promise`.
        """
        done = 0
        try:
            for slab in victims:
                done += 1  # a slab whose freeing fails is lost, not reused
                self._memory.deallocate(slab.block)
        except BaseException:
            promise = 0
            raise
        finally:
            with self._lock:
                for slab in victims[:done]:
                    self._forget(slab)
                    self._trims += 1
                for slab in victims[done:]:
                    self._free.leave(slab.capacity)
                    self._make_idle(slab)
                self._reserved_bytes += promise
                if self._waiters:
                    self._waiters[0].set()
        return promise

    def _free_idle_if_closed(self) -> None:
        if self._closed:
            with self._lock:
                victims = self._pick_victims(self._held.bytes)
            self._discard(victims)

    def _wait(self, nbytes: int, timeout: float | None) -> Lease | _Growth:
        start = time.monotonic()
        waiter = threading.Event()
        pause, longest_pause = _POLL_SECONDS
        try:
            with self._lock:
                self._waiters.append(waiter)
                self._waits += 1
            while True:
                with self._lock:
                    self._check_open()
                    my_turn = self._waiters[0] is waiter
                    found = self._decide(nbytes) if my_turn else None
                    if found is not None:
                        return found
                    waiter.clear()
                    left = None if timeout is None else timeout - (time.monotonic() - start)
                    if left is not None and left <= 0:
                        raise AcquireTimeoutError(
                            f"no slab came free within {timeout} s: requested {format_bytes(nbytes)}, "
                            f"{self._numbers_text()}, {len(self._waiters) - 1} other waiters; release leases sooner, "
                            "wait longer, or raise max_bytes",
                            **self._numbers(nbytes),
                        )
                if my_turn:
                    waiter.wait(pause if left is None else min(pause, left))
                    pause = min(2 * pause, longest_pause)
                else:
                    waiter.wait(left if left is None else min(left, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                if waiter in self._waiters:  # not, if an interrupt came before it was
                    self._waiters.remove(waiter)
                self._wait_seconds += time.monotonic() - start
                if self._waiters:
                    self._waiters[0].set()

    # -- checks and words

    def _check_request(self, nbytes: int) -> None:
        self._check_open()
        if nbytes > self._largest:
            raise BudgetExceededError(
                f"request can never fit: requested {format_bytes(nbytes)}, {self._numbers_text()}; raise max_bytes or "
                "ask for less",
                **self._numbers(nbytes),
            )

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosedError(f"pool is closed: {self._numbers_text()}; make a new SlabPool")

    def _forked(self) -> bool:
        return self._generation != _fork_generation

    def _check_process(self) -> None:
        if self._generation != _fork_generation:
            raise ForkedPoolError(
                f"pool belongs to the parent of process {os.getpid()}: page-locked memory does not survive fork; make "
                "a SlabPool in the child, or use pinstage in the main process only"
            )

    def _frozen_error(self, nbytes: int) -> PoolFrozenError:
        largest = max(self._slabs_by_capacity, default=0)
        return PoolFrozenError(
            f"pool is frozen and would have to allocate: requested {format_bytes(nbytes)}, largest slab "
            f"{format_bytes(largest)}, {self._numbers_text()}; reserve() all that is needed before freeze()",
            **self._numbers(nbytes),
        )

    def _numbers(self, nbytes: int) -> dict[str, int]:
        return {
            "requested_bytes": nbytes,
            "held_bytes": self._held.bytes,
            "leased_bytes": self._leased.bytes,
            "in_flight_bytes": self._flying.bytes,
            "max_bytes": self._max_bytes,
        }

    def _numbers_text(self) -> str:
        return (
            f"held {format_bytes(self._held.bytes)} of max_bytes {format_bytes(self._max_bytes)} "
            f"({self._max_bytes_reason}), leased {format_bytes(self._leased.bytes)}, in flight "
            f"{format_bytes(self._flying.bytes)}"
        )

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody holds the pool or a lease of it any more. What a view still shows is left alone.
        if not hasattr(self, "_trims") or self._forked() or sys.is_finalizing():
            return
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "frozen" if self._frozen else "open"
        return f"<SlabPool {state} {type(self._memory).__name__} {self._numbers_text()}>"
