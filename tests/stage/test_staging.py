"""Staging step by step, on the CPU: the result, the counters, and the state after a failure."""

import itertools
import threading
import weakref

import numpy as np
import pytest
import strategies as known
import torch
from doubles import (
    PATIENCE_SECONDS,
    HeldTarget,
    Interrupts,
    LateTarget,
    assert_idle,
    claim_in_child,
    record_work,
    slabs_for_all,
    use_target,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_same, batches, tensor_of
from torch.nn.utils.rnn import pack_sequence

from pinstage import Layout, SlabPool, Stager, _native
from pinstage._compat.calls import memory_of
from pinstage._stage._target import Target
from pinstage.errors import (
    BudgetExceededError,
    ForkedPoolError,
    LayoutError,
    PinstageError,
    PoolClosedError,
)
from pinstage.memory import PageableMemory

KIB, MIB = 1024, 1024 * 1024
AT_ONCE_BYTES = 64 * KIB
RUN_AHEAD = 3

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what happens without CUDA"
)


@pytest.fixture
def stager(make_stager):
    return make_stager()


def some_batch(seed=0):
    return {
        "image": tensor_of(torch.float32, (4, 5), seed),
        "label": tensor_of(torch.int64, (), seed),
        "ids": np.arange(7) + seed,
        "more": [tensor_of(torch.uint8, (9,), seed).expand(2, -1), "text", None],
    }


# -- what arrives ----------------------------------------------------------------------------------


@given(batch=batches(), at_once_bytes=st.sampled_from([0, AT_ONCE_BYTES]))
def test_every_batch_arrives_as_it_was(shared_stager, batch, at_once_bytes):
    before = shared_stager.stats()
    with pytest.MonkeyPatch.context() as patched:
        if not at_once_bytes:
            slabs_for_all(patched)
        transfer = shared_stager.stage(batch)
    assert_same(batch, transfer.wait())
    after = shared_stager.stats()
    assert after.batches == before.batches + 1
    assert after.copies - before.copies == transfer.copies
    assert (
        transfer.copies <= transfer.blocks <= after.packed_leaves - before.packed_leaves
        or transfer.nbytes >= 1 << 20
    )
    assert after.packed_leaves - before.packed_leaves == len(Layout.of(batch).slots)
    assert after.pool.leased_slabs == after.pool.in_flight_slabs == 0
    takes_slab = transfer.nbytes > at_once_bytes
    assert after.pool.hits + after.pool.misses - before.pool.hits - before.pool.misses == takes_slab


def test_the_source_may_be_changed_right_after_stage(stager):
    batch = some_batch()
    transfer = stager.stage(batch)
    batch["image"].zero_()
    batch["ids"][:] = 0
    batch["more"][0][0].zero_()
    assert_same(some_batch(), transfer.wait())


@pytest.mark.usefixtures("slabs_for_all")
@pytest.mark.parametrize("own_storage", ["auto", False])
def test_earlier_batches_are_untouched_by_later_ones(make_stager, own_storage):
    stager = make_stager(own_storage=own_storage)
    transfers = [stager.stage(some_batch(seed)) for seed in range(5)]
    assert stager.stats().pool.held_slabs == 1, "the slab was not reused, so nothing is shown"
    for seed, transfer in enumerate(transfers):
        assert_same(some_batch(seed), transfer.wait())
        transfer.wait()["image"].zero_()


def test_the_default_device_plays_no_part(stager):
    batch = [some_batch(), torch.zeros(0, 3), pack_sequence([torch.ones(2), torch.ones(1)])]
    empty = [torch.zeros(0), torch.zeros(2, 0)]
    with torch.device("meta"):
        staged, staged_empty = stager.to_device(batch), stager.to_device(empty)
    assert_same(batch, staged)
    assert_same(empty, staged_empty)


# -- what is not packed ----------------------------------------------------------------------------


@pytest.mark.usefixtures("slabs_for_all")
def test_an_error_in_to_returns_the_slab(stager):
    with pytest.raises(NotImplementedError, match="meta"):
        stager.stage([torch.ones(3), torch.ones(3, device="meta")])
    assert stager.stats().batches == 0
    assert_idle(stager.pool)


# -- the transfer ----------------------------------------------------------------------------------


def test_a_transfer_knows_what_travels(stager):
    batch = some_batch()
    transfer = stager.stage(batch)
    assert transfer.nbytes == Layout.of(batch).nbytes
    assert transfer.copies == transfer.blocks == 4
    assert f"nbytes={Layout.of(batch).nbytes} copies=4 to cpu done" in repr(transfer)


def test_a_transfer_gives_the_same_batch_each_time(stager):
    transfer = stager.stage(some_batch())
    assert transfer.wait() is transfer.wait()
    nothing = stager.stage(None)
    assert nothing.wait() is nothing.wait() is None


# -- batches that are copied at once ---------------------------------------------------------------


def test_only_larger_batches_take_a_slab(make_stager):
    stager = make_stager("8MiB")
    for most, leaves in ((MIB, 1), (AT_ONCE_BYTES, 16)):
        before = stager.pool.stats()
        for nbytes, slabs in ((16, 0), (most, 0), (most + 16, 1), (most, 1)):
            source = list(tensor_of(torch.uint8, (nbytes,)).tensor_split(leaves))
            transfer = stager.stage(source)
            assert transfer.nbytes >= nbytes
            assert_same(source, transfer.wait())
            stats = stager.pool.stats()
            assert stats.hits + stats.misses - before.hits - before.misses == slabs


def test_a_small_batch_never_waits_for_a_slab(make_stager):
    stager = make_stager(max_bytes=4096, timeout=0)
    stager.pool.freeze()
    assert_same(some_batch(), stager.to_device(some_batch()))
    assert stager.to_device(torch.ones(10_000)).sum() == 10_000  # more than the cap


def test_the_copying_stream_has_nothing_to_wait_for(queue, device):
    def waits():
        found = [entry for entry in device.log if "waits for" in entry]
        device.log.clear()
        return found

    small = queue.stage(torch.ones(3))
    small.wait()
    assert waits() == []
    small.wait("another")
    small.wait()
    assert waits() == [("another", "waits for", 0, 1)]
    queue.stage(torch.ones(MIB)).wait()
    *copies, event = device.log[1:-1]
    assert (set(copies), event) == ({("copy", "for copies")}, ("event", "for copies"))
    assert waits() == [("current", "waits for", len(device.events) - 1, 1)]
    queue.to_device(torch.ones(AT_ONCE_BYTES))  # on the current stream
    assert waits() == []


# -- slabs -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slabs_for_all")
def test_a_batch_above_the_cap_is_refused(make_stager):
    stager = make_stager(max_bytes=4096)
    stager.to_device([torch.zeros(100)])
    before = stager.stats()
    with pytest.raises(BudgetExceededError, match="pass max_bytes=") as caught:
        stager.stage([torch.zeros(2000)])
    assert (caught.value.requested_bytes, caught.value.max_bytes) == (8000, 4096)
    assert stager.stats() == before
    assert stager.to_device([torch.ones(100)])[0].eq(1).all()


def in_itself():
    batch = [torch.zeros(3)]
    batch.append(batch)
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        lambda: {"a": tensor_of(torch.int8, (100,)), "b": {torch.zeros(1)}},  # one of two
        in_itself,
        lambda: [torch.zeros(9), object.__new__(known.Registered), np.ma.masked_array([1])],
    ],
)
def test_an_unstageable_batch_changes_nothing(stager, batch):
    stager.to_device(some_batch())
    before = stager.stats()
    with pytest.raises(LayoutError):
        stager.stage(batch())
    assert stager.stats() == before


@pytest.mark.usefixtures("slabs_for_all")
def test_a_failed_allocation_changes_nothing(memory, stager):
    memory.fail_allocate(RuntimeError("no more"))
    with pytest.raises(RuntimeError, match="no more"):
        stager.stage(some_batch())
    stats = stager.stats()
    assert (stats.batches, stats.copies, stats.pool.held_bytes) == (0, 0, 0)
    assert_same(some_batch(), stager.to_device(some_batch()))


@pytest.mark.usefixtures("slabs_for_all")
def test_a_kept_error_doesn_t_keep_the_slab(stager, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Target, "blocks", fail)
    with pytest.raises(torch.OutOfMemoryError) as kept:
        stager.stage([torch.ones(1000)])
    assert_idle(stager.pool)
    assert stager.pool.stats().free_slabs == 1
    assert kept.value.__traceback__ is not None


class Exhausting(known.Speaking):
    """Fails when it is rebuilt."""

    @classmethod
    def tree_unflatten(cls, metadata, children):
        raise KeyError("cannot be put together")


def test_an_error_of_unflatten_is_the_callers(stager):
    transfer = stager.stage(Exhausting([torch.zeros(3)], "name"))
    with pytest.raises(KeyError, match="cannot be put together"):
        transfer.wait()


# -- large batches ---------------------------------------------------------------------------------


def batch_of_many_chunks(seed):
    chance = np.random.default_rng(seed)
    return {
        "large": torch.from_numpy(chance.integers(256, size=21 * MIB + 7, dtype=np.uint8)),
        "some": [torch.from_numpy(chance.integers(99, size=1 + 300 * n)) for n in range(60)],
        "strided": torch.from_numpy(chance.random((1100, 1300), dtype=np.float32)).t(),
        "more": torch.from_numpy(chance.integers(99, size=(9 * MIB // 8))),
    }


@pytest.mark.parametrize(
    ("how", "lag"),
    [
        ("reused", 0),
        ("reused", 1),
        ("reused", 3),
        ("reused", 100),
        ("cannot demote", 1),
    ],
)
def test_chunks_packed_over_others_have_no_wrong_byte(make_stager, monkeypatch, lag, how):
    monkeypatch.setattr(_native.core, "demotes", how != "cannot demote")
    stager = make_stager(max_bytes="512MiB", pack_threads=1 if lag == 1 else 3)
    target = use_target(stager, LateTarget(lag))
    staged = [(stager.stage(batch_of_many_chunks(seed)), seed) for seed in range(3)]
    for transfer, seed in staged:
        transfer.synchronize()
        assert_same(batch_of_many_chunks(seed), transfer.wait())
        assert transfer.copies in range(10, 20)  # chunks of about 3 MiB
    of_one = target.sources()[: staged[0][0].copies]
    if how != "reused" or lag == 100:
        assert of_one == sorted(set(of_one))
    elif lag == 1:  # one thread packs, so the next chunk has not begun
        assert len(set(of_one)) < len(of_one)


@pytest.mark.parametrize("threads", [1, 3])
# One batch takes a slab, the other does not.
@pytest.mark.parametrize("nbytes", [2 * KIB, 62 * KIB])
def test_small_batches_of_one_kind_are_one_copy(make_stager, threads, nbytes):
    stager = make_stager(max_bytes="256MiB", pack_threads=threads)
    batch = [tensor_of(torch.uint8, (nbytes,)) for _ in range(14)] + [
        tensor_of(torch.uint8, (3, 5)).t()
    ]
    transfer = stager.stage(batch)
    assert (transfer.copies, transfer.blocks) == (1, 1)
    assert_same(batch, transfer.wait())


# -- counting --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slabs_for_all")
def test_stats_count_batches_copies_leaves_and_bytes(stager):
    shared = torch.zeros(5, dtype=torch.float64)
    parameter = torch.nn.Parameter(shared)
    for _ in range(3):
        transfer = stager.stage(
            [
                torch.zeros(3, dtype=torch.uint8),
                shared,
                shared,
                np.zeros(2, dtype=np.int16),
                parameter,
                parameter,
                "x",
            ]
        )
        assert transfer.passthrough_leaves == 1
    stats = stager.stats()
    assert (stats.batches, stats.copies, stats.blocks) == (3, 9, 9)
    assert stats.packed_leaves == 9
    assert stats.packed_bytes == 3 * (3 + 40 + 4)
    assert stats.packed_bytes + stats.padding_bytes == 3 * (16 + 48 + 16)
    assert stats.passthrough_leaves == 3
    assert repr(stager).startswith("<Stager cpu batches=3 <SlabPool open")


# -- prefetch --------------------------------------------------------------------------------------


class Reading:
    """Batches that count how many were read."""

    def __init__(self, count):
        self.read = 0
        self.count = count

    def __iter__(self):
        while self.read < self.count:
            self.read += 1
            yield some_batch(self.read)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_prefetch_reads_exactly_the_depth_ahead(prefetch, stager, count, depth):
    reading = Reading(count)
    prefetching = iter(prefetch(reading, depth=depth))
    assert reading.read == 0
    for yielded in range(1, count + 1):
        assert_same(some_batch(yielded), next(prefetching))
        expected = min(yielded + depth, count)
        wait_until(lambda expected=expected: stager.stats().batches == expected)
        assert reading.read == expected
    assert next(prefetching, "exhausted") == "exhausted"


def test_prefetch_bounds_how_far_the_loop_runs(prefetch, monkeypatch):
    made, waited = record_work(monkeypatch)
    for number, _ in enumerate(itertools.islice(prefetch(Reading(20)), 15)):
        assert len(made) == number
        assert waited == made[: max(0, number - RUN_AHEAD)]
    assert number == 14


# -- making and closing ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_made_pool_has_the_given_cap(device):
    with Stager(device, max_bytes="3MiB") as stager:
        assert stager.pool.max_bytes == 3 << 20
        assert isinstance(stager.pool.memory, PageableMemory)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        *(
            ({"device": device}, ValueError, f"cannot stage to {device}: only CUDA devices and")
            for device in ("mps", "meta", "xpu:0")
        ),
        *(
            ({"pack_threads": count}, ValueError, f"threads must be at least 1: {count}; 1 packs")
            for count in (0, -1)
        ),
        *(
            ({"run_ahead": count}, ValueError, f"run_ahead must be at least 1: {count}; None sets")
            for count in (0, -3)
        ),
        *(
            ({"run_ahead": wrong}, TypeError, f"run_ahead must be an int or None: {wrong!r}; it is")
            for wrong in (True, 2.0, "3")
        ),
        (
            {"pool": SlabPool("1MiB", memory=PageableMemory()), "max_bytes": "2MiB"},
            ValueError,
            "exclude each other: max_bytes='2MiB'; give",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        Stager(**({"device": "cpu"} | options))


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_a_cuda_device_without_cuda_is_refused(device):
    with pytest.raises(
        PinstageError, match=r"CUDA is not available: cannot stage to cuda.*; use device='cpu'"
    ):
        Stager(device)


@without_cuda
def test_without_cuda_batches_go_to_the_cpu():
    with Stager(max_bytes="1MiB") as stager:
        assert stager.device == torch.device("cpu")
        assert_same(some_batch(), stager.to_device(some_batch()))


def test_after_close_staged_batches_stay_valid():
    with Stager("cpu", max_bytes="1MiB") as stager:
        staged = stager.to_device(some_batch())
        transfer = stager.stage(some_batch(1))
    assert stager.pool.closed
    assert_same(some_batch(), staged)
    assert_same(some_batch(1), transfer.wait())
    with pytest.raises(
        PoolClosedError, match=r"stager is closed: its pool held 0 B of .*; make a new Stager"
    ):
        stager.stage(some_batch())
    stager.close()


def test_close_leaves_a_shared_pool_open(pool):
    with Stager("cpu", pool=pool):
        pass
    pool.acquire(100).release()


# -- threads and processes -------------------------------------------------------------------------


@pytest.mark.usefixtures("slabs_for_all")
def test_several_threads_stage_at_once(make_stager, background):
    stager = make_stager(max_bytes="8KiB", pack_threads=2)
    barrier = threading.Barrier(4)

    def work(first):
        barrier.wait(PATIENCE_SECONDS)
        for seed in range(first, first + 40):
            batch = some_batch(seed) | {"bulk": tensor_of(torch.int16, (1000 + seed,), seed)}
            assert_same(batch, stager.to_device(batch))

    for future in [background(work, 100 * thread) for thread in range(4)]:
        future.result()
    stats = stager.stats()
    assert (stats.batches, stats.copies, stats.packed_leaves) == (160, 800, 800)
    assert stats.pool.peak_held_bytes <= 8192


def test_in_a_forked_child_nothing_is_staged():
    with Stager("cpu", max_bytes="1MiB") as stager:
        stager.to_device(some_batch())

        def claim():
            with pytest.raises(ForkedPoolError, match="make a SlabPool in the child"):
                stager.stage(some_batch())
            with pytest.raises(ForkedPoolError):
                stager.to_device(torch.ones(3))
            with Stager("cpu", max_bytes="1MiB") as fresh:
                assert_same(some_batch(), fresh.to_device(some_batch()))
            stager.close()

        claim_in_child(claim)
        assert_same(some_batch(), stager.to_device(some_batch()))


def test_a_transfer_doesn_t_keep_its_source_batch(stager):
    source = torch.ones(10)
    gone = weakref.ref(source)
    transfer = stager.stage({"x": source})
    del source
    assert gone() is None
    assert transfer.wait()["x"].all()


class Ended(known.Speaking):
    """Its flatten closes an iterator that isn't the loop's."""

    def tree_flatten(self):
        return next(iter(()))


def test_stop_iteration_in_a_batch_ends_nothing(prefetch):
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(prefetch([torch.zeros(1), Ended([], "name"), torch.zeros(1)]))


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (torch.Tensor.to_sparse, 2),
        (torch.Tensor.to_sparse_csr, 3),
        (torch.Tensor.to_sparse_csc, 3),
        (lambda eye: eye.to_sparse_bsr((2, 2)), 3),
        (lambda eye: eye.to_sparse_bsc((2, 2)), 3),
        (lambda eye: torch.nested.nested_tensor([eye, eye]), 1),
        (torch.Tensor.clone, 1),
    ],
)
def test_memory_of_non_strided_tensors_is_their_parts(make, count):
    layouts = [part.layout for part in memory_of(make(torch.eye(4)))]
    assert layouts == [torch.strided] * count


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
def test_interrupts_never_free_a_slab_during_its_copy(make_stager):
    stager = make_stager()
    began_before = 0
    for number in itertools.count(1):
        target = use_target(stager, HeldTarget())
        interrupted = Interrupts(number, "_stager.py", "_sender.py").during(
            lambda: stager.stage(some_batch())
        )
        stats = stager.pool.stats()
        assert (stats.leased_slabs, stats.in_flight_slabs) == (
            0,
            1 if target.copies else stats.in_flight_slabs,
        )
        began_before += interrupted and target.copies > 0
        target.stream.finish()
        assert stager.pool.stats().in_flight_slabs == 0
        if not interrupted:
            break
    assert began_before > 10
