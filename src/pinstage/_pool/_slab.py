"""A slab, the lease by which it is used once, and what a pool holds.

A slab must not be handed out again while it can still be read or written through a view. All views
of a lease (tensor, array, memoryview) share one *exporter*: a ctypes array over the slab, which
every view references. When it is gone, so is the last view.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from .._compat.calls import ownership
from .._compat.views import checked_sizes, tensor_over
from .._memory import Block, capturing_device, record_current_streams, refuse_capture
from .._reaper import reaper
from ..errors import LeaseError
from ._adaptor import ResourceAdaptor
from ._refusals import Figures, Refusal, forked
from ._waiting import NOBODY, Account, Accounts

_is_done = methodcaller("query")
_BYTE, _tensor_of = torch.uint8, torch.frombuffer  # faster to look up than torch's attributes


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
    """Add an event to the guards of a slab or a region, and drop the events that are done, unless
    this thread captures a graph. Any thread may call this.

    Raises:
        TypeError: as `check_fence`.
    """
    check_fence(event)
    # Not ``list(guards.items())``: its tuples may start the collector of Python 3.11.
    before = guards.copy() if capturing_device() is None else {}
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
        account: the owner of the current or last lease; `NOBODY` before the first.
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

    account = NOBODY
    requested = 0
    lease: weakref.ref[Any] | None = None
    views: weakref.ref[Any] | None = None
    event: Fence | None = None
    doomed = for_good = False

    def __init__(self, block: Block, stacks: dict[int, dict[Slab, Any]], used_at: int) -> None:
        self.block, self.ptr, self.capacity = block, block.ptr, block.nbytes
        self.stack = stacks.setdefault(block.nbytes, {})
        self.put = partial(self.stack.setdefault, self)
        self.used_at = used_at
        self.guards = dict[int, Fence]()

    def is_free(self) -> bool:
        """Return whether nothing uses the slab, after querying its events. Call it under the pool's
        lock.

        Raises:
            PinstageError: it has events, and the current stream captures a graph.
        """
        # Without the methods below: an acquired slab should cost few calls.
        if self.lease is not None or self.doomed:
            return False
        views = self.views  # read only now: without a lease, no new views are made
        if views is not None and views() is not None:
            return False
        event, fences = self.event, list(self.guards.values())
        if event is not None:
            fences.append(event)
        # The second question saves a call without CUDA.
        if fences and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            refuse_capture()
        if not all(map(_is_done, fences)):
            return False
        self.event = None  # nothing can have replaced it: the slab has no lease
        self.guards.clear()
        return True

    def is_forgotten(self) -> bool:
        """Return whether its lease is gone without a release."""
        return self.lease is not None and self.lease() is None

    def has_views(self) -> bool:
        return self.views is not None and self.views() is not None

    def is_held_for_good(self) -> bool:
        """Return whether waiting for the slab is useless."""
        return self.for_good and (self.lease is not None or self.has_views())

    def part(self) -> str:
        """Return what keeps it from others, as far as is known without querying events."""
        if self.lease is not None and not self.is_forgotten():
            return "leased"
        return "in_flight" if self.fences() or self.has_views() else "free"

    def fences(self) -> list[Fence]:
        """Return all pending work that is known."""
        guards = list(self.guards.values())
        return guards if self.event is None else [*guards, self.event]


@lru_cache(maxsize=256)
def _exporter_type(capacity: int) -> type[Any]:
    return type("SlabBytes", (ctypes.c_ubyte * capacity,), {"__slots__": ("life", "state")})


class Lease:
    """The right to use one slab once. Made by `SlabPool.acquire`; a context manager that releases
    at its end.

    If the memory is page-locked, leaving the ``with`` block without a `release` records an event on
    the calling thread's current stream of each device that this process uses, and the slab is free
    when these events are done. So a ``copy_(..., non_blocking=True)`` from a view needs nothing
    else. Pass the event of work on any other stream to `guard`. While one of these streams captures
    a graph, leaving the block raises `LeaseError`, and the lease stays held: call `release` behind
    the last replay.

    Views (`tensor`, `numpy`, ``memoryview(lease)``) show the slab itself, without a copy. Its
    content is whatever the last user left. A view that outlives the release keeps the slab out of
    the pool until the view is freed.

    Another thread may use and release a lease, but two threads should not use one at the same time.
    In a forked child, making a view raises `ForkedPoolError`.
    """

    __slots__ = ("__weakref__", "_capacity", "_exporter", "_nbytes", "_ref", "_slab", "_state")

    def __init__(self, state: PoolState, slab: Slab, nbytes: int, account: Account) -> None:
        # Called under the pool's lock. The last line makes the slab leased.
        self._state = state
        self._slab: Slab | None = slab
        self._nbytes = nbytes
        self._capacity = slab.capacity
        self._exporter: Any = None
        slab.views = None
        slab.for_good = False
        slab.account = account
        slab.requested = nbytes
        slab.used_at = next(state.clock)
        slab.stack.pop(slab, None)
        # `slab.lease` is this reference as long as the slab is this lease's. In a garbage cycle,
        # the collector clears the slab's reference before finalisers use the lease for the last
        # time; by then the slab may be another lease's.
        self._ref = slab.lease = weakref.ref(self)

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """Bytes of the slab: at least `nbytes`."""
        return self._capacity

    @property
    def released(self) -> bool:
        """Whether the lease has been given back."""
        return self._slab is None

    def data_ptr(self) -> int:
        """Return the slab's address. It keeps nothing alive, and is valid only until the
        release.
        """
        return self._held("data_ptr()").ptr

    def tensor(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | np.typing.DTypeLike = torch.uint8,
        *,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return leased bytes as a tensor, without a copy.

        Args:
            shape: the tensor's. None is one dimension with as many elements as fit.
            dtype: torch's, or numpy's, by type or name (``np.float32``, ``"float32"``).
            offset: byte at which the tensor starts, a multiple of the size of an element.

        Returns:
            Contiguous tensor on the CPU. It is page-locked if the pool's memory is.

        Raises:
            LeaseError: the lease was released.
            TypeError: torch has no such dtype, it is quantised, or `dtype` is None.
            ValueError: the tensor needs more than the leased bytes, or a size or `offset` is wrong.
        """
        if shape is None and dtype is _BYTE and not offset:
            return _tensor_of(self._export("tensor()"), dtype=_BYTE, count=self._nbytes)
        if dtype is None:  # numpy would take it for float64
            raise TypeError("no dtype: None; pass torch's or numpy's, such as torch.float32")
        if not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        sizes = checked_sizes(shape, dtype, offset, self._nbytes)
        return tensor_over(self._export("tensor()"), dtype, sizes, offset=offset)

    def numpy(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: np.typing.DTypeLike | torch.dtype = np.uint8,
        *,
        offset: int = 0,
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Return leased bytes as an array, without a copy: ``tensor(...).numpy()``.

        Args:
            shape: as for `tensor`.
            dtype: as for `tensor`, if numpy has it.
            offset: as for `tensor`.

        Raises:
            LeaseError, TypeError, ValueError: as `tensor`.
        """
        self._held("numpy()")
        return self.tensor(shape, dtype, offset=offset).numpy()

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return the leased bytes as a writable memoryview, for ``memoryview(lease)`` (Python 3.12
        and later).
        """
        return memoryview(self._export("memoryview()")).cast("B")[: self._nbytes]

    def guard(self, event: Fence | None) -> None:
        """Add an event that the slab has to wait for, however the lease ends.

        Does not block. The slab is handed out again when all guards and the `after` of `release`
        are done. A guard that is done is dropped when another one is added.

        Args:
            event: recorded behind work that reads or writes the slab. A stream works, too: it is
                done when all its work is. None adds nothing.

        Raises:
            LeaseError: the lease was released.
            TypeError: `event` has no ``query()`` or no ``synchronize()``.
        """
        slab = self._held("guard()")
        if event is not None:
            add_guard(slab.guards, event)

    def release(self, *, after: Fence | None = None) -> None:
        """Give the slab back.

        Does not block. The slab is handed out again when `after` and all guards are done and the
        last view of it is gone.

        Args:
            after: the work that still reads or writes the slab, for example the event behind an
                asynchronous copy. The pool keeps it until it is done.

        Raises:
            LeaseError: the lease was released before.
            TypeError: `after` has no ``query()`` or no ``synchronize()``; the lease is still held.
            ForkedPoolError: called in a forked child.
        """
        state = self._state
        if state.is_forked:
            raise forked()
        if after is not None and not hasattr(after, "query"):
            check_fence(after)
        # No call is made until the slab has no lease, so neither another thread nor an interrupt
        # comes between. Of two releases at once, one finds no slab, and the event is set before the
        # slab can be found free.
        slab, self._slab = self._slab, None
        if slab is None:
            self._refuse("release()")
        if slab.lease is self._ref:
            slab.event = after
            slab.lease = None
        self._exporter = None
        slab.put(None)
        state.unrecorded.discard(self)
        if state.waiters:
            state.wake(1)
        if state.closed:
            reaper.tasks.put(state)

    def _held(self, what: str) -> Slab:
        slab = self._slab
        if slab is None or slab.lease is not self._ref:
            self._refuse(what)
        return slab

    def _refuse(self, what: str) -> NoReturn:
        raise LeaseError(
            f"lease is already released: {what} on a lease of {self._nbytes} bytes; acquire a new "
            "one, and release each lease once"
        )

    def _export(self, what: str) -> Any:
        state = self._state
        # Page-locked pages may be missing in a child: reading them would end it.
        if state.is_forked:
            raise forked()
        slab = self._held(what)
        if self._exporter is None:
            exporter = _exporter_type(slab.capacity).from_address(slab.ptr)
            exporter.state = state
            # Not the exporter: if a memoryview is part of a garbage cycle, the collector calls back
            # before finalisers use the exporter for the last time. The collector doesn't track
            # arrays.
            exporter.life = np.empty(0)
            views = weakref.ref(exporter.life, slab.put)
            # Again: another thread may have made it; no call comes between.
            if self._exporter is None:
                self._exporter, slab.views = exporter, views
        return self._exporter

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        *raised: Any,
    ) -> None:
        slab = self._slab
        if slab is None:
            return
        state = self._state
        try:
            if state.record is not None:
                events = state.record()
                if slab.lease is self._ref:  # as in `release`
                    slab.guards.update(zip(guard_numbers, events, strict=False))
        except BaseException as failure:
            if not isinstance(failure, Exception) and slab.lease is self._ref:
                slab.for_good = True  # after an interrupt, no release is expected
            state.unrecorded.add(self)
            if raised[1] is None or not isinstance(failure, Exception):
                raise
            raised[1].add_note(
                f"a lease of {self._nbytes} bytes stays held: {failure!r}; call its "
                "release(after=event)"
            )
        else:
            self.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a lease cannot be copied or pickled: {self!r} is the right to use one slab once; "
            "acquire another, or copy its bytes with lease.tensor().clone()"
        )

    def __repr__(self) -> str:
        state = "released" if self._slab is None else "held"
        return f"<Lease nbytes={self._nbytes} capacity={self._capacity} {state}>"


def guard_until_release(lease: Lease, event: Fence | None) -> int:
    """Set the event that the slab waits for if an interrupt prevents the release; return the slab's
    address.

    `Lease.release` replaces the event.

    Raises:
        LeaseError: the lease was released.
    """
    slab = lease._held("guard()")
    slab.event = event
    return slab.ptr


def hold_for_good(lease: Lease) -> None:
    """Expect no release of a lease and its views: let requests for its bytes fail at once.

    Raises:
        LeaseError: the lease was released.
    """
    lease._held("hold_for_good()").for_good = True


def is_page_locked(lease: Lease) -> bool:
    """Return whether a slab is page-locked for CUDA.

    Raises:
        LeaseError: the lease was released.
    """
    return lease._state.is_pinned(lease._held("is_page_locked()"))


def descriptor_of(lease: Lease) -> int | None:
    """Return the file descriptor of a slab's bytes where the pool's memory is shared, else None.
    Never close it.

    Raises:
        LeaseError: the lease was released.
    """
    return lease._held("descriptor_of()").block.fd


class PoolState:
    """A pool's slabs and counters, shared by the pool, its leases and its growths.

    Attributes:
        lock: held for a decision, and to change the held bytes. It is reentrant, because a
            finaliser may run in its thread.
        is_entered: returns whether this thread has the lock, or is in a call of `memory` for which
            others wait. Always true in a forked child.
        has_told: whether a refusal of memory was reported.
        is_forked: whether this is a forked child's copy, which must not be used.
        memory: where slabs come from.
        record: records events behind the calling thread's work on the devices; None if memory isn't
            page-locked.
        user: the kind of object that made the pool for itself, such as ``Stager``, once that is
            closed; for errors.
        unrecorded: leases that stay held after their block because `record` failed; kept alive
            until released.
        forgotten: leases that were never released: bytes requested, and bytes of the slab.
        waiters: requests that wait.
        slabs: all slabs that are held.
        growths: slow work under way.
        stacks: slabs that may be free, by capacity. A cache, which `scan` rebuilds.
        refusal: the last one, while the pool doesn't try to grow that far again.
        pageable: pools of pageable slabs, private and shared ones, which users make when
            page-locking is refused; by whether they are shared. They are closed with this one.
    """

    closed = frozen = is_forked = has_told = False
    user: str | None = None
    refusal: Refusal | None = None
    hits = misses = peak_held_bytes = peak_held_slabs = total_held_bytes = total_held_slabs = 0

    def __init__(self, memory: ResourceAdaptor, max_bytes: int, reason: str) -> None:
        self.memory, self.max_bytes, self._reason = memory, max_bytes, reason
        # A copy from pageable memory has read the memory when the call returns.
        self.record = record_current_streams if memory.resource.is_pinned else None
        self.granularity = memory.resource.granularity
        self.pageable = dict[bool, Any]()
        self.lock = threading.RLock()
        self.is_entered = has_lock = ownership(self.lock)
        if (is_in_memory := memory.is_entered) is not None:
            self.is_entered = lambda: has_lock() or is_in_memory()
        self.accounts = Accounts(max_bytes, self.granularity)
        self.waiters = set[Any]()
        self.clock = itertools.count(1)
        self.slabs = dict[Slab, None]()
        self.growths = set[Any]()
        self.stacks = dict[int, dict[Slab, Any]]()
        self.unrecorded = set[Any]()
        self.forgotten = list[tuple[int, int]]()
        _all.add(self)
        # Not the state itself: in a garbage cycle, the collector calls back before finalisers use
        # it for the last time.
        self._life = np.empty(0)
        reaper.watch(self._life, partial(free, self.slabs, self.slabs, self.memory))

    # -- slabs; call these under the lock

    def lease(self, account: Account, nbytes: int, bound: int) -> Lease | None:
        """Lease the smallest free slab; return None if there is none.

        Of several of a size, the one returned last is tried first, because it is in the caches,
        then the others, the one returned first at the beginning.

        Args:
            account: the owner.
            nbytes: the request's bytes.
            bound: bytes of the largest slab that may serve the request.
        """
        for size in sorted(self.stacks):
            if not nbytes <= size <= bound:
                continue
            # Only single C calls touch the stack: at any moment, other threads may add to it, by a
            # release, or take from it, to free a slab.
            stack = self.stacks[size]
            try:
                last, _ = stack.popitem()
            except KeyError:
                continue
            slab: Slab | None = last
            if not last.is_free():
                if last.fences():
                    last.put(None)  # else its release, or the end of its last view, does it
                slab = next(filter(Slab.is_free, list(stack)), None)
            if slab is not None:
                self.hits += 1
                return Lease(self, slab, nbytes, account)
        return None

    def add(self, block: Block) -> Slab:
        """Make a slab of a new block."""
        slab = Slab(block, self.stacks, next(self.clock))
        self.slabs[slab] = None
        self.total_held_bytes += slab.capacity
        self.total_held_slabs += 1
        self.peak_held_bytes = max(self.peak_held_bytes, total(self.slabs))
        self.peak_held_slabs = max(self.peak_held_slabs, len(self.slabs))
        return slab

    def scan(self) -> list[Slab]:
        """Check all slabs. Return the free ones, least recently used first, and put them in their
        stacks. Forget a refusal that is old enough to try again.
        """
        if self.refusal is not None and time.monotonic() >= self.refusal.until:
            self.refusal = None
        slabs = list(self.slabs)
        idle = list(filter(Slab.is_free, slabs))
        # Afterwards: querying events may run the garbage collector, which frees leases.
        for slab in slabs:
            if slab.is_forgotten():
                slab.lease = None
                self.forgotten.append((slab.requested, slab.capacity))
                if slab.is_free():
                    idle.append(slab)
        idle.sort(key=attrgetter("used_at"))
        for slab in idle:
            slab.put(None)
        return idle

    # -- bytes held, as far as is known without querying events

    def promised(self) -> int:
        """Return the bytes of the cap that are taken: held, or set aside for growths."""
        held = total(slab for slab in list(self.slabs) if not slab.doomed)
        return held + sum([growth.promised for growth in list(self.growths)])  # type: ignore[no-any-return]

    def whole(self) -> int:
        """Return the bytes that quotas divide: those of the cap, or those held by a frozen pool."""
        return total(self.slabs) if self.frozen else self.max_bytes

    def parts(self) -> dict[str, list[Slab]]:
        """Return the slabs that are held, by what keeps them from others. Those viewed are in
        flight.
        """
        held = list(self.slabs)
        parts: dict[str, list[Slab]] = {"held": held, "leased": [], "in_flight": [], "free": []}
        for slab in held:
            parts[slab.part()].append(slab)
        parts["viewed"] = list(filter(Slab.has_views, parts["in_flight"]))
        parts["held_for_good"] = list(filter(Slab.is_held_for_good, held))
        return parts

    def busy(self) -> Counter[Account]:
        """Return the bytes that owners have: leased, in flight, or being allocated for them."""
        parts = self.parts()
        busy = by_owner([*parts["leased"], *parts["in_flight"]])
        for growth in self.growths:
            busy[growth.waiter.account] += growth.capacity
        return busy

    def held_for_good(self) -> Counter[Account]:
        """Return the bytes that owners hold for good."""
        return by_owner(filter(Slab.is_held_for_good, list(self.slabs)))

    def largest(self, bound: int) -> int:
        """Return the size of the largest slab within a bound that isn't held for good."""
        usable = itertools.filterfalse(Slab.is_held_for_good, list(self.slabs))
        return max([slab.capacity for slab in usable if slab.capacity <= bound], default=0)

    def pending(self) -> list[Fence]:
        """Return the events that slabs without a lease or views wait for."""
        in_flight = self.parts()["in_flight"]
        return [fence for slab in in_flight if not slab.has_views() for fence in slab.fences()]

    def is_pinned(self, slab: Slab) -> bool:
        """Return whether a slab is page-locked for CUDA."""
        is_pinned = slab.block.is_pinned
        return self.memory.resource.is_pinned if is_pinned is None else is_pinned

    def figures(self) -> Figures:
        is_own = self.max_bytes < self.memory.allowed  # else the memory has the tighter limit
        cap = ResourceAdaptor(self.memory.resource).cap if is_own else self.memory.cap
        held = {part: total(slabs) for part, slabs in self.parts().items()}
        return Figures(held, self.max_bytes, self._reason + self.memory.holders(), cap)

    def is_first_refusal(self) -> bool:
        """Return whether the caller has to warn of a refusal of memory: a pool and its users do
        that once.
        """
        has_told, self.has_told = self.has_told, True
        return not has_told

    # -- waking and freeing

    def line(self) -> list[Any]:
        """Return the requests that wait, the oldest first."""
        return sorted(self.waiters, key=attrgetter("arrived"))

    def wake(self, most: int | None = None) -> None:
        """Wake the first requests in line; None for all. Finalisers call this."""
        for waiter in self.line()[:most]:
            waiter.wake()

    def reap(self) -> bool:
        """Free the slabs returned to a closed pool; for the reaper. Return whether no event is
        pending.
        """
        with self.lock:
            idle = self.scan()
            for slab in idle:
                slab.doomed = True
        free(self.slabs, idle, self.memory)
        return not self.pending()


def total(slabs: Iterable[Slab]) -> int:
    """Return the bytes of slabs."""
    return sum([slab.capacity for slab in list(slabs)])


def by_owner(slabs: Iterable[Slab]) -> Counter[Account]:
    """Return the bytes of slabs by their owners."""
    held = Counter[Account]()
    for slab in slabs:
        held[slab.account] += slab.capacity
    return held


def free(slabs: dict[Slab, None], victims: Iterable[Slab], memory: ResourceAdaptor) -> bool:
    """Free some of the slabs that a pool holds, except slabs whose events aren't done; return
    whether the pool holds none any more.

    Call it in a thread that no interrupt reaches, for the slabs of a dropped pool, or those that
    are doomed.

    Raises:
        BaseException: the error of the first slab that could not be freed, and is never used again;
            the others are freed nevertheless.
    """
    errors = list[BaseException]()
    for slab in list(victims):
        try:
            if all(map(_is_done, slab.fences())):
                # Else events may end in a forked child: a slab is a cycle.
                slab.event = None
                slab.guards.clear()
                try:
                    memory.deallocate(slab.block)
                finally:
                    slab.stack.pop(slab, None)
                    del slabs[slab]
        except BaseException as error:  # noqa: BLE001 - raised below, when the others are free
            if not errors:
                errors.append(error)
    if errors:
        raise errors.pop()  # a variable, and the traceback, would keep one another
    return not slabs


_all = weakref.WeakSet[PoolState]()
"""The pools of this process and its parents."""


def _mark_forked() -> None:
    for state in list(_all):
        state.is_forked, state.is_entered = True, lambda: True


os.register_at_fork(after_in_child=_mark_forked)
