"""The cost of a lease: acquire, `tensor()` and release on one thread, compared with torch's own
warm allocators.

    python benchmarks/pool_latency.py --out benchmarks/results/pool_latency.json

Each cycle is timed by itself, on a pool (or torch's cache) that already holds the memory. Each
variant runs in a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from comparison import KIB, MIB, Args, Outcome, Program, Row, Size, Variant, timed

WARM_UPS = 200
CASES = (Size("4KiB", 4 * KIB), Size("1MiB", MIB), Size("64MiB", 64 * MIB))

Cycle = Callable[[int], None]
"""Allocates the given number of bytes and frees them."""


@contextmanager
def _pool(resource: str) -> Iterator[Cycle]:
    import pinstage as ps

    with ps.SlabPool("1GiB", memory=getattr(ps.memory, resource)()) as pool:

        def cycle(nbytes: int) -> None:
            lease = pool.acquire(nbytes)
            tensor = lease.tensor()
            del tensor
            lease.release()

        yield cycle


def _torch_empty(pin_memory: bool) -> Cycle:
    def cycle(nbytes: int) -> None:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        del tensor

    return cycle


def _ours(name: str, resource: str, needs_cuda: bool) -> Variant:
    about = f"`ps.SlabPool(memory=ps.memory.{resource}())`: acquire, tensor(), release"
    return Variant(name, partial(_pool, resource), about, needs_cuda=needs_cuda, ours=True)


VARIANTS = (
    _ours("pool_pinned", "HostAllocMemory", needs_cuda=True),
    _ours("pool_registered", "RegisteredMemory", needs_cuda=True),
    _ours("pool_pageable", "PageableMemory", needs_cuda=False),
    Variant(
        "torch_pinned",
        partial(_torch_empty, True),
        "`torch.empty(n, pin_memory=True)`, warm",
        needs_cuda=True,
    ),
    Variant("torch_pageable", partial(_torch_empty, False), "`torch.empty(n)`, untouched"),
)


def measure(variant: Variant, args: Args, case: Size) -> Outcome:
    """Return the samples of one variant on one size."""
    with variant.open() as cycle:
        cpu, warm_ups = torch.device("cpu"), min(WARM_UPS, args.repeats)
        inputs = [(case.nbytes,)]
        outcome = timed(cycle, cpu, repeats=args.repeats, warm_ups=warm_ups, inputs=inputs)
    return outcome | {"total": outcome["main"], "main": []}


def forget_rates(rows: list[Row]) -> None:
    """Remove the GB/s, since nothing is copied."""
    for row in rows:
        row.gb_per_s = None


PROGRAM = Program.of(
    globals(),
    title="us per cycle: acquire, make a tensor, release",
    options={"repeats": (5000, "cycles for each variant and size")},
    small={"repeats": 100},
    unit="us",
    judge=forget_rates,
)
PROGRAM.run(__name__)
