"""A stager with a region: read in place, split at the ends of chunks, and not before its bytes are
ready.
"""

import gc
import threading

import pytest
import torch
from doubles import HeldTarget, outcome, stays_blocked

import pinstage as ps
from pinstage._region import _chunks

MIB = 1 << 20
ROW = 4096


def filled(make):
    """Return a registered region, and rows of it with numbers in them, across all borders of
    chunks.

    Not a fixture, since its value would keep the memory alive.
    """
    region = make(device=0, row_bytes=ROW)
    rows = region.tensor((4 * MIB // ROW, ROW // 4), torch.int32)
    torch.arange(MIB, out=rows.view(-1), dtype=torch.int32)
    return region, rows


@pytest.fixture
def borrowing():
    with ps.Stager("cpu", max_bytes="16MiB", borrow_pinned=True) as stager:
        yield stager


def test_ranges_end_where_chunks_do(make, cuda):
    region, rows = filled(make)
    assert _chunks.pieces_of(rows) == [(i * MIB, (i + 1) * MIB) for i in range(4)]
    assert _chunks.pieces_of(rows[1:257]) == [(0, MIB - ROW), (MIB - ROW, MIB)]
    assert _chunks.pieces_of(rows[256]) == [(0, ROW)]
    assert _chunks.pieces_of(region.tensor(1, offset=4 * MIB - 1)) == [(0, 1)]
    assert _chunks.pieces_of(torch.empty(5)) == []


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(100, 700), slice(256, 512)])
def test_rows_of_a_region_are_read_in_place(make, cuda, borrowing, part):
    _, rows = filled(make)
    batch = {"rows": rows[part], "other": torch.arange(1000)}
    transfer = borrowing.stage(batch)
    staged = transfer.wait()
    assert torch.equal(staged["rows"], rows[part])
    assert torch.equal(staged["other"], batch["other"])
    assert transfer.copies == len(_chunks.pieces_of(rows[part])) + 1
    assert borrowing.stats().pool.held_bytes < MIB


def test_without_borrowing_a_region_is_packed(make, cuda, stager):
    _, rows = filled(make)
    staged = stager.to_device(rows)
    rows.fill_(0)
    assert torch.equal(staged.view(-1), torch.arange(MIB, dtype=torch.int32))
    assert stager.stats().pool.held_bytes >= 4 * MIB


def test_an_allocated_region_is_one_range(make, cuda):
    cuda.most_registered = 0
    region = make(device=0, row_bytes=ROW)
    rows = region.tensor((4 * MIB // ROW, ROW))
    assert _chunks.pieces_of(rows) == [(0, 4 * MIB)]
    region.close()


def test_copies_wait_for_the_bytes_they_read(make, cuda, borrowing, background):
    opened, calls = threading.Event(), []

    def wait():
        calls.append(None)
        assert len(calls) < 3 or opened.wait(20)

    cuda.before["cudaHostRegister"] = wait
    region = make(8 * MIB, chunk_bytes=2 * MIB, device=0)
    late, early = region.tensor(2 * MIB, offset=6 * MIB), region.tensor(2 * MIB)
    assert torch.equal(borrowing.to_device(early), early)
    staging = background(borrowing.to_device, late)
    assert stays_blocked(staging)
    late.fill_(5)  # the copy comes later
    opened.set()
    assert outcome(staging).eq(5).all()


def test_a_stager_keeps_what_it_reads(make, cuda, borrowing, monkeypatch):
    held = HeldTarget()
    monkeypatch.setattr(borrowing, "_target", held)
    region = make(chunk_bytes=2 * MIB, device=0)
    region.synchronize()
    borrowing.stage(region.tensor(2 * MIB))
    region.close()
    del region
    gc.collect()
    assert len(cuda.registered) == 2
    held.stream.finish()


def test_a_region_of_the_cpu_is_packed(make, borrowing):
    rows = make().tensor(MIB)
    rows.fill_(3)
    assert borrowing.to_device(rows).eq(3).all()
