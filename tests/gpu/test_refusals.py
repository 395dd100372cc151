"""Refused page-locking on a real device: no wrong byte, and no pending error."""

import random
import warnings

import pytest
import torch

from pinstage import DataLoader, SlabPool, Stager
from pinstage.checkpoint import CheckpointStager
from pinstage.errors import StagingWarning
from pinstage.memory import RegisteredMemory, SharedMemory
from pinstage.offload import frozen_module

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


class LimitedMemory(SharedMemory):
    """Memory that refuses single blocks above a limit, or all blocks after the first ones."""

    def __init__(self, device, limit=1 << 40, blocks=1 << 40):
        super().__init__(device)
        self.limit, self.blocks = limit, blocks

    def allocate(self, nbytes):
        if nbytes > self.limit or not self.blocks:
            raise MemoryError(f"refused {nbytes}")
        self.blocks -= 1
        return super().allocate(nbytes)


@pytest.mark.parametrize("blocks", [1 << 40, 2], ids=["one limit", "two limits"])
@pytest.mark.parametrize("hold", ["stream", "step"])
def test_a_refused_checkpoint_has_the_right_bytes(monkeypatch, blocks, hold):
    monkeypatch.setattr("pinstage._stage._host_slabs.SLAB_BYTES", 4 * MIB)
    memory = LimitedMemory("cuda:0", 6 * MIB, blocks)
    parameters = [torch.full((MIB // 4,), float(i), device="cuda:0") for i in range(40)]
    state = dict(enumerate([*parameters, torch.arange(4 * MIB, device="cuda:0"), torch.ones(5)]))
    with SlabPool("1GiB", memory=memory) as pool, CheckpointStager(pool=pool, hold=hold) as stager:
        for save in range(3):
            expected = {name: tensor.cpu() for name, tensor in state.items()}
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                staging = stager.stage(state)
            stager.wait_before_change()
            for tensor in state.values():
                tensor.add_(1)
            staged = staging.result()
            assert all(torch.equal(staged[name], tensor) for name, tensor in expected.items())
            assert len(told) == (not save)
            del staging, staged


def test_refused_frozen_modules_come_from_pageable_memory():
    module = torch.nn.Linear(1024, 8192, bias=False).requires_grad_(False)
    weight = module.weight.detach().clone()
    with SlabPool("1GiB", memory=LimitedMemory("cuda:0", MIB)) as pool:
        with pytest.warns(StagingWarning, match="refused"):
            handle = frozen_module(module, pool, device="cuda:0")
        for _ in range(3):
            with handle:
                assert module.weight.is_cuda
                assert torch.equal(module.weight.cpu(), weight)


def test_a_loader_goes_on_without_further_registrations():
    dataset = [torch.full((MIB,), i, dtype=torch.int32) for i in range(64)]
    with SlabPool("1GiB", memory=LimitedMemory("cuda:0", blocks=2)) as pool:
        loader = DataLoader(dataset, 2, num_workers=4, pool=pool, device="cuda:0")
        with pytest.warns(StagingWarning):
            passes = [[batch[:, 0].tolist() for batch in loader] for _ in range(2)]
        assert passes == [[[i, i + 1] for i in range(0, 64, 2)]] * 2
        assert loader.stats().fallback_batches == 0
        del loader


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
