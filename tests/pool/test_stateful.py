"""The real pool compared with a plain model: which slabs are busy, why, and whose bytes are in
them.

The model never looks at the pool or calls its functions: it implements the documented sizes a
second time. It knows the memory's live blocks, and what keeps the slab of each lease busy; all
numbers, and whether a request must be served, follow from these.
"""

import ctypes
import itertools
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
import torch
from doubles import CountingMemory, ManualEvent
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pinstage import Lease, SlabPool
from pinstage.errors import AcquireTimeoutError, BudgetExceededError, LeaseError, PoolFrozenError

pytestmark = [
    # Any next call may tell it.
    pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning"),
    pytest.mark.filterwarnings("ignore:pool cannot grow"),
    pytest.mark.usefixtures("growing_again"),
]

VIEWS = [
    Lease.tensor,
    Lease.numpy,
    lambda lease: lease.__buffer__(0),
    lambda lease: lease.tensor(dtype=torch.bool),
]
CLASSES = sorted({steps << doublings for steps in range(1, 17) for doublings in range(8)})
"""Capacities of slabs, with eight steps per doubling: 8, 9, ... 15, 16, 18, ... 30, 32, 36 and so
on.
"""

sizes = st.sampled_from([1, 60, 64, 100, 120, 200, 256, 500]) | st.integers(1, 1000)


@dataclass
class Use:
    """One use of one slab, from `acquire` until nothing keeps the slab busy."""

    address: int
    capacity: int
    nbytes: int
    byte: int
    lease: Lease | None
    views: dict[int, object] = field(default_factory=dict)
    event: ManualEvent | None = None

    @property
    def is_leased(self):
        return self.lease is not None

    def check(self):
        content = ctypes.string_at(self.address, self.capacity)
        assert content == bytes([self.byte]) * self.capacity, "a busy slab was overwritten"


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    events = Bundle("events")
    views = Bundle("views")

    looks_after_each_step = True
    """Reading the statistics settles returned slabs. Without it the pool has to notice by
    itself.
    """

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)
        self.uses = {}  # bundles hold keys of this, so that the machine itself keeps nothing alive
        self.granularity = 1
        self.pool = None
        self.frozen = False
        self.every_event = []
        self.hits = self.misses = 0

    @initialize(
        max_bytes=st.sampled_from([256, 600, 1000, 2500]) | st.integers(1, 2500),
        granularity=st.sampled_from([1, 1, 64]),
    )
    def make(self, max_bytes, granularity):
        self.granularity = granularity
        self.max_bytes = max_bytes = max(max_bytes, granularity)
        self.memory = CountingMemory(granularity)
        self.pool = SlabPool(max_bytes, memory=self.memory)

    # -- the model

    def settle(self):
        """Forget what nothing keeps busy any more."""
        for key, use in list(self.uses.items()):
            event_is_done = use.event is None or use.event.query()
            if use.lease is None and not use.views and event_is_done:
                del self.uses[key]

    def idle(self):
        busy = {use.address for use in self.uses.values()}
        return [block.nbytes for block in self.memory.live_blocks if block.ptr not in busy]

    def class_of(self, nbytes):
        largest = self.max_bytes // self.granularity * self.granularity
        size = CLASSES[bisect_left(CLASSES, nbytes)]
        return min(-(-size // self.granularity) * self.granularity, largest)

    def can_serve(self, nbytes):
        if any(capacity >= nbytes for capacity in self.idle()):
            return True
        busy_bytes = sum(use.capacity for use in self.uses.values())
        return not self.frozen and busy_bytes + self.class_of(nbytes) <= self.max_bytes

    def expected_failure(self, nbytes):
        if self.class_of(nbytes) < nbytes:
            return BudgetExceededError
        if self.can_serve(nbytes):
            return None
        if self.frozen and not any(block.nbytes >= nbytes for block in self.memory.live_blocks):
            return PoolFrozenError
        return AcquireTimeoutError

    def within_reuse(self, nbytes, capacities):
        """Return the slabs that may serve a request before the pool grows: at most an eighth of
        each is wasted.
        """
        limit = self.class_of(nbytes)
        return [
            size
            for size in capacities
            if nbytes <= size and (size <= limit or 8 * (size - nbytes) <= size)
        ]

    # -- the rules

    @rule(target=leases, nbytes=sizes)
    def acquire(self, nbytes):
        failure = self.expected_failure(nbytes)
        idle, live, allocations = self.idle(), self.memory.live_bytes, self.memory.allocations
        try:
            lease = self.pool.acquire(nbytes, timeout=0)
        except (AcquireTimeoutError, BudgetExceededError, PoolFrozenError) as error:
            assert type(error) is failure  # noqa: PT017 - success is as good
            assert (self.memory.live_bytes, self.memory.allocations) == (live, allocations)
            return multiple()
        assert failure is None
        address, capacity = lease.data_ptr(), lease.capacity
        for use in self.uses.values():
            assert address + capacity <= use.address or use.address + use.capacity <= address, (
                "busy slab lent"
            )
        assert any(
            (block.ptr, block.nbytes) == (address, capacity) for block in self.memory.live_blocks
        )
        assert nbytes == lease.nbytes <= capacity
        grew = self.memory.allocations > allocations
        self.misses += grew
        self.hits += not grew
        if suitable := self.within_reuse(nbytes, idle):
            assert not grew
            assert capacity in ([min(suitable)] if self.looks_after_each_step else suitable)
        elif grew:
            assert capacity == self.class_of(nbytes)
        else:
            assert self.frozen or live + self.class_of(nbytes) > self.max_bytes, (
                "too large a slab for no need"
            )
        key = next(self.numbers)
        byte = key % 251
        ctypes.memset(address, byte, capacity)
        self.uses[key] = Use(address, capacity, nbytes, byte, lease)
        return key

    @rule(nbytes=sizes)
    def acquire_without_memory(self, nbytes):
        failure, live = self.expected_failure(nbytes), self.memory.live_bytes
        allocations = self.memory.allocations
        self.memory.fail_allocate(MemoryError("told to"))
        try:
            self.pool.acquire(nbytes, timeout=0).release()
        except (MemoryError, AcquireTimeoutError, PoolFrozenError) as error:
            assert type(error) is (failure or MemoryError)  # noqa: PT017 - success is as good
            assert failure is None or self.memory.live_bytes == live
            if failure is None:  # it continues with existing slabs, or replaces them
                assert self.class_of(nbytes) > self.memory.live_bytes
        else:
            assert failure is None
            if self.memory.allocations > allocations:  # refused once, then granted
                self.misses += 1
            else:
                assert self.memory.live_bytes == live
                self.hits += 1
        self.memory.forget_failures()

    @rule(nbytes=sizes, count=st.integers(1, 3), nth=st.integers(1, 2))
    def reserve_without_memory(self, nbytes, count, nth):
        live = self.memory.live_bytes
        self.memory.fail_allocate(MemoryError("told to"), nth=nth)
        try:
            self.pool.reserve(nbytes, count=count)
        except (MemoryError, PoolFrozenError):
            assert self.memory.live_bytes == live
        self.memory.forget_failures()

    @rule(key=consumes(leases))
    def release(self, key):
        use = self.uses[key]
        use.check()
        lease, use.lease = use.lease, None
        lease.release()
        assert lease.released
        with pytest.raises(LeaseError):
            lease.release()
        self.settle()

    @rule(target=events, key=consumes(leases))
    def release_after_event(self, key):
        use = self.uses[key]
        lease, use.lease, use.event = use.lease, None, ManualEvent()
        self.every_event.append(use.event)
        lease.release(after=use.event)
        return key

    @rule(key=consumes(events))
    def finish_event(self, key):
        use = self.uses[key]
        use.check()
        use.event.finish()
        self.settle()

    @rule(key=events)
    def ask_an_event_that_fails(self, key):
        use = self.uses[key]
        use.event.error = RuntimeError("told to")
        try:
            self.pool.trim(to_bytes=1_000_000)
        except RuntimeError as error:
            assert error is use.event.error  # noqa: PT017 - no error is as good: a living view hides the event
        use.event.error = None

    @rule(target=views, key=leases, make=st.sampled_from(VIEWS))
    def make_view(self, key, make):
        use, number = self.uses[key], next(self.numbers)
        use.views[number] = make(use.lease)
        return key, number

    @rule(keys=consumes(views))
    def drop_view(self, keys):
        key, number = keys
        self.uses[key].check()
        del self.uses[key].views[number]
        self.settle()

    @rule(key=consumes(leases))
    def forget_lease(self, key):
        self.uses[key].lease = None
        self.settle()

    @rule(nbytes=sizes, count=st.integers(0, 4))
    def reserve(self, nbytes, count):
        capacity, live = self.class_of(nbytes), self.memory.live_bytes
        allocations = self.memory.allocations
        missing = max(0, count - len(self.within_reuse(nbytes, self.idle())))
        failure = None
        if missing and self.frozen:
            failure = PoolFrozenError
        elif missing and live + missing * capacity > self.max_bytes:
            failure = BudgetExceededError
        if capacity < nbytes:
            failure = BudgetExceededError
        try:
            self.pool.reserve(nbytes, count=count)
        except (BudgetExceededError, PoolFrozenError) as error:
            assert type(error) is failure  # noqa: PT017 - success is as good
            missing = 0
        else:
            assert failure is None
        assert self.memory.allocations == allocations + missing
        assert self.memory.live_bytes == live + missing * capacity

    @rule(to_bytes=st.integers(0, 2500))
    def trim(self, to_bytes):
        live, idle = self.memory.live_bytes, self.idle()
        freed = self.pool.trim(to_bytes=to_bytes)
        assert self.memory.live_bytes == live - freed
        assert freed <= sum(idle), "a busy slab was freed"
        assert self.memory.live_bytes <= to_bytes or not self.idle()
        if freed:
            assert live - freed + max(idle) > to_bytes, "more than asked"

    @precondition(lambda self: not self.frozen and len(self.uses) > 3)
    @rule()
    def freeze(self):
        self.frozen = True
        self.pool.freeze()

    @rule()
    def look(self):
        self.check_stats()

    # -- what always holds

    @invariant()
    def the_cap_holds(self):
        if self.pool is not None:
            assert self.memory.live_bytes <= self.memory.peak_live_bytes <= self.max_bytes

    @invariant()
    def the_counters_are_those_of_the_model(self):
        if self.pool is not None and self.looks_after_each_step:
            self.check_stats()

    def check_stats(self):
        stats = self.pool.stats()
        leased = [use.capacity for use in self.uses.values() if use.is_leased]
        in_flight = [use.capacity for use in self.uses.values() if not use.is_leased]
        idle = self.idle()
        assert stats.held_bytes == self.memory.live_bytes <= stats.max_bytes == self.max_bytes
        assert stats.held_bytes == stats.free_bytes + stats.leased_bytes + stats.in_flight_bytes
        assert (stats.leased_slabs, stats.leased_bytes) == (len(leased), sum(leased))
        assert (stats.in_flight_slabs, stats.in_flight_bytes) == (len(in_flight), sum(in_flight))
        assert (stats.free_slabs, stats.free_bytes) == (len(idle), sum(idle))
        assert stats.held_slabs == len(idle) + len(self.uses)
        assert (stats.hits, stats.misses) == (self.hits, self.misses)

    def teardown(self):
        if self.pool is None:
            return
        CountingMemory.made.remove(self.memory)  # checked here
        # Also those of uses that the model thinks are over: close() waits for all.
        for event in self.every_event:
            event.finish()
        while self.uses:
            _, use = self.uses.popitem()
            use.check()
            del use
        self.pool.close()
        assert self.memory.live_bytes == 0


class UnwatchedPoolMachine(PoolMachine):
    looks_after_each_step = False


TestPool = PoolMachine.TestCase
TestUnwatchedPool = UnwatchedPoolMachine.TestCase
TestPool.settings = TestUnwatchedPool.settings = settings(
    max_examples=3 * settings.default.max_examples,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
