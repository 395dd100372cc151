"""Refused page-locking on a real device: no wrong byte, and no pending error."""

import random
import warnings

import pytest
import torch

from pinstage import SlabPool, Stager
from pinstage.errors import StagingWarning
from pinstage.memory import RegisteredMemory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_device")]

MIB = 1 << 20


class WalledMemory(RegisteredMemory):
    """Memory that refuses beyond a limit, and sometimes below it."""

    def __init__(self, device, wall, chance=None):
        super().__init__(device)
        self.wall, self.chance, self.refusals = wall, chance, 0

    def allocate(self, nbytes):
        held = sum(block.nbytes for block in list(self._live))
        if held + nbytes > self.wall or (self.chance is not None and self.chance.random() < 0.5):
            self.refusals += 1
            raise MemoryError(f"refused {nbytes}")
        return super().allocate(nbytes)


def test_parts_of_a_slab_are_not_overwritten_early():
    memory = WalledMemory("cuda:0", 3 * MIB)
    with SlabPool("1GiB", memory=memory) as pool, Stager("cuda:0", pool=pool) as stager:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StagingWarning)
            for seed in range(50):
                batch = torch.randint(
                    1 << 30, (8 * MIB,), generator=torch.Generator().manual_seed(seed)
                )
                assert torch.equal(stager.to_device(batch).cpu(), batch)
        assert stager.stats().fallback_batches == 50


def test_random_refusals_leave_no_wrong_byte(monkeypatch):
    monkeypatch.setattr("pinstage._pool._growth.RETRY_SECONDS", 0.0)
    chance = random.Random(17)
    memory = WalledMemory("cuda:0", 8 * MIB, chance)
    noise = torch.randint(256, (16 * MIB,), dtype=torch.uint8)
    noise_there = noise.to("cuda:0")
    with (
        SlabPool("1GiB", memory=memory) as pool,
        Stager("cuda:0", pool=pool) as stager,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", StagingWarning)
        while memory.refusals < 10_000:
            start = chance.randrange(4 * MIB)
            part = slice(start, start + chance.choice([1000, 70_000, 3 * MIB, 12 * MIB]))
            assert torch.equal(stager.to_device(noise[part]), noise_there[part])
            pool.trim()
    torch.cuda.synchronize()
