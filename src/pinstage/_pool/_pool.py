"""The pool's public methods, and waiting. `PoolState` makes the decisions."""

from __future__ import annotations

import _thread
import contextlib
import operator
import threading
import time
import warnings
from functools import partial
from typing import NoReturn, SupportsIndex

from .._memory import REFUSALS, MemoryResource, default_memory
from .._reaper import remarks
from .._sizes import Size, format_bytes, parse_bytes
from .._steps import step
from ..errors import StagingWarning, UnreleasedLeaseWarning
from . import _refusals
from ._adaptor import RefusedForNow
from ._classes import reuse_limit
from ._growth import Growth, GrowthPlan
from ._host_budget import HostBudget, adaptor_for, cap_of
from ._lease import Lease
from ._slab import Fence
from ._state import PoolState
from ._stats import PoolStats
from ._waiting import GIVE_UP_SECONDS, Waiter, check_timeout, this_thread

_LOGGED: list[str] = []
"""The logged line about the first forgotten lease of this process."""


def check_pool(pool: object, max_bytes: Size = "auto", budget: HostBudget | None = None) -> None:
    """Check that a pool is a `SlabPool`, and that no other cap is given.

    Raises:
        TypeError: `pool` is something else.
        ValueError: `max_bytes` or `budget` is given, too.
    """
    if not isinstance(pool, SlabPool):
        cap = repr(pool) if isinstance(pool, int | str) else "..."
        raise TypeError(f"pool must be a SlabPool: {pool!r}; pass SlabPool({cap})")
    if budget is not None or max_bytes not in ("auto", pool.max_bytes):
        given = f"max_bytes={max_bytes!r}" if budget is None else f"budget={budget!r}"
        raise ValueError(
            f"pool and {given.partition('=')[0]} exclude each other: {given}; give the cap to the "
            "pool"
        )


def check_open(pool: SlabPool) -> None:
    """Refuse a batch that needs no slab if `SlabPool.acquire` would refuse any slab.

    Raises:
        PoolError: the pool is closed, of a parent process, or in the middle of a call of this
            thread.
    """
    pool._check_entry()
    pool._state.check_open()


def close_for(pool: SlabPool, user: str) -> None:
    """Close a pool that its user, such as a ``Stager``, made for itself. Later errors name the
    user.
    """
    pool._state.user = user
    pool.close()


def state_of(pool: SlabPool) -> PoolState:
    """Return the state whose plain attributes ``closed`` and ``is_forked`` say why a pool would
    refuse a lease.
    """
    return pool._state


def lease_in_flight(pool: SlabPool, nbytes: int, *, owner: str) -> tuple[Lease, Fence] | None:
    """Lease a slab that its owner has released and that is in flight. Does not block.

    For callers whose writes are ordered by streams: let the stream that writes the slab wait for
    the event. Then the host need not wait, and the pool need not grow.

    Args:
        pool: the pool of the slab.
        nbytes: bytes needed, at least 1.
        owner: the name under which the slab was leased, and is leased again.

    Returns:
        The lease, and the event behind which the slab was released. None if no slab in flight of
        this owner is suitable, or if a request waits.

    Raises:
        PoolClosedError, ForkedPoolError: as `SlabPool.acquire`.
    """
    check_open(pool)
    with pool._state.lock:
        return pool._state.serve_in_flight(owner, nbytes)


class SlabPool:
    """A thread-safe pool of host slabs in size classes, under a hard cap.

    Args:
        max_bytes: cap on the bytes held, idle slabs included: an int, or text such as ``"2GiB"``.
            ``"auto"`` is a quarter of the memory that is available, divided by the ranks of this
            host, or the whole `budget` if there is one. `PoolStats.max_bytes_reason` says where the
            number comes from.
        budget: a second cap, which pools of several processes share.
        memory: where slabs come from; `memory.default_memory` if None: page-locked where CUDA is
            usable, else pageable.

    Raises:
        TypeError: `max_bytes` is not a size, `budget` is not a `HostBudget`, or `memory` is not a
            memory resource.
        ValueError: `max_bytes` is not positive, or another pool of this host has a `HostBudget` of
            this name with another cap.
        HostBudgetError: the folder of host budgets cannot be used.

    Requests are rounded up to size classes, eight for each doubling, so by at most 12.5% (and to
    whole pages where memory is page-locked). A request is served in this order: by an idle slab
    that wastes at most 12.5%, or, from 1 MiB on, by one of at most twice its class; by growing; at
    the cap, by any larger idle slab; by freeing idle slabs, least recently used first; by waiting,
    first come, first served.

    All methods may be called from any thread. After ``fork`` the child's copy refuses to work.
    """

    def __init__(
        self,
        max_bytes: Size = "auto",
        *,
        budget: HostBudget | None = None,
        memory: MemoryResource | None = None,
    ) -> None:
        cap, reason = cap_of(max_bytes, budget)
        if memory is not None and (isinstance(memory, type) or not hasattr(memory, "allocate")):
            raise TypeError(
                f"memory must be a MemoryResource: {memory!r}; pass one such as PageableMemory()"
            )
        resource = default_memory() if memory is None else memory
        self._state = PoolState(adaptor_for(resource, budget), cap, reason)
        self._has_told = False

    # -- the public methods

    @property
    def memory(self) -> MemoryResource:
        """The memory resource that slabs come from."""
        return self._state.memory.resource

    @property
    def max_bytes(self) -> int:
        """The cap in bytes."""
        return self._state.max_bytes

    @property
    def frozen(self) -> bool:
        """Whether the pool refuses to allocate."""
        return self._state.frozen

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._state.closed

    def acquire(
        self, nbytes: Size, *, timeout: float | None = None, owner: str = "unnamed"
    ) -> Lease:
        """Lease a slab of at least `nbytes`.

        Blocks only at the cap, or at the owner's limit, until another lease is released or an event
        is done. The order is first come, first served, except for bytes guaranteed to an owner (see
        `set_quota`). The call also takes the time to allocate when the pool grows, and to free when
        idle slabs have to make room (CUDA then waits for the device). `reserve` beforehand avoids
        both.

        Args:
            nbytes: bytes needed, at least 1; text such as ``"4MiB"`` is accepted.
            timeout: seconds to wait at most; 0 does not wait, None waits forever.
            owner: a name for the user of the slab: it is counted in `PoolStats.owners`, and has the
                quota of that name.

        Raises:
            MemoryError, OSError, RuntimeError: from `memory`, if it refuses and the pool has no
                slab that is large enough. If the pool has one, the request waits for it, and a
                `StagingWarning` says so once. The pool tries to grow that far again after a minute,
                or by `reserve`.
            BudgetExceededError: the request exceeds `max_bytes`, or the part that quotas and slabs
                held for good (`PoolStats.held_for_good_bytes`) leave to the owner; waiting
                wouldn't help.
            AcquireTimeoutError: nothing came free in time.
            PoolFrozenError: the pool is frozen and has no slab that is large enough.
            PoolClosedError: the pool is closed, or was closed while this call waited.
            ForkedPoolError: called in a forked child.
        """
        if type(nbytes) is not int:
            nbytes = parse_bytes(nbytes)
        if nbytes <= 0:
            raise ValueError(
                f"nbytes must be at least 1: {nbytes}; a batch without bytes needs no slab"
            )
        if timeout is not None and (type(timeout) is not float or timeout < 0):
            check_timeout(timeout)
        state = self._state
        if state.is_entered() or state.forgotten:
            self._check_entry()
        with step("acquire"):
            with state.lock:
                account = state.accounts[owner]
                # Case 1 of `PoolState.serve`.
                if not (state.closed or state.waiters or state.accounts.have_quotas):
                    lease = state.lease(account, nbytes, reuse_limit(nbytes, state.granularity))
                    if lease is not None:
                        return lease
            return self._serve_or_wait(Waiter(account, nbytes, timeout))

    def set_quota(self, owner: str, *, min_bytes: Size = 0, max_bytes: Size | None = None) -> None:
        """Guarantee a part of the cap to an owner, and limit what it may hold. Does not block, and
        allocates nothing.

        Slabs that the owner has leased or that are in flight count with their full size, not with
        the bytes requested. Guaranteed bytes that are not used are kept free, so that the owner
        gets them at once. A request that waits because of its own owner's limit doesn't delay those
        behind it.

        In a frozen pool, quotas divide the bytes that it holds. Slabs beyond a new quota stay where
        they are until they are released. A second call for the same owner replaces the first.

        Args:
            owner: the name, as given to `acquire`.
            min_bytes: bytes that no other owner may have; text such as ``"1GiB"`` is accepted.
            max_bytes: bytes that it may have; None for no limit but the cap.

        Raises:
            ValueError: `min_bytes` is above `max_bytes`, `max_bytes` is 0, or guarantees together
                are above the cap.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        least, most = parse_bytes(min_bytes), None if max_bytes is None else parse_bytes(max_bytes)
        self._check_entry()
        with self._state.lock:
            self._state.check_open()
            self._state.accounts.set_quota(owner, least, most)
        self._state.wake_all()

    def reserve(self, nbytes: Size, *, count: int = 1, background: bool = False) -> Fence:
        """Allocate now, so that `count` leases of `nbytes` at once need no allocation later.

        Idle slabs that would serve such a request count. Blocks for the allocations, unless they
        are made in the background.

        Args:
            nbytes: bytes of each lease.
            count: leases at the same time.
            background: allocate in a thread, and return at once. Other threads may use the pool
                meanwhile.

        Returns:
            A fence that is done when all slabs are there. Its `synchronize` waits for that, and
            raises the error that prevented it.

        Raises:
            BudgetExceededError: the missing slabs do not fit under the cap beside the held bytes,
                or beside those that other pools hold of a `HostBudget`; nothing was allocated.
            PoolFrozenError: slabs are missing and the pool is frozen.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        nbytes, count = parse_bytes(nbytes), operator.index(count)
        if nbytes <= 0 or count < 0:
            raise ValueError(
                f"reserve needs sizes: nbytes={nbytes}, count={count}; pass nbytes >= 1 and count "
                ">= 0"
            )
        self._check_entry()
        state = self._state
        missing = partial(state.reserve, nbytes, count)
        with state.lock:
            missing()  # an error is raised in the caller's thread
        growth = Growth(state, missing)
        if background:
            _thread.start_new_thread(growth.run, ())
        else:
            growth.result()
        return growth

    def trim(self, to_bytes: Size = 0) -> int:
        """Give idle slabs back to the system, least recently used first, until at most `to_bytes`
        are held.

        Blocks: freeing page-locked memory makes CUDA wait for the device, so call it outside the
        hot path.

        Returns:
            Bytes given back.

        Raises:
            ForkedPoolError: called in a forked child.
        """
        target = parse_bytes(to_bytes)
        self._check_entry()
        freed = self._state.trim(target)
        self._warn_of_forgotten()
        return freed

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state
        allocates nothing.
        """
        self._check_entry()
        self._state.frozen = True
        self._state.wake_all()

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab that is still leased is freed when its lease
        is released; a slab with live views, by a later `close` or `stats`. May be called again. In
        a forked child it does nothing.
        """
        state = self._state
        if state.is_forked:
            return
        state.closed = True
        state.wake_all()
        # A finaliser in the middle of a call of this thread: the reaper does the rest.
        if state.is_entered():
            state.tidy_later()
        else:
            for event in state.pending():
                event.synchronize()
            self.trim()
        state.memory.end()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters, after querying events. Doesn't block while
        the pool is open.
        """
        state = self._state
        self._check_entry()
        with state.lock:
            snapshot = state.snapshot()
        self._warn_of_forgotten()
        if state.closed and snapshot.free_slabs:
            self.trim()
        return snapshot

    # -- waiting

    def _serve_or_wait(self, me: Waiter) -> Lease:
        """Serve a request: first come, first served, within what quotas allow.

        Each request checks for itself, and takes the requests before it into account. A release
        wakes the first one. With quotas, a later request may go first, so each request that finds
        nothing wakes the next. A request that makes the pool grow stays in line until its plan is
        made, so that no request overtakes it.
        """
        state, waiters = self._state, self._state.waiters
        try:
            while (lease := self._serve(me)) is None:
                self._pause(me)
        finally:
            # An interrupt may have come before it was added; `remove` is a single C call.
            if me in waiters:
                waiters.remove(me)
            state.wake_first()
            me.count_seconds()
        if state.closed:
            lease.release()
            self.trim()
            state.check_open()
        return lease

    def _serve(self, me: Waiter) -> Lease | None:
        """Serve a request, growing if the pool may; return None if it has to wait in line."""
        state, waiters = self._state, self._state.waiters
        while True:
            if me not in waiters:
                waiters.append(me)
            line = list(waiters)
            serve = partial(state.serve, me.account, me.nbytes, line[: line.index(me)])
            with state.lock:
                decision = serve()
            if not isinstance(decision, GrowthPlan):
                return decision
            lease = self._grow(Growth(state, serve, me), me)
            if lease is not None:
                return lease

    def _grow(self, growth: Growth, me: Waiter) -> Lease | None:
        """Grow, and return the lease; None if there is none, and the request has to be decided
        again.
        """
        began = time.monotonic()
        try:
            lease = growth.result()
        except RefusedForNow:
            return None  # it waited for others
        except REFUSALS:
            refusal = growth.refusal
            if refusal is None or self._state.why_never(me.account, me.nbytes, refusal) is not None:
                raise
            lease = None
            self._tell(growth.plan.capacity, refusal.reason)
        if growth.plan.count:
            me.postpone(time.monotonic() - began)  # growing isn't waiting
        return lease

    def _tell(self, nbytes: int, reason: str) -> None:
        """Warn, once, that the platform has refused memory."""
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"pool cannot grow by {format_bytes(nbytes)}, and goes on with the slabs that it "
                f"has: {self._state.figures()}; {reason}; this warning is shown once",
                StagingWarning,
                stacklevel=6,
            )

    def _pause(self, me: Waiter) -> None:
        """Wait until a request may have become possible.

        Raises:
            AcquireTimeoutError: the request has waited for long enough.
        """
        state, line, gives_up = self._state, list(self._state.waiters), this_thread.gives_up
        position = line.index(me)
        me.begin_to_wait()
        if state.accounts.have_quotas and line[position + 1 :]:
            with contextlib.suppress(RuntimeError):
                line[position + 1].wake()
        left = me.deadline - time.monotonic()
        if left <= 0 or (gives_up is not None and gives_up()):
            raise _refusals.timed_out(state.figures(), me.nbytes, me.timeout, len(line) - 1)
        patience = threading.TIMEOUT_MAX if gives_up is None else GIVE_UP_SECONDS
        me.sleep(timeout=min(left, patience if position else me.next_pause()))

    # -- checks

    def _check_entry(self) -> None:
        """Refuse a call in a forked child, or inside another call; warn of forgotten leases."""
        state = self._state
        if state.is_forked:
            raise _refusals.forked()
        if state.is_entered():
            raise _refusals.entered_again()
        if state.forgotten:
            self._warn_of_forgotten(stacklevel=4)

    def _warn_of_forgotten(self, stacklevel: int = 3) -> None:
        forgotten = self._state.forgotten
        while forgotten:
            nbytes, capacity = forgotten.pop()
            text = (
                f"lease was never released: {nbytes} bytes of {capacity} were returned by garbage "
                "collection; use `with pool.acquire(...)` or call release()"
            )
            if not _LOGGED:  # Python hides the warning by default
                _LOGGED.append(text)
                remarks.add(
                    f"{text}. If an interrupt ended a call, that was its lease, and nothing is "
                    "wrong. This is logged once: `python -W default` shows each "
                    "UnreleasedLeaseWarning"
                )
            warnings.warn(text, UnreleasedLeaseWarning, stacklevel=stacklevel)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a pool cannot be copied or pickled: {self!r}; make another SlabPool, or pass this "
            "one on"
        )

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "frozen" if self.frozen else "open"
        return f"<SlabPool {state} {type(self.memory).__name__} {self._state.figures()}>"
