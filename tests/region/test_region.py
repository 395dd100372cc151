"""`HostRegion`: its parts, when it is ready, and when its memory is freed."""

import gc
import mmap
import os
import pickle
import re
import sys
import threading
import weakref

import pytest
import torch
from doubles import (
    ManualEvent,
    claim_in_child,
    is_held,
    is_mapped,
    outcome,
    stays_blocked,
    wait_until,
)
from processes import completed

import pinstage as ps
from pinstage import _reaper
from pinstage._memory import _limits, _pages, _ranges, _resource
from pinstage._region import _chunks
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    ClosedError,
    PinningError,
    StagingWarning,
)

MIB = 1 << 20


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_are_registered_one_by_one(make, cuda, shared):
    region = make(3 * MIB + 5, device=0, shared=shared)
    region.synchronize(timeout=20)
    assert region.kind == "registered"
    assert not region.reason
    start = region.tensor(1).data_ptr()
    assert cuda.registered == {start + i * MIB: MIB for i in range(3)} | {
        start + 3 * MIB: mmap.PAGESIZE
    }
    assert region.nbytes == 3 * MIB + 5


def test_the_first_chunk_is_registered_by_the_constructor(make, cuda, hold_after):
    opened = hold_after(1)
    region = make(device=0)
    assert len(cuda.registered) == 1
    assert not region.query()
    region.synchronize(MIB)
    with pytest.raises(TimeoutError, match=r"1\.00 MiB of 1\.00 MiB ready"):
        region.synchronize(MIB + 1, timeout=0.01)
    opened.set()
    region.synchronize()
    assert region.query()
    assert len(cuda.registered) == 4


def test_page_locking_disregards_captures(make, cuda):
    make(device=0).synchronize()
    mode = ("cuThreadExchangeStreamCaptureMode", 2)
    assert cuda.calls.index(mode) < [call[0] for call in cuda.calls].index("cudaHostRegister")


def test_progress_is_told_of_each_chunk(make):
    told = []
    region = make(2 * MIB + 1, progress=lambda *figures: told.append(figures))
    region.synchronize()
    whole = 2 * MIB + mmap.PAGESIZE
    wait_until(lambda: len(told) == 3)
    assert told == [(MIB, whole), (2 * MIB, whole), (whole, whole)]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_error_of_progress_is_a_warning(make, error):
    def fail(*_):
        raise error

    with pytest.warns(
        StagingWarning, match=rf"isn't called again, since it raised {error.__name__}"
    ):
        make(progress=fail).synchronize()


def test_a_wait_says_that_progress_closed_the_region(make, background):
    regions, is_waited_for = [], threading.Event()

    def close(ready, _):
        if ready > MIB:
            assert is_waited_for.wait(20)
            regions.pop().close()

    regions.append(make(64 * MIB, progress=close))
    waiting = background(regions[0].synchronize)
    assert stays_blocked(waiting)
    is_waited_for.set()
    with pytest.raises(ClosedError, match="the region was closed before it was ready"):
        outcome(waiting)


@pytest.mark.parametrize("nbytes", [1, 4096, MIB - 1, MIB, 3 * MIB + 1])
def test_content_is_zero_and_of_the_exact_size(make, nbytes):
    region = make(nbytes, chunk_bytes=4 * MIB)
    region.synchronize()
    whole = region.tensor()
    assert whole.shape == (nbytes,)
    assert not whole.any()
    whole.fill_(7)
    assert region.tensor(1, offset=nbytes - 1).item() == 7


def test_bytes_written_before_it_is_ready_stay(make, monkeypatch):
    # As on a kernel before 5.14, where touching pages would overwrite them.
    advise = _pages.advise
    refused = _pages.MADV_POPULATE_WRITE
    monkeypatch.setattr(_pages.ctypes, "get_errno", lambda: 22)
    monkeypatch.setattr(
        _pages, "advise", lambda a, n, advice: advice != refused and advise(a, n, advice)
    )
    release = threading.Event()
    touch = _ranges.HostRange.touch

    def slow(self, start, end):
        assert start == 0 or release.wait(20)
        touch(self, start, end)

    monkeypatch.setattr(_ranges.HostRange, "touch", slow)
    region = make()
    region.tensor(MIB, offset=2 * MIB).fill_(9)
    release.set()
    region.synchronize()
    assert region.tensor(MIB, offset=2 * MIB).eq(9).all()


# -- kinds -----------------------------------------------------------------------------------------


def test_without_cuda_it_is_pageable_and_says_why(make):
    region = make(device=None)
    region.synchronize()
    why = (
        "this build of PyTorch has no CUDA"
        if torch.version.cuda is None
        else "PyTorch finds no CUDA device"
    )
    assert (region.kind, region.reason) == ("pageable", why)
    assert make().reason == "the device is cpu"


def test_where_registering_is_refused_memory_is_allocated(make, cuda):
    cuda.most_registered = MIB - 1
    region = make(device=0)
    assert region.kind == "allocated"
    assert "cudaErrorNotSupported" in region.reason
    assert region.query()
    assert not cuda.registered
    (nbytes,) = cuda.allocated.values()
    assert 4 * MIB <= nbytes <= 4 * MIB + mmap.PAGESIZE
    region.tensor(MIB, offset=3 * MIB).fill_(1)
    region.close()
    wait_until(lambda: not cuda.allocated)


def test_driver_memory_serves_where_page_tables_are_shared(make, cuda):
    cuda.attributes["PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"] = 1
    region = make(device=0)
    assert (region.kind, region.reason) == (
        "allocated",
        "registering doesn't page-lock memory for cuda:0 on this system",
    )
    region.close()
    wait_until(lambda: not cuda.allocated)


@pytest.mark.parametrize("shared", [False, True])
def test_where_both_are_refused_it_is_pageable(make, cuda, shared):
    cuda.most_registered = 0
    cuda.refuse("cudaHostAlloc", 2, 1)
    with pytest.warns(StagingWarning, match="a region is pageable.*cudaErrorNotSupported"):
        region = make(device=0, shared=shared)
    region.synchronize()
    assert region.kind == "pageable"
    assert ("cudaHostAlloc" in cuda.names()) is not shared
    assert not cuda.allocated
    cuda.last_error = 0


def test_a_refused_later_chunk_makes_all_pageable(make, cuda):
    cuda.fail("cudaHostRegister", 2, nth=3)
    refused = r"refused after 2\.00 MiB of 4\.00 MiB"
    with pytest.warns(StagingWarning, match=f"{refused}: cudaHostRegister") as warnings:  # noqa: PT031 - another thread warns
        region = make(device=0)
        assert _chunks.pieces_of(region.tensor(MIB, offset=3 * MIB).fill_(1)) == []
    assert len(warnings) == 1
    with pytest.raises(PinningError, match=refused):
        region.synchronize()
    assert region.query()
    assert region.kind == "pageable"
    assert not cuda.registered


def test_memory_that_runs_out_at_first_leaves_nothing(make, cuda, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("none left")

    monkeypatch.setattr(_pages, "populate", fail)
    with pytest.raises(MemoryError, match="none left"):
        make(device=0)
    assert not cuda.registered


@pytest.fixture
def fail_one_thread(monkeypatch):
    """Let the next start of a thread that page-locks or frees fail, or that thread's first line."""

    def fail(name, error, target="_run"):
        work, failed = getattr(_reaper.UninterruptedCall, name), []

        def fail_once(call):
            function = getattr(call, "_function", None)  # a call that is over has none
            if failed or getattr(function, "__name__", "") != target:
                return work(call)
            failed.append(call)
            raise error

        monkeypatch.setattr(_reaper.UninterruptedCall, name, fail_once)
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
        return failed

    return fail


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_a_thread_that_cannot_be_started_leaves_nothing(make, fail_one_thread, monkeypatch, error):
    freed, free = [], _ranges.HostRange.free
    monkeypatch.setattr(_ranges.HostRange, "free", lambda self: freed.append(free(self)))
    fail_one_thread("begin", error("can't start new thread"))
    with pytest.raises(error, match="can't start new thread"):
        make()
    wait_until(lambda: freed)


def test_a_thread_that_ends_at_once_is_replaced(make, fail_one_thread):
    failed = fail_one_thread("reap", MemoryError())
    region = make()
    region.synchronize(timeout=20)
    assert failed


@pytest.mark.parametrize("name", ["begin", "reap"])
def test_memory_is_freed_although_one_thread_fails(make, fail_one_thread, name):
    region = make()
    memory, failed = region._chunks.memory, fail_one_thread(name, MemoryError(), "_free")
    region.close()
    wait_until(lambda: not is_held(memory))
    assert failed


# -- limits ----------------------------------------------------------------------------------------


def test_more_than_is_left_is_refused(make, tree, monkeypatch):
    root = tree({"proc/meminfo": "MemAvailable:    2048 kB\n", "proc/self/cgroup": ""})
    left = _limits._left
    monkeypatch.setattr(_limits, "_left", lambda _: left(root))
    with pytest.raises(
        MemoryError, match=r"4\.00 MiB asked, 2\.00 MiB left \(memory available on this machine\)"
    ):
        make()
    make(MIB)


def test_missing_huge_pages_are_a_named_error(make):
    with pytest.raises((MemoryError, OSError)) as caught:
        make(1 << 50, huge_pages="1GiB")
    assert (
        "1048576 pages have to be free: see /sys/kernel/mm/hugepages/hugepages-1048576kB"
        in caught.value.__notes__[0]
    )


@pytest.mark.parametrize(("size", "page"), [("2MiB", 2 * MIB), ("1GiB", 1 << 30)])
@pytest.mark.parametrize("shared", [False, True])
def test_explicit_huge_pages_are_asked_of_the_kernel(make, monkeypatch, size, page, shared):
    asked = []
    create = os.memfd_create

    def ordinary(name, flags):
        asked.append(flags)
        return create(name, flags & (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    monkeypatch.setattr(os, "memfd_create", ordinary)
    region = make(5 * MIB, huge_pages=size, shared=shared)
    assert asked[0] & os.MFD_HUGETLB
    assert 1 << (asked[0] >> os.MFD_HUGE_SHIFT & 63) == page
    assert region._chunks.memory.nbytes == -(-5 * MIB // page) * page
    region.tensor(1).fill_(1)


def test_crawling_huge_pages_give_way_to_ordinary_ones(make, monkeypatch):
    advices = []
    advise = _pages.advise
    monkeypatch.setattr(_ranges, "_CRAWL_BYTES_PER_SECOND", 1 << 60)
    monkeypatch.setattr(_ranges, "_TIMED_BYTES", MIB)
    monkeypatch.setattr(_pages, "advise", lambda *args: advices.append(args[2]) or advise(*args))
    with pytest.warns(
        StagingWarning,
        match=r"1\.00 MiB of huge pages took .* the rest of a region has ordinary pages",
    ):
        make().synchronize()
    assert advices.index(mmap.MADV_NOHUGEPAGE) > advices.index(mmap.MADV_HUGEPAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbytes": 0}, "nbytes must be more than 0 bytes: 0"),
        ({"nbytes": "much"}, "not a size: 'much'"),
        ({"chunk_bytes": "4095"}, "chunk_bytes is less than a page: '4095'. Pass 4,096"),
        ({"row_bytes": 0}, "row_bytes must be more than 0"),
        ({"huge_pages": "4KiB"}, "huge_pages must be 'auto', '2MiB' or '1GiB': '4KiB'"),
        ({"numa_node": -1}, "numa_node must be a node's number"),
    ],
)
def test_wrong_arguments_are_refused(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


# -- views and their borders -----------------------------------------------------------------------


def test_a_view_across_a_border_is_refused(make):
    region = make()
    region.tensor((256, 1024), torch.float32)
    with pytest.raises(
        ValueError, match=r"crosses the border of two chunks at byte 1048576.*row_bytes=None"
    ):
        region.tensor((257, 1024), torch.float32)
    with pytest.raises(ValueError, match="at byte 2097152"):
        region.tensor(2, torch.float32, offset=2 * MIB - 4)
    region.tensor(MIB, offset=MIB)


def test_views_of_whole_rows_may_cross_borders(make):
    region = make(row_bytes=12 * 1024)
    rows = region.tensor((300, 3, 1024), torch.float32)
    rows.copy_(torch.arange(300).view(-1, 1, 1).expand(300, 3, 1024))
    assert region.tensor((1, 3, 1024), torch.float32, offset=299 * 12 * 1024).eq(299).all()
    region.tensor((100, 6, 1024), torch.float32, offset=12 * 1024)
    with pytest.raises(ValueError, match="row_bytes=12288"):
        region.tensor((900, 1024), torch.float32)
    with pytest.raises(ValueError, match="row_bytes=12288"):
        region.tensor((200, 3, 1024), torch.float32, offset=4096)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [
        ((1025,), torch.float32, 0),
        ((-1,), torch.uint8, 0),
        (1, torch.float32, 2),
        (1, torch.uint8, -1),
        (1, torch.uint8, 4096),
    ],
)
def test_a_view_that_does_not_fit_is_refused(make, shape, dtype, offset):
    with pytest.raises(ValueError, match=r"doesn't fit: .* of 4096; pass sizes"):
        make(4096).tensor(shape, dtype, offset=offset)


def test_empty_views_and_every_dtype_are_served(make):
    region = make(4096)
    assert region.tensor((0, 5)).shape == (0, 5)
    assert region.tensor((), torch.float64).shape == ()
    for dtype in (torch.bool, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.int16):
        assert region.tensor(4, dtype, offset=64).dtype is dtype


# -- the end ---------------------------------------------------------------------------------------


def test_views_keep_the_memory(make, cuda):
    region = make(device=0)
    region.synchronize()
    view = region.tensor(MIB).view(torch.float32)[5:]
    memory = region._chunks.memory
    region.close()
    del region
    gc.collect()
    view.fill_(1)
    assert len(cuda.registered) == 4
    del view
    wait_until(lambda: not cuda.registered)
    wait_until(lambda: not is_held(memory))


def test_guards_keep_the_memory_until_they_are_done(make, cuda):
    region, event, done = make(device=0), ManualEvent(), ManualEvent()
    region.synchronize()
    done.finish()
    region.guard(done)
    gone = weakref.ref(done)
    del done
    region.guard(event)
    assert gone() is None
    with pytest.raises(TypeError, match="not an event or a stream: 'x'"):
        region.guard("x")
    region.close()
    wait_until(lambda: event.queries > 2)
    assert len(cuda.registered) == 4
    event.finish()
    wait_until(lambda: not cuda.registered)


@pytest.mark.parametrize("unfinished", range(3))
def test_guards_of_two_threads_at_once_are_kept(make, unfinished):
    """The second thread comes while the first one queries an earlier guard."""
    region, events = make(), [ManualEvent(), ManualEvent()]

    class Interrupting(ManualEvent):
        def query(self):
            if not self.queries:
                self.queries += 1
                region.guard(events[0])
            return super().query()

    events.append(Interrupting())
    for event in events[:0:-1]:
        region.guard(event)
    region.close()
    last = events.pop(unfinished)
    for event in events:
        event.finish()
    wait_until(lambda: last.queries > 3)
    last.finish()


def test_a_region_that_is_closed_early_stops(make, cuda, hold_after, background):
    opened = hold_after(1)
    region = make(device=0)
    waiting = background(region.synchronize)
    assert stays_blocked(waiting)
    region.close()
    wait_until(lambda: region._chunks._stops)
    opened.set()
    with pytest.raises(ClosedError, match="closed before it was ready"):
        outcome(waiting)
    wait_until(lambda: not cuda.registered)
    assert cuda.names().count("cudaHostRegister") < 4


def test_a_chunk_that_cuda_keeps_keeps_the_mapping(make, cuda):
    region = make(device=0)
    region.synchronize()
    memory = region._chunks.memory
    cuda.fail("cudaHostUnregister", 1, nth=2)
    with pytest.warns(StagingWarning, match="page-locked memory is leaked"):  # noqa: PT031 - another thread warns
        region.close()
        wait_until(lambda: len(cuda.registered) == 1)
    assert [block.nbytes for block in _resource.LEAKED] == [MIB]
    assert is_mapped(memory.address)
    cuda.registered.clear()
    _resource.LEAKED.clear()
    memory.free()


@pytest.mark.parametrize(
    ("use", "message"), [("tree", "has no tree"), ("handle", "made with shared=True")]
)
def test_a_region_lacks_what_wasn_t_asked_for(make, use, message):
    with pytest.raises(ValueError, match=message):
        getattr(make(), use)()


@pytest.mark.parametrize("use", ["tensor", "query", "synchronize", "handle", "tree"])
def test_a_closed_region_refuses(make, use):
    with make(shared=True) as region:
        pass
    region.close()
    error = ValueError if use == "tree" else ClosedError
    with pytest.raises(error):
        getattr(region, use)()
    with pytest.raises(ClosedError, match="the region is closed"):
        region.guard(ManualEvent())
    assert "closed" in repr(region)


def test_the_end_of_the_program_unregisters_nothing():
    code = """
import sys
sys.path.insert(0, {helpers!r})
from fake_cuda import FakeCuda
from pinstage._memory import _cuda
import pinstage as ps
fake = FakeCuda()
_cuda._bindings = _cuda.Bindings(fake, fake)
region = ps.HostRegion(64 << 20, chunk_bytes="1MiB", device=0)
view = region.tensor(4)
import atexit
atexit.register(lambda: print("end", "cudaHostUnregister" in fake.names()))
"""
    helpers = sys.modules["fake_cuda"].__file__.rpartition("/")[0]
    result = completed([sys.executable, "-W", "error", "-c", code.format(helpers=helpers)])
    assert (result.returncode, result.stdout, result.stderr) == (0, "end False\n", "")


def test_a_forked_child_is_refused(make):
    region = make()

    def claim():
        for use in (region.tensor, region.query, region.synchronize):
            with pytest.raises(PinningError, match="belongs to the parent"):
                use()

    claim_in_child(claim)


def test_a_forked_child_uses_shared_views(make):
    region = make(shared=True)
    view = region.tensor(10)
    claim_in_child(lambda: (view.fill_(3), region.tensor(1, offset=10).fill_(4)))
    assert region.tensor(11).tolist() == [3] * 10 + [4]


def test_a_region_is_collected_with_its_views(make):
    region = ps.HostRegion(MIB, device="cpu")
    end, memory = weakref.ref(region), region._chunks.memory
    del region
    gc.collect()
    assert end() is None
    wait_until(lambda: not is_held(memory))


def test_a_region_is_not_pickled(make):
    with pytest.raises(TypeError, match=r"pass its handle\(\)"):
        pickle.dumps(make())


# -- budgets ---------------------------------------------------------------------------------------


@pytest.fixture
def budget():
    return ps.HostBudget("6MiB", name="job")


def test_a_region_is_counted_until_it_is_freed(make, budget):
    region = make(budget=budget)
    view = region.tensor(1)
    region.close()
    assert [usage.held_bytes for usage in budget.usage()] == [4 * MIB]
    del view
    wait_until(lambda: not budget.usage())


def test_what_the_budget_has_not_is_refused(make, budget):
    with pytest.raises(
        BudgetExceededError, match=r"7\.00 MiB requested from HostBudget\('6\.00 MiB'"
    ):
        make(7 * MIB, budget=budget)
    make(budget=budget)
    with pytest.raises(AcquireTimeoutError, match=r"4\.00 MiB in process"):
        make(3 * MIB, budget=budget)
    make(2 * MIB, budget=budget)
