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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from comparison.harness import Outcome, Size, Variant
from comparison.program import Args, Program

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
    return Variant(name, partial(_resource, name), about, needs_cuda=True, ours=True)


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
    Variant(
        "pageable_touched",
        _pageable_touched,
        "`torch.empty(n).zero_()`, not page-locked",
        where=lambda case: case.nbytes <= MIB,  # of a smoke run
    ),
)


def measure(variant: Variant, args: Args, case: Size) -> Outcome:
    """Return the samples of the first allocation, whose case comes first, or of the later ones."""
    allocate, total = variant.setup(), []
    for _ in range(1 if case.id.endswith("first") else args.repeats):
        start = time.perf_counter()
        release = allocate(case.nbytes)
        total.append(time.perf_counter() - start)
        release()
    return {"status": "ok", "detail": "", "total": total}


def touched(args: Args) -> AbstractContextManager[None]:
    """Touch more memory than a process needs, before the first one."""
    if not args.smoke:
        torch.empty(max(TOUCHED_FIRST, args.nbytes), dtype=torch.uint8).zero_()
    return nullcontext()


def cases(args: Args) -> list[Size]:
    """Return the first allocation, and the later ones."""
    name = f"{args.nbytes // MIB}MiB" if args.nbytes % GIB else f"{args.nbytes // GIB}GiB"
    return [Size(f"{name} {turn}", args.nbytes) for turn in ("first", "again")]


PROGRAM = Program(
    path=__file__,
    about=__doc__,
    title="ms until the memory is ready",
    ways=VARIANTS,
    cases=cases,
    measure=measure,
    options={
        "repeats": (2, "later allocations of each process"),
        "nbytes": (GIB, "bytes to make ready"),
    },
    small={"nbytes": MIB, "rounds": 1},
    rounds=3,
    around=touched,
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
