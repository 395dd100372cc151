"""How long until 1 GiB of page-locked memory is ready, by each memory resource and by torch.

    python benchmarks/memory_startup.py --out benchmarks/results/memory_startup.json

"first" is the first allocation of a fresh process that has its CUDA context; "again" follows after
that one is freed. Each of the `--rounds` processes gives one sample of "first" and `--repeats` of
"again". Before the first process, the parent touches more memory than the processes need: a virtual
machine may get its memory from the host on first touch, and the first variant would pay for that.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from page_locking import Allocate, Held, torch_pin_memory, touched

import pinstage as ps
from comparison import GIB, MIB, Args, Outcome, Program, Size, Variant, ok


def _resource(name: str, device: str) -> Allocate:
    from cuda.bindings import driver, runtime  # noqa: F401 - imported here, and not in the timer

    def allocate(nbytes: int) -> Held:
        memory = getattr(ps.memory, name)(device)
        block = memory.allocate(nbytes)
        return Held(int, lambda: memory.deallocate(block))

    return allocate


def _cuda_host_alloc(_: str) -> Allocate:
    from cuda.bindings import runtime

    runtime.cudaFree(0)  # this runtime finds the context now, not in the timer

    def allocate(nbytes: int) -> Held:
        status, address = runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocPortable)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaHostAlloc: {status.name}")
        return Held(int, lambda: runtime.cudaFreeHost(address))

    return allocate


def _pageable_touched(_: str) -> Allocate:
    def allocate(nbytes: int) -> Held:
        held = [torch.empty(nbytes, dtype=torch.uint8).zero_()]
        return Held(int, held.clear)

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
        "torch_pin_memory", torch_pin_memory, "`torch.empty(n, pin_memory=True)`", needs_cuda=True
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
    allocate, total = variant.setup(str(args.device)), []
    for _ in range(1 if case.id.endswith("first") else args.repeats):
        start = time.perf_counter()
        held = allocate(case.nbytes)
        total.append(time.perf_counter() - start)
        held.release()
    return ok(total)


def cases(args: Args) -> list[Size]:
    """Return the first allocation, and the later ones."""
    size, unit = (MIB, "MiB") if args.nbytes % GIB else (GIB, "GiB")
    name = f"{args.nbytes // size}{unit}"
    return [Size(f"{name} {turn}", args.nbytes) for turn in ("first", "again")]


PROGRAM = Program.of(
    globals(),
    title="ms until the memory is ready",
    cases=cases,
    options={
        "repeats": (2, "later allocations of each process"),
        "nbytes": (GIB, "bytes to make ready"),
    },
    small={"nbytes": MIB, "rounds": 1},
    rounds=3,
    around=touched,
)
PROGRAM.run(__name__)
