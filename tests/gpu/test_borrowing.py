"""Batches that are already page-locked: they are not packed, and no memory is reused before its
copy is done.
"""

import gc

import pytest
import torch

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def pinned(value, nbytes=MIB):
    return torch.full((nbytes,), value, dtype=torch.uint8).pin_memory()


def test_page_locked_leaves_and_others_arrive(borrowing):
    with borrowing.pool.acquire(MIB) as lease:
        batch = [
            pinned(1),
            torch.full((MIB // 2,), 2, dtype=torch.uint8),
            torch.arange(7),
            lease.tensor(MIB, torch.uint8),
        ]
        batch[3].fill_(4)
        before = borrowing.stats().pool.held_bytes
        transfer = borrowing.stage(batch)
        assert transfer.copies == 4
        packed = ps.Layout.of(batch[1:3]).nbytes
        assert packed <= borrowing.stats().pool.held_bytes - before < MIB
        for leaf, staged in zip(batch, transfer.wait(), strict=True):
            assert torch.equal(leaf, staged.cpu())


def test_a_dropped_pinned_tensor_lives_until_its_copy(borrowing, latch):
    borrowing.to_device([pinned(0)])
    torch.cuda.synchronize()
    tensor = pinned(1)
    address = tensor.data_ptr()
    latch.hold(torch.cuda.current_stream())
    latch.hold(borrowing._target.stream)
    staged = borrowing.to_device([tensor])
    del tensor
    gc.collect()
    others = [pinned(9) for _ in range(8)]
    assert address not in [other.data_ptr() for other in others]
    latch.open()
    assert (staged[0] == 1).all()


def test_a_lease_is_sent_directly_and_then_returned(cuda_device, latch):
    batch = {"x": torch.randn(1000), "name": "a", "y": torch.arange(3)}
    layout = ps.Layout.of(batch)
    with (
        ps.SlabPool(max_bytes="1MiB") as pool,
        ps.Stager(cuda_device, pool=pool) as stager,
        latch,
    ):
        stager.to_device(batch)
        torch.cuda.synchronize()
        lease = pool.acquire(layout.nbytes)
        layout.pack(batch, lease.tensor())
        latch.hold(stager._target.stream)
        transfer = stager.stage_lease(lease, layout, layout.others(batch))
        assert lease.released
        assert not transfer.query()
        assert pool.stats().in_flight_slabs == 1
        latch.open()
        staged = transfer.wait()
        torch.cuda.synchronize()
        assert pool.stats().in_flight_slabs == 0
        assert staged["name"] == "a"
        assert all(torch.equal(batch[key], staged[key].cpu()) for key in "xy")


# -- page-locked leaves that are read at the call --------------------------------------------------


@pytest.mark.parametrize(
    ("leaves", "nbytes"), [(2, 40 << 10), (8, MIB), (12, 64 << 10), (3, 16 * MIB)]
)
@pytest.mark.parametrize("is_busy", [False, True])
def test_sources_may_be_overwritten_after_the_call(cuda_device, leaves, nbytes, is_busy):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        for value in range(1, 8):
            batch = [pinned(value, nbytes) for _ in range(leaves)]
            if is_busy:
                torch.cuda._sleep(20_000_000)
            staged = stager.to_device(batch)
            for leaf in batch:
                leaf.fill_(99)
            assert all((tensor == value).all() for tensor in staged)
        assert stager.stats().pool.peak_held_bytes == 0


def test_a_call_waits_for_no_other_stream(cuda_device):
    """torch hands out its streams in turn, so 64 of them are all that it has."""
    streams = [torch.cuda.Stream(cuda_device) for _ in range(64)]
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        batch = [pinned(1), pinned(2)]
        stager.to_device(batch)
        torch.cuda.synchronize()
        for stream in {*streams, torch.cuda.current_stream(cuda_device)}:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(400_000_000)
        began = torch.cuda.Event()
        began.record()
        transfer = stager.stage(batch)
        assert transfer.query()
        assert not began.query()
        assert [int(tensor[0]) for tensor in transfer.wait()] == [1, 2]


def test_later_stagers_use_earlier_streams(cuda_device):
    found = set()
    for _ in range(5):
        with ps.Stager(cuda_device, max_bytes="1MiB") as stager:
            found.add(stager._target.stream.cuda_stream)
        del stager
        gc.collect()
    assert len(found) <= 2


def test_results_larger_than_the_cap_arrive(cuda_device):
    tree = [torch.randint(0, 255, (n,), dtype=torch.uint8, device=cuda_device) for n in (3, MIB)]
    tree += [torch.arange(20 * MIB, dtype=torch.int32, device=cuda_device)]
    with ps.Stager(cuda_device, max_bytes="8MiB") as stager:
        found = stager.to_host(tree)
        assert all(
            torch.equal(mine, theirs.cpu()) for mine, theirs in zip(found, tree, strict=True)
        )
        # At most half of the cap, and a small slab.
        assert stager.stats().pool.peak_held_bytes <= 4 * MIB + (64 << 10)
