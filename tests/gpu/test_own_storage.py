"""Leaves in their own memory and in blocks, on the device: the memory that they keep, its reuse,
and waits.
"""

import gc
import time
import weakref

import pytest
import torch
from own_leaves import KIB, MIB, assert_in_blocks, assert_own, few, many, of_bytes
from strategies import assert_same

import pinstage as ps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SLEEP_CYCLES = 300_000_000
"""Cycles of a kernel that takes at least 100 ms."""


# -- what a leaf keeps -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["to_device", "stage", "prefetch", "loader"])
def test_leaves_own_or_share_memory_as_documented(cuda_device, way):
    for batch, assert_kept in ((few(), assert_own), (many(), assert_in_blocks)):
        with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
            if way == "to_device":
                staged = stager.to_device(batch)
            elif way == "stage":
                staged = stager.stage(batch).wait()
            elif way == "prefetch":
                (staged,) = stager.prefetch([batch])
            else:
                (staged,) = ps.DataLoader(
                    [batch], None, num_workers=1, device=cuda_device, max_bytes="64MiB"
                )
        assert_same(batch, staged, cuda_device)
        assert_kept(batch, staged)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("own_storage", ["auto", True, False])
def test_a_batch_is_the_same_whoever_shares_memory(cuda_device, own_storage):
    with ps.Stager(cuda_device, max_bytes="64MiB", own_storage=own_storage) as stager:
        for batch in (
            few(),
            many(),
            [torch.arange(3), torch.ones(2)],
            [of_bytes(128 * KIB), torch.ones(2)],
        ):
            assert_same(batch, stager.to_device(batch), cuda_device)
            assert_same(batch, stager.stage(batch).wait(), cuda_device)


LABEL_BYTES = 512

WITH_LABELS = {
    "less than 1 MiB": lambda: torch.zeros(64, 3, 64, 64, dtype=torch.uint8),
    "more": lambda: torch.zeros(64, 3, 128, 128, dtype=torch.uint8),
    "many leaves": lambda: [of_bytes(40 * KIB) for _ in range(20)],
}


@pytest.mark.parametrize("make", WITH_LABELS.values(), ids=WITH_LABELS)
def test_kept_labels_hold_only_themselves(cuda_device, stager, make):
    def staged_label():
        return stager.to_device({"images": make(), "label": torch.arange(64)})["label"]

    staged_label()
    torch.cuda.synchronize()
    # Makes the allocator reclaim memory that other streams have used.
    torch.empty(1, device=cuda_device)
    before = torch.cuda.memory_allocated(cuda_device)
    kept = [staged_label() for _ in range(50)]
    torch.cuda.synchronize()
    torch.empty(1, device=cuda_device)
    assert torch.cuda.memory_allocated(cuda_device) - before <= 50 * LABEL_BYTES
    assert all(torch.equal(label.cpu(), torch.arange(64)) for label in kept)


# -- who may use it --------------------------------------------------------------------------------

FILLED = {
    "at once": lambda value: [
        torch.full((1000,), value),
        torch.full((1000,), value, dtype=torch.float64),
    ],
    "slab": lambda value: [torch.full((40 * KIB,), value) for _ in range(2)],
    "own": lambda value: [
        torch.full((MIB,), value),
        torch.full((MIB,), value, dtype=torch.float64),
    ],
    "blocks": lambda value: [torch.full((64 * KIB,), value) for _ in range(20)],
    "small blocks": lambda value: [torch.full((4 * KIB,), value) for _ in range(80)],
}


@pytest.mark.parametrize("own_storage", ["auto", True, False])
@pytest.mark.parametrize("make", FILLED.values(), ids=FILLED)
def test_memory_is_kept_while_another_stream_uses_it(cuda_device, latch, make, own_storage):
    consumer = torch.cuda.Stream(cuda_device)
    with ps.Stager(cuda_device, max_bytes="128MiB", own_storage=own_storage) as stager, latch:
        stager.pool.reserve(ps.Layout.of(make(1.0)).nbytes, count=6)
        with torch.cuda.stream(consumer):
            [leaf.clone() for leaf in stager.stage(make(1.0)).wait(consumer)]
        torch.cuda.synchronize()
        staged = stager.stage(make(1.0)).wait(consumer)
        latch.hold(consumer)
        with torch.cuda.stream(consumer):
            kept = [leaf.clone() for leaf in staged]
        del staged
        gc.collect()
        # The same sizes on the same stream, which the allocator would reuse.
        for value in range(2, 8):
            stager.stage(make(float(value))).synchronize()
        assert not consumer.query()
        latch.open()
        consumer.synchronize()
        assert all((leaf == 1).all() for leaf in kept)


@pytest.mark.parametrize("make", FILLED.values(), ids=FILLED)
def test_to_device_is_safe_on_any_current_stream(cuda_device, latch, make):
    consumer = torch.cuda.Stream(cuda_device)
    with (
        ps.Stager(cuda_device, max_bytes="128MiB", run_ahead=None) as stager,
        latch,
        torch.cuda.stream(consumer),
    ):
        stager.pool.reserve(ps.Layout.of(make(1.0)).nbytes, count=6)
        [leaf.clone() for leaf in stager.to_device(make(1.0))]
        torch.cuda.synchronize()
        latch.hold(consumer)
        kept = [
            [leaf.clone() for leaf in stager.to_device(make(float(value)))] for value in range(1, 6)
        ]
        assert not consumer.query()
        latch.open()
        consumer.synchronize()
        for value, leaves in enumerate(kept, 1):
            assert all((leaf == value).all() for leaf in leaves)


# -- a few small leaves ----------------------------------------------------------------------------


def test_page_locked_leaves_can_change_after_the_call(cuda_device, stager, latch):
    (stager.to_device([torch.full((1000,), 1.0).pin_memory(), torch.ones(3)])[0] == 1).all().item()
    lease = stager.pool.acquire(4000)
    leased = lease.tensor((1000,), torch.float32).fill_(4.0)
    source = torch.full((1000,), 3.0).pin_memory()
    torch.cuda.synchronize()
    latch.hold(torch.cuda.current_stream(cuda_device))
    staged = stager.to_device(
        {"pinned": source, "leased": leased, "plain": torch.full((1000,), 5.0)}
    )
    assert not torch.cuda.current_stream(cuda_device).query()
    source.fill_(7.0)
    leased.fill_(8.0)
    del source
    gc.collect()
    others = [torch.full((1000,), 9.0).pin_memory() for _ in range(8)]
    latch.open()
    for name, value in (("pinned", 3.0), ("leased", 4.0), ("plain", 5.0)):
        assert (staged[name] == value).all(), name
    assert stager.pool.stats().misses == 1
    del others, leased
    lease.release()


def test_large_leaves_take_a_slab_unless_idle(cuda_device, stager, latch):
    plain = of_bytes(500 * KIB)

    def slabs():
        pool = stager.pool.stats()
        return pool.hits + pool.misses

    torch.cuda.synchronize()
    assert_same([plain], stager.to_device([plain]), cuda_device)
    assert slabs() == 0
    pinned = plain.clone().pin_memory()
    torch.cuda.synchronize()
    assert_same([plain], stager.to_device([pinned]), cuda_device)
    assert slabs() == 1
    latch.hold(torch.cuda.current_stream(cuda_device))
    staged = stager.to_device([plain])
    latch.open()
    assert_same([plain], staged, cuda_device)
    assert slabs() == 2


def test_few_leaves_follow_earlier_work_of_the_stream(cuda_device, stager, latch):
    """Earlier work on the stream may still use their memory."""
    stager.to_device([torch.zeros(1000)])[0].clone()
    torch.cuda.synchronize()
    latch.hold(torch.cuda.current_stream(cuda_device))
    before = stager.to_device([torch.full((1000,), 1.0)])[0]
    seen = before.clone()
    del before
    after = stager.to_device([torch.full((1000,), 2.0)])[0]  # likely in the same memory
    latch.open()
    assert (seen == 1).all()
    assert (after == 2).all()


# -- beside a busy device --------------------------------------------------------------------------

SHAPES = {
    "1x8B": (1, 8),
    "3x32KiB": (3, 32 * KIB),
    "2x196KiB": (2, 196 * KIB),
    "4x256KiB": (4, 256 * KIB),
    "8x1MiB": (8, MIB),
}


@pytest.mark.parametrize(("calls", "run_ahead"), [(1, 3), (3, 3), (100, None)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_warm_call_returns_while_the_device_works(cuda_device, shape, calls, run_ahead):
    leaves, nbytes = shape
    batch = [of_bytes(nbytes, seed=seed) for seed in range(leaves)]
    stream = torch.cuda.current_stream(cuda_device)
    cycles = SLEEP_CYCLES if calls < 10 else 5 * SLEEP_CYCLES

    def seconds():
        """Stage during work on a stream; return the time of the slowest call, and whether the
        stream stayed busy.
        """
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        took = []
        for _ in range(calls):
            began = time.perf_counter()
            staged = stager.to_device(batch)
            took.append(time.perf_counter() - began)
        is_busy = not stream.query()
        assert_same(batch, staged, cuda_device)
        return max(took), is_busy

    with ps.Stager(cuda_device, max_bytes="2GiB", run_ahead=run_ahead) as stager:
        stager.pool.reserve(ps.Layout.of(batch).nbytes, count=calls)
        seconds()  # loads kernels, and fills torch's allocator with memory for as many batches
        slowest, is_busy = seconds()
        assert slowest < 0.02
        assert is_busy, "nothing is shown"


# -- how far the host runs ahead -------------------------------------------------------------------

STEP_CYCLES = 20_000_000
"""Cycles of a kernel that takes some 10 ms."""


def one_large(step):
    return [torch.full((37 * MIB // 4,), float(step))]


def ragged(step):
    generator = torch.Generator().manual_seed(step)
    elements = torch.randint(MIB // 4, MIB // 2, (32,), generator=generator).tolist()
    return [torch.full((count,), float(step)) for count in elements]


def small(step):
    return [torch.full((100 * KIB // 4,), float(step)) for _ in range(9)]


@pytest.mark.parametrize("make", [one_large, ragged, small])
def test_a_waitless_loop_takes_four_extra_batches(cuda_device, make):
    steps = 60
    batches = [make(step) for step in range(steps)]
    largest = max(sum(leaf.nbytes for leaf in batch) for batch in batches)

    def peak(to_device):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(cuda_device)
        torch.cuda.reset_peak_memory_stats(cuda_device)
        total = torch.zeros((), device=cuda_device)
        for batch in batches:
            staged = to_device(batch)
            torch.cuda._sleep(STEP_CYCLES)
            total += staged[0].max()
        assert total.item() == sum(range(steps))
        return torch.cuda.memory_stats(cuda_device)["reserved_bytes.all.peak"] - before

    with ps.Stager(cuda_device, max_bytes="1GiB") as stager:
        stager.to_device(batches[0])[0].max().item()
        torchs = peak(lambda batch: [leaf.to(cuda_device, non_blocking=True) for leaf in batch])
        ours = peak(stager.to_device)
    assert ours <= torchs + 4 * largest + 2 * MIB, f"{ours / MIB:.0f} MiB beside {torchs / MIB:.0f}"


def test_slabs_don_t_pile_up_behind_a_stream(stager):
    batch = [of_bytes(200 * KIB), torch.ones(3)]
    torch.cuda._sleep(STEP_CYCLES)
    for _ in range(30):
        stager.to_device(batch)
        torch.cuda._sleep(STEP_CYCLES)
    assert stager.pool.stats().peak_held_bytes <= 6 * 256 * KIB


def test_a_target_dies_with_its_stager(cuda_device):
    """Garbage with events aborts a forked child that collects it."""
    gc.collect()
    gc.disable()
    try:
        stager = ps.Stager(cuda_device, max_bytes="64MiB")
        for leaves in ([torch.ones(3)], [torch.ones(1000)] * 2, [torch.ones(1 << 20)]):
            stager.to_device(leaves)
        target = weakref.ref(stager._target)
        stager.close()
        del stager
        assert target() is None
    finally:
        gc.enable()
