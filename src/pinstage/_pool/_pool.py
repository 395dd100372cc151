"""The pool: every decision is taken under the lock, by its `Holdings`; slow work is done outside it, here."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from .._memory import MemoryResource, cap_bytes, default_memory
from .._sizes import parse_bytes
from .._steps import step
from . import _refusals
from ._holdings import Growth, Holdings
from ._lease import Event, Lease, Slab
from ._stats import PoolStats
from ._waiting import WaitingLine

if TYPE_CHECKING:
    from types import TracebackType

_fork_generation = 0


def _count_fork() -> None:
    global _fork_generation  # noqa: PLW0603 - one number for the process, written by the fork hook alone
    _fork_generation += 1


os.register_at_fork(after_in_child=_count_fork)


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
        cap, reason = cap_bytes(max_bytes)
        if cap <= 0:
            raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
        self._memory: MemoryResource = default_memory() if memory is None else memory
        self._generation = _fork_generation
        self._lock = threading.Lock()
        self._line = WaitingLine(self._lock)
        self._holdings = Holdings(cap, reason, self._memory.granularity, self._line)
        self._returns = self._holdings.returns

    # -- the public verbs

    @property
    def memory(self) -> MemoryResource:
        """The memory resource that slabs come from."""
        return self._memory

    @property
    def max_bytes(self) -> int:
        """The cap in bytes."""
        return self._holdings.max_bytes

    @property
    def frozen(self) -> bool:
        """Whether the pool refuses to allocate."""
        return self._holdings.frozen

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._holdings.closed

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
            holdings = self._holdings
            with self._lock:
                if holdings.closed or nbytes > holdings.largest:
                    self._check_request(nbytes)
                found = None if self._line.waiters else holdings.decide(nbytes)
                if type(found) is Slab:
                    return Lease(self, found, nbytes)
            return self._wait_or_grow(nbytes, found, timeout)  # type: ignore[arg-type]

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
            capacity, missing = self._holdings.plan_reserve(nbytes, count)
        made: list[Slab] = []
        try:
            while len(made) < missing:
                made.append(Slab(self._memory.allocate(capacity)))
        except BaseException:
            try:
                for slab in made:
                    self._memory.deallocate(slab.block)
            finally:
                with self._lock:  # only now: the cap counts what is not freed yet
                    self._holdings.unreserve(missing * capacity)
            raise
        with self._lock:
            self._holdings.reserved(made, missing * capacity)
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
            victims = self._holdings.victims_down_to(target)
        self._discard(victims)
        return sum(slab.capacity for slab in victims)

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state allocates nothing."""
        self._check_process()
        with self._lock:
            self._holdings.frozen = True

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab still leased, or with a living view, is freed when its lease is
        released, or by a later `close` or `stats`: a leak before a dangling pointer. May be called again. In a forked
        child it does nothing.
        """
        if self._forked():
            return
        with self._lock:
            self._holdings.closed = True
            self._line.wake_all()
            self._holdings.settle_returns()
            pending = self._holdings.pending()
        for event in pending:
            event.synchronize()
        self.trim()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters. Does not block; looks at events first."""
        self._check_process()
        with self._lock:
            self._holdings.look()
            snapshot = self._holdings.snapshot()
        self._free_idle_if_closed()
        return snapshot

    # -- for leases

    def _release(self, lease: Lease, after: Event | None) -> None:
        if self._generation != _fork_generation:
            self._check_process()
        holdings = self._holdings
        with self._lock:
            slab = lease._take_slab()
            holdings.end_lease(slab)
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
                holdings.wait_for_views(slab)
            elif after is None:
                holdings.make_idle(slab)
            else:
                holdings.wait_for_event(slab)
        if holdings.closed:
            self._free_idle_if_closed()

    # -- slow work, outside the lock

    def _wait_or_grow(self, nbytes: int, found: Growth | None, timeout: float | None) -> Lease:
        served: Lease | Growth | None = found

        def attempt(my_turn: bool) -> bool:
            nonlocal served
            self._check_open()
            decided = self._holdings.decide(nbytes) if my_turn else None
            served = Lease(self, decided, nbytes) if isinstance(decided, Slab) else decided
            return served is not None

        def too_late() -> Exception:
            return _refusals.too_late(self._holdings, nbytes, timeout, len(self._line.waiters) - 1)

        if served is None:
            self._line.wait(attempt, timeout, too_late)
        assert served is not None
        return served if isinstance(served, Lease) else self._grow(nbytes, served)

    def _grow(self, nbytes: int, growth: Growth) -> Lease:
        outstanding = growth.reserved
        try:
            if growth.victims:
                # The room the victims leave is promised to this allocation before anyone else can see it.
                outstanding = self._discard(growth.victims, promise=growth.capacity - growth.reserved) + growth.reserved
            slab = Slab(self._memory.allocate(growth.capacity))
        except BaseException:
            with self._lock:
                self._holdings.unreserve(outstanding)
            raise
        with self._lock:
            self._holdings.grown(slab, outstanding, nbytes)
            lease = Lease(self, slab, nbytes)
        if self._holdings.closed:
            lease.release()
            self._check_open()
        return lease

    def _discard(self, victims: list[Slab], *, promise: int = 0) -> int:
        """Free slabs that are out of the idle ones already; put back what could not be reached because of an error.

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
                self._holdings.discarded(victims[:done], victims[done:], promise)
        return promise

    def _free_idle_if_closed(self) -> None:
        if self._holdings.closed:
            with self._lock:
                victims = self._holdings.all_idle()
            self._discard(victims)

    # -- checks

    def _check_request(self, nbytes: int) -> None:
        self._check_open()
        if nbytes > self._holdings.largest:
            raise _refusals.never_fits(self._holdings, nbytes)

    def _check_open(self) -> None:
        if self._holdings.closed:
            raise _refusals.closed(self._holdings)

    def _forked(self) -> bool:
        return self._generation != _fork_generation

    def _check_process(self) -> None:
        if self._generation != _fork_generation:
            raise _refusals.forked()

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody holds the pool or a lease of it any more. What a view still shows is left alone.
        if not hasattr(self, "_returns") or self._forked() or sys.is_finalizing():
            return
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "frozen" if self.frozen else "open"
        return f"<SlabPool {state} {type(self._memory).__name__} {_refusals.text(self._holdings)}>"
