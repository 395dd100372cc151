"""The cost of a lease: acquire, `tensor()` and release on one thread, compared with torch's own
warm allocators.

    python benchmarks/pool_latency.py --out benchmarks/results/pool_latency.json

Each cycle is timed by itself, on a pool (or torch's cache) that already holds the memory. Each
variant runs in a fresh process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import script
import torch

from comparison import harness, table
from comparison.harness import Outcome, Size, Variant
from comparison.record import Row

KIB, MIB = 1 << 10, 1 << 20
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


@contextmanager
def _torch_empty(pin_memory: bool) -> Iterator[Cycle]:
    def cycle(nbytes: int) -> None:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        del tensor

    yield cycle


def _ours(name: str, resource: str, needs_cuda: bool) -> Variant:
    about = f"`ps.SlabPool(memory=ps.memory.{resource}())`: acquire, tensor(), release"
    return Variant(
        name, partial(_pool, resource), about, package="pinstage", needs_cuda=needs_cuda, ours=True
    )


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


def measure(variant: Variant, repeats: int, case: harness.Case) -> Outcome:
    """Return the samples of one variant on one size."""
    setup: AbstractContextManager[Cycle] = variant.setup()
    with setup as cycle:
        for _ in range(min(WARM_UPS, repeats)):
            cycle(case.nbytes)
        total = []
        for _ in range(repeats):
            start = time.perf_counter()
            cycle(case.nbytes)
            total.append(time.perf_counter() - start)
    return {"status": "ok", "detail": "", "total": total}


def forget_rates(rows: list[Row]) -> None:
    """Remove the GB/s, since nothing is copied."""
    for row in rows:
        row.gb_per_s = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed."""
    parser = script.parser(__doc__, repeats=5000, repeats_help="cycles for each variant and size")
    args = parser.parse_args(argv)
    script.settle_device(args)
    if args.smoke:
        args.repeats = min(args.repeats, 100)
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        harness.start_device(torch.device(args.device))
        harness.work(CASES, partial(measure, variant, args.repeats), lambda: None)
        return 0
    variants = script.chosen(args.only, VARIANTS)
    rows = script.collect(
        "pool_latency", __file__, variants, CASES, args, unit="us", judge=forget_rates
    )
    table.grid("us per cycle: acquire, make a tensor, release", rows, "median", "p10", "p90")
    return script.finish("pool_latency", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
