"""`out=` with a region: tensors are read from it and written to it in place, split at the ends of
chunks.
"""

import threading

import pytest
import torch
from doubles import outcome, stays_blocked

import pinstage as ps

MIB = 1 << 20
ROW = 4096
ROWS = 4 * MIB // ROW


def rows_of(region):
    return region.tensor((ROWS, ROW // 4), torch.int32)


def numbers(rows=ROWS):
    return torch.arange(rows * ROW // 4, dtype=torch.int32).view(rows, -1)


@pytest.fixture
def borrowing():
    with ps.Stager("cpu", max_bytes="16MiB", borrow_pinned=True) as stager:
        yield stager


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(100, 700), slice(256, 512)])
def test_rows_go_into_a_region_in_place(make, cuda, borrowing, part):
    rows = rows_of(make(device=0, row_bytes=ROW))
    rows.fill_(-1)
    source, address = numbers()[part].clone(), rows.data_ptr()
    expected = rows.clone()
    expected[part] = source
    out = borrowing.to_host({"rows": source}, out={"rows": rows[part]})
    assert torch.equal(rows, expected)
    assert out["rows"].data_ptr() == address + (part.start or 0) * ROW


def test_a_write_into_a_region_waits(make, cuda, borrowing, background, monkeypatch):
    opened, calls = threading.Event(), []

    def wait():
        calls.append(None)
        assert len(calls) < 4 or opened.wait(20)

    cuda.before["cudaHostRegister"] = wait
    last = rows_of(make(device=0, row_bytes=ROW))[-100:]
    writing = background(borrowing.to_host, numbers(100), out=last)
    assert stays_blocked(writing)
    opened.set()
    assert outcome(writing) is last
    assert torch.equal(last, numbers(100))


@pytest.mark.parametrize("part", [slice(None), slice(100, 700)])
@pytest.mark.parametrize("borrows", [False, True])
def test_rows_come_out_of_a_region(make, cuda, part, borrows):
    rows = rows_of(make(device=0, row_bytes=ROW))
    rows.copy_(numbers())
    there = [torch.zeros_like(rows[part]), torch.zeros(3)]
    with ps.Stager("cpu", max_bytes="16MiB", borrow_pinned=borrows) as stager:
        stager.to_device([rows[part], torch.ones(3)], out=there)
    assert torch.equal(there[0], rows[part])
    assert there[1].eq(1).all()


def test_blocks_are_swapped_out_and_in(make, cuda, borrowing):
    host = rows_of(make(device=0, row_bytes=ROW)).view(16, -1, ROW // 4)
    device = torch.stack([torch.full_like(host[0], number) for number in range(4)])
    borrowing.to_host([device[1], device[3]], out=[host[4], host[11]])
    borrowing.to_device([host[11], host[4]], out=[device[0], device[2]])
    assert device[:, 0, 0].tolist() == [3, 1, 1, 3]


def test_a_tree_goes_into_its_places(borrowing):
    tree = {"a": torch.randn(300, 300), "b": [torch.arange(5), "name"]}
    with ps.HostRegion.empty_like(tree, device="cpu", chunk_bytes="64KiB") as region:
        kept = borrowing.to_host(tree, out=region.tree())
    assert torch.equal(kept["a"], tree["a"])
    assert torch.equal(kept["b"][0], tree["b"][0])
    assert kept["b"][1] == "name"
