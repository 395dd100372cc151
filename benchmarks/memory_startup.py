"""How long until 1 GiB of page-locked memory is ready, by each memory resource and by torch.

    python benchmarks/memory_startup.py --out benchmarks/results/memory_startup.json

"first" is the first allocation of a fresh process that has its CUDA context; "again" follows after
that one is freed. Each of the `--rounds` processes gives one sample of "first" and `--repeats` of
"again". Before the first process, the parent touches more memory than the processes need: a virtual
machine may get its memory from the host on first touch, and the first variant would pay for that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import script
import torch

from comparison import harness, record, table
from comparison.harness import Outcome, Size, Variant

MIB, GIB = 1 << 20, 1 << 30
TOUCHED_FIRST = 4 * GIB

Allocate = Callable[[int], Callable[[], Any]]
"""Makes the given number of bytes ready, and returns a function that frees them."""


def _resource(name: str) -> Allocate:
    from cuda.bindings import driver, runtime  # noqa: F401 - an import is paid once, and is not part of an allocation

    import pinstage as ps

    def allocate(nbytes: int) -> Callable[[], Any]:
        memory = getattr(ps.memory, name)()
        block = memory.allocate(nbytes)
        return lambda: memory.deallocate(block)

    return allocate


def _torch_pin_memory() -> Allocate:
    def allocate(nbytes: int) -> Callable[[], Any]:
        held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)]

        def release() -> None:
            held.clear()
            torch._C._host_emptyCache()

        return release

    return allocate


def _cuda_host_alloc() -> Allocate:
    from cuda.bindings import runtime

    runtime.cudaFree(0)  # this runtime finds the context now, not in the timer

    def allocate(nbytes: int) -> Callable[[], Any]:
        status, address = runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocPortable)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaHostAlloc: {status.name}")
        return lambda: runtime.cudaFreeHost(address)

    return allocate


def _pageable_touched() -> Allocate:
    def allocate(nbytes: int) -> Callable[[], Any]:
        held = [torch.empty(nbytes, dtype=torch.uint8).zero_()]
        return held.clear

    return allocate


def _ours(name: str, about: str) -> Variant:
    return Variant(
        name, partial(_resource, name), about, package="pinstage", needs_cuda=True, ours=True
    )


VARIANTS = (
    _ours("HostAllocMemory", "`ps.memory.HostAllocMemory().allocate(n)`"),
    _ours("RegisteredMemory", "`ps.memory.RegisteredMemory().allocate(n)`"),
    _ours("SharedMemory", "`ps.memory.SharedMemory().allocate(n)`"),
    Variant(
        "cuda_host_alloc",
        _cuda_host_alloc,
        "`cudaHostAlloc`, portable",
        package="cuda.bindings",
        needs_cuda=True,
    ),
    Variant(
        "torch_pin_memory", _torch_pin_memory, "`torch.empty(n, pin_memory=True)`", needs_cuda=True
    ),
)
SMOKE_VARIANTS = (
    Variant("pageable_touched", _pageable_touched, "`torch.empty(n).zero_()`, not page-locked"),
)


def measure(allocate: Allocate, repeats: int, case: harness.Case) -> Outcome:
    """Return the samples of the first allocation, whose case comes first, or of the later ones."""
    total = []
    for _ in range(1 if case.id.endswith("first") else repeats):
        start = time.perf_counter()
        release = allocate(case.nbytes)
        total.append(time.perf_counter() - start)
        release()
    return {"status": "ok", "detail": "", "total": total}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed."""
    parser = script.parser(__doc__, repeats=2, repeats_help="later allocations of each process")
    parser.add_argument("--nbytes", type=int, default=GIB, help="bytes to make ready")
    parser.set_defaults(rounds=3)
    args = parser.parse_args(argv)
    script.settle_device(args)
    if args.smoke:
        args.nbytes, args.rounds = min(args.nbytes, MIB), 1
    name = f"{args.nbytes // MIB}MiB" if args.nbytes % GIB else f"{args.nbytes // GIB}GiB"
    cases = [Size(f"{name} first", args.nbytes), Size(f"{name} again", args.nbytes)]
    variants = (*VARIANTS, *SMOKE_VARIANTS) if args.smoke or args.child else VARIANTS
    if args.child:
        (variant,) = script.chosen(args.child, variants)
        harness.start_device(torch.device(args.device))
        harness.work(cases, partial(measure, variant.setup(), args.repeats), lambda: None)
        return 0
    variants = tuple(script.chosen(args.only, variants))
    if not args.smoke:
        torch.empty(TOUCHED_FIRST, dtype=torch.uint8).zero_()
    further = ["--nbytes", str(args.nbytes)]
    rows = script.collect(
        "memory_startup", __file__, variants, cases, args, further, judge=record.compare
    )
    table.grid("ms until the memory is ready", rows, "median", "p10", "p90")
    table.grid("speed-up over the best rival", [row for row in rows if row.ours], "vs_best_rival")
    return script.finish("memory_startup", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
