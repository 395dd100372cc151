"""A slab that is in flight may be leased again by its owner, who orders its work behind the
event.
"""

import pytest
from doubles import ManualEvent, outcome

from pinstage._pool import lease_in_flight
from pinstage.errors import AcquireTimeoutError


def in_flight(pool, owner="offload", nbytes=100):
    event = ManualEvent()
    pool.acquire(nbytes, owner=owner).release(after=event)
    return event


def test_the_slab_has_its_last_lease_s_event(pool):
    first, second = in_flight(pool), in_flight(pool)
    lease, event = lease_in_flight(pool, 100, owner="offload")
    assert event is first
    assert not first.query()
    stats = pool.stats()
    assert (stats.leased_bytes, stats.in_flight_bytes, stats.held_bytes) == (104, 104, 208)
    after = ManualEvent()
    lease.release(after=after)
    assert pool.stats().in_flight_slabs == 2
    for done in (first, second, after):
        done.finish()
    assert pool.stats().free_slabs == 2


def test_unsuitable_slabs_are_not_leased_in_flight(pool):
    events = [in_flight(pool, "loader"), in_flight(pool, nbytes=400), in_flight(pool, nbytes=50)]
    assert lease_in_flight(pool, 100, owner="offload") is None
    for event in events:
        event.finish()
    assert pool.stats().free_slabs == 3
    assert lease_in_flight(pool, 50, owner="offload") is None


def test_a_dropped_lease_leaves_the_event_in_place(pool):
    event = in_flight(pool)
    lease_in_flight(pool, 100, owner="offload")
    with pytest.warns(RuntimeWarning, match="never released"):
        stats = pool.stats()
    assert (stats.leased_slabs, stats.in_flight_slabs) == (0, 1)
    event.finish()
    assert pool.stats().free_slabs == 1


def test_what_an_owner_has_is_counted_once(pool):
    pool.set_quota("offload", max_bytes=208)
    event = in_flight(pool)
    lease, _ = lease_in_flight(pool, 100, owner="offload")
    other = pool.acquire(100, owner="offload")
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(100, owner="offload", timeout=0)
    lease.release()
    other.release()
    event.finish()
    pool.acquire(200, owner="offload").release()


def test_while_somebody_waits_it_is_not_given(pool, waiting):
    event = in_flight(pool, nbytes=900)
    waiter = waiting(pool, 900, owner="loader")
    assert lease_in_flight(pool, 900, owner="offload") is None
    event.finish()
    outcome(waiter).release()
