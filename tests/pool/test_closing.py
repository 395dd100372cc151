"""The end of a pool: closed, or dropped."""

import contextlib
import gc
import re
import warnings
import weakref

import pytest
import warm
from doubles import (
    Gate,
    ManualEvent,
    outcome,
    stays_blocked,
    wait_for_reaper,
    wait_until,
)

from pinstage import SlabPool, Stager
from pinstage._memory import Block
from pinstage._pool import lease_in_flight
from pinstage._pool._slab import Slab, free
from pinstage.errors import PoolClosedError, PoolError, UnreleasedLeaseWarning


def test_a_pool_is_closed_when_its_block_fails(memory):
    pool = SlabPool(1000, memory=memory)
    pool.reserve(100)
    with pytest.raises(KeyError), pool:
        raise KeyError
    assert memory.live_bytes == 0


@pytest.mark.parametrize(
    "verb",
    [
        lambda pool: pool.acquire(1),
        lambda pool: pool.acquire(10**6),
        lambda pool: pool.reserve(1),
        lambda pool: pool.set_quota("loader"),
        lambda pool: lease_in_flight(pool, 1, owner="loader"),
    ],
)
def test_a_closed_pool_refuses_new_leases(pool, memory, verb):
    pool.close()
    with pytest.raises(
        PoolClosedError, match=r"pool is closed: held 0 B of .*; make a new SlabPool"
    ):
        verb(pool)
    assert memory.allocations == 0


def test_a_closed_pool_can_be_inspected_and_trimmed(pool):
    pool.reserve(100)
    pool.close()
    assert (pool.stats().trims, pool.trim()) == (1, 0)
    assert repr(pool).startswith("<SlabPool closed CountingMemory held 0 B")


def test_a_pool_shows_its_state(pool):
    assert repr(pool) == (
        "<SlabPool open CountingMemory held 0 B of max_bytes 1000 B (given: 1000), leased 0 B, in "
        "flight 0 B>"
    )
    pool.freeze()
    assert repr(pool).startswith("<SlabPool frozen ")


def test_closing_wakes_all_waiters_with_an_error(pool, waiting):
    lease = pool.acquire(1000)
    futures = [waiting(pool, 1000, timeout=timeout) for timeout in (60, None, 60, None)]
    pool.close()
    for future in futures:
        with pytest.raises(PoolClosedError):
            outcome(future)
    lease.release()


def after_release(lease, event):
    lease.release(after=event)


def after_last_view(lease, event):
    view = lease.tensor()
    lease.release(after=event)
    del view


def by_guard(lease, event):
    lease.guard(event)
    lease.release()


@pytest.mark.parametrize("put_in_flight", [after_release, after_last_view, by_guard])
def test_close_waits_for_and_frees_slabs_in_flight(pool, memory, background, put_in_flight):
    event = ManualEvent()
    put_in_flight(pool.acquire(100), event)
    closing = background(pool.close)
    assert event.waited_for.wait(10)
    assert stays_blocked(closing)
    assert memory.live_bytes == 104
    event.finish()
    outcome(closing)
    assert memory.live_bytes == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_slabs_in_flight_are_freed_after_close(memory, dropped):
    pool, event = SlabPool(1000, memory=memory), ManualEvent()
    with pool.acquire(100) as lease:
        pool.close()
        lease.tensor().fill_(1)
        lease.release(after=event)
    assert (pool.stats().in_flight_slabs, memory.live_bytes) == (1, 104)
    if dropped:
        del pool, lease
    queries = event.queries
    wait_until(lambda: event.queries > queries + 2)
    assert memory.live_bytes == 104
    event.finish()
    wait_until(lambda: memory.live_bytes == 0)


@pytest.mark.parametrize("look", [SlabPool.close, SlabPool.stats, SlabPool.trim])
def test_views_stay_valid_after_close(pool, memory, look):
    lease = pool.acquire(100)
    view = lease.tensor()
    view.fill_(42)
    lease.release()
    pool.close()
    look(pool)
    assert view.tolist() == [42] * 100
    assert memory.live_bytes == 104
    del view
    look(pool)
    assert memory.live_bytes == 0


def test_a_lease_forgotten_after_close_is_freed(pool, memory):
    lease = pool.acquire(100)
    pool.close()
    del lease
    with pytest.warns(UnreleasedLeaseWarning):
        pool.stats()
    assert memory.live_bytes == 0


@pytest.mark.parametrize("verb", [SlabPool.acquire, SlabPool.reserve])
def test_an_allocation_under_way_at_close_is_freed(pool, memory, background, verb):
    memory.allocate_gate = Gate()
    growing = background(verb, pool, 100)
    memory.allocate_gate.wait_for_arrival()
    pool.close()
    memory.allocate_gate.open()
    if verb is SlabPool.acquire:
        with pytest.raises(PoolClosedError):
            outcome(growing)
    else:
        outcome(growing)
    assert memory.live_bytes == 0
    assert pool.stats().leased_slabs == 0


def test_a_failing_event_at_close_keeps_its_slab(pool, memory):
    event = ManualEvent()
    pool.acquire(100).release(after=event)
    event.error = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        pool.close()
    assert pool.closed
    assert memory.live_bytes == 104
    event.error = None
    event.finish()
    pool.close()
    assert memory.live_bytes == 0


@pytest.mark.parametrize("thing", ["lease", "view", "event", "guard"])
def test_a_pool_in_a_cycle_frees_its_slabs(memory, thing):
    pool, event = SlabPool(1000, memory=memory), ManualEvent()
    pool.reserve(100, count=2)
    lease = pool.acquire(100)
    kept = {"lease": lease, "view": lease.numpy()}.get(thing)
    if thing == "guard":
        lease.guard(event)
    if thing != "lease":
        lease.release(after=event if thing == "event" else None)
    cycle = [pool, lease]
    cycle.append(cycle)
    del cycle, pool, lease
    gc.collect()
    if kept is None:
        wait_until(lambda: memory.live_bytes == 104)
        event.finish()
    else:
        wait_for_reaper()
        assert memory.live_bytes == 208
        del kept
    wait_until(lambda: memory.live_bytes == 0)


def test_a_dropped_pool_whose_memory_fails_says_so(memory):
    pool = SlabPool(1000, memory=memory)
    pool.reserve(100, count=2)
    lost = memory.live_blocks[0]
    memory.fail_deallocate(RuntimeError("device is gone"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del pool
        wait_until(lambda: len(told) > 0)
    assert re.search(
        "memory of a dropped pool, loader or region could not be freed: .*device is gone",
        str(told[0].message),
    )
    assert memory.live_blocks == [lost]
    memory.deallocate(lost)


@pytest.mark.filterwarnings("ignore:memory of a dropped pool")
def test_an_unfreeable_slab_keeps_no_other(memory):
    pool, event = SlabPool(1000, memory=memory), ManualEvent()
    idle, in_flight = pool.acquire(100), pool.acquire(200)
    [lost] = [block for block in memory.live_blocks if block.nbytes < 200]
    memory.fail_deallocate(RuntimeError("told to"))
    idle.release()
    in_flight.release(after=event)
    del pool, idle, in_flight
    wait_until(lambda: memory.deallocations == 1)
    event.finish()
    wait_until(lambda: memory.live_blocks == [lost])
    memory.deallocate(lost)


def test_errors_of_slabs_keep_nothing():
    """Without a collection."""
    made = []

    class LostError(RuntimeError):
        def __init__(self):
            made.append(weakref.ref(self))

    class Memory:
        def deallocate(self, block):
            raise LostError

    gc.disable()
    try:
        with contextlib.suppress(LostError):
            slabs = dict.fromkeys(Slab(Block(0, 1), {}, 0) for _ in range(2))
            free(slabs, slabs, Memory())
        assert [error() for error in made] == [None, None]
    finally:
        gc.enable()


def test_a_dropped_pool_frees_returned_slabs_after_closing(memory):
    event = ManualEvent()
    with SlabPool(1000, memory=memory) as pool:
        in_flight, forgotten, viewed = (pool.acquire(100) for _ in range(3))
        view = viewed.tensor()
    in_flight.release(after=event)
    viewed.release()
    del forgotten
    event.finish()
    del view, viewed, in_flight, pool
    wait_until(lambda: memory.live_bytes == 0)


def test_a_half_made_pool_is_dropped_silently():
    with pytest.raises(ValueError, match="max_bytes"):
        SlabPool(max_bytes=0)
    with pytest.raises(TypeError, match="memory must be a MemoryResource"):
        SlabPool(10, memory=object())
    gc.collect()


def test_stager_stats_work_while_the_pool_frees(memory, background):
    pool = SlabPool(1000, memory=memory)
    stager = Stager("cpu", pool=pool)
    event = ManualEvent()
    lease = pool.acquire(100)
    view = lease.tensor()
    lease.release(after=event)
    event.finish()
    pool.close()
    memory.deallocate_gate = Gate()
    del view
    frees = background(stager.stats)
    memory.deallocate_gate.wait_for_arrival()
    assert outcome(background(repr, stager))
    stager.to_device({"no": "tensors"})  # counts too
    memory.deallocate_gate.open()
    assert outcome(frees).batches <= 1


def run_script(script):
    """Run a program; return its exit status and output."""
    done = warm.completed(script, timeout=60)
    return done.returncode, done.stdout, done.stderr


SLOW_MEMORY = """
import gc, os, time, torch, pinstage as ps

class Slow(ps.memory.PageableMemory):
    def deallocate(self, block):
        os.write(1, b"begun ")
        time.sleep(0.5)
        super().deallocate(block)
        os.write(1, b"freed")
"""


def test_a_program_waits_for_freeing_at_its_end():
    script = """
pool = ps.SlabPool(1000, memory=Slow())
pool.reserve(100)
del pool
time.sleep(0.2)
"""
    assert run_script(SLOW_MEMORY + script) == (0, "begun freed", "")


def test_finalisers_close_pools_after_the_program_s_end():
    script = """
import builtins, pinstage as ps

class Owner:
    def __init__(self):
        self.itself = self
        self.pool = ps.SlabPool(budget=BUDGET, memory=ps.memory.PageableMemory())
        self.pool.acquire(100).release()
        self.region = ps.HostRegion(100, budget=BUDGET, device="cpu")

    def __del__(self):
        self.pool.close()
        self.region.close()
        print("closed")

def batches():
    with ps.SlabPool(budget=BUDGET, memory=ps.memory.PageableMemory()) as pool, pool.acquire(100) as lease:
        yield lease

BUDGET = ps.HostBudget("1MiB", name="end")
builtins.kept = Owner(), batches()
next(builtins.kept[1])
"""
    assert run_script(script) == (0, "closed\n", "")


def test_a_program_may_end_with_everything_in_use():
    script = """
import warnings
warnings.simplefilter("error", ResourceWarning)
pool = ps.SlabPool("1MiB", memory=Slow())
lease = pool.acquire(100)
view = pool.acquire(200).tensor()
counted = ps.SlabPool(budget=ps.HostBudget("1MiB", name="end"), memory=Slow()).acquire(100)
stager = ps.Stager("cpu", pool=pool)
transfer, fetch = stager.stage([torch.ones(3)]), stager.fetch([torch.ones(3)])
batches = iter(stager.prefetch([[torch.ones(2)]] * 5))
next(batches)
loader = ps.DataLoader(torch.arange(8), 2, num_workers=1, device="cpu", persistent_workers=True)
iterator = iter(loader)
next(iterator)
cycle = [lease, view, counted, stager, transfer, fetch, batches, loader, iterator]
cycle.append(cycle)
"""
    assert run_script(SLOW_MEMORY + script) == (0, "", "")


def test_an_event_ends_with_its_slab(memory):
    """Garbage with an event aborts a forked child that collects it."""
    gc.collect()
    gc.disable()
    try:
        pool, event = SlabPool(1000, memory=memory), ManualEvent()
        pool.acquire(100).release(after=event)
        event.finish()
        del pool
        wait_until(lambda: memory.live_bytes == 0)
        alive = weakref.ref(event)
        del event
        wait_until(lambda: alive() is None)
    finally:
        gc.enable()


class Thing:
    """Something that a caller holds."""


@pytest.mark.parametrize(
    ("prepare", "nbytes"),
    [
        (SlabPool.close, 1),
        (SlabPool.freeze, 1),
        (lambda pool: pool.acquire(pool.max_bytes), 1),
        (lambda pool: None, 1 << 40),
    ],
)
def test_a_refusal_keeps_none_of_its_callers_alive(pool, prepare, nbytes):
    """A frame that has the error as a local is a cycle: all that called it lives until the next
    collection, a loader's iterator and its workers, too.
    """
    held = []

    def ask():
        thing = Thing()
        held.append(weakref.ref(thing))
        pool.acquire(nbytes, timeout=0)

    lease = prepare(pool)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(PoolError):
            ask()
        assert held[0]() is None
    finally:
        gc.enable()
        if lease is not None:
            lease.release()
