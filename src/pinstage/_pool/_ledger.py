"""What the pool holds and has promised, and what is decided about it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .._memory import MemoryResource
from .._reaper import reaper
from .._torch import ownership
from ..errors import BudgetExceededError, PoolFrozenError
from . import _refusals
from ._accounts import Account, Accounts, Waiter
from ._classes import reuse_limit, size_class
from ._host_budget import LimitedMemory, held_bytes
from ._lease import Lease
from ._refusals import Figures, Refusal
from ._resize import Resize, free_what_is_done
from ._slab import Fence, IdleSlabs, Inbox, Meter, Slab
from ._stats import OwnerStats, PoolStats

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 60.0
"""A pool that was refused memory tries to grow again after so long: a refusal may take as long as an allocation."""

_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
"""Of this process and its parents."""


def _mark_forked() -> None:
    for ledger in list(_ledgers):
        ledger.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)


class Ledger:
    """The budget and the slabs: idle, leased, in flight.

    All methods but those of the last section are called under `lock`, between `begin` and `end`, and none does slow
    work: they decide, count, and start a `Resize` for what is slow.

    An interrupt may end any of them in the middle. Then `end` is not reached, and the next `begin` finds out anew what
    is where: each slab says by itself what keeps it busy, and each `Resize` what is being allocated and freed. All else
    here can be computed from these.
    """

    def __init__(
        self,
        memory: MemoryResource,
        max_bytes: int,
        reason: str,
        host: LimitedMemory | None,
        record: Callable[[], tuple[Fence, ...]] | None,
    ) -> None:
        self.max_bytes = max_bytes
        self._reason = reason
        self.closed = False  # may be set without the lock
        self.frozen = False
        self.is_forked = False  # a forked child's copy, which must not be used
        self.lock = threading.RLock()  # for all but the inbox; a thread that has it may come again, by a finaliser
        has_lock = ownership(self.lock)
        # Says whether this thread has it, or has the host's files, for which a pool would have to wait if it grew.
        self.is_entered = has_lock if host is None else lambda: has_lock() or host.is_entered()
        self.inbox = Inbox()
        self.record = record
        self.unrecorded: dict[Lease, None] = {}
        self.forgotten: list[tuple[int, int]] = []  # leases nobody released: bytes asked for, and of the slab
        self._memory = memory
        self._host = host
        self._granularity = memory.granularity
        self.accounts = Accounts(max_bytes, self._granularity)

        self._slabs: dict[Slab, None] = {}  # all of them; resizes write it, too
        self._resizes: dict[Resize, Any] = {}  # those that are under way, or not settled
        self._is_torn = False
        self._hits = self._misses = self._trims = self._recovered = 0
        self._total_requested_bytes = 0
        # What follows can be computed from the slabs and the resizes.
        self._held, self._leased, self._in_flight, self._free = Meter(), Meter(), Meter(), Meter()
        self._idle = IdleSlabs()
        self._pending: dict[Slab, None] = {}  # in flight: without a view, event not seen done
        self._requested_bytes = 0
        self._promised_bytes = 0  # to resizes
        self._slabs_by_capacity: dict[int, int] = {}
        self._refusal: Refusal | None = None
        _ledgers.add(self)
        # Not the ledger itself: the garbage collector tells of a death before finalisers have had their last use of it.
        self._life = np.empty(0)
        reaper.watch(self._life, partial(free_what_is_done, self._slabs, memory))

    # -- the bounds of each call

    def begin(self) -> None:
        """Take in what has come back since the last call, and repair what an interrupt left half done."""
        if self._is_torn:
            self._repair()
        self._is_torn = True
        if self.inbox.notices:
            self._settle_notices()

    def end(self) -> None:
        self._is_torn = False

    def decide(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call one of the methods that are called under the lock, as it has to be called."""
        with self.lock:
            self.begin()
            found = method(*args, **kwargs)
            self.end()
        return found

    # -- decisions

    def serve(
        self, account: Account, nbytes: int, ahead: Sequence[Waiter] = ()
    ) -> Lease | Resize | PoolFrozenError | MemoryError | None:
        """Serve a request from what is there, or begin to grow, or return None: wait.

        What the owner may have now, with those in mind who have waited longer, is `Accounts.room`, which names the
        cases of shares and of turns. Within that, the cases are, in this order:

        1. an idle slab of which at most 12.5% would be waste, or, from 1 MiB on, of at most twice the class;
        2. the same, once those events have been asked that slabs in flight wait for;
        3. there is room under the cap: allocate a slab of the request's class;
        4. any larger idle slab;
        5. idle slabs of other classes would make room: free them, least recently used first, and allocate;
        6. wait.

        A frozen pool leaves out 3 and 5, shares what it holds, and refuses at once where it has no slab that would do.
        So does a pool that was refused memory by the platform, for `RETRY_SECONDS`: meanwhile it asks for no such total
        again (3), and frees nothing that it might not get back (5).
        """
        room = account.largest
        if ahead or self.accounts.are_shared:
            if self._pending:
                self.ask_events()
            room = self.accounts.room(account, ahead, self._whole())
        capacity = size_class(nbytes, self._granularity)
        if capacity > room:
            capacity = room
        limit = reuse_limit(nbytes, capacity)
        if limit > room:
            limit = room
        slab = self._idle.take(nbytes, limit)
        if slab is None and self._pending and self.ask_events():
            slab = self._idle.take(nbytes, limit)
        if slab is None:
            may_grow = nbytes <= room and not self.frozen
            if may_grow and capacity <= self._headroom():
                return self._start((), capacity, 1, nbytes, account)
            slab = self._idle.take(nbytes, room)
        if slab is not None:
            self._hits += 1
            return self._lend(slab, account, nbytes)
        if may_grow:
            shortfall = capacity - self._headroom(by_freeing=True)
            if shortfall <= self._idle.bytes:
                victims = self._idle.take_oldest(shortfall)
                return self._start(victims, capacity, 1, nbytes, account)
        return self.hopeless(account, nbytes)

    def serve_in_flight(self, owner: str, nbytes: int) -> tuple[Lease, Fence] | None:
        """Lend a slab that its owner has given back, while its event is not done yet, along with that event.

        Not while anybody waits: then it is for whose turn it is.
        """
        account = self.accounts[owner]
        if self.inbox.line:
            return None
        limit = reuse_limit(nbytes, size_class(nbytes, self._granularity))
        for slab in self._pending:  # the one given back first comes first
            event = slab.event
            if slab.account is account and event is not None and not slab.guards and nbytes <= slab.capacity <= limit:
                del self._pending[slab]
                account.busy_bytes -= slab.capacity
                self._hits += 1
                lease = self._lend(slab, account, nbytes)
                slab.event = event  # should nobody release the lease
                return lease, event
        return None

    def hopeless(self, account: Account, nbytes: int) -> PoolFrozenError | MemoryError | None:
        """Return the error of a request that a pool which cannot grow will never serve; None if it may be served."""
        refusal = self._refusal
        if not self.frozen and refusal is None:
            return None
        largest = self.accounts.largest(account, self._whole())
        sizes = [size for size in self._slabs_by_capacity if size <= largest]
        if any(size >= nbytes for size in sizes):
            return None
        if self.frozen or refusal is None:
            return _refusals.frozen(self.figures(), nbytes, max(sizes, default=0))
        capacity = min(size_class(nbytes, self._granularity), largest)
        if capacity <= refusal.held or self._held.bytes + self._promised_bytes + capacity < refusal.total:
            return None
        return _refusals.refused(self.figures(), nbytes, refusal)

    def _whole(self) -> int:
        return self._held.bytes if self.frozen else self.max_bytes

    def reserve(self, nbytes: int, count: int) -> Resize | PoolFrozenError | BudgetExceededError | None:
        """Begin to allocate the slabs that are missing for `count` leases at once; None if none is."""
        self.ask_events()
        self._refusal = None  # who asks for it beforehand wants to know
        largest = self.max_bytes // self._granularity * self._granularity
        capacity = min(size_class(nbytes, self._granularity), largest)
        missing = max(0, count - self._idle.count(nbytes, reuse_limit(nbytes, capacity)))
        if not missing:
            return None
        if self.frozen:
            return _refusals.frozen(self.figures(), nbytes, max(self._slabs_by_capacity, default=0))
        if missing * capacity > self._headroom():
            return _refusals.reserve_does_not_fit(self.figures(), capacity, missing)
        return self._start((), capacity, missing)

    def trim(self, to_bytes: int) -> Resize | None:
        """Begin to free idle slabs, so that at most `to_bytes` are held; None if there is nothing to free."""
        self.ask_events()
        being_freed = self._free.bytes - self._idle.bytes
        victims = self._idle.take_oldest(self._held.bytes - being_freed - to_bytes)
        return self._start(victims) if victims else None

    def ask_events(self) -> bool:
        """Make those slabs idle whose event is done; say whether there were any."""
        # All are asked before any is moved: a query that raises, as CUDA's does after a failed kernel, changes nothing.
        done = [
            slab
            for slab in self._pending
            if (slab.event is None or slab.event.query())
            and (not slab.guards or all(guard.query() for guard in slab.guards))
        ]
        for slab in done:
            del self._pending[slab]
            slab.event, slab.guards = None, ()
            self._make_idle(slab)
        if self.inbox.notices:  # an event may have collected garbage
            self._settle_notices()
        return bool(done)

    def _headroom(self, *, by_freeing: bool = False) -> int:
        """Return the bytes by which the pool may grow; negative if so many must be freed first."""
        most, refusal = self.max_bytes if self._host is None else self._host.allowed, self._refusal
        if refusal is not None:
            if time.monotonic() >= refusal.until:
                self._refusal = None
            else:
                most = min(most, refusal.held if by_freeing else refusal.total - 1)
        return most - self._held.bytes - self._promised_bytes

    def _start(
        self,
        victims: Sequence[Slab],
        capacity: int = 0,
        count: int = 0,
        nbytes: int = 0,
        account: Account | None = None,
    ) -> Resize:
        """Begin slow work.

        Victims stay counted as held until they are freed, so that the cap holds at every moment; then their room is
        promised to this resize before anyone else can see it.
        """
        what = victims, capacity, count, nbytes, account
        resize = Resize(self._memory, self.inbox, self._slabs, self._host, self, *what)
        self._promised_bytes += resize.promised
        if account is not None:
            account.busy_bytes += capacity
        resize.start(self._resizes)
        return resize

    # -- from state to state

    def _lend(self, slab: Slab, account: Account, nbytes: int) -> Lease:
        lease = Lease(self, slab, nbytes)
        slab.account = account
        account.busy_bytes += slab.capacity
        slab.requested = nbytes
        slab.event = slab.exporter = None
        slab.holder = lease._notice = weakref.ref(lease, slab.came_back)
        slab.enter(self._leased)
        self._requested_bytes += nbytes
        self._total_requested_bytes += nbytes
        return lease

    def _settle_notices(self) -> None:
        """Bring slabs to the state that they are in now, and take note of what resizes have done."""
        notices = self.inbox.notices
        while notices:
            for thing in list(notices):  # by one call of C: others may come meanwhile
                del notices[thing]  # before it is looked at: what comes afterwards is a notice anew
                if type(thing) is Slab:
                    self._settle(thing)
                else:
                    self._settle_resize(thing)

    def _settle(self, slab: Slab) -> None:
        """Bring a slab that came back to the state that it is in now. A notice may be late, or come twice."""
        if slab.state is self._leased:
            if slab.holder is not None:
                if slab.holder() is not None:
                    return  # another lease by now
                self.forgotten.append((slab.requested, slab.capacity))
                slab.holder = None
            self._requested_bytes -= slab.requested
            slab.requested = 0
        elif slab.state is not self._in_flight:
            return  # idle already, or being freed
        if slab.has_view():
            slab.enter(self._in_flight)
        elif slab.event is not None or slab.guards:
            slab.enter(self._in_flight)
            self._pending[slab] = None
        else:
            self._make_idle(slab)

    def _settle_resize(self, resize: Resize) -> None:
        if resize not in self._resizes:
            return
        finished = resize.finished
        while resize.settled < resize.gone:
            self._remove(resize.victims[resize.settled])
            resize.settled += 1
        self._promised_bytes -= resize.promised
        resize.promised = 0 if finished else resize.room_needed()
        self._promised_bytes += resize.promised
        if not finished:
            return
        for slab in resize.victims[resize.gone :]:  # not reached, because of an error
            self._make_idle(slab)
        if resize.account is not None:
            resize.account.busy_bytes -= resize.capacity
        if resize.refusal:
            held = self._held.bytes + self._promised_bytes
            total = held + resize.capacity * resize.count
            self._refusal = Refusal(resize.refusal, total, held, time.monotonic() + RETRY_SECONDS)
        for slab in resize.made:
            self._held.enter(slab.capacity)
            self._slabs_by_capacity[slab.capacity] = self._slabs_by_capacity.get(slab.capacity, 0) + 1
            if resize.account is not None:
                self._misses += 1
                resize.lease = self._lend(slab, resize.account, resize.nbytes)
            else:
                self._make_idle(slab)
        del self._resizes[resize]
        self.inbox.ring()

    def _make_idle(self, slab: Slab) -> None:
        account, slab.account = slab.account, None
        if account is not None:
            account.busy_bytes -= slab.capacity
        slab.enter(self._free)
        self._idle.put(slab)

    def _remove(self, slab: Slab) -> None:
        capacity = slab.capacity
        self._trims += 1
        self._held.leave(capacity)
        self._free.leave(capacity)
        self._slabs_by_capacity[capacity] -= 1
        if not self._slabs_by_capacity[capacity]:
            del self._slabs_by_capacity[capacity]
            self._idle.forget(capacity)

    def _repair(self) -> None:
        """Find out anew what is where. Each line may be the last one again: then the next call repairs."""
        for resize in [resize for resize in self._resizes if resize.finished]:
            del self._resizes[resize]  # who waits for its lease will find none, and ask again
        for resize in self._resizes:
            resize.settled, resize.promised = resize.gone, resize.room_needed()
        known = {thing for thing in list(self.inbox.notices) if type(thing) is Slab}
        known.update(self._idle.slabs(), self._pending)
        being_freed = {slab for resize in self._resizes for slab in resize.victims[resize.settled :]}
        coming = {slab for resize in self._resizes for slab in list(resize.made)}
        self._idle, self._pending, self._requested_bytes, self._slabs_by_capacity = IdleSlabs(), {}, 0, {}
        self._promised_bytes = sum(resize.promised for resize in self._resizes)
        for slab in list(self._slabs):
            if slab in coming:
                continue
            size = slab.capacity
            self._slabs_by_capacity[size] = self._slabs_by_capacity.get(size, 0) + 1
            if slab.has_lease():
                slab.state = self._leased
                self._requested_bytes += slab.requested
                continue
            lost = slab not in known and slab not in being_freed and not slab.has_view()
            if slab.holder is not None:
                slab.holder = None
                if slab.state is self._leased:
                    self.forgotten.append((slab.requested, size))
            elif lost and slab.state is not self._in_flight:
                self._recovered += 1
            slab.requested = 0
            if slab.has_view() or slab.fences():
                slab.state = self._in_flight
                if not slab.has_view():
                    self._pending[slab] = None
            else:
                slab.state, slab.account = self._free, None
                if slab not in being_freed:
                    self._idle.put(slab)
        counted = [slab for slab in self._slabs if slab not in coming]
        for state in (self._leased, self._in_flight, self._free):
            state.recount([slab.capacity for slab in counted if slab.state is state])
        self._held.recount([slab.capacity for slab in counted])
        growing = [(resize.account, resize.capacity) for resize in self._resizes]
        busy = [(slab.account, slab.capacity) for slab in counted]
        for account in self.accounts.values():
            account.busy_bytes = sum(size for whose, size in [*growing, *busy] if whose is account)

    def pending(self) -> list[Fence]:
        """Return the events that slabs in flight wait for."""
        return [fence for slab in self._pending for fence in slab.fences()]

    def snapshot(self, waits: int, wait_seconds: float) -> PoolStats:
        self.ask_events()
        return PoolStats(
            **self._held.figures("held"),
            **self._leased.figures("leased"),
            **self._in_flight.figures("in_flight"),
            **self._free.figures("free"),
            max_bytes=self.max_bytes,
            max_bytes_reason=self.reason,
            requested_bytes=self._requested_bytes,
            total_requested_bytes=self._total_requested_bytes,
            hits=self._hits,
            misses=self._misses,
            waits=waits,
            wait_seconds=wait_seconds,
            trims=self._trims,
            recovered=self._recovered,
            owners={account.name: self._of_owner(account) for account in self.accounts.values()},
        )

    def _of_owner(self, account: Account) -> OwnerStats:
        slabs = [slab for slab in list(self._slabs) if slab.account is account]
        leased = sum(slab.capacity for slab in slabs if slab.state is self._leased)
        held = sum(slab.capacity for slab in slabs)
        return OwnerStats(
            held_bytes=held,
            leased_bytes=leased,
            in_flight_bytes=held - leased,
            available_bytes=max(0, self.accounts.room(account, (), self._whole())),
            at_least=account.at_least,
            at_most=account.at_most,
            waits=account.waits,
            wait_seconds=account.wait_seconds,
        )

    # -- without the lock

    def tidy_later(self) -> None:
        reaper.tasks.put(self)

    def reap(self) -> bool:
        """Free what came back to a closed pool; for the reaper. Says whether nothing more will come by itself."""
        with self.lock:
            self.begin()
            self.trim(0)
            done = not self._pending
            self.end()
        return done

    def lend(self, nbytes: int) -> None:
        """Free so many bytes of what is idle, or all, for another process; not what a frozen pool needs. Blocks."""
        with self.lock:
            self.begin()
            self.ask_events()
            victims = [] if self.frozen else self._idle.take_oldest(nbytes)
            resize = self._start(victims) if victims else None
            self.end()
        if resize is not None:
            resize.wait()

    def is_waited_for(self) -> bool:
        return bool(self.inbox.line)

    def report(self, waits: int, wait_seconds: float) -> dict[str, Any]:
        """Say how the pool is, for those who watch this host."""
        stats = self.decide(self.snapshot, waits, wait_seconds)
        owners = {name: asdict(owner) for name, owner in stats.owners.items()}
        names = ("leased_bytes", "in_flight_bytes", "free_bytes", "waits", "wait_seconds")
        return {name: getattr(stats, name) for name in names} | {"owners": owners}

    @property
    def reason(self) -> str:
        """Where the cap comes from, and what others had of it when it was asked for last."""
        return self._reason + ("" if self._host is None else self._host.holders())

    def figures(self) -> Figures:
        held, leased, in_flight = self._held.bytes, self._leased.bytes, self._in_flight.bytes
        others = None if self._host is None else held_bytes(self._host.others)
        return Figures(held, leased, in_flight, self.max_bytes, self.reason, others)
