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
