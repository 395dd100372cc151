"""The cap, and changes of the bytes held: growth, trim, reserve, freeze; also when memory fails."""

import contextlib
import sys
import threading

import pytest
from doubles import CountingMemory, Gate, ManualEvent, outcome, stays_blocked, wait_until

from pinstage import HostBudget, SlabPool, _reaper
from pinstage._pool import _pool
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    PoolClosedError,
    PoolFrozenError,
)


def idle_in_order(pool, *sizes):
    """Make idle slabs of these sizes, the least recently used first."""
    leases = [pool.acquire(nbytes) for nbytes in sizes]
    for lease in leases:
        lease.release()


pytestmark = pytest.mark.usefixtures("growing_again")
slow_polling = pytest.mark.usefixtures("no_polling")

# -- the cap


@pytest.mark.parametrize(
    ("max_bytes", "granularity", "least"),
    [
        (0, 1, "1"), (4095, 4096, "4,096"), ("2", 1, "4,096"), ("4095B", 1, "4,096"),
        ("4KiB", 1 << 20, "1,048,576"),
    ],
)  # fmt: skip
def test_a_cap_below_one_slab_is_refused(max_bytes, granularity, least):
    message = f"max_bytes is too small: .*Pass at least {least}, or a size with a unit"
    with pytest.raises(ValueError, match=message):
        SlabPool(max_bytes, memory=CountingMemory(granularity))


def test_a_budget_below_the_granularity_is_refused():
    budget = HostBudget(4095, name="small")
    with pytest.raises(ValueError, match="max_bytes is too small: 4095"):
        SlabPool(budget=budget, memory=CountingMemory(4096))
    SlabPool("1MiB", budget=budget, memory=CountingMemory(1)).close()


@slow_polling
def test_freed_room_is_kept_for_its_request(pool, memory, background, waiting):
    idle_in_order(pool, 400, 400)
    memory.deallocate_gate, memory.allocate_gate = Gate(), Gate()
    large = background(pool.acquire, 700)
    memory.deallocate_gate.wait_for_arrival()
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(320, timeout=0)  # would fit, if the room weren't promised to the other request
    assert memory.live_bytes == pool.stats().held_bytes == 832
    memory.deallocate_gate.open()
    memory.allocate_gate.wait_for_arrival()
    assert (memory.freed, pool.stats().held_bytes) == ([416, 416], 0)
    with pytest.raises(BudgetExceededError):
        pool.reserve(320)
    small = waiting(pool, 320)
    memory.allocate_gate.open()
    outcome(large).release()
    outcome(small).release()
    assert memory.peak_live_bytes <= 1000


@slow_polling
def test_the_cap_holds_during_a_trim(pool, memory, background, waiting):
    idle_in_order(pool, 448, 448)
    memory.deallocate_gate = Gate()
    trim = background(pool.trim)
    memory.deallocate_gate.wait_for_arrival()
    lease = waiting(pool, 448)
    assert stays_blocked(lease)
    memory.deallocate_gate.open()
    assert outcome(trim) == 896
    outcome(lease).release()
    assert memory.peak_live_bytes == 896


# -- trim


def test_the_cap_frees_least_recently_used_slabs(pool, memory):
    idle_in_order(pool, 320, 288, 352)
    with pool.acquire(288):  # this one is the most recently used now
        pass
    with pool.acquire(500):
        assert memory.freed == [320, 352]  # enough
    assert pool.stats().trims == 2


def test_trim_frees_least_recently_used_slabs_first(pool, memory):
    idle_in_order(pool, 96, 208, 112, 192)
    assert pool.trim(to_bytes=400) == 304
    assert memory.freed == [96, 208]
    assert pool.stats().held_bytes == 304
    assert pool.trim(to_bytes="304") == 0
    assert pool.trim() == 304
    assert memory.live_bytes == 0


def test_two_trims_at_once_free_what_one_does(pool, memory, background):
    idle_in_order(pool, 96, 96, 96, 96)
    memory.deallocate_gate = Gate()
    first = background(pool.trim, to_bytes=192)
    memory.deallocate_gate.wait_for_arrival()
    second = background(pool.trim, to_bytes=192)
    memory.deallocate_gate.open()
    assert outcome(first) + outcome(second) == 192
    assert memory.live_bytes == 192


def test_a_trim_counts_slabs_that_others_free(pool, memory, background):
    idle_in_order(pool, 96, 112, 128)
    memory.deallocate_gate = Gate()
    other = background(pool.trim, 300)
    memory.deallocate_gate.wait_for_arrival()

    def free_one(frame, kind, _):
        code = frame.f_code
        if kind == "call" and code.co_name == "<genexpr>" and code.co_filename == _pool.__file__:
            sys.setprofile(None)
            memory.deallocate_gate.open()
            wait_until(lambda: len(pool._state.slabs) == 2)

    sys.setprofile(free_one)
    try:
        assert pool.trim() == 240
    finally:
        sys.setprofile(None)
    assert outcome(other) == 96


# -- reserve


def test_a_reservation_in_the_background_is_done_later(pool, memory):
    memory.allocate_gate = Gate()
    fence = pool.reserve(200, count=2, background=True)
    memory.allocate_gate.wait_for_arrival()
    assert not fence.query()
    assert pool.stats().held_bytes == 0
    memory.allocate_gate.open()
    fence.synchronize()
    assert fence.query()
    pool.freeze()
    with pool.acquire(200, timeout=0), pool.acquire(200, timeout=0):
        assert pool.stats().misses == 0


@pytest.mark.parametrize("in_background", [False, True])
def test_reservations_use_the_caller_s_device(pool, memory, monkeypatch, in_background):
    here, devices = threading.local(), []

    def as_called_here():
        device = getattr(here, "device", 0)
        return lambda: contextlib.nullcontext(setattr(here, "device", device))

    allocate = memory.allocate
    monkeypatch.setattr(_reaper, "as_called_here", as_called_here)
    monkeypatch.setattr(
        memory, "allocate", lambda nbytes: devices.append(here.device) or allocate(nbytes)
    )
    here.device = 1
    pool.reserve(200, background=in_background).synchronize()
    assert devices == [1]


def test_a_kept_fence_keeps_no_pool(memory):
    pool = SlabPool(1000, memory=memory)
    fence = pool.reserve(200)
    del pool
    wait_until(lambda: memory.live_bytes == 0)
    assert fence.query()


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        (lambda pool: None, BudgetExceededError),
        (SlabPool.freeze, PoolFrozenError),
        (SlabPool.close, PoolClosedError),
    ],
)
def test_an_impossible_reservation_fails_before_it_begins(pool, memory, verb, error):
    verb(pool)
    with pytest.raises(error):
        pool.reserve(250, count=5, background=True)
    assert memory.allocations == 0


def test_a_failed_background_reservation_raises_in_synchronize(pool, memory):
    memory.fail_allocate(MemoryError("no more"), nth=2)
    fence = pool.reserve(200, count=3, background=True)
    with pytest.raises(MemoryError, match="no more"):
        fence.synchronize()
    assert fence.query()
    assert pool.stats().held_bytes == 0
    pool.acquire(960).release()


def test_a_reservation_beyond_the_cap_says_how_far(pool):
    with (
        pool.acquire(500),
        pytest.raises(BudgetExceededError, match="2 slabs of 256 B are missing") as caught,
    ):
        pool.reserve(250, count=2)
    assert (caught.value.requested_bytes, caught.value.leased_bytes) == (512, 512)


@pytest.mark.parametrize(("nbytes", "count"), [(0, 1), (1, -1), (100, 2.5)])
def test_a_senseless_reservation_is_refused(pool, nbytes, count):
    message = r"reserve needs sizes: .*pass nbytes >= 1 and count >= 0|float"
    with pytest.raises((ValueError, TypeError), match=message):
        pool.reserve(nbytes, count=count)


def test_the_cap_holds_while_reservations_are_rolled_back(pool, memory, background):
    memory.fail_allocate(MemoryError("no pages"), nth=2)
    memory.deallocate_gate = Gate()
    reservation = background(pool.reserve, 480, count=2)
    memory.deallocate_gate.wait_for_arrival()
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(600, timeout=0)
    memory.deallocate_gate.open()
    with pytest.raises(MemoryError):
        outcome(reservation)
    assert memory.peak_live_bytes <= 1000
    pool.acquire(1000, timeout=0).release()


@slow_polling
def test_a_reservation_under_way_counts_and_wakes_waiters(pool, memory, background, waiting):
    pool.reserve(512)
    memory.allocate_gate = Gate()
    reservation = background(pool.reserve, 160, count=3)
    memory.allocate_gate.wait_for_arrival()
    with pool.acquire(512, timeout=0):  # growing doesn't hold up others
        waiter = waiting(pool, 160)
        memory.allocate_gate.open()
        outcome(reservation)
        outcome(waiter).release()
    assert memory.allocations == 4


# -- freeze


def test_a_frozen_pool_with_the_largest_cap_raises(make_pool):
    pool = make_pool(sys.maxsize)
    pool.reserve(100)
    pool.freeze()
    with pytest.raises(PoolFrozenError, match="requested 1000 B, largest slab 104 B"):
        pool.acquire(1000, timeout=0)
    assert pool.stats().free_bytes == 104


def test_a_frozen_pool_without_a_large_slab_raises(pool):
    pool.acquire(200).release()
    pool.freeze()
    assert pool.frozen
    with pytest.raises(
        PoolFrozenError, match=r"300 B, largest slab 208 B.*; reserve\(\) .* before freeze"
    ) as caught:
        pool.acquire(300)
    assert (caught.value.requested_bytes, caught.value.held_bytes) == (300, 208)


def test_freezing_ends_waits_that_need_an_allocation(pool, waiting):
    leases = [pool.acquire(500), pool.acquire(480)]
    waiter = waiting(pool, 600)
    pool.freeze()
    with pytest.raises(PoolFrozenError):
        outcome(waiter)
    for lease in leases:
        lease.release()


# -- memory that fails


@slow_polling
@pytest.mark.filterwarnings("ignore:pool cannot grow by")
def test_a_failed_allocation_lets_the_next_waiter_try(pool, memory, background, waiting):
    memory.allocate_gate = Gate()
    memory.fail_allocate(MemoryError("no pages"))
    failing = background(pool.acquire, 1000)
    memory.allocate_gate.wait_for_arrival()
    waiter = waiting(pool, 1000)
    memory.allocate_gate.open()
    outcome(waiter).release()
    # Unless the other request was faster: then there is a slab to wait for.
    with contextlib.suppress(MemoryError):
        outcome(failing).release()


@pytest.mark.parametrize("error", [RuntimeError, GeneratorExit])
def test_a_slab_that_cannot_be_freed_stays_out(pool, memory, error):
    idle_in_order(pool, 96, 112, 128)
    lost = memory.live_blocks[1]
    memory.fail_deallocate(error("device is gone"), nth=2)
    with pytest.raises(error, match="device is gone"):
        pool.trim()
    stats = pool.stats()
    assert (stats.held_bytes, stats.free_bytes, stats.free_slabs) == (0, 0, 0)
    assert memory.live_blocks == [lost]  # the others are freed nevertheless
    with pool.acquire(112) as lease:
        assert lease.data_ptr() != lost.ptr
    memory.deallocate(lost)


def test_a_failed_free_fails_only_its_request(pool, memory):
    idle_in_order(pool, 400, 400)
    lost = memory.live_blocks[0]
    memory.fail_deallocate(RuntimeError("device is gone"))
    with pytest.raises(RuntimeError, match="device is gone"):
        pool.acquire(900)
    stats = pool.stats()
    assert (stats.held_bytes, stats.free_bytes, stats.leased_bytes) == (0, 0, 0)
    assert memory.live_blocks == [lost]
    memory.deallocate(lost)
    pool.acquire(1000, timeout=0).release()


def test_a_failing_event_query_raises_and_changes_nothing(pool):
    good, bad = ManualEvent(), ManualEvent()
    pool.acquire(96).release(after=good)
    pool.acquire(112).release(after=bad)
    before = pool.stats()
    good.finish()
    bad.error = RuntimeError("CUDA error: device-side assert triggered")
    for verb in (
        pool.stats,
        pool.trim,
        lambda: pool.acquire(112, timeout=0),
        lambda: pool.reserve(96),
    ):
        with pytest.raises(RuntimeError, match="device-side assert"):
            verb()
    bad.error = None
    after = pool.stats()
    assert (after.free_slabs, after.in_flight_slabs) == (1, 1)
    assert after.held_bytes == before.held_bytes == after.free_bytes + after.in_flight_bytes
    bad.finish()
    with pool.acquire(96) as one, pool.acquire(96) as two:
        assert one.data_ptr() != two.data_ptr()
