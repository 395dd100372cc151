"""Batches that are already page-locked: leaves are copied in place, and leases are sent unchanged.

Nothing is page-locked without a GPU, so a driver made for the tests says what is, and copies; the
extension asks it as it asks CUDA's.
"""

import gc
import threading
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from doubles import (
    HeldTarget,
    ManualEvent,
    claim_in_child,
    interrupts,
    use_target,
    wait_until,
)
from fake_driver import Locking
from strategies import assert_same, tensor_of

from pinstage import Layout, Stager
from pinstage._reaper import reaper
from pinstage._stage._transfer import Kept
from pinstage.errors import LeaseError

LARGE = 32 * 1024
"""From this size on, page-locked leaves aren't packed."""


@pytest.fixture(params=[False, True], ids=["read at the call", "borrowed"])
def borrows(request):
    return request.param


@pytest.fixture
def device(driver):
    return Locking()


@pytest.fixture
def locking(borrows, device):
    """A stager, which borrows or not."""
    with Stager("cpu", max_bytes="64MiB", borrow_pinned=borrows) as stager:
        use_target(stager, device).event.finish()
        yield stager


@pytest.fixture
def borrowing(device):
    with Stager("cpu", max_bytes="64MiB", borrow_pinned=True) as stager:
        use_target(stager, device)
        yield stager


def large(seed, dtype=torch.float32):
    return tensor_of(dtype, (LARGE // dtype.itemsize + 5,), seed)


def staged(stager, driver, batch):
    """Stage a batch; return its transfer and the result."""
    transfer = stager.stage(batch)
    driver.go_on()
    return transfer, transfer.wait()


@pytest.mark.parametrize("own_storage", ["auto", True, False])
@pytest.mark.parametrize("which", [(0,), (1,), (3,), (0, 1), (1, 3), (0, 1, 3)])
def test_page_locked_and_packed_leaves_arrive_in_place(driver, borrows, which, own_storage):
    batch = [
        large(1),
        large(2, torch.int16),
        tensor_of(torch.uint8, (7,), 3),
        large(4),
        tensor_of(torch.bool, (3,), 5),
    ]
    driver.lock(*(batch[i] for i in which))
    with Stager("cpu", max_bytes="64MiB", borrow_pinned=borrows, own_storage=own_storage) as stager:
        target = use_target(stager, Locking())
        target.event.finish()
        transfer, result = staged(stager, driver, batch)
        assert target.calls == [(len(which), not borrows)]
        assert_same(batch, result)
        stats = stager.stats()
        rest = [leaf for i, leaf in enumerate(batch) if i not in which]
        with stager.pool.acquire(Layout.of(rest).nbytes) as lease:
            assert stats.pool.held_bytes == lease.capacity
        assert transfer.nbytes == Layout.of(batch).nbytes
        assert stats.copies == transfer.copies >= len(which) + 1


def test_large_leaves_around_page_locked_ones_are_packed(driver, borrows, locking):
    batch = [
        tensor_of(torch.uint8, (3 << 20,), 1),
        large(2),
        tensor_of(torch.uint8, (5 << 20,), 3),
        large(4),
    ]
    driver.lock(batch[1], batch[3])
    borrows or driver.lock(batch[0])  # the first three are asked
    assert_same(batch, staged(locking, driver, batch)[1])


def test_a_fully_page_locked_batch_needs_no_slab(driver, locking):
    batch = {"x": large(1), "y": [large(2)]}
    driver.lock(batch["x"], batch["y"][0])
    transfer, result = staged(locking, driver, batch)
    assert transfer.copies == 2
    assert_same(batch, result)
    assert locking.stats().pool.hits + locking.stats().pool.misses == 0


def test_unborrowed_leaves_are_read_at_the_call(driver, borrows, locking):
    batch = [*(large(i, torch.int32) for i in (1, 2)), tensor_of(torch.uint8, (9,), 3)]
    driver.lock(*batch[:2])
    before = [leaf.clone() for leaf in batch]
    transfer = locking.stage(batch)
    for leaf in batch:
        leaf.zero_()
    driver.go_on()
    is_read = [torch.equal(a, b) for a, b in zip(before, transfer.wait(), strict=True)]
    assert is_read == [not borrows, not borrows, True]


def test_few_page_locked_leaves_need_no_table(driver, device, borrowing):
    batch = [large(1), tensor_of(torch.int64, (3,), 2), "name", large(3)]
    driver.lock(batch[0], batch[3])
    result = borrowing.to_device(batch)
    assert not device.calls
    assert_same(batch, result)
    assert driver.questions == 4
    many = [tensor_of(torch.uint8, (1 << 20,), i) for i in range(8)]
    driver.lock(*many)
    assert_same(many, borrowing.to_device(many))
    assert not device.calls
    assert borrowing.stats().copies == 3 + 8
    assert borrowing.stats().pool.hits + borrowing.stats().pool.misses == 0


def test_staging_few_page_locked_leaves_needs_no_table(driver, borrowing):
    device = use_target(borrowing, Locking(stages_few=True))
    batch = [large(1), tensor_of(torch.int64, (3,), 2), "name", large(3)]
    driver.lock(batch[0], batch[3])
    transfer = borrowing.stage(batch)
    assert (transfer.copies, transfer.blocks, transfer.query()) == (3, 3, False)
    device.event.finish()
    assert transfer.query()
    assert_same(batch, transfer.wait())
    assert not device.calls
    too_large = [tensor_of(torch.uint8, (1 << 19,), i) for i in range(3)]
    driver.lock(*too_large)
    transfer, result = staged(borrowing, driver, too_large)
    assert_same(too_large, result)
    assert device.calls == [(3, False)]


def test_small_and_strided_leaves_are_packed(driver, device, locking):
    small = [tensor_of(torch.uint8, (LARGE - 1,), i) for i in range(9)]
    strided = tensor_of(torch.uint8, (LARGE, 2), 2)[:, 0]
    conjugated = tensor_of(torch.complex64, (LARGE,), 4).conj()
    batch = [*small, strided, conjugated]
    driver.lock(*batch)
    assert_same(batch, staged(locking, driver, batch)[1])
    assert not device.calls


def test_arrays_permuted_tensors_and_aliases_are_sent_directly(driver, locking):
    array = np.arange(LARGE, dtype=np.int32)
    permuted = tensor_of(torch.float32, (64, 32, 64), 1).permute(2, 0, 1)
    driver.lock(array, permuted)
    batch = [array, permuted, permuted]
    transfer, result = staged(locking, driver, batch)
    assert transfer.copies == 2
    assert_same(batch, result)
    assert result[1] is result[2]


def test_a_leaf_with_a_hole_is_packed(driver, device, locking):
    batch = [large(1), tensor_of(torch.uint8, (1 << 20,), 2), large(3)]
    driver.lock(batch[0])
    driver.lock_range(batch[1].data_ptr(), 4096)
    driver.lock_range(batch[1].data_ptr() + (1 << 20) - 4096, 4096)
    driver.lock_range(batch[2].data_ptr(), batch[2].nbytes - 1)
    assert_same(batch, staged(locking, driver, batch)[1])
    assert [copies for copies, _ in device.calls] == [1]


def test_a_refused_call_packs_its_leaves(driver, device, locking):
    batch = [large(1), tensor_of(torch.uint8, (2 << 20,), 2), large(3)]
    driver.lock(*batch)
    driver.refuse()
    transfer = locking.stage(batch)
    assert [copies for copies, _ in device.calls] == [-1]
    assert_same(batch, transfer.wait())
    assert transfer.nbytes == Layout.of(batch).nbytes
    assert locking.stats().pool.misses == 1


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors:pinstage.errors.StagingWarning")
def test_a_refused_call_moves_others_once(driver, locking):
    class Movable:
        def __init__(self):
            self.tensor, self.moves = torch.ones(3), 0

        def to(self, device):
            self.moves += 1

    batch = [large(1), Movable(), large(2)]
    driver.lock(batch[0], batch[2])
    driver.refuse()
    staged = locking.stage(batch).wait()
    assert [copies for copies, _ in locking._target.calls] == [-1]
    assert_same([batch[0], batch[2]], [staged[0], staged[2]])
    assert staged[1].moves == 1


def test_three_leaves_are_asked_at_first(driver, device, borrows, locking):
    batch = [large(i) for i in range(20)]
    locking.stage(batch)
    asked = driver.questions
    assert asked == (2 * 20 if borrows else 2 * 3)
    driver.lock(batch[2], batch[19])
    assert_same(batch, staged(locking, driver, batch)[1])
    assert device.calls[-1][0] == 2


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


def test_a_call_drops_earlier_lenders(driver, device, borrowing, monkeypatch):
    monkeypatch.setattr(reaper, "tasks", SimpleQueue())  # nothing else drops them
    monkeypatch.setattr("pinstage._stage._sender.kept", Kept())
    events, lenders = [ManualEvent() for _ in range(3)], []
    for device.event in events:
        (leaf,) = driver.lock(large(1))
        borrowing.to_device([leaf])
        lenders.append(weakref.ref(leaf))
    del leaf
    for event, alive in ((events[1], 3), (events[0], 1)):
        event.finish()
        device.event = events[2]
        borrowing.to_device(driver.lock(large(1)))
        assert [lender() is not None for lender in lenders].count(True) == alive
    assert lenders[2]() is not None


def test_a_packed_call_drops_earlier_lenders(driver, device, borrowing, monkeypatch):
    monkeypatch.setattr(reaper, "tasks", SimpleQueue())
    monkeypatch.setattr("pinstage._stage._sender.kept", Kept())
    event = device.event = ManualEvent()
    batches = [driver.lock(*map(large, range(12))) for _ in range(2)]
    died = weakref.ref(batches[0][-1])
    borrowing.to_device(list(batches.pop(0)))
    assert died() is not None
    event.finish()
    device.event = ManualEvent()
    borrowing.to_device(list(batches.pop()))
    assert died() is None


def test_to_keep_more_asks_no_event(monkeypatch):
    """A finaliser may do it in the middle of a capture, which asking an event may invalidate."""
    monkeypatch.setattr(reaper, "tasks", SimpleQueue())
    kept, event = Kept(), ManualEvent()
    event.finish()
    for _ in range(3):
        kept.until(event, [torch.ones(1)])
    assert (event.queries, len(kept.things)) == (0, 3)
    kept.drop_oldest()
    assert not kept.things


def test_interrupts_drop_no_lender_in_flight(monkeypatch):
    """Even if another thread has dropped the oldest one in between."""
    monkeypatch.setattr(reaper, "tasks", SimpleQueue())  # nothing else drops them

    class Done(ManualEvent):
        def query(self):
            if asked and not self.queries:
                self.queries = 1
                kept.drop_oldest()
            return bool(asked)

    for run in interrupts("_transfer.py", at_least=3):
        kept, asked, lender = Kept(), [], torch.ones(1)
        kept.until(Done(), [torch.ones(1)])
        kept.until(ManualEvent(), [lender])
        lender = weakref.ref(lender)
        asked.append(True)
        run(kept.drop_oldest)
        assert lender() is not None


def test_lenders_are_kept_until_their_copy_is_done(driver, device, borrowing):
    for count in (1, 12):
        batch = driver.lock(*(large(i) for i in range(count)))
        died = weakref.ref(batch[-1])
        event = device.event = ManualEvent()
        borrowing.to_device(list(batch))
        del batch
        gc.collect()
        assert died() is not None
        event.finish()
        wait_until(lambda died=died: died() is None)


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
