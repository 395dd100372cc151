"""Batches that are already page-locked: leaves are copied in place, and leases are sent unchanged.

Nothing is page-locked without a GPU, so a double reports some tensors as page-locked; the copies
are real.
"""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from doubles import HeldTarget, ManualEvent, claim_in_child, use_target, wait_until
from strategies import assert_same, tensor_of

from pinstage import Layout, Stager
from pinstage._pool import size_class
from pinstage._reaper import reaper
from pinstage.errors import LeaseError

LARGE = 256 * 1024


@pytest.fixture
def page_locked(monkeypatch):
    """Report some tensors as page-locked, by the addresses of their first bytes."""
    found = set()

    def pieces_of(tensor):
        return [(0, tensor.nbytes)] if tensor.data_ptr() in found else []

    monkeypatch.setattr("pinstage._stage._sender.pieces_of", pieces_of)
    return found


@pytest.fixture
def borrowing(page_locked):
    """A stager that copies large page-locked leaves from where they are."""
    with Stager("cpu", max_bytes="64MiB", borrow_pinned=True) as stager:
        yield stager


def large(seed, dtype=torch.float32):
    return tensor_of(dtype, (LARGE // dtype.itemsize + 5,), seed)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("which", [(), (0,), (1,), (3,), (0, 1), (1, 3), (0, 1, 3)])
def test_borrowed_and_packed_leaves_arrive_in_place(page_locked, borrowing, which):
    batch = [
        large(1),
        large(2, torch.int16),
        tensor_of(torch.uint8, (7,), 3),
        large(4),
        tensor_of(torch.bool, (3,), 5),
    ]
    page_locked.update(batch[i].data_ptr() for i in which)
    transfer = borrowing.stage(batch)
    assert_same(batch, transfer.wait())
    stats = borrowing.stats()
    rest = [leaf for i, leaf in enumerate(batch) if i not in which]
    assert stats.pool.held_bytes == size_class(
        Layout.of(rest).nbytes, borrowing.pool.memory.granularity
    )
    assert transfer.nbytes == Layout.of(batch).nbytes
    assert stats.copies == transfer.copies >= len(which) + 1


def test_large_leaves_around_borrowed_ones_travel_in_chunks(page_locked):
    batch = [
        tensor_of(torch.uint8, (3 << 20,), 1),
        large(2),
        tensor_of(torch.uint8, (5 << 20,), 3),
        large(4),
    ]
    page_locked.update(batch[i].data_ptr() for i in (1, 3))
    with Stager("cpu", max_bytes="64MiB", borrow_pinned=True, pack_threads=2) as stager:
        assert_same(batch, stager.to_device(batch))


def test_a_fully_page_locked_batch_needs_no_slab(page_locked, borrowing):
    batch = {"x": large(1), "y": [large(2)]}
    page_locked.update((batch["x"].data_ptr(), batch["y"][0].data_ptr()))
    transfer = borrowing.stage(batch)
    assert transfer.copies == 2
    assert_same(batch, transfer.wait())
    assert borrowing.stats().pool.hits + borrowing.stats().pool.misses == 0


def test_small_strided_and_unwanted_leaves_are_packed(page_locked, borrowing, stager):
    small, strided = (
        tensor_of(torch.uint8, (LARGE - 1,), 1),
        tensor_of(torch.uint8, (LARGE, 2), 2)[:, 0],
    )
    conjugated = tensor_of(torch.complex64, (LARGE,), 4).conj()
    batch = [small, strided, conjugated]
    page_locked.update(leaf.data_ptr() for leaf in batch)
    assert_same(batch, borrowing.to_device(batch))
    assert borrowing.stats().pool.held_bytes >= 2 * LARGE - 16 + conjugated.nbytes
    whole = large(3)
    page_locked.add(whole.data_ptr())
    stager.stage([whole])
    assert stager.stats().pool.held_bytes > LARGE


def test_arrays_permuted_tensors_and_aliases_are_borrowed(page_locked, borrowing):
    array = np.arange(LARGE, dtype=np.int32)
    permuted = tensor_of(torch.float32, (64, 32, 64), 1).permute(2, 0, 1)
    page_locked.update((array.ctypes.data, permuted.data_ptr()))
    batch = [array, permuted, permuted]
    transfer = borrowing.stage(batch)
    staged = transfer.wait()
    assert transfer.copies == 2
    assert_same(batch, staged)
    assert staged[1] is staged[2]


# -- leases that are sent unchanged ----------------------------------------------------------------


def test_a_lease_is_sent_directly_and_released(stager):
    batch = {
        "x": tensor_of(torch.float32, (4, 5), 1),
        "name": "a",
        "n": torch.nn.Parameter(torch.ones(2)),
    }
    layout = Layout.of(batch)
    lease = stager.pool.acquire(layout.nbytes)
    layout.pack(batch, lease.tensor())
    transfer = stager.stage_lease(lease, layout, layout.others(batch))
    assert lease.released
    assert (transfer.copies, transfer.passthrough_leaves) == (1, 1)
    assert_same(batch, transfer.wait())
    stats = stager.stats().pool
    assert stats.leased_slabs == 0
    assert stats.hits + stats.misses == 1  # no other slab was requested


def test_a_sent_lease_keeps_guards_and_waits(stager):
    layout = Layout.of(torch.zeros(100))
    target = use_target(stager, HeldTarget())
    lease = stager.pool.acquire(layout.nbytes)
    lease.guard(event := ManualEvent())
    stager.stage_lease(lease, layout)
    for done in (target.stream, event):
        assert stager.pool.stats().in_flight_slabs == 1
        done.finish()
    assert stager.pool.stats().free_slabs == 1


def test_a_layout_of_nothing_releases_the_lease_too(stager):
    lease = stager.pool.acquire(1)
    assert stager.stage_lease(lease, Layout.of(["text"]), ["text"]).wait() == ["text"]
    assert lease.released


def test_an_unsendable_lease_stays_the_caller_s(stager):
    layout = Layout.of([torch.zeros(100), "text"])
    with (
        stager.pool.acquire(16) as small,
        pytest.raises(ValueError, match=r"lease is too small: 16 bytes .* of 400"),
    ):
        stager.stage_lease(small, layout, ["text"])
    with stager.pool.acquire(layout.nbytes) as lease:
        with pytest.raises(TypeError, match=r"layout must be a Layout: 5; pass Layout.of\(batch\)"):
            stager.stage_lease(lease, 5)
        with pytest.raises(ValueError, match="others has the wrong length: 0 for 1 leaves"):
            stager.stage_lease(lease, layout)
        assert not lease.released
        stager.stage_lease(lease, layout, ["text"])
    with pytest.raises(LeaseError, match="already released"):
        stager.stage_lease(lease, layout, ["text"])


def test_lenders_are_kept_until_their_copy_is_done(page_locked, borrowing):
    tensor = large(1)
    page_locked.add(tensor.data_ptr())
    died = weakref.ref(tensor)
    target = use_target(borrowing, HeldTarget())
    borrowing.to_device([tensor])
    del tensor
    gc.collect()
    assert died() is not None
    target.stream.finish()
    wait_until(lambda: died() is None)


def test_a_forked_child_ends_no_waiting_copy():
    """Freeing page-locked memory may call CUDA, which aborts a forked child."""

    class Waiting:
        def reap(self):
            begun.set()
            return done.wait()

    begun, done = threading.Event(), threading.Event()
    reaper.start()
    reaper.tasks.put(Waiting())  # so that the next one stays in the queue
    begun.wait()
    leaf = torch.ones(3)
    reaper.bury(leaf)
    alive = weakref.ref(leaf)
    del leaf

    def claim():
        gc.collect()
        assert alive() is not None

    try:
        claim_in_child(claim)
    finally:
        done.set()
    wait_until(lambda: alive() is None)
