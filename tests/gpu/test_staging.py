"""Staging on the device: one copy, no waiting, nothing overwritten, nothing reused too early."""

import contextlib
import statistics
import timeit
from collections import Counter

import numpy as np
import pytest
import strategies
import torch
from hypothesis import HealthCheck, given, settings
from latch import Latch
from profiled import names_of
from steady import long_run

import pinstage as ps
from pinstage._stage._at_once import AT_ONCE_BYTES

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def nested_batch(leaves=1000, elements=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "samples": [
            {
                "x": torch.randn(elements, generator=generator),
                "y": torch.randn(elements, generator=generator),
            }
            for _ in range(leaves // 2)
        ]
    }


def copy_stream(stager):
    return stager._target.stream  # for the tests that hold this stream


def sending_stream(stager, nbytes):
    return torch.cuda.current_stream() if nbytes < MIB else copy_stream(stager)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=strategies.batches())
def test_any_nested_batch_arrives_bit_for_bit(cuda_device, stager, batch):
    strategies.assert_same(batch, stager.to_device(batch), cuda_device)


@pytest.mark.parametrize("own_storage", ["auto", False])
def test_a_thousand_leaves_are_one_copy_per_block(cuda_device, own_storage):
    with ps.Stager(cuda_device, max_bytes="64MiB", own_storage=own_storage) as stager:
        batch = nested_batch()
        stager.to_device(batch)
        blocks = stager.stats().blocks
        torch.cuda.synchronize()
        events = names_of(lambda: stager.to_device(batch))
        copies = [name for name in events if name.startswith("Memcpy HtoD")]
        assert copies == ["Memcpy HtoD (Pinned -> Device)"] * blocks
        assert blocks == (
            1
            if own_storage is False
            else len({leaf.dtype for leaf in batch["samples"][0].values()})
        )


def test_the_steady_state_neither_allocates_nor_synchronises(stager):
    batches = [nested_batch(elements=n) for n in (16, 50, 64)]
    for batch in batches * 3:
        stager.to_device(batch)
    torch.cuda.synchronize()
    stager.pool.freeze()

    def steps():
        for batch in batches * 5:
            stager.to_device(batch)

    of_the_profiler = Counter(names_of(lambda: None, final_synchronize=False))
    events = Counter(names_of(steps, final_synchronize=False)) - of_the_profiler
    forbidden = (
        "Synchronize",
        "HostAlloc",
        "FreeHost",
        "HostRegister",
        "HostUnregister",
        "cudaMalloc",
        "cudaFree",
    )
    assert {name for name in events if any(word in name for word in forbidden)} == set()
    assert events["Memcpy HtoD (Pinned -> Device)"] == 10
    assert events["Memcpy HtoD (Pageable -> Device)"] == 5  # the batches of 64,000 bytes


def test_a_trace_shows_violations_of_the_steady_state(cuda_device):
    def pin_and_free():
        with ps.SlabPool("2MiB", memory=ps.memory.RegisteredMemory(cuda_device)) as pool:
            pool.reserve("1MiB")
        with ps.SlabPool("2MiB", memory=ps.memory.HostAllocMemory(cuda_device)) as pool:
            pool.reserve("1MiB")

    pin_and_free()
    seen = names_of(pin_and_free)
    for call in ("HostRegister", "HostUnregister", "HostAlloc", "FreeHost", "DeviceSynchronize"):
        assert any(call in name for name in seen), (call, sorted(set(seen)))


@pytest.mark.usefixtures("slabs_for_all")
def test_random_batches_allocate_nothing_and_leave_nothing(cuda_device):
    before, after = long_run(cuda_device, 10_000)
    assert after.pool.misses == before.pool.misses
    assert after.pool.total_held_slabs == before.pool.total_held_slabs
    assert after.pool.hits - before.pool.hits == 10_000
    # The step in which torch's allocator grows.
    assert after.device_bytes - before.device_bytes <= 2 * MIB
    assert after.resident_bytes - before.resident_bytes < 16 * MIB


def test_stage_returns_while_the_copy_stream_is_held(stager, latch):
    batch = nested_batch(elements=300)
    stager.to_device(batch)
    latch.hold(copy_stream(stager))
    transfer = stager.stage(batch)
    staged = transfer.wait()
    assert not transfer.query()
    latch.open()
    transfer.synchronize()
    assert transfer.query()
    strategies.assert_same(batch, staged, stager.device)


def stage_and_overwrite(stager, latch):
    """The scenario that matters most: try to get and overwrite a slab whose copy has not
    started.
    """
    original = torch.arange(MIB // 2, dtype=torch.int32)
    latch.hold(copy_stream(stager))
    transfer = stager.stage({"x": original})
    with (
        contextlib.suppress(ps.errors.AcquireTimeoutError),
        stager.pool.acquire(2 * MIB, timeout=0.2) as lease,
    ):
        lease.tensor().fill_(0xFF)
    latch.open()
    return original, transfer.wait()["x"].cpu()


def test_a_slab_is_not_overwritten_before_its_copy(cuda_device, latch):
    with ps.Stager(cuda_device, max_bytes=2 * MIB) as stager, latch:
        original, arrived = stage_and_overwrite(stager, latch)
        assert torch.equal(arrived, original)


def test_batches_are_corrupted_without_the_event_gate(cuda_device, latch, monkeypatch):
    release = ps.Lease.release

    def release_at_once(lease, *, after=None):
        release(lease)

    monkeypatch.setattr(ps.Lease, "release", release_at_once)
    with ps.Stager(cuda_device, max_bytes=2 * MIB) as stager, latch:
        original, arrived = stage_and_overwrite(stager, latch)
        assert not torch.equal(arrived, original)
        assert (arrived == -1).all()


def test_the_copy_s_event_returns_the_slab(stager, latch):
    latch.hold(copy_stream(stager))
    transfer = stager.stage({"x": torch.ones(MIB)})
    stats = stager.pool.stats()
    assert (stats.leased_bytes, stats.free_bytes) == (0, 0)
    assert stats.in_flight_bytes == stats.held_bytes >= 4 * MIB
    latch.open()
    transfer.synchronize()
    stats = stager.pool.stats()
    assert (stats.in_flight_bytes, stats.free_bytes) == (0, stats.held_bytes)


def test_events_are_reused_except_those_of_live_transfers(cuda_device, stager, latch):
    batch = {"x": torch.ones(MIB)}
    used = set()
    for _ in range(50):
        transfer = stager.stage(batch)
        used.add(id(transfer._sent[0].event))
        transfer.synchronize()
        del transfer
    assert len(used) < 9  # three of these mark how far the host runs ahead
    latch.hold(copy_stream(stager))
    waiting = [stager.stage(batch) for _ in range(3)]
    assert len({id(transfer._sent[0].event) for transfer in waiting}) == 3
    latch.open()
    for transfer in waiting:
        transfer.synchronize()
    with Latch(cuda_device) as again:
        again.hold(copy_stream(stager))
        later = stager.stage(batch)
        assert [transfer.query() for transfer in (*waiting, later)] == [True, True, True, False]


@pytest.mark.parametrize("elements", [1000, MIB])
def test_any_consumer_stream_sees_the_whole_batch(cuda_device, stager, latch, elements):
    consumer = torch.cuda.Stream(cuda_device)
    stager.stage(torch.zeros(elements)).wait(consumer).clone()
    torch.cuda.synchronize()
    latch.hold(sending_stream(stager, 4 * elements))
    staged = stager.stage(torch.full((elements,), 3.0)).wait(consumer)
    with torch.cuda.stream(consumer):
        seen = staged.clone()
    assert not consumer.query()
    latch.open()
    consumer.synchronize()
    assert (seen == 3.0).all()


@pytest.mark.parametrize("elements", [1000, 4096, 100_000])
def test_the_source_may_be_changed_when_stage_returns(cuda_device, stager, latch, elements):
    source = {"t": torch.arange(elements), "n": np.arange(float(elements))}
    latch.hold(sending_stream(stager, 16 * elements))
    transfer = stager.stage(source)
    assert not transfer.query()
    source["t"].zero_()
    source["n"][:] = 0
    latch.open()
    staged = transfer.wait()
    assert torch.equal(staged["t"].cpu(), torch.arange(elements))
    assert torch.equal(staged["n"].cpu(), torch.arange(float(elements), dtype=torch.float64))


# -- batches that are copied at once


def test_thirty_small_batches_return_on_a_held_stream(cuda_device, stager, latch):
    source = torch.zeros(AT_ONCE_BYTES, dtype=torch.uint8)
    stager.to_device(source).clone()
    latch.hold(torch.cuda.current_stream(cuda_device))
    transfers = [stager.stage(source.fill_(value)) for value in range(30)]
    assert not any(transfer.query() for transfer in transfers)
    latch.open()
    assert all(bool((transfer.wait() == value).all()) for value, transfer in enumerate(transfers))


def test_unpackable_leaves_arrive_by_to_and_are_counted(cuda_device, stager):
    weight = torch.ones(3, requires_grad=True)
    batch = {
        "sparse": torch.eye(4).to_sparse(),
        "grad": weight,
        "there": torch.ones(2, device=cuda_device),
        "plain": torch.ones(5),
    }
    transfer = stager.stage(batch)
    staged = transfer.wait()
    assert (transfer.passthrough_leaves, transfer.copies) == (3, 1)
    assert torch.equal(staged["sparse"].to_dense().cpu(), torch.eye(4))
    assert staged["there"] is batch["there"]
    staged["grad"].sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))
    assert all(tensor.device == cuda_device for tensor in staged.values())
    assert (stager.stats().passthrough_leaves, stager.stats().packed_leaves) == (3, 1)


def test_device_tensors_staged_to_cpu_are_complete(cuda_device):
    with ps.Stager("cpu") as stager:
        there = torch.zeros(MIB, device=cuda_device)
        there.fill_(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)
        there.fill_(7)
        assert (stager.to_device({"x": there})["x"] == 7).all()


def test_a_very_large_batch_is_sent_in_chunks(cuda_device):
    with ps.Stager(cuda_device, max_bytes="1GiB", pack_threads=4) as stager:
        batch = {"samples": [{"x": torch.randn(MIB), "y": torch.randn(MIB + 3)} for _ in range(12)]}
        transfer = stager.stage(batch)
        strategies.assert_same(batch, transfer.wait(), stager.device)
        assert transfer.copies > 1
        assert stager.stats().copies == transfer.copies


def test_ragged_batches_arrive_intact_under_a_small_cap(cuda_device):
    random = np.random.default_rng(0)
    with ps.Stager(cuda_device, max_bytes="4MiB") as stager:
        kept = []
        for step in range(400):
            batch = [
                torch.full((int(n),), step, dtype=torch.int16) for n in random.integers(0, 9000, 50)
            ]
            kept.append((step, stager.to_device(batch)))
            if len(kept) > 8:
                number, staged = kept.pop(0)
                assert all((leaf == number).all() for leaf in staged)
        stats = stager.pool.stats()
        assert stats.peak_held_bytes <= 4 * MIB
        assert stats.leased_bytes == 0


def test_a_lease_costs_at_most_eight_pinned_tensors(cuda_device):
    def of_pool():
        lease = pool.acquire(MIB)
        lease.tensor()
        lease.release()

    def of_torch():
        torch.empty(MIB, dtype=torch.uint8, pin_memory=True)

    with ps.SlabPool(max_bytes="64MiB") as pool:
        ours, torchs = (
            [timeit.timeit(way, number=100) / 100 for _ in range(200)]
            for way in (of_pool, of_torch)
        )
    pool_time, torch_time = statistics.median(ours), statistics.median(torchs)
    assert pool_time <= 8 * torch_time, (
        f"acquire + tensor() + release took {pool_time * 1e6:.2f} us, torch {torch_time * 1e6:.2f} "
        "us"
    )
