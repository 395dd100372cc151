"""How bytes are copied into a slab: with one thread or several, in chunks, and when the copy is
interrupted.
"""

import itertools
import os
import re
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from doubles import PATIENCE_SECONDS, claim_in_child, guarded, outcome
from processes import output_of
from strategies import bits, slab_for, tensor_of

from pinstage import _native
from pinstage._batch import (
    most_threads,
    pack,
    pack_by_threads,
    reuses_places,
    start_packing,
    take_apart,
)
from pinstage._batch._pack import MOST_THREADS, PARALLEL_FROM_BYTES, REUSE_FROM_BYTES
from pinstage._host import usable_cpus

KIB, MIB = 1 << 10, 1 << 20


def bytes_of(*sizes, skipped=0):
    """Return leaves of these sizes in bytes, at odd addresses if some bytes are `skipped`."""
    return [
        tensor_of(torch.uint8, (size + skipped,), seed % 7)[skipped:]
        for seed, size in enumerate(sizes)
    ]


def strided_leaves():
    """Non-contiguous leaves, some of megabytes, one lazily conjugated, one empty."""
    return [
        tensor_of(torch.uint8, (3, 2000, 1001), 1)[:, :, :1000],
        tensor_of(torch.bfloat16, (1, 1, 1500, 3000), 2)[..., ::2],
        tensor_of(torch.float32, (300, 700), 8)[:, ::7],
        tensor_of(torch.complex128, (900, 600), 3)[:, 1:],
        tensor_of(torch.complex128, (90, 600), 3)[:, ::3],
        tensor_of(torch.bool, (1, 7_000_000), 4)[:, ::2],
        tensor_of(torch.int64, (5, 1), 5).expand(5, 100_000),
        tensor_of(torch.complex64, (3, 40), 6).conj(),
        tensor_of(torch.float32, (0, 4), 7)[:, ::2],
    ]


BATCHES = {
    "nothing": list,
    "empty leaves": lambda: [torch.empty(0), torch.empty(0, 3)],
    "one small leaf": lambda: bytes_of(7),
    "many small leaves": lambda: bytes_of(*(n % 50 for n in range(3000))),
    "many that make megabytes": lambda: bytes_of(*(n % 5000 for n in range(3000))),
    "just too small for threads": lambda: bytes_of(PARALLEL_FROM_BYTES - 216, 100),
    "one large leaf": lambda: bytes_of(3 * MIB + 3),
    "large leaves at odd addresses": lambda: bytes_of(
        *(256 * KIB + n for n in range(-2, 40, 7)), skipped=13
    ),
    "small and large leaves": lambda: bytes_of(*(n**4 for n in range(50))),
    "a leaf of many chunks": lambda: bytes_of(32 * MIB + 5),
    "leaves of many chunks": lambda: bytes_of(3, 24 * MIB, 5, 16 * MIB - 1, 1, 3),
    "strided leaves": strided_leaves,
    "strided leaves beside many": lambda: [
        *strided_leaves(),
        *(tensor_of(torch.int16, (11,), n) for n in range(100)),
    ],
}


@pytest.fixture(scope="module", params=BATCHES)
def batch(request):
    """A batch, and the expected content of its slab, with zeros as padding."""
    leaves = BATCHES[request.param]()
    table = take_apart(leaves).table
    expected = np.zeros(table.nbytes, dtype=np.uint8)
    for leaf, offset in zip(leaves, table.rows["offset"].tolist(), strict=True):
        part = bits(leaf).contiguous().flatten().view(torch.uint8).numpy()
        expected[offset : offset + part.size] = part
    return leaves, torch.from_numpy(expected)


def parts_and_slab(leaves):
    """Return leaves taken apart, and a slab for them."""
    parts = take_apart(leaves)
    return parts, slab_for(parts.table)


def wait_for_all(job):
    job.wait(len(job.ends) - 1)


def packed(leaves, threads):
    """Pack leaves; return the slab."""
    parts = take_apart(leaves)
    with guarded(parts.table.nbytes) as slab, start_packing(parts, slab, threads) as job:
        wait_for_all(job)
        return slab


def packed_in_order(parts, threads, expected):
    """Pack leaves, and compare the slab up to the end of each chunk, as soon as it is reported."""
    with guarded(parts.table.nbytes) as slab:
        job = start_packing(parts, slab, threads)
        assert (job is None) == (parts.table.nbytes < PARALLEL_FROM_BYTES)
        if job is not None:
            with job:
                for chunk, end in enumerate(job.ends):
                    job.wait(chunk)
                    assert torch.equal(slab[:end], expected[:end])
                assert end == parts.table.nbytes
        assert torch.equal(slab, expected)


def ends_of(sizes):
    """Return the ends of a batch's chunks, all in one place."""
    source = torch.zeros(max(sizes), dtype=torch.uint8)
    with start_packing(*parts_and_slab([source[:size] for size in sizes]), 2) as job:
        return job.ends


# -- the same bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_is_reported_is_in_the_slab_already(batch, threads):
    leaves, expected = batch
    packed_in_order(take_apart(leaves), threads, expected)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 300_001, 16 * MIB - 1])
def test_samples_are_stacked_at_consecutive_places(count, threads):
    """Chunks begin at any byte of a stack."""
    columns = [
        list(bytes_of(*[count] * (64 if count < MIB else 3))),
        [torch.randn(4, 3).T for _ in range(3)],
        [torch.empty(0, 5)] * 3,
        [torch.ones(3, dtype=torch.int16)] * 5,
    ]
    stacks = [_native.core.alike(samples, False) for samples in columns]
    tree = [torch.ones(3), *stacks]
    parts = take_apart(tree)
    with guarded(parts.table.nbytes) as expected:
        pack(take_apart([tree[0], *map(torch.stack, columns)]), expected)
    packed_in_order(parts, threads, expected)


# -- chunks ----------------------------------------------------------------------------------------


def test_chunks_start_small_and_double():
    assert [end / MIB for end in ends_of([MIB] * 20)] == [0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5, 20]
    assert [end / MIB for end in ends_of([16 * MIB])] == [0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 16]
    assert [end / MIB for end in ends_of([MIB])] == [0.5, 1]


@pytest.mark.parametrize(
    "sizes",
    [
        [PARALLEL_FROM_BYTES],
        [16 * MIB],
        [16 * MIB + 1],
        [50_000_007],
        [256] * 9000,
        [512 * KIB] * 150,
        [512 * KIB + 1] * 99,
        [256 * KIB - 16] * 300,
        [100, 10**7, 36, 50 * MIB, 4, 4, 4],
        [7488] * 7001 + [10**7],
    ],
    ids=lambda sizes: f"{len(sizes)} of {sizes[0]}",
)
def test_chunks_cover_everything_within_size_limits(sizes):
    ends = ends_of(sizes)
    assert ends[-1] == sum(-(-size // 16) * 16 for size in sizes)
    lengths = [high - low for low, high in itertools.pairwise([0, *ends])]
    first, slack = MIB // 2, MIB // 4  # a piece is not cut
    if len(lengths) > 1:
        assert min(lengths) >= first
        assert lengths[0] <= first + slack
    assert all(after <= 2 * before + slack for before, after in itertools.pairwise(lengths[:-1]))
    assert max(lengths) <= 4 * MIB + first + slack


@pytest.mark.parametrize("chunk", [-1, 5, 10**30])
def test_there_is_nothing_behind_the_last_chunk(chunk):
    with start_packing(*parts_and_slab(bytes_of(10 * MIB)), 2) as job:
        assert len(job.ends) == 5
        for ask in (job.wait, job.place, job.reuse):
            with pytest.raises((ValueError, OverflowError), match=r"no such chunk|too"):
                ask(chunk)


# -- places ----------------------------------------------------------------------------------------


def through_places(leaves, threads, held):
    """Pack leaves. Each chunk has been sent when `held` later chunks are packed.

    Returns:
        The bytes sent, and each chunk's place and its start in the batch.
    """
    parts = take_apart(leaves)
    travelled, places = torch.full((parts.table.nbytes,), 0xEE, dtype=torch.uint8), []
    with (
        guarded(parts.table.nbytes) as slab,
        start_packing(parts, slab, threads, reuses=True) as job,
    ):
        starts = [0, *job.ends]
        for chunk, (start, end) in enumerate(itertools.pairwise(starts)):
            job.wait(chunk)
            places.append(job.place(chunk))
            travelled[start:end] = slab[places[-1] : places[-1] + end - start]
            if chunk >= held:
                gone = chunk - held
                # No longer needed.
                slab[places[gone] : places[gone] + starts[gone + 1] - starts[gone]] = 0xDD
                job.reuse(gone)
    return travelled, places, starts


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("held", [0, 2])
def test_a_chunk_packed_over_another_is_intact(batch, threads, held):
    leaves, expected = batch
    parts = take_apart(leaves)
    if expected.numel() < PARALLEL_FROM_BYTES:
        assert not reuses_places(parts)
        return
    travelled, places, starts = through_places(leaves, threads, held)
    assert torch.equal(travelled, expected)
    assert all(place <= start for place, start in zip(places, starts, strict=False))


def test_one_thread_packs_large_batches_in_few_chunks():
    _, places, _ = through_places(bytes_of(*[5 * MIB + 1] * 20), 1, 1)
    assert len(places) > 20
    assert len(set(places)) < 12


def test_large_batches_reuse_places_where_cpus_demote_lines(monkeypatch):
    large = bytes_of(REUSE_FROM_BYTES)
    for demotes in (True, False):
        monkeypatch.setattr(_native.core, "demotes", demotes)
        assert reuses_places(take_apart(large)) is demotes
        assert not reuses_places(take_apart(large[0][:-16]))


# -- threads ---------------------------------------------------------------------------------------


def tasks():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def threads_that_pack():
    return tasks().count("pinstage-pack")


def test_threads_persist_and_aren_t_python_s():
    packed(bytes_of(8 * MIB), 3)
    before, ours, of_python = len(tasks()), threads_that_pack(), threading.active_count()
    assert ours >= 2  # the third is the calling thread
    for _ in range(20):
        packed(bytes_of(8 * MIB), 3)
    assert (threads_that_pack(), threading.active_count()) == (ours, of_python)
    assert len(tasks()) <= before  # one of an earlier test may have ended


def test_several_threads_pack_at_once(background):
    barrier = threading.Barrier(3)

    def work(seed):
        leaves = [tensor_of(torch.uint8, (size + seed,), seed) for size in (2 * MIB, 100)]
        expected = packed(leaves, 1)
        barrier.wait(PATIENCE_SECONDS)
        for _ in range(10):
            assert torch.equal(packed(leaves, 2), expected)

    for future in [background(work, seed) for seed in range(3)]:
        future.result()


def slow_leaves():
    """Leaves of little memory that take a tenth of a second or more to copy."""
    return [tensor_of(torch.uint8, (2 * KIB,), 3).expand(64 * KIB, 2 * KIB)[:, ::2]]


@pytest.mark.parametrize("threads", [1, 2])
def test_python_threads_run_during_packing(threads, background):
    parts, slab = parts_and_slab(slow_leaves())
    is_packed = threading.Event()

    def turns():
        count = 0
        while not is_packed.is_set():
            count += 1
            time.sleep(0.001)
        return count

    counting = background(turns)
    pack_by_threads(parts, slab, threads)
    is_packed.set()
    assert outcome(counting) > 5


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait_for", [None, 0])
@pytest.mark.parametrize("end", ["exit", "error", "forgotten"])
def test_an_abandoned_job_writes_no_more(wait_for, end):
    parts, slab = parts_and_slab(bytes_of(32 * MIB))
    for _ in range(5):
        job = start_packing(parts, slab, 4).__enter__()
        if wait_for is not None:
            job.wait(wait_for)
        if end == "exit":
            job.__exit__()
        elif end == "error":
            with pytest.raises(ZeroDivisionError), job:  # entered twice
                raise ZeroDivisionError
        del job
        slab.zero_()
        packed(bytes_of(4 * MIB), 4)  # the threads are free again
        assert not slab.any(), "written after its end"


def test_a_job_writes_nothing_before_its_block():
    parts, slab = parts_and_slab(bytes_of(32 * MIB))
    slab.zero_()
    packed(bytes_of(4 * MIB), 4)  # the threads are there
    jobs = [start_packing(parts, slab, 4) for _ in range(5)]
    packed(bytes_of(32 * MIB), 4)  # long enough for the jobs before it in the queue
    assert not slab.any()
    with jobs[0] as job:
        wait_for_all(job)
    assert slab.any()


def test_a_job_that_has_ended_has_no_chunks():
    job = start_packing(*parts_and_slab(bytes_of(4 * MIB)), 2)
    with job:
        pass
    assert job.ends == ()
    with pytest.raises(ValueError, match="closed"):
        job.wait(0)
    job.__exit__()  # once more


def test_a_job_survives_a_waiting_thread(background):
    parts, slab = parts_and_slab(slow_leaves())
    job = start_packing(parts, slab, 2)
    waiting = background(wait_for_all, job)
    time.sleep(0.01)  # it begins to wait
    with pytest.raises(RuntimeError, match="being waited for"):
        job.__exit__()
    outcome(waiting)
    job.__exit__()
    assert torch.equal(slab.view(64 * KIB, KIB), slow_leaves()[0])


class Pressed(Exception):  # noqa: N818 - stands for a key
    pass


def test_a_signal_is_answered_midway_and_stops_writing():
    parts, slab = parts_and_slab(slow_leaves())

    def press(*_):
        raise Pressed

    before = signal.signal(signal.SIGALRM, press)
    try:
        with start_packing(parts, slab, 2) as job:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            with pytest.raises(Pressed):
                wait_for_all(job)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    slab.zero_()
    packed(bytes_of(4 * MIB), 2)
    assert not slab.any()


def test_a_child_forked_midway_doesn_t_wait():
    leaves = slow_leaves()
    parts, slab = parts_and_slab(leaves)

    def claim():
        # Torch would wait for OpenMP threads, which only the parent has.
        torch.set_num_threads(1)
        with pytest.raises(RuntimeError, match="forked in the middle"):
            wait_for_all(job)
        job.__exit__()
        again = packed(bytes_of(4 * MIB), 3)
        assert torch.equal(again, bytes_of(4 * MIB)[0])
        assert len(tasks()) > 1  # it has threads of its own

    with start_packing(parts, slab, 3) as job:
        claim_in_child(claim)
        wait_for_all(job)
    assert torch.equal(slab.view(64 * KIB, KIB), leaves[0])


def test_a_job_keeps_its_leaves_and_its_slab():
    source, slab = torch.zeros(2, 32 * MIB, dtype=torch.uint8).unbind()
    died = [weakref.ref(source), weakref.ref(slab)]
    job = start_packing(take_apart([source]), slab, 2)
    del source, slab
    with job:
        assert [one() is None for one in died] == [False, False]
    assert [one() is None for one in died] == [True, True]


WITHOUT_THREADS = """
import resource, sys, warnings
import torch
from pinstage._batch import start_packing
from pinstage._batch import take_apart

parts = take_apart([torch.ones(8 << 20, dtype=torch.uint8)])
slab = torch.zeros(parts.table.nbytes, dtype=torch.uint8)
job = start_packing(parts, slab, 3)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as told:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held, limits[1]))
    with job:
        job.wait(len(job.ends) - 1)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    with start_packing(parts, slab, 3):
        pass
print(slab.eq(1).all().item(), [str(one.message) for one in told])
"""


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan needs address space of its own"
)
def test_a_thread_that_cannot_start_warns_once():
    printed = output_of(warm.command("-c", WITHOUT_THREADS))
    text = r"packing goes on with 1 threads: no other could be started \(error 11\); raise the limit of threads"
    assert re.match(rf"True \['{text}[^']*'\]\n", printed), printed


STUCK = """
import ctypes, fcntl, mmap, os, platform, select, struct, time, weakref
import torch
from pinstage._batch import start_packing
from pinstage._batch import take_apart

number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
faults = ctypes.CDLL(None).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
if faults < 0:
    raise SystemExit("userfaultfd is refused")
memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(faults, 0xC018AA3F, struct.pack("=QQQ", 0xAA, 0, 0))  # UFFDIO_API
fcntl.ioctl(faults, 0xC020AA00, struct.pack("=QQQQ", address, 8 << 20, 1, 0))  # UFFDIO_REGISTER: pages never come
leaf = torch.frombuffer(memory, dtype=torch.uint8)
slab = torch.empty(8 << 20, dtype=torch.uint8)
alive = [weakref.ref(leaf), weakref.ref(slab)]
job = start_packing(take_apart([leaf]), slab, 2).__enter__()
del leaf, slab
select.select([faults], [], [])  # a thread reads the leaf
began = time.monotonic()
del job
print(time.monotonic() - began, [one() is not None for one in alive], flush=True)
os._exit(0)
"""


def test_ending_a_job_doesn_t_wait_forever():
    done = warm.completed(STUCK, timeout=60)
    if "refused" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    seconds, kept = done.stdout.split(" ", 1)
    assert 1 < float(seconds) < 30
    assert kept == "[True, True]\n"


# -- how many threads ------------------------------------------------------------------------------


def test_by_default_a_limited_number_of_cpus_packs():
    assert most_threads("auto") == min(usable_cpus(), MOST_THREADS)
    assert most_threads(40) == 40
