"""Waiting at the cap: what ends it, the order, and what it leaves behind."""

import dataclasses
import math
import signal
import sys
import threading
import time

import pytest
from doubles import ManualEvent, outcome, stays_blocked, wait_for_waiters, wait_until

from pinstage._pool import hold_for_good
from pinstage.errors import AcquireTimeoutError, BudgetExceededError, PoolFrozenError

slow_polling = pytest.mark.usefixtures("no_polling")


# -- the timeout


@pytest.mark.parametrize("timeout", [0, 0.03])
def test_a_timeout_is_exact_and_changes_nothing(pool, timeout):
    event = ManualEvent()
    pool.acquire(300).release(after=event)
    with pool.acquire(500):
        before = pool.stats()
        with pytest.raises(AcquireTimeoutError) as caught:
            pool.acquire(700, timeout=timeout)
        after = pool.stats()
    event.finish()
    assert timeout <= after.wait_seconds < 10
    waited = {"waits": 1, "wait_seconds": after.wait_seconds, "owners": after.owners}
    assert after == dataclasses.replace(before, **waited)
    error = caught.value
    assert (error.requested_bytes, error.max_bytes) == (700, 1000)
    assert (error.held_bytes, error.leased_bytes, error.in_flight_bytes) == (832, 512, 320)
    assert str(error) == (
        f"no slab came free within {timeout} s: requested 700 B, held 832 B of max_bytes 1000 B "
        "(given: 1000), leased 512 B, in flight 320 B, 0 other waiters; release leases sooner, "
        "wait longer, or pass "
        'max_bytes="2KiB"'
    )


@pytest.mark.parametrize("timeout", [-1, -0.001, -math.inf, math.nan])
def test_a_negative_timeout_or_nan_is_refused(pool, timeout):
    with pytest.raises(ValueError, match="timeout must be 0 or more"):
        pool.acquire(1, timeout=timeout)
    assert pool.stats().held_bytes == 0


@pytest.mark.parametrize("timeout", [math.inf, 1e12])
def test_an_infinite_timeout_works_anywhere_in_the_queue(pool, waiting, timeout):
    with pool.acquire(1000):
        waiters = [waiting(pool, 1000, timeout=timeout) for _ in range(2)]
    for waiter in waiters:
        outcome(waiter).release()


@slow_polling
def test_a_waiter_that_gives_up_makes_room(pool, waiting):
    lease = pool.acquire(512)
    impatient = waiting(pool, 1000, timeout=0.5)
    modest = waiting(pool, 400)
    assert not modest.done()  # there is room for it, but it is not its turn
    with pytest.raises(AcquireTimeoutError):
        outcome(impatient)
    outcome(modest).release()
    lease.release()


# -- what ends the wait


def test_waiting_polls_events_now_and_then(pool, background):
    event = ManualEvent()
    pool.acquire(1000).release(after=event)
    waiter = background(pool.acquire, 1000)
    wait_until(lambda: event.queries > 20)
    queries, start = event.queries, time.monotonic()
    assert stays_blocked(waiter)
    asked = event.queries - queries
    assert 0 < asked < 1000 * (time.monotonic() - start)
    event.finish()
    outcome(waiter).release()


# -- the order


@slow_polling
def test_small_requests_don_t_overtake_a_large_one(pool, waiting):
    leases = [pool.acquire(480), pool.acquire(480)]
    large = waiting(pool, 900)
    small = waiting(pool, 100)
    leases[0].release()
    with pytest.raises(AcquireTimeoutError, match=" 2 other waiters;"):  # nor by a new one
        pool.acquire(480, timeout=0.01)  # for which there is an idle slab
    assert stays_blocked(small)
    assert not large.done()
    leases[1].release()
    lease = outcome(large)
    assert not small.done()
    lease.release()
    outcome(small).release()


# -- interrupted


@slow_polling
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupted_waiter_leaves_the_queue(pool, background, waiting, ahead):
    raised = []

    def raise_once(*_):
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt

    def interrupt():
        wait_for_waiters(pool, ahead + 1)
        while not raised:  # Python misses a signal just before a wait in C until that has ended
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.01)

    signal.signal(signal.SIGINT, raise_once)  # `interruptible` restores it
    lease = pool.acquire(1000)
    others = [waiting(pool, 1000) for _ in range(ahead)]
    interruption = background(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(1000)
    outcome(interruption)
    others.append(waiting(pool, 1000))
    lease.release()
    for other in others:
        outcome(other).release()


def test_an_interrupt_before_waking_stops_no_line(pool, waiting, background):
    event, line = ManualEvent(), pool._state.waiters
    pool.acquire(1000).release(after=event)

    def interrupt(frame, kind, function):
        if (kind, frame.f_code.co_name) == ("c_return", "_serve") and function == line.discard:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def first():
        sys.setprofile(interrupt)
        pool.acquire(1000, timeout=0.1)

    interrupted = background(first)
    wait_for_waiters(pool, 1)
    following = waiting(pool, 1000)
    with pytest.raises(KeyboardInterrupt):
        outcome(interrupted)
    event.finish()  # which wakes none
    outcome(following).release()


def test_a_waiter_interrupted_at_an_event_leaves_nothing(pool, waiting):
    event = ManualEvent()
    pool.acquire(1000).release(after=event)
    waiter = waiting(pool, 1000)
    event.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        outcome(waiter)
    event.error = None
    event.finish()
    lease = pool.acquire(1000, timeout=0)
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(1000, timeout=0)
    lease.release()


# -- slabs held for good


def held_for_good(pool, nbytes, **options):
    """Return a view for which a slab is held, as by a frozen module."""
    lease = pool.acquire(nbytes, **options)
    hold_for_good(lease)
    view = lease.numpy()
    lease.release()
    return view


def test_a_request_fails_beside_slabs_held_for_good(pool):
    views = [held_for_good(pool, 512), held_for_good(pool, 128)]
    stats = pool.stats()
    assert (stats.held_for_good_bytes, stats.in_flight_bytes) == (640, 640)
    with pool.acquire(320), pytest.raises(BudgetExceededError) as caught:
        pool.acquire(361, timeout=60)
    assert pool.stats().waits == 0
    assert str(caught.value) == (
        "request doesn't fit beside slabs held for good: requested 361 B, held 960 B of max_bytes "
        "1000 B (given: 1000), leased 320 B, in flight 640 B (640 B in live views), 640 B of these "
        "held for good; close handles of frozen modules and drop these modules, or pass "
        'max_bytes="2KiB" or more'
    )
    views.clear()
    assert pool.stats().held_for_good_bytes == 0
    pool.acquire(900).release()


def test_a_request_that_fits_beside_them_waits(pool, waiting):
    views = [held_for_good(pool, 640)]
    lease = pool.acquire(320)
    waiter = waiting(pool, 360)
    lease.release()
    outcome(waiter).release()
    views.clear()


def test_a_waiter_fails_once_its_bytes_are_held(pool, waiting):
    lease = pool.acquire(512)
    waiter = waiting(pool, 900)
    hold_for_good(lease)
    with pytest.raises(BudgetExceededError):
        outcome(waiter)
    lease.release()
    pool.acquire(900).release()


def test_nothing_waits_for_a_slab_held_for_good(make_pool, memory):
    """A pool that can't grow: frozen, or refused by the platform."""
    pool = make_pool(4096)
    views = [held_for_good(pool, 1024)]
    pool.acquire(128).release()
    memory.fail_allocate(MemoryError("no more"))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no more"):
            pool.acquire(1000, timeout=60)
    pool.freeze()
    with pytest.raises(PoolFrozenError, match="largest slab 128 B"):
        pool.acquire(1000)
    views.clear()
    pool.acquire(1000).release()


@pytest.mark.parametrize("max_bytes", [4096, sys.maxsize])
def test_nothing_waits_for_memory_that_was_refused(make_pool, memory, max_bytes):
    pool = make_pool(max_bytes)
    memory.fail_allocate(MemoryError("no more"))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no more"):
            pool.acquire(1000, timeout=0)


def test_slabs_held_for_good_count_for_quotas(pool):
    pool.set_quota("offload", min_bytes=500)
    views = [held_for_good(pool, 256, owner="offload")]
    pool.acquire(500, owner="others").release()
    with pytest.raises(BudgetExceededError, match="held for good"):
        pool.acquire(800, owner="offload")
    views.clear()
