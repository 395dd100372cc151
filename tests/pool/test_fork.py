"""After ``fork`` the child's copy of a pool refuses to work, and the parent's is unchanged."""

import gc
import os
import warnings

import pytest
from doubles import ManualEvent, claim_in_child

from pinstage import SlabPool
from pinstage.errors import ForkedPoolError
from pinstage.memory import PageableMemory

VERBS = {
    "acquire": lambda pool, lease: pool.acquire(10),
    "reserve": lambda pool, lease: pool.reserve(10),
    "trim": lambda pool, lease: pool.trim(),
    "freeze": lambda pool, lease: pool.freeze(),
    "stats": lambda pool, lease: pool.stats(),
    "release": lambda pool, lease: lease.release(),
    "release after an event": lambda pool, lease: lease.release(after=ManualEvent()),
    "end of a block": lambda pool, lease: lease.__exit__(None, None, None),
    "tensor": lambda pool, lease: lease.tensor(),
    "numpy": lambda pool, lease: lease.numpy(),
    "memoryview": lambda pool, lease: lease.__buffer__(0),
}


def test_a_lease_dropped_in_the_child_does_nothing(memory):
    leases = {"pool": SlabPool(1000, memory=memory)}
    leases["plain"] = leases["pool"].acquire(100)
    leases["viewed"] = leases["pool"].acquire(100)
    leases["view"] = leases["viewed"].tensor()

    def claim():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            leases.clear()
            gc.collect()
        assert warned == []
        assert (memory.live_bytes, memory.deallocations) == (208, 0)

    claim_in_child(claim)
    leases["plain"].release()
    leases["viewed"].release()
    del leases["view"]
    leases["pool"].close()
    assert memory.live_bytes == 0


def test_closing_in_the_child_does_nothing(pool, memory):
    event = ManualEvent()
    pool.acquire(100).release(after=event)

    def claim():
        pool.close()
        assert not pool.closed
        assert memory.deallocations == 0
        assert not event.waited_for.is_set()

    claim_in_child(claim)
    event.finish()


def test_a_child_forked_mid_call_doesn_t_hang(pool):
    lease = pool.acquire(100)

    class ForkingEvent(ManualEvent):
        def query(self):  # the pool's lock is held, here and in the child
            if not self.queries:
                claim_in_child(claim)
            return super().query()

    def claim():
        message = f"parent of process {os.getpid()}: .*; make a SlabPool in the child"
        for verb in VERBS.values():
            with pytest.raises(ForkedPoolError, match=message):
                verb(pool, lease)
        pool.close()
        assert repr(pool).startswith("<SlabPool ")

    event = ForkingEvent()
    pool.acquire(100).release(after=event)
    assert pool.stats().in_flight_slabs == 1
    assert event.queries
    event.finish()
    lease.release()


def test_a_grandchild_is_refused_the_child_s_pool(pool):
    def claim():
        with SlabPool(1000, memory=PageableMemory()) as own:
            with own.acquire(100) as lease:
                lease.tensor().fill_(1)

            def claim_of_grandchild():
                for inherited in (own, pool):
                    with pytest.raises(ForkedPoolError):
                        inherited.acquire(10)

            claim_in_child(claim_of_grandchild)
            own.acquire(100).release()

    claim_in_child(claim)
