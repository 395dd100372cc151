"""Trains with FSDP2 on batches that a frozen pool stages, and on the same batches on the device.
Run by torchrun.

FSDP2 was reported to hang when each batch is pinned and freed: freeing waits for the device, whose
collectives wait for the other rank. Each rank writes its results to ``FOLDER/rank<n>.json``.

    torchrun --nproc-per-node 2 fsdp_steps.py FOLDER cuda 300
"""

import contextlib
import gc
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

import pinstage as ps

WIDTH = 64
LAYOUTS = 30
"""Batches of different layouts; the warm-up uses all of them."""
SAMPLES = 16
WAITS_OR_PINS = (
    "DeviceSynchronize",
    "HostAlloc",
    "FreeHost",
    "HostRegister",
    "HostUnregister",
    "MallocHost",
)


class Model(nn.Module):
    """Reads every leaf, so that one wrong byte changes the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch):
        rows = torch.cat([sample["rows"] for sample in batch["samples"]])
        for block in self.blocks:
            rows = block(rows)
        weights = torch.cat([sample["weights"] for sample in batch["samples"]])
        return ((self.head(rows)[:, 0] - batch["target"]) ** 2 * weights).mean()


def ragged_batch(rng):
    # More than 64 KiB: each batch takes a slab.
    counts = [rng.randrange(16, 56) for _ in range(SAMPLES)]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    samples = [
        {
            "rows": torch.randn(count, WIDTH, generator=generator),
            "weights": torch.rand(count, generator=generator),
        }
        for count in counts
    ]
    return {"samples": samples, "target": torch.randn(sum(counts), generator=generator)}


def sharded(model, layers, device):
    """Shard a model over all ranks, on a device; return it."""
    model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


def training(batches, device):
    """Return a function that trains for some steps, from weights that are the same each time."""
    torch.manual_seed(0)
    model = Model()
    sharded(model, model.blocks, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    coming = iter(batches)

    def steps(count):
        losses = []
        for _ in range(count):
            loss = model(next(coming))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return steps


def profiled(work, device):
    """Do work; return its result, and the trace's counts of waits for the device, pinning and
    unpinning by caller.
    """
    if device.type != "cuda":
        return work(), Counter()
    torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        result = work()
    events = [
        event for event in profiler.events() if any(word in event.name for word in WAITS_OR_PINS)
    ]
    return result, Counter(f"{event.name} in {whose(event)}" for event in events)


def whose(event):
    """Return ``pinstage`` for an event in one of its steps, otherwise the surrounding operation."""
    parents = []
    while (event := event.cpu_parent) is not None:
        parents.append(event.name)
    return (
        "pinstage"
        if any(name.startswith("pinstage.") for name in parents)
        else (*parents, "nothing")[0]
    )


def pin_and_wait(device):
    """Pin and wait, which training must not do, to check that a trace shows it."""
    with ps.Stager(device, max_bytes="8MiB") as stager:
        stager.to_device(torch.ones(1 << 20))  # 4 MiB: it takes a slab
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(folder, device, steps):
    rng = random.Random(dist.get_rank())
    batches = [ragged_batch(rng) for _ in range(LAYOUTS)]
    warm_up = 2 * LAYOUTS
    order = [*range(LAYOUTS), *(rng.randrange(LAYOUTS) for _ in range(warm_up + steps - LAYOUTS))]

    there = [tree_map(lambda leaf: leaf.to(device), batch) for batch in batches]
    go_on = training((there[number] for number in order), device)
    go_on(warm_up)
    expected, without = profiled(lambda: go_on(steps), device)

    with ps.Stager(device, max_bytes="32MiB") as stager:
        go_on = training((stager.to_device(batches[number]) for number in order), device)
        go_on(warm_up)
        stager.pool.freeze()
        before = stager.pool.stats()
        gc.collect()
        found, with_staging = profiled(lambda: go_on(steps), device)
        after = stager.pool.stats()
    _, control = profiled(lambda: pin_and_wait(device), device)
    report = {
        "losses": [loss.item() for loss in found],
        "expected": [loss.item() for loss in expected],
        "without_staging": without,
        "with_staging": with_staging,
        "control": control,
        "leases": after.hits - before.hits,
        "allocations": after.total_held_slabs - before.total_held_slabs,
        "frees": before.held_slabs - after.held_slabs,
        "pinned": stager.pool.memory.is_pinned,
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


@contextlib.contextmanager
def device_of_rank(kind, backend):
    """Yield the rank's device of a kind, ``cuda`` or ``cpu``, in a process group."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        backend = "gloo"
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _folder, _kind, _steps = sys.argv[1:]
    with device_of_rank(_kind, "nccl") as _device:
        main(Path(_folder), _device, int(_steps))
