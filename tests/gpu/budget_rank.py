"""A process that shares a `HostBudget` on a device, for `test_host_budget.py`. Prints messages in
JSON, one per line.

python budget_rank.py DEVICE hold NBYTES
python budget_rank.py DEVICE want NBYTES
python budget_rank.py DEVICE stage TRUTH PLACE SECONDS
"""

import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from host_processes import MIB, Truth, Truthful, say

import pinstage as ps

BUDGET = ps.HostBudget(64 * MIB, name="gpu-tests")


class TruthfulPageable(Truthful, ps.memory.PageableMemory):
    pass


class TruthfulRegistered(Truthful, ps.memory.RegisteredMemory):
    pass


def hold(device, nbytes):
    """Use memory until the end of the input."""
    torch.cuda.init()  # before this, torch treats no memory as page-locked
    with (
        ps.SlabPool(budget=BUDGET, memory=ps.memory.default_memory(device)) as pool,
        pool.acquire(int(nbytes)) as lease,
    ):
        say(is_pinned=lease.tensor().is_pinned())
        sys.stdin.readline()


def want(device, nbytes):
    """Wait for memory that another process has; report when it is available, and stage with it."""
    with (
        ps.SlabPool(budget=BUDGET, memory=ps.memory.default_memory(device)) as pool,
        ps.Stager(device, pool=pool) as stager,
    ):
        stager.to_device(torch.ones(3))  # so that making the context isn't timed
        say(ready=True)
        with pool.acquire(int(nbytes), timeout=60) as lease:
            say(at=time.monotonic(), is_pinned=lease.tensor().is_pinned())
        batch = torch.randint(256, (int(nbytes),), dtype=torch.uint8)
        say(is_right=torch.equal(stager.to_device(batch).cpu(), batch))


def stage(device, truth, place, seconds):
    """Stage batches of many sizes, and give the memory back, while another process does the
    same.
    """
    chance, end = random.Random(place), time.monotonic() + float(seconds)
    kind, owner = (TruthfulPageable, ()) if device == "cpu" else (TruthfulRegistered, (device,))
    memory = kind(Truth(truth), int(place), BUDGET.max_bytes, *owner)
    noise = torch.randint(256, (48 * MIB,), dtype=torch.uint8)
    there = noise.to(device)
    batches = wrong = 0
    with ps.SlabPool(budget=BUDGET, memory=memory) as pool, ps.Stager(device, pool=pool) as stager:
        while time.monotonic() < end:
            part = slice(chance.randrange(8 * MIB), chance.randrange(9, 48) * MIB)
            wrong += not torch.equal(stager.to_device(noise[part]), there[part])
            batches += 1
            pool.trim()
    say(batches=batches, wrong=wrong, excesses=memory.excesses)


if __name__ == "__main__":
    {"hold": hold, "want": want, "stage": stage}[sys.argv[2]](sys.argv[1], *sys.argv[3:])
