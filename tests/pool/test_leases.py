"""Leases: their views, their end, and what keeps a slab in use after that."""

import ctypes
import gc
import itertools
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import warm
from doubles import ManualEvent, PinnedMemory, calls_of, outcome
from loader_data import same

from pinstage._pool import add_guard, guard_until_release, lease_in_flight
from pinstage.errors import AcquireTimeoutError, LeaseError, UnreleasedLeaseWarning

VIEWS = {
    "tensor": lambda lease: lease.tensor(),
    "tensor of a shape": lambda lease: lease.tensor((2, 3), torch.float32),
    "numpy": lambda lease: lease.numpy(),
    "memoryview": lambda lease: lease.__buffer__(0),
}


def states(pool):
    """Return the numbers of slabs that are leased, in flight, and free."""
    stats = pool.stats()
    return stats.leased_slabs, stats.in_flight_slabs, stats.free_slabs


LEASED, IN_FLIGHT, FREE = (1, 0, 0), (0, 1, 0), (0, 0, 1)


@pytest.fixture
def full_pool(make_pool):
    """A pool with room for a single slab, so that its reuse is visible."""
    pool = make_pool(128)
    pool.reserve(128)
    return pool


# -- what a lease shows


def test_all_views_show_the_same_bytes(pool):
    with pool.acquire(100) as lease:
        tensor, array, view = lease.tensor(), lease.numpy(), lease.__buffer__(0)
        assert tensor.data_ptr() == array.ctypes.data == lease.data_ptr()
        tensor.copy_(torch.arange(100, dtype=torch.uint8))
        assert bytes(view) == bytes(range(100)) == array.tobytes()
        array[0], view[1] = 7, 8
        assert tensor[:2].tolist() == [7, 8]
        assert ctypes.string_at(lease.data_ptr(), 2) == b"\x07\x08"
        del tensor, array, view


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 6), torch.float32),
        (96, torch.uint8),
        ((2, 3, 4), torch.bfloat16),
        ((), torch.float64),
        ((96,), torch.bool),
    ],
)
def test_views_have_the_given_shape_and_dtype(pool, shape, dtype):
    with pool.acquire(96) as lease:
        view = lease.tensor(shape, dtype)
        assert view.shape == torch.empty(shape).shape
        assert (view.dtype, view.is_contiguous(), view.data_ptr()) == (
            dtype,
            True,
            lease.data_ptr(),
        )
        if dtype != torch.bfloat16:  # numpy has none
            assert same(torch.from_numpy(lease.numpy(shape, dtype)), view)
        del view


@pytest.mark.parametrize("shape", [(3, 0), 0])
def test_empty_views_ignore_the_default_device(pool, shape):
    with pool.acquire(4) as lease, torch.device("meta"):
        view = lease.tensor(shape, torch.float64)
        assert (view.shape, view.dtype) == (torch.empty(shape).shape, torch.float64)
        assert view.device.type == "cpu"


def test_a_tensor_starts_at_its_offset(pool):
    with pool.acquire(100) as lease:
        lease.numpy()[:] = range(100)
        assert lease.tensor(3, offset=97).tolist() == [97, 98, 99]
        assert lease.tensor(offset=98).tolist() == [98, 99]
        assert lease.tensor((2,), torch.int16, offset=4).data_ptr() == lease.data_ptr() + 4
        assert lease.tensor(dtype=torch.float64, offset=88).shape == (1,)
        assert lease.tensor(offset=100).shape == (0,)
        assert lease.numpy(2, np.int16, offset=4).tolist() == [0x0504, 0x0706]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": -1}, "from byte -1 of 101; pass .* an offset that is a multiple of 1"),
        ({"offset": 2, "dtype": torch.float32}, "from byte 2 of 101; .* a multiple of 4"),
        ({"offset": 102}, "0 bytes from byte 102 of 101"),
        ({"shape": -1}, "not negative"),
        ({"shape": (-1, -1)}, "not negative"),
        (
            {"shape": 26, "dtype": torch.float32},
            r"shape \[26\] and torch.float32 doesn't fit: 104 bytes from byte 0 of 101",
        ),
        ({"shape": 1, "offset": 101}, "1 bytes from byte 101 of 101"),
    ],
)
def test_a_view_outside_the_lease_is_refused(pool, arguments, message):
    with pool.acquire(101) as lease:
        assert lease.capacity >= 104
        with pytest.raises(ValueError, match=message):
            lease.tensor(**arguments)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 688")
def test_a_lease_is_a_buffer_itself(pool):
    with pool.acquire(100) as lease:
        assert memoryview(lease).nbytes == 100


def test_a_lease_shows_its_sizes_and_state(pool):
    lease = pool.acquire(100)
    assert repr(lease) == "<Lease nbytes=100 capacity=104 held>"
    assert (lease.nbytes, lease.capacity, lease.released) == (100, 104, False)
    lease.release()
    assert repr(lease) == "<Lease nbytes=100 capacity=104 released>"
    assert (lease.nbytes, lease.capacity, lease.released) == (100, 104, True)


# -- how it ends


USES = VIEWS | {
    "data_ptr": lambda lease: lease.data_ptr(),
    "guard": lambda lease: lease.guard(ManualEvent()),
    "release": lambda lease: lease.release(),
    "release after an event": lambda lease: lease.release(after=ManualEvent()),
}


@pytest.mark.parametrize("name", USES)
def test_a_released_lease_cannot_be_used(full_pool, name):
    lease = full_pool.acquire(100)
    lease.release()
    verb = name.split()[0]
    message = rf"already released: {verb}\(\) on a lease of 100 bytes; acquire a new one"
    with full_pool.acquire(100):  # the same slab
        with pytest.raises(LeaseError, match=message):
            USES[name](lease)
        assert states(full_pool) == LEASED


def test_of_two_releases_at_once_exactly_one_succeeds(pool, background):
    for _ in range(100):
        lease = pool.acquire(100)
        view = lease.tensor()
        start = threading.Barrier(2)

        def release(lease=lease, start=start):
            start.wait()
            try:
                lease.release()
            except LeaseError:
                return False
            return True

        assert sorted(
            [outcome(future) for future in [background(release), background(release)]]
        ) == [False, True]
        assert states(pool) == IN_FLIGHT
        del view
        assert states(pool) == FREE


# -- what keeps the slab out of the pool


def test_done_events_are_not_kept(full_pool):
    event = ManualEvent()
    full_pool.acquire(100).release(after=event)
    event.finish()
    full_pool.stats()
    assert sys.getrefcount(event) == 2


DERIVED = {
    "slice of a tensor": lambda lease: lease.tensor()[3:5],
    "reshaped tensor": lambda lease: lease.tensor().view(10, 10).t(),
    "tensor of another dtype": lambda lease: lease.tensor().view(torch.float32)[1:],
    "array of a tensor": lambda lease: lease.tensor().numpy(),
    "tensor of an array": lambda lease: torch.from_numpy(lease.numpy()),
    "slice of an array": lambda lease: lease.numpy()[::7],
    "slice of a memoryview": lambda lease: lease.__buffer__(0)[1:2],
    "storage": lambda lease: lease.tensor().untyped_storage(),
    "list of rows": lambda lease: list(lease.tensor((5, 5), torch.int32).unbind()),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_derived_views_keep_the_slab(full_pool, derive):
    lease = full_pool.acquire(100)
    derived = derive(lease)
    lease.release()
    assert states(full_pool) == IN_FLIGHT
    del derived
    assert states(full_pool) == FREE


def test_a_warm_lease_takes_at_most_six_calls(pool):
    """Python calls in the package: a small batch has little time for more."""

    def lease_and_release():
        pool.acquire(100).release(after=(event := ManualEvent()))
        event.finish()

    lease_and_release()
    calls = calls_of(lease_and_release)
    assert 0 < len(calls) <= 6, calls


# -- guards


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_slab_waits_for_guards_and_release(full_pool, order):
    events = [ManualEvent() for _ in range(3)]
    lease = full_pool.acquire(100)
    lease.guard(events[0])
    lease.guard(events[1])
    lease.guard(None)
    lease.release(after=events[2])
    for number in order:
        assert states(full_pool) == IN_FLIGHT
        events[number].finish()
    assert states(full_pool) == FREE
    full_pool.acquire(100, timeout=0).release()
    assert states(full_pool) == FREE


def test_leaving_the_block_keeps_its_guards(full_pool):
    with full_pool.acquire(100) as lease:
        lease.guard(event := ManualEvent())
    assert states(full_pool) == IN_FLIGHT
    assert lease_in_flight(full_pool, 100, owner="unnamed") is None
    event.finish()
    assert states(full_pool) == FREE


def test_done_guards_are_dropped_with_the_next(full_pool):
    with full_pool.acquire(100) as lease:
        for _ in range(100):
            lease.guard(event := ManualEvent())
            lease.guard(event)
            event.finish()
        done = weakref.ref(event)
        lease.guard(last := ManualEvent())
        del event
        assert done() is None
    last.finish()


def test_the_collector_may_run_while_guards_are_added():
    """Python 3.11 calls it wherever an object is made, and other threads run meanwhile."""
    guards, last = {number: ManualEvent() for number in range(-4, 0)}, ManualEvent()
    thresholds, expected = gc.get_threshold(), {*guards.values(), last}

    def another(phase, _):
        if phase == "stop":
            guards[-5 - len(guards)] = event = ManualEvent()
            expected.add(event)

    gc.callbacks.append(another)
    gc.set_threshold(1)
    try:
        add_guard(guards, last)
    finally:
        gc.callbacks.remove(another)
        gc.set_threshold(*thresholds)
    assert set(guards.values()) == expected


def test_a_guard_is_added_though_an_earlier_fails(full_pool):
    broken, good = ManualEvent(), ManualEvent()
    broken.error = RuntimeError("a kernel failed")
    lease = full_pool.acquire(100)
    lease.guard(broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        lease.guard(good)
    broken.error = None
    broken.finish()
    lease.release()
    assert states(full_pool) == IN_FLIGHT
    good.finish()
    assert states(full_pool) == FREE


@pytest.mark.parametrize(
    "wrong", ["x", True, torch.cuda.current_stream], ids=["text", "bool", "function"]
)
def test_a_wrong_event_is_refused_at_once(full_pool, wrong):
    lease = full_pool.acquire(100)
    with pytest.raises(TypeError, match=r"not an event or a stream: .*; pass an event"):
        lease.guard(wrong)
    with pytest.raises(TypeError, match="not an event or a stream"):
        lease.release(after=wrong)
    assert not lease.released
    lease.release()
    assert full_pool.stats().free_slabs == 1


# -- leaving the block records the current streams


class Recorder:
    """Stands for the current streams: an event for each recording, or an error."""

    def __init__(self):
        self.events = []
        self.error = None

    def __call__(self):
        if self.error is not None:
            raise self.error
        self.events.append(ManualEvent())
        return (self.events[-1],)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr("pinstage._pool._slab.record_current_streams", recorder)
    return recorder


@pytest.fixture
def pinned_pool(make_pool, recorder):
    return make_pool(128, memory=PinnedMemory())


def test_a_slab_waits_for_work_of_its_block(pinned_pool, recorder):
    with pinned_pool.acquire(100):
        assert recorder.events == []
    assert states(pinned_pool) == IN_FLIGHT
    with pytest.raises(AcquireTimeoutError):
        pinned_pool.acquire(100, timeout=0)
    recorder.events[0].finish()
    assert states(pinned_pool) == FREE


def test_release_and_pageable_memory_record_nothing(pinned_pool, pool, recorder):
    with pinned_pool.acquire(100) as lease:
        lease.release()
    with pool.acquire(100):
        pass
    assert recorder.events == []
    assert states(pinned_pool) == states(pool) == FREE


def hold_after_failure(pool, lease):
    """Check that the slab stays in use, even if the lease is dropped, until it is released."""
    assert states(pool) == LEASED
    dead = weakref.ref(lease)
    del lease
    gc.collect()
    assert states(pool) == LEASED
    dead().release(after=(event := ManualEvent()))
    assert states(pool) == IN_FLIGHT
    event.finish()
    assert states(pool) == FREE
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize(
    "error", [LeaseError("captures"), RuntimeError("a kernel failed"), KeyboardInterrupt()]
)
def test_a_slab_with_unrecordable_work_stays_out(pinned_pool, recorder, error):
    leases = [pinned_pool.acquire(100)]
    recorder.error = error
    with pytest.raises(type(error)), leases[0]:
        pass
    recorder.error = error.__traceback__ = None
    hold_after_failure(pinned_pool, leases.pop())


def test_a_failed_recording_doesn_t_mask_the_error(pinned_pool, recorder):
    leases = [pinned_pool.acquire(100)]
    recorder.error = RuntimeError("a kernel failed")
    with pytest.raises(KeyError) as raised, leases[0]:
        raise KeyError
    note = (
        "a lease of 100 bytes stays held: RuntimeError('a kernel failed'); call its "
        "release(after=event)"
    )
    assert raised.value.__notes__ == [note]
    del raised
    recorder.error = None
    hold_after_failure(pinned_pool, leases.pop())


# -- leases that are never released


@pytest.mark.parametrize("shown", ["", "warnings.simplefilter('always')"])
def test_a_forgotten_lease_is_printed_once(shown):
    program = f"""
import logging, warnings
import pinstage as ps
{shown}
with ps.SlabPool("1MiB", memory=ps.memory.PageableMemory()) as pool:
    pool.acquire(100)
"""
    done = warm.completed(program, timeout=120)
    done.check_returncode()
    assert done.stderr.count("lease was never released: 100 bytes of 104") == 1


@pytest.mark.parametrize("view_goes_first", [False, True])
def test_a_forgotten_lease_waits_for_guard_and_views(full_pool, view_goes_first):
    lease = full_pool.acquire(100)
    views = [lease.tensor()]
    lease.guard(event := ManualEvent())
    del lease
    with pytest.warns(
        UnreleasedLeaseWarning,
        match=r"100 bytes of 128 .*; use `with pool.acquire\(\.\.\.\)` or call",
    ):
        full_pool.stats()
    for end in (views.clear, event.finish) if view_goes_first else (event.finish, views.clear):
        assert states(full_pool) == IN_FLIGHT
        end()
    assert states(full_pool) == FREE


def test_release_replaces_the_event_for_interrupts(full_pool):
    lease = full_pool.acquire(100)
    guard_until_release(lease, ManualEvent())
    lease.release()
    assert states(full_pool) == FREE
    with pytest.raises(LeaseError, match="already released: guard"):
        guard_until_release(lease, ManualEvent())


def test_collecting_leases_inside_a_call_doesn_t_deadlock(pool):
    class CollectingEvent(ManualEvent):
        def query(self):
            gc.collect()  # the pool holds its lock here
            return super().query()

    event = CollectingEvent()
    pool.acquire(100).release(after=event)
    holder = [pool.acquire(100), pool.acquire(100)]
    holder += [holder[0].__buffer__(0), holder[1].tensor(), holder]
    del holder
    with pytest.warns(UnreleasedLeaseWarning) as warned:
        pool.stats()
    assert len(warned) == 2
    assert states(pool) == (0, 1, 2)
    event.finish()


def test_freeing_views_inside_a_call_doesn_t_deadlock(pool):
    views = []

    class DroppingEvent(ManualEvent):
        def query(self):
            views.clear()  # the pool holds its lock here
            return super().query()

    event = DroppingEvent()
    leases = [pool.acquire(100) for _ in VIEWS]
    pool.acquire(100).release(after=event)
    for lease, make_view in zip(leases, VIEWS.values(), strict=True):
        views.append(make_view(lease))
        lease.release()
    assert len(views) == 4
    pool.stats()
    assert states(pool) == (0, 1, 4)
    event.finish()


def test_finalisers_can_use_memoryviews_of_the_same_garbage(make_pool):
    pool = make_pool(max_bytes=4096)
    used = []

    class Writer:
        def __init__(self, view):
            self.view, self.me = view, self

        def __del__(self):
            with pytest.raises(AcquireTimeoutError):
                pool.acquire(4096, timeout=0)
            self.view[0] = 7
            used.append(True)

    with pool.acquire(4096) as lease:
        Writer(lease.__buffer__(0))
    gc.collect()
    assert used == [True]
    pool.acquire(4096, timeout=0).release()
