"""The state of a pool, and all decisions about it.

Whether a slab is free follows only from its lease, its views and its events. `PoolState.stacks` is
a cache of the free slabs, which `scan` rebuilds, so an interrupt or a finaliser can lose nothing.
Only the pool's own threads change the held bytes (`_growth`), and no interrupt reaches them.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter

from ..errors import PoolError
from . import _refusals
from ._classes import reuse_limit, size_class
from ._growth import LOOK, Decision, Growth, GrowthPlan
from ._lease import Lease, event_of
from ._refusals import Refusal
from ._slab import Fence, Holdings, Slab, take_first
from ._stats import OwnerStats, PoolStats
from ._waiting import Account, Waiter

_HELD = ("peak_held_bytes", "peak_held_slabs", "total_held_bytes")


class PoolState(Holdings):
    """The decisions. Call the methods of the first section under `lock`; none of them does slow
    work.
    """

    # -- decisions

    def serve(self, account: Account, nbytes: int, ahead: Sequence[Waiter] = ()) -> Decision:
        """Serve a request from free slabs, plan to grow, or return None if it has to wait.

        `Accounts.room` limits what the owner may have now, by quotas and by the requests that have
        waited longer. Within that limit, the cases are, in this order:

        1. an idle slab that wastes at most 12.5%, or, from 1 MiB on, of at most twice the class;
        2. there is room under the cap: allocate a slab of the request's class;
        3. any larger idle slab;
        4. idle slabs of other classes would make room: free them, least recently used first, and
           allocate;
        5. wait, and now and then check whether the memory resource allows more.

        A frozen pool skips 2 and 4, divides what it holds by quotas, and refuses a request at once
        if no slab fits it. After the platform has refused memory, a pool is restricted for a while:
        it doesn't ask for the refused total again (2), and frees nothing that it might not get back
        (4).

        Raises:
            PoolError, MemoryError: the request is refused; see `why_never`.
        """
        error = self.why_never(account, nbytes)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it and this frame would keep one another, and all that called
        idle = self.scan()
        room = self._room(account, ahead)
        capacity = min(size_class(nbytes, self.granularity), room)
        may_grow = nbytes <= room and not self.frozen
        fitting = [slab.capacity for slab in idle if nbytes <= slab.capacity <= room]
        smallest = min(fitting, default=sys.maxsize)
        if smallest <= reuse_limit(nbytes, self.granularity):
            return self.lease(account, nbytes, smallest)
        if may_grow and capacity <= self._headroom():
            return GrowthPlan((), capacity, 1)
        if smallest <= room:
            return self.lease(account, nbytes, smallest)
        missing = capacity - self._headroom(by_freeing=True)
        if may_grow and missing <= sum(slab.capacity for slab in idle):
            return GrowthPlan(_oldest(idle, missing), capacity, 1)
        return LOOK if may_grow and self.memory.is_due() else None

    def lease(
        self,
        account: Account,
        nbytes: int,
        bound: int,
        is_usable: Callable[[Slab], bool] | None = None,
    ) -> Lease | None:
        """Lease the smallest suitable slab; return None if there is none. All slabs that the pool
        has are chosen here.

        Args:
            account: the owner.
            nbytes: the request's bytes.
            bound: bytes of the largest slab that may serve the request.
            is_usable: says which slabs may serve it; of several of a size, the first in the stack
                does. None for free slabs: then the last in the stack, which was returned last and
                is in the caches, comes first.
        """
        sizes = self.sizes
        for size in sizes[bisect_left(sizes, nbytes) : bisect_right(sizes, bound)]:
            # Only single C calls touch the stack: a release in another thread may add to it at any
            # moment.
            stack = self.stacks[size]
            last = stack.popitem()[0] if stack and is_usable is None else None
            slab = last
            if last is None or not last.is_free():
                slab = take_first(stack, is_usable or Slab.is_free)
            if last is not None and last is not slab and last.fences():
                last.put(None)  # else its release, or the end of its last view, does it
            if slab is not None:
                self.hits += 1
                return Lease(self, slab, nbytes, account)
        return None

    def scan(self) -> list[Slab]:
        """Check all slabs. Return the free ones, least recently used first, and put them in their
        stacks.
        """
        slabs = list(self.slabs)
        idle = [slab for slab in slabs if slab.lease is None and slab.is_free()]
        # Afterwards: querying events may run the garbage collector, which frees leases.
        for slab in slabs:
            if slab.lease is not None and slab.lease() is None:
                slab.lease = None
                self.forgotten.append((slab.requested, slab.capacity))
                if slab.is_free():
                    idle.append(slab)
        idle.sort(key=attrgetter("used_at"))
        for slab in idle:
            slab.put(None)
        return idle

    def serve_in_flight(self, owner: str, nbytes: int) -> tuple[Lease, Fence] | None:
        """Lease a slab that its owner has released but whose event is not done yet; return both.

        Returns None while a request waits: the slab is for the first in line.
        """
        account = self.accounts[owner]
        if self.waiters:
            return None
        limit = reuse_limit(nbytes, self.granularity)
        lease = self.lease(account, nbytes, limit, lambda slab: slab.is_in_flight_of(account))
        return None if lease is None else (lease, event_of(lease))

    def why_never(
        self, account: Account, nbytes: int, just_now: Refusal | None = None
    ) -> PoolError | MemoryError | None:
        """Return the error of a request that can't be served; None if it may be, now or later.

        The cases, in this order:

        1. the pool is closed;
        2. the request is larger than the part of the cap that quotas leave to its owner;
        3. it is larger than the part of it that isn't held for good;
        4. no slab is large enough, and the pool is frozen;
        5. no slab is large enough, and the platform refused to let the pool grow that far,
           `just_now` or recently.

        Slabs held for good aren't counted as large enough.
        """
        if self.closed:
            return _refusals.closed(self.figures(), self.user)
        largest = self.accounts.room(account, self.max_bytes)
        if nbytes > largest:
            return _refusals.never_fits(
                self.figures(), nbytes, account if self.accounts.have_quotas else None, largest
            )
        for_good = self.held_for_good()
        busy = _by_owner(for_good)
        if nbytes > self.accounts.room(account, self.max_bytes, busy):
            return _refusals.never_free(self.figures(), nbytes)
        largest = self.accounts.room(account, self._whole(), busy)
        usable = [slab.capacity for slab in list(self.slabs) if slab not in for_good]
        held = max((size for size in usable if size <= largest), default=0)
        if nbytes <= held:
            return None
        if self.frozen:
            return _refusals.frozen(self.figures(), nbytes, held)
        refusal = just_now or self._standing_refusal()
        capacity = min(size_class(nbytes, self.granularity), largest)
        if (
            refusal is None
            or capacity + busy.total() <= refusal.held
            or self.promised() + capacity < refusal.total
        ):
            return None
        return _refusals.refused(self.figures(), nbytes, refusal)

    def reserve(self, nbytes: int, count: int) -> GrowthPlan | None:
        """Plan to allocate the slabs that are missing for `count` leases at once; None if none are
        missing.

        Raises:
            PoolClosedError, PoolFrozenError, BudgetExceededError: the slabs can't be allocated.
        """
        self.check_open()
        self.refusal = None  # a reservation always asks the platform, and reports its error
        limit, largest = (
            reuse_limit(nbytes, self.granularity),
            self.max_bytes // self.granularity * self.granularity,
        )
        if nbytes > largest:
            raise _refusals.never_fits(self.figures(), nbytes)
        capacity = min(size_class(nbytes, self.granularity), largest)
        missing = count - sum(nbytes <= slab.capacity <= limit for slab in self.scan())
        if missing <= 0:
            return None
        if self.frozen:
            raise _refusals.frozen(self.figures(), nbytes, max(self.sizes, default=0))
        if missing * capacity > self.max_bytes - self.promised():
            raise _refusals.reserve_does_not_fit(self.figures(), capacity, missing)
        return GrowthPlan((), capacity, missing)

    def free(self, nbytes: int) -> GrowthPlan | None:
        """Plan to free idle slabs of `nbytes` together, or all; None if there is nothing to
        free.
        """
        victims = _oldest(self.scan(), nbytes)
        return GrowthPlan(victims) if victims else None

    def check_open(self) -> None:
        if self.closed:
            raise _refusals.closed(self.figures(), self.user)

    def _headroom(self, *, by_freeing: bool = False) -> int:
        """Return the bytes by which the pool may grow; negative if bytes must be freed first."""
        most = min(self.max_bytes, self.memory.allowed)
        if (refusal := self._standing_refusal()) is not None:
            most = min(most, refusal.held if by_freeing else refusal.total - 1)
        return most - self.promised()

    def _standing_refusal(self) -> Refusal | None:
        if self.refusal is not None and time.monotonic() >= self.refusal.until:
            self.refusal = None
        return self.refusal

    def _room(self, account: Account, ahead: Sequence[Waiter]) -> int:
        """Return the size of the largest slab that an owner may take now, after a `scan`."""
        if ahead or self.accounts.have_quotas:
            return self.accounts.room(account, self._whole(), self._busy(), ahead)
        return self.accounts.room(account, self.max_bytes, _by_owner(self.held_for_good()))

    def _whole(self) -> int:
        return self.held_bytes if self.frozen else self.max_bytes

    def _busy(self) -> Counter[Account | None]:
        """Return the bytes that owners have: leased, in flight as of the last scan, or being
        allocated for them.
        """
        leased, in_flight, _ = self.parts()
        busy = _by_owner(leased) + _by_owner(in_flight)
        for growth in self.growths:
            if growth.waiter is not None:
                busy[growth.waiter.account] += growth.plan.capacity
        return busy

    def snapshot(self) -> PoolStats:
        """Check all slabs, and return the counters."""
        self.scan()
        leased, in_flight, free = self.parts()
        return PoolStats(
            **_sums("held", [*leased, *in_flight, *free]),
            **_sums("leased", leased),
            **_sums("in_flight", in_flight),
            **_sums("free", free),
            held_for_good_bytes=sum(slab.capacity for slab in self.held_for_good()),
            **{
                name: getattr(self, name)
                for name in ("max_bytes", "hits", "misses", "trims", *_HELD)
            },
            max_bytes_reason=self.reason,
            pinned_bytes=sum(slab.capacity for slab in self.slabs if self.is_pinned(slab)),
            total_held_slabs=len(self.slabs) + self.trims,
            waits=sum(account.waits for account in self.accounts.values()),
            wait_seconds=sum((account.wait_seconds for account in self.accounts.values()), 0.0),
            owners=self._owners(_by_owner(leased), _by_owner(in_flight)),
        )

    def _owners(
        self, leased: Counter[Account | None], in_flight: Counter[Account | None]
    ) -> dict[str, OwnerStats]:
        whole, busy = self._whole(), self._busy()
        return {
            name: OwnerStats(
                held_bytes=leased[account] + in_flight[account],
                leased_bytes=leased[account],
                in_flight_bytes=in_flight[account],
                available_bytes=max(0, self.accounts.room(account, whole, busy)),
                **{
                    name: getattr(account, name)
                    for name in ("min_bytes", "max_bytes", "waits", "wait_seconds")
                },
            )
            for name, account in self.accounts.items()
        }

    # -- without the lock

    def trim(self, to_bytes: int) -> int:
        """Free idle slabs, so that at most `to_bytes` are held. Return the bytes freed. Blocks."""

        def surplus() -> GrowthPlan | None:
            return self.free(
                sum(slab.capacity for slab in list(self.slabs) if not slab.doomed) - to_bytes
            )

        with self.lock:
            if surplus() is None:
                return 0
        growth = Growth(self, surplus)
        growth.result()
        return growth.freed

    def reap(self) -> bool:
        """Free the slabs returned to a closed pool; for the reaper. Return whether no event is
        pending.
        """
        growth = Growth(self, partial(self.free, self.max_bytes))
        growth.run()
        growth.result()
        return not self.pending()


def _oldest(idle: Sequence[Slab], nbytes: int) -> list[Slab]:
    """Return the first slabs that have that many bytes together, or all."""
    before = accumulate([slab.capacity for slab in idle], initial=0)
    return [slab for slab, earlier in zip(idle, before, strict=False) if earlier < nbytes]


def _by_owner(slabs: Sequence[Slab]) -> Counter[Account | None]:
    held: Counter[Account | None] = Counter()
    for slab in slabs:
        held[slab.account] += slab.capacity
    return held


def _sums(state: str, slabs: Sequence[Slab]) -> dict[str, int]:
    return {f"{state}_bytes": sum(slab.capacity for slab in slabs), f"{state}_slabs": len(slabs)}
