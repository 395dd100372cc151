"""The pool: its public methods, all decisions about its slabs, and waiting."""

from __future__ import annotations

import _thread
import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, index
from typing import NoReturn

from .._memory import (
    REFUSALS,
    MemoryResource,
    capturing_device,
    default_memory,
    refuse_capture,
)
from .._reaper import UninterruptedCall, reaper, uninterrupted
from .._sizes import Size, format_bytes, parse_bytes, reuse_limit, size_class
from .._steps import step
from ..errors import PoolError, StagingWarning, UnreleasedLeaseWarning
from ._adaptor import RefusedForNow, ResourceAdaptor
from ._growth import Growth, carry_out
from ._host_budget import HostBudget, LimitedMemory, cap_of, given_bytes
from ._refusals import entered_again, forked
from ._slab import Fence, Lease, PoolState, Slab, total
from ._stats import PoolStats, snapshot
from ._waiting import NOBODY, Account, check_timeout, this_thread

POLL_SECONDS = (50e-6, 2e-3)
"""First and longest pause of the first request in line. A release wakes it at once. Finished events
and freed views wake no thread, so it also polls."""

_NONE: int = math.inf  # type: ignore[assignment]
"""In decisions, the size of a slab that there isn't. It is above any cap."""

BEHIND_SECONDS = 0.2
"""Interval at which the requests behind it check whether to give up, and whether they are the first
now: an interrupt may end a call before it wakes the next one."""


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
    pool._refuse_if_closed()


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


def refuse_if_useless(pool: SlabPool, owner: str, nbytes: int) -> None:
    """Refuse a request for which waiting is useless, as `SlabPool.acquire`. Nothing is leased.

    Raises:
        BudgetExceededError: it exceeds the cap, or what quotas and slabs held for good leave.
        PoolFrozenError, MemoryError: no slab is large enough, and the pool can't grow now.
    """
    state = pool._state
    with state.lock:
        pool._refuse_if_useless(state.accounts[owner], nbytes)


def largest_for(pool: SlabPool, owner: str) -> int:
    """Return the bytes of the largest slab that an owner can ever have, by quotas and beside what
    is held for good.

    Raises:
        PoolClosedError, ForkedPoolError: as `SlabPool.acquire`.
    """
    check_open(pool)
    state = pool._state
    with state.lock:
        return state.accounts.room(state.accounts[owner], state.max_bytes, state.held_for_good())


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
    state = pool._state
    with state.lock:
        account = state.accounts[owner]
        if state.waiters:
            return None  # the slab is for the first in line
        limit = reuse_limit(nbytes, state.granularity)
        fitting = [slab for slab in list(state.slabs) if nbytes <= slab.capacity <= limit]
        # The smallest slab, and among equals the one leased first.
        for slab in sorted(fitting, key=attrgetter("capacity", "used_at")):
            if slab.account is account and slab.lease is None and not slab.has_views():
                event = slab.event  # read only now: a release sets it
                if event is not None and not slab.guards:
                    state.hits += 1
                    return Lease(state, slab, nbytes, account), event
    return None


@dataclass(eq=False)
class Waiter:
    """A request, which may have to wait until it is woken.

    It waits for a lock that `wake` releases. A `threading.Event` isn't used, because an interrupt
    may leave it locked forever. Nor is a `SimpleQueue`: it may treat a short time-out as none, and
    wait on when the rest of the time is below zero.
    """

    account: Account = NOBODY
    """Its owner's."""
    nbytes: int = 0
    """Bytes needed; 0 for calls that lease nothing."""
    timeout: float | None = None
    """The most seconds to wait; None for no limit."""
    waits = 0
    """1 if it had to wait, else 0."""
    was_refused = False
    """Whether growing was refused for now. Then it stays in line when it tries again, or later
    requests would get what it waits for."""
    is_over = False
    """Whether its call has ended, perhaps by an interrupt."""

    def __post_init__(self) -> None:
        self.wakeup = _thread.allocate_lock()
        """Another thread releases it."""
        self.wakeup.acquire()
        self.arrived = time.monotonic()
        """The time at which it began, later by the time for growing."""
        self.deadline = math.inf if self.timeout is None else self.arrived + self.timeout
        """The time until which it waits."""

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake
            self.wakeup.release()


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
        ValueError: `max_bytes` is less than the memory's granularity (a page, where it is
            page-locked), or text for less than a page; or another pool of this host has a
            `HostBudget` of this name with another cap.
        HostBudgetError: the folder of host budgets cannot be used.

    Requests are rounded up to size classes, eight for each doubling, so by at most 12.5% (and to
    whole pages where memory is page-locked). A request is served in this order: by an idle slab
    that wastes at most 12.5%, or, from 1 MiB on, by one of at most twice its class; by growing; at
    the cap, by any larger idle slab; by freeing idle slabs, least recently used first; by waiting,
    first come, first served.

    All methods may be called from any thread. After ``fork`` the child's copy refuses to work. In a
    thread whose current stream captures a CUDA graph, a call that would allocate or query an event
    raises `PinstageError`.
    """

    def __init__(
        self,
        max_bytes: Size = "auto",
        *,
        budget: HostBudget | None = None,
        memory: MemoryResource | None = None,
    ) -> None:
        if memory is not None and (isinstance(memory, type) or not hasattr(memory, "allocate")):
            raise TypeError(
                f"memory must be a MemoryResource: {memory!r}; pass one such as PageableMemory()"
            )
        resource = default_memory() if memory is None else memory
        cap, reason = cap_of(max_bytes, budget, resource.granularity)
        adaptor = ResourceAdaptor(resource) if budget is None else LimitedMemory(resource, budget)
        self._state = PoolState(adaptor, cap, reason)

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
        if timeout is not None:
            check_timeout(timeout)
        state = self._state
        if state.is_entered() or state.forgotten:
            self._check_entry()
        with step("acquire"):
            with state.lock:
                account = state.accounts[owner]
                # The first case of `_decide`.
                if not (state.closed or state.waiters or state.accounts.have_quotas):
                    lease = state.lease(account, nbytes, reuse_limit(nbytes, state.granularity))
                    if lease is not None:
                        return lease
            return self._serve(Waiter(account, nbytes, timeout))

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
            ValueError: `min_bytes` is above `max_bytes`, `max_bytes` is less than the memory's
                granularity, or guarantees together are above the cap.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        least = parse_bytes(min_bytes)
        most = None if max_bytes is None else given_bytes(max_bytes, self._state.granularity)
        check_open(self)
        with self._state.lock:
            self._state.accounts.set_quota(owner, least, most)
        self._state.wake()

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
        nbytes, count = parse_bytes(nbytes), index(count)
        if nbytes <= 0 or count < 0:
            raise ValueError(
                f"reserve needs sizes: nbytes={nbytes}, count={count}; pass nbytes >= 1 and count "
                ">= 0"
            )
        self._check_entry()
        state = self._state
        with state.lock:
            growth = Growth(Waiter(), (), *self._missing(nbytes, count))
        if growth.count:
            refuse_capture()
        call = UninterruptedCall(partial(carry_out, state, growth))
        if background:
            call.begin()
        else:
            call.result()
        return call

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
        state = self._state
        with state.lock:
            surplus = total(slab for slab in list(state.slabs) if not slab.doomed) - target
            growth = Growth(Waiter(), _oldest(state.scan(), surplus))
        if growth.victims:
            uninterrupted(partial(carry_out, state, growth))
        self._warn_of_forgotten()
        return total(growth.victims)

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state
        allocates nothing.
        """
        self._check_entry()
        self._state.frozen = True
        self._state.wake()

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab that is still leased is freed when its lease
        is released; a slab with live views, by a later `close` or `stats`. May be called again. In
        a thread that captures a CUDA graph, it leaves the waiting and freeing to another thread. In
        a forked child it does nothing.
        """
        state = self._state
        if state.is_forked:
            return
        state.closed = True
        state.wake()
        # In a capture, or a finaliser in the middle of a call of this thread: the reaper does the
        # rest.
        try:
            if state.is_entered() or capturing_device() is not None:
                reaper.tasks.put(state)
            else:
                for event in state.pending():
                    event.synchronize()
                self.trim()
        finally:
            state.memory.end()
            for pool in list(state.pageable.values()):
                pool.close()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters, after querying events. Doesn't block while
        the pool is open.
        """
        state = self._state
        self._check_entry()
        with state.lock:
            stats = snapshot(state)
        self._warn_of_forgotten()
        if state.closed and stats.free_slabs:
            self.trim()
        return stats

    # -- decisions

    def _decide(self, me: Waiter) -> Lease | Growth | None:
        """Decide a request: return its lease, the slow work that it needs first, or None if it has
        to wait. Call it under the lock.

        `Accounts.room` limits what the owner may have now, by quotas and by the requests that have
        waited longer. Within that limit, the cases are, in this order:

        1. an idle slab that wastes at most 12.5%, or, from 1 MiB on, of at most twice the class;
        2. there is room under the cap: grow by a slab of the request's class;
        3. any larger idle slab;
        4. idle slabs of other classes would make room: evict them, least recently used first, and
           grow;
        5. waiting is useless: refuse (`_refuse_if_useless`);
        6. wait.

        A frozen pool doesn't grow, divides what it holds by quotas, and refuses a request at once
        if no slab fits it. After the platform has refused memory, a pool is restricted for a while:
        it doesn't ask for the refused total again (2), and frees nothing that it might not get back
        (4).

        Raises:
            PoolError, MemoryError: the request is refused.
        """
        state = self._state
        self._refuse_if_closed()
        idle = state.scan()
        room, capacity = self._room(me), _NONE
        if me.nbytes <= room and not state.frozen:
            capacity = min(size_class(me.nbytes, state.granularity), room)
        fitting = [slab.capacity for slab in idle if me.nbytes <= slab.capacity <= room]
        smallest = min(fitting, default=_NONE)
        if smallest <= reuse_limit(me.nbytes, state.granularity):
            return state.lease(me.account, me.nbytes, smallest)
        if capacity <= self._headroom():
            return Growth(me, (), capacity, 1)
        if smallest <= room:
            return state.lease(me.account, me.nbytes, smallest)
        missing = capacity - self._headroom(by_freeing=True)
        if missing <= total(idle):
            return Growth(me, _oldest(idle, missing), capacity, 1)
        self._refuse_if_useless(me.account, me.nbytes)
        return None

    def _refuse_if_useless(self, account: Account, nbytes: int) -> None:
        """Refuse a request for which waiting is useless.

        The cases, in this order:

        1. the request is larger than the part of the cap that quotas leave to its owner;
        2. no slab is large enough, and the pool is frozen;
        3. it is larger than the part of it that isn't held for good;
        4. no slab is large enough, and the platform refused to let the pool grow that far.

        Slabs held for good aren't counted as large enough.

        Raises:
            PoolError, MemoryError: the request is refused.
        """
        state = self._state
        room, busy = state.accounts.room, state.held_for_good()
        largest = room(account, state.max_bytes, Counter())
        left = room(account, state.whole(), busy)
        held = state.largest(left)
        if nbytes > largest:
            named = account if state.accounts.have_quotas else None
            raise state.figures().never_fits(nbytes, named, largest)
        if nbytes <= held:
            return
        if state.frozen:
            raise state.figures().frozen(nbytes, held)
        if nbytes > left:
            raise state.figures().never_free(nbytes)
        refusal = state.refusal
        capacity = min(size_class(nbytes, state.granularity), left)
        if (
            refusal is None
            or capacity + busy.total() <= refusal.held
            or state.promised() + capacity < refusal.total
        ):
            return
        raise state.figures().refused(nbytes, refusal)

    def _missing(self, nbytes: int, count: int) -> tuple[int, int]:
        """Return the size and number of the slabs that are missing for `count` leases at once.

        Raises:
            PoolClosedError, PoolFrozenError, BudgetExceededError: the slabs can't be allocated.
        """
        state = self._state
        self._refuse_if_closed()
        state.refusal = None  # a reservation always asks the platform, and reports its error
        unit = state.granularity
        largest = state.max_bytes // unit * unit
        if nbytes > largest:
            raise state.figures().never_fits(nbytes)
        capacity, limit = min(size_class(nbytes, unit), largest), reuse_limit(nbytes, unit)
        idle = sum(nbytes <= slab.capacity <= limit for slab in state.scan())
        missing = max(0, count - idle)
        if missing and state.frozen:
            raise state.figures().frozen(nbytes, state.largest(largest))
        if missing * capacity > state.max_bytes - state.promised():
            raise state.figures().reserve_does_not_fit(capacity, missing)
        return capacity, missing

    def _room(self, me: Waiter) -> int:
        """Return the size of the largest slab that a request may take now, after a `scan`."""
        state, line = self._state, self._state.line()
        ahead = line[: line.index(me)]
        if ahead or state.accounts.have_quotas:
            return state.accounts.room(me.account, state.whole(), state.busy(), ahead)
        return state.accounts.room(me.account, state.max_bytes, state.held_for_good())

    def _headroom(self, by_freeing: bool = False) -> int:
        """Return the bytes by which the pool may grow; negative if bytes must be freed first."""
        state = self._state
        most = min(state.max_bytes, state.memory.allowed)
        if (refusal := state.refusal) is not None:
            most = min(most, refusal.held if by_freeing else refusal.total - 1)
        return most - state.promised()

    # -- slow work, and waiting

    def _serve(self, me: Waiter) -> Lease:
        """Serve a request: first come, first served, within what quotas allow.

        Each request checks for itself, and takes the requests before it into account. A release
        wakes the first one. With quotas, a later request may go first, so each request that finds
        nothing wakes the next. A request leaves the line to grow, so that later ones needn't wait
        for that; but not if it was refused before.
        """
        state, lease = self._state, None
        try:
            while lease is None:
                with state.lock:
                    state.waiters.add(me)
                    decision = self._decide(me)
                if isinstance(decision, Growth):
                    lease = self._work(decision, me)
                elif decision is None:
                    self._pause(me)
                else:
                    lease = decision
        finally:
            me.is_over = True
            state.waiters.discard(me)
            state.wake(1)
            me.account.wait_seconds += me.waits * (time.monotonic() - me.arrived)
        return lease

    def _work(self, growth: Growth, me: Waiter) -> Lease | None:
        """Do slow work in a thread of the pool. Return the lease; None if there is none, and the
        request has to be decided again.
        """
        refuse_capture()
        state, began, lease = self._state, time.monotonic(), None
        try:
            lease = uninterrupted(partial(carry_out, state, growth))
        except RefusedForNow:  # it waited for others
            me.was_refused = True
            return None
        except REFUSALS as error:
            refusal = growth.refusal
            if refusal is None:
                raise
            try:
                with state.lock:
                    state.refusal = refusal  # a look at the slabs may have dropped it
                    self._refuse_if_useless(me.account, me.nbytes)
            except (PoolError, MemoryError):
                raise error from error.__cause__
            if state.is_first_refusal():
                warnings.warn(
                    f"pool cannot grow by {format_bytes(growth.capacity)}, and goes on with the "
                    f"slabs that it has: {state.figures()}; {refusal.reason}; this warning is "
                    "shown once",
                    StagingWarning,
                    stacklevel=4,
                )
        took = time.monotonic() - began  # growing isn't waiting
        me.arrived += took
        me.deadline += took
        return lease

    def _pause(self, me: Waiter) -> None:
        """Wait until a request may have become possible.

        Raises:
            AcquireTimeoutError: the request has waited for long enough.
        """
        state, line = self._state, self._state.line()
        position = line.index(me)
        me.account.waits += 1 - me.waits
        me.waits = 1
        if state.accounts.have_quotas:
            for following in line[position + 1 :][:1]:
                following.wake()
        now = time.monotonic()
        left = me.deadline - now
        if left <= 0 or this_thread.gives_up():
            raise state.figures().timed_out(me.nbytes, me.timeout, len(line) - 1)
        patience = BEHIND_SECONDS
        if position == 0:  # a little longer each time
            shortest, longest = POLL_SECONDS
            patience = min(max(shortest, now - me.arrived), longest)
        me.wakeup.acquire(timeout=min(left, patience))

    # -- checks

    def _refuse_if_closed(self) -> None:
        if self._state.closed:
            raise self._state.figures().closed(self._state.user)

    def _check_entry(self) -> None:
        """Refuse a call in a forked child, or inside another call; warn of forgotten leases."""
        state = self._state
        if state.is_forked:
            raise forked()
        if state.is_entered():
            raise entered_again()
        self._warn_of_forgotten(stacklevel=4)

    def _warn_of_forgotten(self, stacklevel: int = 3) -> None:
        forgotten = self._state.forgotten
        while forgotten:
            nbytes, capacity = forgotten.pop()
            warnings.warn(
                f"lease was never released: {nbytes} bytes of {capacity} were returned by garbage "
                "collection; use `with pool.acquire(...)` or call release(). If an interrupt ended "
                "a call, that was its lease, and nothing is wrong",
                UnreleasedLeaseWarning,
                stacklevel=stacklevel,
            )

    def __reduce__(self) -> NoReturn:
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


def _oldest(idle: Sequence[Slab], nbytes: int) -> list[Slab]:
    """Return the first slabs that have that many bytes together, or all."""
    chosen = list[Slab]()
    for slab in idle:
        if nbytes > 0:
            chosen.append(slab)
        nbytes -= slab.capacity
    return chosen
