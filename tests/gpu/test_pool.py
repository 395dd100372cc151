"""Leases by hand on the device: a slab isn't leased again while work that began in its block still
uses it.
"""

import pytest
import torch
from latch import Latch

import pinstage as ps
from pinstage.errors import AcquireTimeoutError, LeaseError

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PATIENCE_SECONDS = 20


@pytest.fixture
def pool(cuda_device):
    """A pool with room for a single slab, already allocated: freeing it would wait for a held
    stream.
    """
    with ps.SlabPool(MIB, memory=ps.memory.RegisteredMemory(cuda_device)) as pool:
        pool.reserve(MIB)
        yield pool


@pytest.fixture
def there(cuda_device):
    """A device tensor that slabs are copied to. The kernel that compares it with a number is
    loaded.
    """
    there = torch.zeros(MIB, dtype=torch.uint8, device=cuda_device)
    assert holds(there, 0)
    return there


def holds(there, number):
    torch.cuda.synchronize(there.device)
    return bool((there == number).all())


def assert_is_out(pool):
    with pytest.raises(AcquireTimeoutError):
        pool.acquire(MIB, timeout=0)


def overwrite(pool):
    """Write to the slab as soon as it is leased."""
    with pool.acquire(MIB, timeout=PATIENCE_SECONDS) as lease:
        lease.tensor().fill_(9)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "another current stream"])
def test_slabs_wait_for_copies_begun_in_the_block(cuda_device, pool, there, latch, side):
    stream = torch.cuda.Stream(cuda_device) if side else torch.cuda.default_stream(cuda_device)
    with latch, torch.cuda.stream(stream):
        latch.hold(stream)
        with pool.acquire(MIB) as lease:
            lease.tensor().fill_(7)
            there.copy_(lease.tensor(), non_blocking=True)
        assert pool.stats().in_flight_slabs == 1
        assert_is_out(pool)
    overwrite(pool)
    assert holds(there, 7)


def test_slabs_wait_for_copies_of_failed_blocks(cuda_device, pool, there, latch):
    def copy_and_fail():
        with pool.acquire(MIB) as lease:
            there.copy_(lease.tensor().fill_(7), non_blocking=True)
            raise KeyError

    with latch:
        latch.hold(torch.cuda.current_stream(cuda_device))
        with pytest.raises(KeyError):
            copy_and_fail()
        assert_is_out(pool)
    overwrite(pool)
    assert holds(there, 7)


def test_a_guard_holds_the_slab_for_another_stream(cuda_device, pool, there, latch):
    stream = torch.cuda.Stream(cuda_device)
    with latch:
        latch.hold(stream)
        with pool.acquire(MIB) as lease:
            lease.tensor().fill_(7)
            with torch.cuda.stream(stream):
                there.copy_(lease.tensor(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
            lease.guard(event)
        torch.cuda.current_stream(cuda_device).synchronize()
        assert_is_out(pool)
    overwrite(pool)
    assert holds(there, 7)


def test_slabs_are_returned_when_the_work_is_done(cuda_device, pool, there):
    for number in range(50):
        with pool.acquire(MIB, timeout=PATIENCE_SECONDS) as lease:
            there.copy_(lease.tensor().fill_(number), non_blocking=True)
        assert holds(there, number)
    stats = pool.stats()
    assert (stats.free_slabs, stats.total_held_slabs) == (1, 1)


def test_pageable_memory_is_free_after_the_block(cuda_device, latch):
    with ps.SlabPool(MIB, memory=ps.memory.PageableMemory()) as pool, latch:
        latch.hold(torch.cuda.current_stream(cuda_device))
        with pool.acquire(MIB):
            pass
        assert pool.stats().free_slabs == 1


def test_a_block_ending_in_capture_keeps_its_slab(cuda_device, pool, there):
    graph, lease = torch.cuda.CUDAGraph(), pool.acquire(MIB)
    lease.tensor().fill_(7)
    there.copy_(lease.tensor(), non_blocking=True)
    assert holds(there, 7)
    with (
        torch.cuda.graph(graph),
        pytest.raises(LeaseError, match=r"captures a graph.*release\(after=event\)"),
        lease,
    ):
        there.copy_(lease.tensor(), non_blocking=True)
    assert not lease.released
    assert pool.stats().leased_slabs == 1
    assert_is_out(pool)
    lease.tensor().fill_(8)
    graph.replay()
    event = torch.cuda.Event()
    event.record()
    lease.release(after=event)
    assert holds(there, 8)
    overwrite(pool)
    assert pool.stats().held_slabs == 1


def test_an_error_in_a_capture_is_not_masked(cuda_device, pool, there):
    lease, done = pool.acquire(MIB), []

    def capture():
        with lease:
            there.copy_(lease.tensor(), non_blocking=True)
            raise KeyError

    there.copy_(lease.tensor().fill_(7), non_blocking=True)
    torch.cuda.synchronize(cuda_device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(KeyError) as raised:
            capture()
        done.append(raised.value.__notes__)
    assert "release(after=event)" in done[0][0]
    assert pool.stats().leased_slabs == 1
    lease.release()


def test_copies_to_two_devices_are_both_waited_for(two_devices, pool):
    targets = [torch.zeros(MIB, dtype=torch.uint8, device=device) for device in two_devices]
    assert all(holds(there, 0) for there in targets)
    for held in two_devices:
        with Latch(held) as latch:
            latch.hold(torch.cuda.current_stream(held))
            with pool.acquire(MIB, timeout=PATIENCE_SECONDS) as lease:
                lease.tensor().fill_(7)
                for there in targets:
                    there.copy_(lease.tensor(), non_blocking=True)
            torch.cuda.current_stream(two_devices[1 - held.index]).synchronize()
            assert_is_out(pool)
        overwrite(pool)
        assert all(holds(there, 7) for there in targets)


@pytest.mark.parametrize(
    "kind", [ps.memory.RegisteredMemory, ps.memory.SharedMemory, ps.memory.HostAllocMemory]
)
def test_a_large_slab_is_pinned_in_the_background(cuda_device, kind):
    nbytes = 320 * MIB
    with ps.SlabPool("1GiB", memory=kind(cuda_device)) as pool:
        fence = pool.reserve(nbytes, background=True)
        busy = torch.ones(1024, 1024, device=cuda_device)
        for _ in range(20):  # other processes may use the device
            busy = busy @ busy / 1024
        fence.synchronize()
        assert fence.query()
        pool.freeze()
        with pool.acquire(nbytes, timeout=0) as lease:
            assert lease.tensor().is_pinned()
            lease.tensor()[-1] = 7
            there = lease.tensor().to(cuda_device, non_blocking=True)
        assert int(there[-1]) == 7
        assert pool.stats().misses == 0
    assert (busy == 1).all()
