"""A long run of random ragged batches, and what the process holds afterwards. Used on the CPU and
on the GPU.
"""

import mmap
import random
from pathlib import Path
from typing import NamedTuple

import torch

import pinstage as ps

BATCHES = 200


class Footprint(NamedTuple):
    """What a process holds at one moment."""

    resident_bytes: int
    device_bytes: int
    pool: ps.PoolStats


def ragged_batch(rng):
    """Return a nested batch of 2 to 40 leaves of up to 4 KiB; its structure may repeat an earlier
    one.
    """
    tensors = [
        torch.randint(0, 255, (rng.randrange(4096),), dtype=torch.uint8).view(
            rng.choice([torch.uint8, torch.int8])
        )
        for _ in range(rng.randrange(2, 40))
    ]
    return {
        "streams": [{"values": tensor, "id": f"{n}"} for n, tensor in enumerate(tensors)],
        "targets": tensors[:1],
    }


def long_run(device, steps):
    """Stage `steps` ragged batches in random order, from a pool that may allocate nothing after a
    warm-up.

    Returns:
        The footprint after the warm-up, and at the end.
    """
    rng = random.Random(0)
    batches = [ragged_batch(rng) for _ in range(BATCHES)]
    with ps.Stager(device, max_bytes="16MiB") as stager:

        def stage(count):
            for _ in range(count):
                batch = rng.choice(batches)
                staged = stager.to_device(batch)
                assert staged["streams"][-1]["values"].shape == batch["streams"][-1]["values"].shape
            return footprint(stager)

        for batch in batches:
            stager.to_device(batch)
        stage(5 * BATCHES)
        stager.pool.freeze()
        before = stage(BATCHES)
        return before, stage(steps)


def footprint(stager):
    on_device = 0
    if stager.device.type == "cuda":
        torch.cuda.synchronize(stager.device)
        on_device = torch.cuda.memory_reserved(stager.device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(pages * mmap.PAGESIZE, on_device, stager.pool.stats())
