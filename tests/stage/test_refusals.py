"""Refused page-locking: the pool and its users continue with the memory that they have, and no byte
is wrong.
"""

import random
import signal
import warnings

import pytest
import torch
from doubles import HeldTarget, WalledMemory, outcome, stays_blocked, use_target, wait_until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import assert_same, batches

from pinstage import SlabPool, Stager
from pinstage._batch import pack, take_apart, windows
from pinstage._memory import remedy
from pinstage._pool import state_of
from pinstage._stage import HostSlabs
from pinstage.errors import AcquireTimeoutError, StagingWarning
from pinstage.memory import HostAllocMemory, PageableMemory, RegisteredMemory

pytestmark = pytest.mark.usefixtures("slabs_for_all")

MIB = 1024 * 1024
REFUSALS = 20 * settings.default.max_examples
"""For each of two kinds of memory."""

quietly = pytest.mark.filterwarnings(
    "ignore:page-locking of", "ignore:pool cannot grow", "ignore:a stager falls back to pageable"
)


@pytest.fixture
def walled(make_pool):
    """Make a pool over memory with a limit; return the memory and the pool."""

    def make(wall, max_bytes=1 << 30):
        memory = WalledMemory(wall)
        return memory, make_pool(max_bytes, memory=memory)

    return make


@pytest.fixture
def walled_stager(walled):
    """Make a stager with a pool over memory with a limit."""
    return lambda wall: Stager("cpu", pool=walled(wall)[1])


def test_a_handler_may_end_a_wait(make_pool, monkeypatch):
    def ring(*_):
        raise TimeoutError("rung")

    before = signal.signal(signal.SIGALRM, ring)
    pool = make_pool(MIB)
    with pool.acquire(MIB), Stager("cpu", pool=pool, timeout=5) as stager:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match=r"^rung$"):
            stager.to_device(torch.zeros(MIB, dtype=torch.uint8))
    signal.signal(signal.SIGALRM, before)


# -- the pool


@quietly
def test_a_refused_request_raises_and_frees_nothing(walled):
    memory, pool = walled(700)
    pool.acquire(200).release()
    with pytest.raises(MemoryError, match="refused 640"):
        pool.acquire(600)
    with pytest.raises(
        MemoryError, match=r"refused before: requested 600 B.*refused 640; .*ask for less"
    ):
        pool.acquire(600)
    assert (memory.refusals, memory.deallocations) == (1, 0)
    pool.acquire(300).release()  # a smaller request


def test_a_refused_pool_goes_on_and_warns_once(walled, background):
    memory, pool = walled(500)
    lease = pool.acquire(400)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        waiter = background(pool.acquire, 400)
        wait_until(lambda: pool.stats().waits == 1)
        assert stays_blocked(waiter)
        lease.release()
        outcome(waiter).release()
        with pool.acquire(400), pytest.raises(AcquireTimeoutError):
            pool.acquire(400, timeout=0)
    (one,) = told
    assert one.category is StagingWarning
    assert "pool cannot grow by 416 B, and goes on with the slabs that it has" in str(one.message)
    assert "refused 416; " in str(one.message)
    assert memory.refusals == 1


def test_a_refusal_is_retried_later_or_by_reserve(walled, monkeypatch):
    memory, pool = walled(500)
    with pytest.raises(MemoryError):
        pool.acquire(600)
    memory.wall = 1000
    with pytest.raises(MemoryError):
        pool.acquire(600)
    pool.reserve(600)
    pool.acquire(600).release()
    pool.trim()
    memory.wall = 500
    monkeypatch.setattr("pinstage._pool._growth.RETRY_SECONDS", 0.0)
    with pytest.raises(MemoryError):
        pool.acquire(600)
    memory.wall = 1000
    pool.acquire(600).release()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"proc/meminfo": "MemAvailable: 2 kB\n"},
            r"2.00 KiB left (memory available on this machine): free some",
        ),
        ({"proc/meminfo": "MemAvailable: 999999999 kB\n"}, r"free page-locked memory elsewhere"),
        (
            {"proc/sys/kernel/osrelease": "5.15.0-microsoft-standard-WSL2\n"},
            r"WSL2 page-locks about 1.00 GiB",
        ),
    ],
)
def test_the_remedy_names_the_binding_limit(tree, files, text, monkeypatch):
    monkeypatch.setattr("pinstage._host.locked_limit", lambda root: None)
    assert text in remedy(4096, tree(files))


# -- a stager


def test_an_oversized_batch_goes_through_a_smaller_slab(walled_stager):
    stager = walled_stager(3 * MIB)
    memory = stager.pool.memory
    batch = {
        "a": torch.randn(5, 1000, 777),
        "b": [torch.arange(100_003), "text"],
        "c": torch.randn(300, 400).t(),
    }
    with pytest.warns(
        StagingWarning,
        match=r"page-locking of 16.04 MiB was refused, the batch is sent in parts.*refused 18874368; .* is shown once",
    ):
        got = stager.to_device(batch)
    assert_same(batch, got)
    before = memory.refusals
    assert_same(batch, stager.to_device(batch))
    assert memory.refusals == before, "what was refused is not asked for at each batch"
    stats = stager.stats()
    assert (stats.fallback_batches, stats.batches) == (2, 2)
    assert stats.copies > 8
    assert stats.pool.held_bytes <= 3 * MIB


@quietly
def test_pageable_memory_serves_where_all_is_refused(walled_stager):
    stager = walled_stager(0)
    batch = torch.randn(3 * MIB)
    assert_same(batch, stager.to_device(batch))
    assert_same(batch, stager.to_host(batch))
    assert (stager.stats().fallback_batches, stager.pool.stats().held_bytes) == (2, 0)


@pytest.mark.usefixtures("nothing_said")
def test_pageable_memory_is_said_once_in_a_process(walled_stager):
    stager = walled_stager(0)
    with pytest.warns(StagingWarning) as told:
        list(map(stager.to_device, [torch.ones(1000)] * 3))
    assert [str(one.message).partition(":")[0] for one in told] == [
        "page-locking of 3.91 KiB was refused, the batch is sent in parts through a smaller slab",
        "a stager falls back to pageable memory, which is slow",
    ]


@quietly
def test_a_part_isn_t_overwritten_before_its_copy(walled_stager, background):
    stager = walled_stager(MIB)
    target = use_target(stager, HeldTarget())
    staging = background(stager.stage, torch.arange(MIB))
    wait_until(lambda: target.copies == 2)  # both parts of the slab
    assert stays_blocked(staging)
    assert target.copies == 2
    target.stream.finish()
    assert_same(torch.arange(MIB), outcome(staging).wait())


@quietly
@given(batch=batches(), size=st.sampled_from([16, 48, 1024]))
# A piece of it is dense.
@example(batch=torch.arange(400).as_strided((2, 3, 4), (100, 1, 3)), size=48)
def test_the_parts_of_a_batch_are_its_bytes(batch, size):
    parts = take_apart(batch)
    whole, pieced = (torch.zeros(parts.table.nbytes, dtype=torch.uint8) for _ in range(2))
    pack(parts, whole)
    for start, leaves in windows(parts, size):
        window = take_apart(leaves)
        assert window.table.nbytes <= size
        pack(window, pieced[start : start + window.table.nbytes])
    assert torch.equal(pieced, whole)


@quietly
@pytest.mark.parametrize("kind", [RegisteredMemory, HostAllocMemory])
def test_many_refusals_lose_nothing(kind, cuda, monkeypatch):
    monkeypatch.setattr("pinstage._pool._growth.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("pinstage._stage._host_slabs.LEAST_SLAB_BYTES", 4096)
    # It reads files, 10,000 times.
    monkeypatch.setattr("pinstage._pool._growth.remedy", lambda nbytes: "")
    chance = random.Random(17)
    call = "cudaHostRegister" if kind is RegisteredMemory else "cudaHostAlloc"
    noise = torch.randint(256, (200_000,), dtype=torch.uint8)
    refusals = 0
    with (
        SlabPool("64MiB", memory=kind(0)) as pool,
        Stager("cpu", pool=pool, pack_threads=1) as stager,
    ):
        while refusals < REFUSALS:
            start = chance.randrange(150_000)
            batch = noise[start : start + chance.choice([1000, 20_000, 50_000])]
            times = chance.choice([0, 1, 2, 12, 200])
            cuda.refuse(call, chance.choice([1, 2]), times)
            for _ in range(1 + times // 4):
                # Torch would wake its threads for it.
                assert (stager.to_device(batch).numpy() == batch.numpy()).all()
                if chance.random() < 0.5:
                    pool.trim()
            refusals += times - cuda.refuse(call, 0, 0)
        assert pool.stats().leased_slabs == 0
    assert stager.stats().fallback_batches > REFUSALS // 20


@quietly
def test_the_cap_limits_pageable_slabs_too(walled):
    memory, pool = walled(500, max_bytes=1000)
    slabs = HostSlabs(pool, "one", None)
    leases = [slabs.lease_now(400), HostSlabs(pool, "another", None).lease_now(400)]
    assert memory.live_bytes == pool.stats().held_bytes == leases[0].capacity
    assert slabs.lease_now(400) is None
    for lease in leases:
        lease.release()
    assert pool.stats().leased_bytes == 0


def test_a_closed_pool_frees_pageable_slabs(walled):
    _, pool = walled(0)
    with pytest.warns(StagingWarning, match="page-locking of 400 B was refused, pageable memory"):
        lease = HostSlabs(pool, "one", None).lease_now(400)
    (pageable,) = state_of(pool).pageable.values()
    lease.release()
    pool.close()
    assert pageable.closed
    assert pageable.stats().held_bytes == 0


def test_pageable_memory_is_refused_by_nobody(cuda):
    with SlabPool("1MiB", memory=PageableMemory()) as pool:
        pool.acquire(1000).release()
    assert cuda.calls == []
