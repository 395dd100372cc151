"""The counters: every field, and that they agree with each other."""

import dataclasses

import pytest
from doubles import ManualEvent, outcome

from pinstage import OwnerStats, PoolStats, PoolUsage
from pinstage.errors import AcquireTimeoutError


def test_a_new_pool_has_counted_nothing(pool):
    expected = dict.fromkeys((field.name for field in dataclasses.fields(PoolStats)), 0)
    expected |= {"max_bytes": 1000, "max_bytes_reason": "given: 1000", "owners": {}}
    assert dataclasses.asdict(pool.stats()) == expected


def test_totals_and_peaks_follow_the_life_of_slabs(pool, waiting):
    event = ManualEvent()
    pool.reserve(100, count=2)
    one, two, three = (pool.acquire(nbytes) for nbytes in (99, 100, 300))
    view = two.tensor()
    one.release()
    two.release()
    three.release(after=event)
    stats = pool.stats()
    assert (stats.free_bytes, stats.in_flight_bytes, stats.in_flight_slabs) == (104, 424, 2)
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(900, timeout=0)
    waiter = waiting(pool, 900)
    event.finish()
    del view
    outcome(waiter).release()
    stats = pool.stats()
    assert (stats.held_bytes, stats.peak_held_bytes, stats.total_held_bytes) == (960, 960, 1488)
    assert (stats.held_slabs, stats.peak_held_slabs, stats.total_held_slabs) == (1, 3, 4)
    assert (stats.hits, stats.misses, stats.waits, stats.trims) == (2, 2, 2, 3)
    assert 0 < stats.wait_seconds < 10


def test_counters_are_integers_except_seconds_and_reason(pool):
    pool.acquire(100).release()
    figures = dataclasses.asdict(pool.stats())
    owners = figures.pop("owners")
    bound = owners["unnamed"].pop("max_bytes")
    assert bound is None
    for name, value in [*figures.items(), *owners["unnamed"].items()]:
        assert type(value) is {"wait_seconds": float, "max_bytes_reason": str}.get(name, int), name


def test_the_text_of_the_stats_is_one_line(pool):
    with pool.acquire(500), pytest.raises(AcquireTimeoutError):
        pool.acquire(600, timeout=0)
    assert str(pool.stats()) == (
        f"held 512 B of 1000 B, leased 0 B, in flight 0 B; 0 hits, 1 miss, 0 trims, "
        f"waited {pool.stats().wait_seconds:.3f} s in 1 request"
    )


@pytest.mark.parametrize("kind", [PoolStats, OwnerStats, PoolUsage])
def test_statistics_are_frozen_dataclasses(kind):
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
