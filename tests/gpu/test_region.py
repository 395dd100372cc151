"""`HostRegion` on a real device: chunks, borders, copies in flight, other processes, the end of a
program.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from doubles import is_held, wait_until
from region_processes import copy_on_device

import pinstage as ps
from pinstage._memory import _resource
from pinstage._region import _chunks
from pinstage.errors import PinningError

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
ROW = 64 * 1024


@pytest.fixture(autouse=True)
def _no_leaks(cuda_device):
    yield
    gc.collect()
    wait_until(lambda: not _chunks._living)
    assert _resource.LEAKED == []


def numbered(region):
    """Return the rows of a region, across all borders of chunks, with a number in each element."""
    rows = region.tensor((region.nbytes // ROW, ROW // 4), torch.int32)
    torch.arange(rows.numel(), dtype=torch.int32, out=rows.view(-1))
    return rows


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "HugetlbPages"))
    )


@pytest.mark.parametrize("shared", [False, True])
def test_all_chunks_are_page_locked(cuda_device, shared):
    with ps.HostRegion(300 * MIB + 1, shared=shared, device=cuda_device) as region:
        assert (region.kind, region.reason) == ("registered", "")
        assert region.tensor(1).is_pinned()
        region.synchronize()
        chunks = [
            region.tensor(1, offset=offset) for offset in (0, 64 * MIB - 1, 64 * MIB, 300 * MIB)
        ]
        assert all(chunk.is_pinned() for chunk in chunks)
        assert not region.tensor(44 * MIB, offset=256 * MIB).any()
        del chunks


def test_it_is_exact_and_quick(cuda_device):
    torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    with ps.HostRegion(MIB, device=cuda_device) as warm:
        warm.synchronize()
    before, began = resident(), time.perf_counter()
    with ps.HostRegion(2 * GIB, device=cuda_device) as region:
        first = time.perf_counter() - began
        region.synchronize()
        last = time.perf_counter() - began
        growth = (resident() - before) / region.nbytes
    assert growth < 1.02
    assert first < last / 2


def test_torch_copies_rows_but_not_across_chunks(cuda_device):
    with ps.HostRegion(4 * MIB, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device) as region:
        rows = numbered(region)
        region.synchronize()
        border = MIB // ROW
        for index in (0, border - 1, border, len(rows) - 1):
            assert torch.equal(rows[index].to(cuda_device, non_blocking=True).cpu(), rows[index])
        with pytest.raises(RuntimeError, match="invalid argument"):
            rows[border - 1 : border + 1].to(cuda_device, non_blocking=True)
        torch.ones(5, device=cuda_device).sum().item()  # no error is pending
        del rows


@pytest.mark.parametrize("part", [slice(None), slice(3, 50), slice(16, 32)])
@pytest.mark.parametrize("borrows", [False, True])
def test_a_stager_copies_any_rows(cuda_device, part, borrows):
    with (
        ps.HostRegion(4 * MIB, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device) as region,
        ps.Stager(cuda_device, max_bytes="16MiB", borrow_pinned=borrows) as stager,
    ):
        rows = numbered(region)
        region.synchronize()
        batch = {"rows": rows[part], "other": torch.arange(1000), "large": torch.randn(400_000)}
        staged = stager.to_device(batch)
        for key, leaf in batch.items():
            assert torch.equal(staged[key].cpu(), leaf)
        assert stager.stats().pool.peak_held_bytes < 2 * MIB  # without the rows
        del rows, batch


def test_rows_that_are_not_ready_are_packed(cuda_device, borrowing):
    with ps.HostRegion(4 * GIB, row_bytes=ROW, device=cuda_device) as region:
        last = region.tensor((64, ROW), offset=4 * GIB - 64 * ROW)
        last.fill_(7)
        assert borrowing.to_device(last).eq(7).all()
        del last


def assert_kept(memory):
    gc.collect()
    time.sleep(0.2)  # long enough to be freed, if it could be
    assert is_held(memory)


def test_a_dropped_region_lives_until_the_copy(cuda_device, borrowing, latch):
    borrowing.to_device([torch.ones(MIB).pin_memory()])
    region = ps.HostRegion(8 * MIB, chunk_bytes=2 * MIB, row_bytes=ROW, device=cuda_device)
    rows = numbered(region)
    expected, memory = rows.clone(), region._chunks.memory
    region.synchronize()
    torch.cuda.synchronize()
    latch.hold(borrowing._target.stream)
    staged = borrowing.to_device(rows)
    region.close()
    del rows, region
    assert_kept(memory)
    latch.open()
    assert torch.equal(staged.cpu(), expected)
    wait_until(lambda: not is_held(memory))


@pytest.mark.parametrize("part", [slice(None), slice(3, 50), slice(16, 32)])
def test_rows_are_copied_from_and_into_place(cuda_device, part):
    with (
        ps.HostRegion(4 * MIB, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device) as region,
        ps.Stager(cuda_device, max_bytes="16MiB", borrow_pinned=True) as stager,
    ):
        rows = numbered(region)
        expected = rows.clone()
        expected[part] *= -1
        there = expected[part].to(cuda_device)
        assert (
            stager.to_host({"rows": there}, out={"rows": rows[part]})["rows"].data_ptr()
            == rows[part].data_ptr()
        )
        assert torch.equal(rows, expected)
        back = torch.zeros_like(there)
        stager.to_device([rows[part]], out=[back])
        assert torch.equal(back.cpu(), expected[part])
        assert stager.stats().pool.peak_held_bytes == 0
        del rows


def test_many_blocks_are_swapped_out_and_in(cuda_device):
    with (
        ps.HostRegion(64 * MIB, chunk_bytes=5 * MIB, row_bytes=MIB, device=cuda_device) as region,
        ps.Stager(cuda_device, max_bytes="16MiB", borrow_pinned=True) as stager,
    ):
        host = region.tensor((64, MIB // 4), torch.int32)
        cache = (
            torch.arange(16, dtype=torch.int32, device=cuda_device)
            .repeat_interleave(MIB // 4)
            .view(16, -1)
        )
        homes = {i: (i * 37 + 5) % 64 for i in range(16)}
        stager.to_host([cache[i] for i in homes], out=[host[j] for j in homes.values()])
        cache.zero_()
        stager.to_device([host[j] for j in homes.values()], out=[cache[i] for i in homes])
        assert cache[:, ::1000].cpu().eq(torch.arange(16).view(-1, 1)).all()
        del host


def _interrupted_in_the_wait(function, *args, **kwargs):
    """Call a function that copies to the host; let an interrupt arrive before it waits for the
    copies.
    """

    def interrupt(frame, event, _):
        if event == "call" and frame.f_code is ps.HostTransfer.synchronize.__code__:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)


def test_a_dropped_region_stays_until_it_is_written(cuda_device, stager, latch):
    region = ps.HostRegion(8 * MIB, chunk_bytes=2 * MIB, row_bytes=ROW, device=cuda_device)
    rows = numbered(region)
    memory = region._chunks.memory
    source = torch.full_like(rows, 5, device=cuda_device)
    region.synchronize()
    stager.to_host([source], out=[rows])
    torch.cuda.synchronize()
    latch.hold(torch.cuda.current_stream())
    with pytest.raises(KeyboardInterrupt):
        _interrupted_in_the_wait(stager.to_host, [source], out=[rows])
    region.close()
    del rows, region
    assert_kept(memory)
    latch.open()
    torch.cuda.synchronize()
    wait_until(lambda: not is_held(memory))


def test_a_guard_keeps_memory_for_torch_s_copy(cuda_device, latch):
    stream = torch.cuda.Stream(cuda_device)
    region = ps.HostRegion(MIB, device=cuda_device)
    view = region.tensor(MIB)
    view.fill_(9)
    there = torch.zeros(MIB, dtype=torch.uint8, device=cuda_device)
    torch.cuda.synchronize()
    latch.hold(stream)
    with torch.cuda.stream(stream):
        there.copy_(view, non_blocking=True)
    region.guard(stream.record_event())
    memory = region._chunks.memory
    region.close()
    del view, region
    assert_kept(memory)
    latch.open()
    stream.synchronize()
    assert there.eq(9).all()
    wait_until(lambda: not is_held(memory))


def test_a_graph_is_captured_meanwhile(cuda_device):
    x = torch.ones(1000, device=cuda_device)
    x.mul_(1)
    torch.cuda.synchronize()
    with ps.HostRegion(4 * GIB, device=cuda_device) as region:
        graphs = []
        while not region.query():
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], capture_error_mode="global"):
                x.mul_(2)
        region.synchronize()
        assert graphs
    torch.cuda.synchronize()
    x.fill_(1)
    graphs[0].replay()
    assert x.eq(2).all()


def test_a_later_refusal_makes_it_pageable(cuda_device, monkeypatch):
    register, calls = _chunks.HostRange.register, []

    def refuse(self, start, end):
        calls.append(start)
        if len(calls) == 3:
            # Not a valid address: the driver itself refuses.
            start, end = (
                1 << 60,
                (1 << 60) + end - start,
            )
        register(self, start, end)

    monkeypatch.setattr(_chunks.HostRange, "register", refuse)

    def fails():
        region = ps.HostRegion(4 * MIB, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device)
        with pytest.raises(PinningError, match=r"after 2\.00 MiB of 4\.00 MiB"):
            region.synchronize()
        return region

    with pytest.warns(RuntimeWarning, match="a region is pageable"):
        region = fails()
    assert not region.tensor(1).is_pinned()
    with region, ps.Stager(cuda_device, max_bytes="16MiB", borrow_pinned=True) as stager:
        rows = numbered(region)
        assert torch.equal(stager.to_device(rows).cpu(), rows)
        del rows
    torch.ones(5, device=cuda_device).sum().item()  # no error is pending


def test_driver_memory_serves_where_registering_fails(cuda_device, monkeypatch):
    def refuse(self, start, end):
        raise PinningError("refused by the test", call="cudaHostRegister", nbytes=end - start)

    monkeypatch.setattr(_chunks.HostRange, "register", refuse)
    with ps.HostRegion(4 * MIB, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device) as region:
        assert region.kind == "allocated"
        rows = numbered(region)
        assert torch.equal(rows.to(cuda_device, non_blocking=True).cpu(), rows)
        del rows


@pytest.mark.parametrize("is_killed", [False, True])
def test_another_process_copies_from_the_same_memory(cuda_device, is_killed):
    context = multiprocessing.get_context("spawn")
    with ps.HostRegion(
        4 * MIB, shared=True, chunk_bytes=MIB, row_bytes=ROW, device=cuda_device
    ) as region:
        rows = numbered(region)
        total = int(rows.sum())  # the process changes a row afterwards
        ours, theirs = context.Pipe()
        process = context.Process(
            target=copy_on_device, args=(region.handle(), theirs, str(cuda_device), ROW)
        )
        process.start()
        assert ours.poll(120), "the process said nothing"
        said = ours.recv()
        assert said == {"kind": "registered", "sum": total}
        assert bool(rows[-1].eq(-1).all())  # written there from the device
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            ours.send("end")
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
        assert torch.equal(rows[20].to(cuda_device).cpu(), rows[20])
        del rows


def test_a_program_that_ends_meanwhile_ends_well(cuda_device):
    code = f"""
import torch, pinstage as ps
region = ps.HostRegion({4 * GIB}, device="{cuda_device}")
view = region.tensor(5)
print(region.query())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr
    assert "Traceback" not in result.stderr


def test_all_devices_copy_from_it(two_devices):
    with ps.HostRegion(MIB, device=two_devices[1]) as region:
        view = region.tensor(MIB)
        view.fill_(3)
        for device in two_devices:
            there = view.to(device, non_blocking=True)
            torch.cuda.synchronize(device)
            assert there.eq(3).all()
        del view
