"""A slab, what keeps it busy, and what a pool holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from .._compat.calls import ownership
from .._memory import Block, record_current_streams
from .._reaper import reaper
from ._adaptor import ResourceAdaptor
from ._refusals import Figures, Refusal
from ._waiting import Account, Accounts, Waiter


class Fence(Protocol):
    """Work that a slab has to wait for, such as a `torch.cuda.Event` or a stream."""

    def query(self) -> bool:
        """Return whether the work is done. Does not block."""
        ...

    def synchronize(self) -> None:
        """Block the host until the work is done."""
        ...


def check_fence(fence: object) -> None:
    """Check that an object is a fence. With any other object, each later look at the slab would
    fail.

    Raises:
        TypeError: it lacks a method of `Fence`.
    """
    if not (hasattr(fence, "query") and hasattr(fence, "synchronize")):
        raise TypeError(
            f"not an event or a stream: {fence!r}; pass an event recorded behind the work, or None"
        )


guard_numbers = itertools.count()
"""The keys of guards. None is used twice, so a thread that drops one drops no other."""


def add_guard(guards: dict[int, Fence], event: Fence) -> None:
    """Add an event to the guards of a slab or a region, and drop the events that are done. Any
    thread may call this.

    Raises:
        TypeError: as `check_fence`.
    """
    check_fence(event)
    # Not ``list(guards.items())``: its tuples may start the collector of Python 3.11.
    before = guards.copy()
    guards[next(guard_numbers)] = event  # first, because a query may fail
    for number, guard in before.items():
        if guard is event or guard.query():
            guards.pop(number, None)


class Slab:
    """One contiguous host allocation of the pool.

    `lease`, `views`, `event`, `guards` and `doomed` determine whether it is free. Nothing else
    does.

    Attributes:
        block: its memory.
        ptr: address of its first byte.
        capacity: its size in bytes.
        stack: slabs of its capacity that may be free, the one returned last at the end.
        put: adds the slab to `stack`, whatever its argument. A single C call, so finalisers may
            make it.
        account: the owner of the current or last lease; None before the first.
        requested: bytes that this lease asked for.
        used_at: the number of this lease, counted over the whole pool.
        lease: weak reference to the lease; None after the release.
        views: weak reference to an object that all views of the last lease keep alive; None if it
            had none.
        event: pending work of the last lease: from its release, or from `guard_until_release` until
            then.
        guards: other pending work, by unique numbers.
        doomed: whether a thread is about to free it.
        for_good: whether no release is expected of the current or last lease and its views.
    """

    def __init__(self, block: Block, stacks: dict[int, dict[Slab, Any]], used_at: int) -> None:
        self.block, self.ptr, self.capacity = block, block.ptr, block.nbytes
        self.stack = stacks.setdefault(block.nbytes, {})
        self.put: Callable[[object], object] = partial(self.stack.setdefault, self)
        self.account: Account | None = None
        self.requested, self.used_at = 0, used_at
        self.lease: weakref.ref[Any] | None = None
        self.views: weakref.ref[Any] | None = None
        self.event: Fence | None = None
        self.guards: dict[int, Fence] = {}
        self.doomed = self.for_good = False

    def is_free(self) -> bool:
        """Return whether nothing uses the slab, after querying its events. Call it under the pool's
        lock.
        """
        if self.lease is not None or self.doomed:
            return False
        views = self.views  # read only now: without a lease, no new views are made
        if views is not None and views() is not None:
            return False
        event = self.event
        if event is not None:
            if not event.query():
                return False
            self.event = None  # nothing can have replaced it: the slab has no lease
        if self.guards:
            if not all(guard.query() for guard in list(self.guards.values())):
                return False
            self.guards.clear()
        return True

    def is_in_flight_of(self, account: Account) -> bool:
        """Return whether the slab's only obstacle is the event behind which an owner has released
        it.
        """
        is_released = self.account is account and self.lease is None and self.event is not None
        return is_released and not self.guards and not self.has_views()

    def has_views(self) -> bool:
        return self.views is not None and self.views() is not None

    def is_held_for_good(self) -> bool:
        """Return whether waiting for the slab is useless."""
        return self.for_good and (self.lease is not None or self.has_views())

    def fences(self) -> list[Fence]:
        """Return all pending work that is known."""
        guards = list(self.guards.values())
        return guards if self.event is None else [*guards, self.event]


def take_first(stack: dict[Slab, Any], is_usable: Callable[[Slab], bool]) -> Slab | None:
    """Take the first usable slab out of a stack."""
    slab = next(filter(is_usable, list(stack)), None)
    if slab is not None:
        stack.pop(slab, None)
    return slab


class Holdings:
    """A pool's slabs and counters.

    Attributes:
        lock: held for a decision, and to change the held bytes. It is reentrant, because a
            finaliser may run in its thread.
        is_entered: returns whether this thread has the lock, or is in a call of `memory` for which
            others wait. Always true in a forked child.
        is_forked: whether this is a forked child's copy, which must not be used.
        memory: where slabs come from.
        record: records events behind the calling thread's work on the devices; None if memory isn't
            page-locked.
        user: the kind of object that made the pool for itself, such as ``Stager``, once that is
            closed; for errors.
        unrecorded: leases that stay held after their block because `record` failed; kept alive
            until released.
        forgotten: leases that were never released: bytes requested, and bytes of the slab.
        waiters: requests that wait, ordered by age, the oldest first.
        slabs: all slabs that are held; written by growths.
        growths: slow work under way, written by growths.
        stacks: slabs that may be free, by capacity.
        sizes: the capacities of slabs, sorted.
        reap: frees slabs that were returned to a closed pool; for the reaper.
    """

    reap: Callable[[], bool]

    def __init__(self, memory: ResourceAdaptor, max_bytes: int, reason: str) -> None:
        self.memory, self.max_bytes, self._reason = memory, max_bytes, reason
        # A copy from pageable memory has read the memory when the call returns.
        self.record = record_current_streams if memory.resource.is_pinned else None
        self.granularity = memory.resource.granularity
        self.closed = self.frozen = self.is_forked = False
        self.user: str | None = None
        self.lock = threading.RLock()
        self.is_entered = has_lock = ownership(self.lock)
        if (is_in_memory := memory.is_entered) is not None:
            self.is_entered = lambda: has_lock() or is_in_memory()
        self.accounts = Accounts(max_bytes, self.granularity)
        self.waiters: deque[Waiter] = deque()
        self.clock = itertools.count(1)
        self.slabs: dict[Slab, None] = {}
        self.growths: dict[Any, None] = {}
        self.stacks: dict[int, dict[Slab, Any]] = {}
        self.sizes: list[int] = []
        self.unrecorded: dict[Any, None] = {}
        self.forgotten: list[tuple[int, int]] = []
        self.refusal: Refusal | None = None
        self.hits = self.misses = self.trims = 0
        self.peak_held_bytes = self.peak_held_slabs = self.total_held_bytes = 0
        _all.add(self)
        # Not the state itself: in a garbage cycle, the collector calls back before finalisers use
        # it for the last time.
        self._life = np.empty(0)
        reaper.watch(self._life, partial(free_what_is_done, self.slabs, self.memory))

    def is_pinned(self, slab: Slab) -> bool:
        """Return whether a slab is page-locked for CUDA."""
        is_pinned = slab.block.is_pinned
        return self.memory.resource.is_pinned if is_pinned is None else is_pinned

    def tidy_later(self) -> None:
        """Let the reaper free slabs that were returned to a closed pool. Finalisers call this."""
        reaper.tasks.put(self)

    def wake_first(self) -> None:
        """Wake the first request in line. Finalisers call this."""
        try:  # noqa: SIM105 - contextlib.suppress runs Python code, which an interrupt may end
            self.waiters[0].wake()
        except (IndexError, RuntimeError):
            pass  # no thread waits, or it is awake

    def wake_all(self) -> None:
        """Wake all requests in line."""
        for waiter in list(self.waiters):
            with contextlib.suppress(RuntimeError):
                waiter.wake()

    @property
    def held_bytes(self) -> int:
        return sum(slab.capacity for slab in list(self.slabs))

    def promised(self) -> int:
        """Return the bytes of the cap that are taken: held, or promised to growths."""
        promised: int = sum(growth.promised() for growth in list(self.growths))
        return self.held_bytes + promised

    def parts(self) -> tuple[list[Slab], list[Slab], list[Slab]]:
        """Return the slabs that are leased, in flight, and free, as far as is known without
        querying events.
        """
        leased, in_flight, free = parts = list[Slab](), list[Slab](), list[Slab]()
        for slab in list(self.slabs):
            if slab.lease is not None and slab.lease() is not None:
                leased.append(slab)
            elif slab.doomed or not (slab.fences() or slab.has_views()):
                free.append(slab)
            else:
                in_flight.append(slab)
        return parts

    def held_for_good(self) -> list[Slab]:
        return [slab for slab in list(self.slabs) if slab.is_held_for_good()]

    def pending(self) -> list[Fence]:
        """Return the events that slabs without a lease or views wait for."""
        _, in_flight, _ = self.parts()
        return [fence for slab in in_flight if not slab.has_views() for fence in slab.fences()]

    @property
    def reason(self) -> str:
        """Where the cap comes from, and what limited the pool besides it at the last check."""
        return self._reason + self.memory.holders()

    def figures(self) -> Figures:
        leased, in_flight, free = self.parts()
        viewed = [slab for slab in in_flight if slab.has_views()]
        parts = [*leased, *in_flight, *free], leased, in_flight, viewed, self.held_for_good()
        held, lent, flying, seen, kept = (sum(slab.capacity for slab in slabs) for slabs in parts)
        most = self.max_bytes
        is_own = most < self.memory.allowed  # else the memory resource has the tighter limit
        cap = ResourceAdaptor(self.memory.resource).cap if is_own else self.memory.cap
        return Figures(held, lent, flying, seen, kept, most, self.reason, cap)


def free_what_is_done(slabs: dict[Slab, None], memory: ResourceAdaptor) -> bool:
    """Free the slabs of a dropped pool, except slabs whose events aren't done; return whether none
    is left.

    Raises:
        Exception: the error of the first slab that could not be freed; the others are freed
            nevertheless.
    """
    errors: list[Exception] = []
    for slab in list(slabs):
        try:
            if all(fence.query() for fence in slab.fences()):
                # Else events may end in a forked child: a slab is a cycle.
                slab.event = None
                slab.guards.clear()
                del slabs[slab]
                memory.deallocate(slab.block)
        except Exception as error:  # noqa: BLE001 - raised below, when the others are free
            if not errors:
                errors.append(error)
    if errors:
        raise errors.pop()  # a variable, and the traceback, would keep one another
    return not slabs


_all: weakref.WeakSet[Holdings] = weakref.WeakSet()
"""The pools of this process and its parents."""


def _mark_forked() -> None:
    for held in list(_all):
        held.is_forked, held.is_entered = True, lambda: True


os.register_at_fork(after_in_child=_mark_forked)
