"""The counters: every field, and that they agree with each other."""

import dataclasses

import pytest
from doubles import ManualEvent, outcome, wait_until

from pinstage import OwnerStats, PoolStats, PoolUsage
from pinstage.errors import AcquireTimeoutError


def check(pool, **expected):
    """Compare the named counters, and check the rules that always hold between all counters."""
    stats = pool.stats()
    assert {name: getattr(stats, name) for name in expected} == expected
    for unit in ("bytes", "slabs"):
        current = {
            state: getattr(stats, f"{state}_{unit}")
            for state in ("held", "free", "leased", "in_flight")
        }
        assert current["held"] == current["free"] + current["leased"] + current["in_flight"]
        assert min(current.values()) >= 0
        assert (
            current["held"]
            <= getattr(stats, f"peak_held_{unit}")
            <= getattr(stats, f"total_held_{unit}")
        )
    assert stats.peak_held_bytes <= stats.max_bytes
    return stats


def test_a_new_pool_has_counted_nothing(pool):
    expected = dict.fromkeys((field.name for field in dataclasses.fields(PoolStats)), 0)
    check(pool, **expected | {"max_bytes": 1000, "max_bytes_reason": "given: 1000", "owners": {}})


def test_every_counter_follows_the_life_of_slabs(pool, background):
    event = ManualEvent()
    pool.reserve(100, count=2)
    check(
        pool,
        held_bytes=208,
        held_slabs=2,
        free_bytes=208,
        free_slabs=2,
        total_held_slabs=2,
        misses=0,
    )

    one, two, three = (pool.acquire(nbytes) for nbytes in (99, 100, 300))
    view = two.tensor()
    check(
        pool,
        held_bytes=528,
        leased_bytes=528,
        leased_slabs=3,
        free_bytes=0,
        hits=2,
        misses=1,
    )

    one.release()
    two.release()
    three.release(after=event)
    check(pool, leased_bytes=0, free_bytes=104, in_flight_bytes=424, in_flight_slabs=2)

    with pytest.raises(AcquireTimeoutError):
        pool.acquire(900, timeout=0)
    waiter = background(pool.acquire, 900)
    wait_until(lambda: pool.stats().waits == 2)
    event.finish()
    del view
    outcome(waiter).release()
    stats = check(
        pool,
        held_bytes=960,
        leased_bytes=0,
        in_flight_bytes=0,
        free_bytes=960,
        max_bytes=1000,
        held_slabs=1,
        leased_slabs=0,
        in_flight_slabs=0,
        free_slabs=1,
        peak_held_bytes=960,
        peak_held_slabs=3,
        total_held_bytes=528 + 960,
        total_held_slabs=4,
        hits=2,
        misses=2,
        waits=2,
        trims=3,
    )
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
