"""A long pass over ragged batches with ever new structures holds no more memory at its end than
half-way.

``python tests/loader/test_steady.py BATCHES`` is the long form.
"""

import mmap
import os
import random
import sys
from multiprocessing import active_children
from pathlib import Path

import loader_data as data
import torch

import pinstage as ps

MIB = 1 << 20


def ragged(index):
    """Return one of some thousand structures: tensors of random length, one that can't be packed,
    and text.
    """
    rng = random.Random(index)
    fields = {
        f"field {n}": torch.full((rng.randrange(4096),), n, dtype=torch.uint8)
        for n in range(rng.randrange(1, 20))
    }
    moved = torch.ones(2, requires_grad=True)
    return fields | {
        f"number {rng.randrange(200)}": index,
        "text": "x" * rng.randrange(100),
        "moved": moved,
    }


def footprint():
    """Return the bytes that this process and the workers hold, and their open files."""
    processes = [os.getpid(), *sorted(worker.pid for worker in active_children())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes]
    files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes]
    return [count * mmap.PAGESIZE for count in pages], files


def long_pass(batches):
    """Read `batches` batches; return the footprint after the first half, and at the end."""
    loader = ps.DataLoader(
        data.Mapped(ragged, batches), None, num_workers=2, device="cpu", max_bytes="1MiB"
    )
    iterator = iter(loader)
    for _ in range(batches // 2):
        next(iterator)
    before = footprint()
    for _ in range(batches // 2 - 10):
        next(iterator)
    return before, footprint()


def test_memory_and_files_are_steady_in_long_passes():
    (bytes_before, files_before), (bytes_after, files_after) = long_pass(2000)
    assert (
        max(after - before for before, after in zip(bytes_before, bytes_after, strict=True))
        < 2 * MIB
    )
    # One file more or less: torch sends each tensor that can't be packed in its own file.
    assert max(after - before for before, after in zip(files_before, files_after, strict=True)) < 10


if __name__ == "__main__":
    for found in long_pass(int(sys.argv[1])):
        print(found)  # noqa: T201
