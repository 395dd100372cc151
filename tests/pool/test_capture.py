"""In a thread that captures a graph, no event is asked, and no slab is allocated."""

import pytest
from doubles import ManualEvent, refuse, wait_until

CALLS = {
    "acquire": lambda pool: pool.acquire(100, timeout=0).release(),
    "reserve": lambda pool: pool.reserve(100),
    "trim": lambda pool: pool.trim(),
    "stats": lambda pool: pool.stats(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("how", ["event", "guard"])
def test_no_event_is_asked(pool, memory, capture, call, how):
    event = ManualEvent()
    lease = pool.acquire(100)
    if how == "guard":
        lease.guard(event)
    lease.release(after=event if how == "event" else None)
    with capture():
        refuse(call, pool)
    assert event.queries == 0
    assert memory.live_bytes > 0
    event.finish()
    call(pool)
    assert memory.allocations == 1, "the slab was lost"


@pytest.mark.parametrize("name", ["acquire", "reserve"])
def test_the_pool_doesn_t_grow(pool, memory, capture, name):
    with capture():
        refuse(CALLS[name], pool)
    assert memory.allocations == 0
    CALLS[name](pool)
    assert pool.stats().held_slabs == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_idle_slabs_can_be_used(pool, memory, capture, call):
    pool.reserve(100)
    with capture():
        call(pool)
    assert memory.allocations == 1


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
