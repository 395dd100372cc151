"""A stager with a region: read and written in place, split at the ends of chunks, and not before
its bytes are ready.
"""

import gc

import pytest
import torch
from doubles import HeldTarget, outcome, stays_blocked, use_target
from fake_driver import Locking

import pinstage as ps
from pinstage._region import _chunks

MIB = 1 << 20
ROW = 4096
ROWS = 4 * MIB // ROW
PARTS = [slice(None), slice(1, None), slice(100, 700), slice(256, 512)]


def numbers(rows=ROWS):
    return torch.arange(rows * ROW // 4, dtype=torch.int32).view(rows, -1)


def registered_rows(make):
    """Return rows of a registered region, with numbers in them, across all borders of chunks.

    Not a fixture, since its value would keep the memory alive.
    """
    rows = make(device=0, row_bytes=ROW).tensor((ROWS, ROW // 4), torch.int32)
    return rows.copy_(numbers())


@pytest.fixture
def borrowing(driver):
    with ps.Stager("cpu", max_bytes="16MiB", borrow_pinned=True) as stager:
        use_target(stager, Locking()).event.finish()
        yield stager


def lock(driver, region, nbytes=MIB):
    """Count the chunks of a region as registered."""
    rows = region.view(-1)
    for at in range(0, region.nbytes, nbytes):
        driver.lock(rows[at // 4 : (at + nbytes) // 4])


def test_ranges_end_where_chunks_do(make, cuda):
    rows = registered_rows(make)
    assert _chunks.pieces_of(rows) == [(i * MIB, (i + 1) * MIB) for i in range(4)]
    assert _chunks.pieces_of(rows[1:257]) == [(0, MIB - ROW), (MIB - ROW, MIB)]
    assert _chunks.pieces_of(rows[256]) == [(0, ROW)]
    assert _chunks.pieces_of(rows.view(-1)[-1]) == [(0, 4)]
    for pageable in (torch.empty(5), make().tensor(5)):
        assert _chunks.pieces_of(pageable) == []


@pytest.mark.parametrize(("part", "copies"), [*zip(PARTS, [4, 4, 3, 1], strict=True)])
def test_rows_of_a_region_are_read_in_place(make, cuda, driver, borrowing, part, copies):
    rows = registered_rows(make)
    lock(driver, rows)
    batch = {"rows": rows[part], "other": torch.arange(1000)}
    transfer = borrowing.stage(batch)
    driver.go_on()
    staged = transfer.wait()
    assert torch.equal(staged["rows"], rows[part])
    assert torch.equal(staged["other"], batch["other"])
    assert transfer.copies == copies + 1
    assert borrowing.stats().pool.held_bytes < MIB


@pytest.mark.parametrize("part", PARTS)
def test_rows_go_into_a_region_in_place(make, cuda, borrowing, part):
    rows = registered_rows(make).fill_(-1)
    source, address = numbers()[part].clone(), rows.data_ptr()
    expected = rows.clone()
    expected[part] = source
    out = borrowing.to_host({"rows": source}, out={"rows": rows[part]})
    assert torch.equal(rows, expected)
    assert out["rows"].data_ptr() == address + (part.start or 0) * ROW


@pytest.mark.parametrize("part", [slice(None), slice(100, 700)])
@pytest.mark.parametrize("borrows", [False, True])
def test_rows_come_out_of_a_region(make, cuda, driver, part, borrows):
    rows = registered_rows(make)
    lock(driver, rows)
    there = [torch.zeros_like(rows[part]), torch.zeros(3)]
    with ps.Stager("cpu", max_bytes="16MiB", borrow_pinned=borrows) as stager:
        use_target(stager, Locking()).event.finish()
        transfer = stager.stage([rows[part], torch.ones(3)])
        driver.go_on()
        there = transfer.wait()
        assert stager.stats().pool.held_bytes < MIB
    rows.fill_(0)
    assert torch.equal(there[0], numbers()[part])
    assert there[1].eq(1).all()


def test_an_allocated_region_is_one_range(make, cuda):
    cuda.most_registered = 0
    assert _chunks.pieces_of(registered_rows(make)) == [(0, 4 * MIB)]


def test_rows_that_are_not_ready_are_packed(make, borrowing, hold_after):
    opened = hold_after(2)
    region = make(8 * MIB, chunk_bytes=2 * MIB, device=0)
    late = region.tensor(2 * MIB, offset=6 * MIB).fill_(5)
    assert borrowing.to_device(late).eq(5).all()
    assert borrowing.stats().pool.held_bytes >= 2 * MIB
    opened.set()
    region.synchronize()


def test_a_write_into_a_region_waits(make, borrowing, background, hold_after):
    opened = hold_after(3)
    last = registered_rows(make)[-100:]
    writing = background(borrowing.to_host, numbers(100), out=last)
    assert stays_blocked(writing)
    opened.set()
    assert outcome(writing) is last
    assert torch.equal(last, numbers(100))


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
