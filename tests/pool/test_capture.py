"""In a thread that captures a graph, no event is asked, and no slab is allocated or freed."""

import pytest
from doubles import ManualEvent, wait_until

from pinstage.errors import PinstageError

CALLS = {
    "acquire": lambda pool: pool.acquire(100, timeout=0).release(),
    "reserve": lambda pool: pool.reserve(100),
    "trim": lambda pool: pool.trim(),
    "stats": lambda pool: pool.stats(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("is_warm", [False, True])
def test_no_event_is_asked(pool, memory, capture, call, is_warm):
    event = ManualEvent()
    if is_warm:
        pool.acquire(100).release(after=event)
    calls = memory.allocations, memory.deallocations
    with capture(), pytest.raises(PinstageError, match="captures a graph"):
        call(pool)
    assert event.queries == 0
    assert (memory.allocations, memory.deallocations) == calls
    event.finish()
    call(pool)


def test_releases_and_guards_work(pool, capture):
    guards = ManualEvent(), ManualEvent()
    lease = pool.acquire(100)
    lease.guard(guards[0])
    with capture():
        lease.guard(guards[1])
        lease.release()
        pool.set_quota("loader", min_bytes=10)
        pool.freeze()
    assert guards[0].queries == 0
    for guard in guards:
        assert pool.stats().in_flight_slabs == 1
        guard.finish()
    assert pool.stats().free_slabs == 1


def test_another_thread_closes_the_pool(pool, memory, capture):
    event = ManualEvent()
    pool.acquire(100).release(after=event)
    with capture():
        pool.close()
        assert pool.closed
        assert not event.waited_for.is_set()
    event.finish()
    wait_until(lambda: not memory.live_bytes)
