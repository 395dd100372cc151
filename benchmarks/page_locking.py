"""Page-lock a large range: its time, its resident memory, and the delay of other processes and
threads.

    python benchmarks/page_locking.py --out benchmarks/results/page_locking.json

Each way runs in a fresh process, `--repeats` times in turn with an idle GPU and with kernels of 20
ms running. Meanwhile another process calls ``cudaMemGetInfo``, and another thread launches kernels;
the longest of these calls counts. Resident memory is VmRSS and HugetlbPages together. Before the
first process, the parent touches as much memory: a virtual machine may get it from its host on
first touch.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pinstage as ps
from comparison import GIB, MIB, Args, Outcome, Program, Row, Size, Variant, kernel, ok, resident

CHUNK_BYTES = 64 * MIB
TOUCHED_FIRST = 4 * GIB
KERNEL_SECONDS = 0.02

FIRST, LAST, RESIDENT, BACK = "first byte", "last byte", "resident", "given back"
NEIGHBOUR, LAUNCH = "neighbour's call", "own launch"
MEASURED = (FIRST, LAST, NEIGHBOUR, LAUNCH, RESIDENT, BACK)


class Held(NamedTuple):
    """Memory that is being page-locked."""

    wait: Callable[[], object]
    """Returns when the last byte is ready."""
    release: Callable[[], object]
    """Gives the memory back."""


Allocate = Callable[[int], Held]


# -- ways ------------------------------------------------------------------------------------------


def torch_pin_memory(device: str) -> Allocate:  # noqa: ARG001 - as the others
    def allocate(nbytes: int) -> Held:
        held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)]

        def release() -> None:
            held.clear()
            torch._C._host_emptyCache()

        return Held(int, release)

    return allocate


def _region(device: str, **options: Any) -> Allocate:
    def allocate(nbytes: int) -> Held:
        region = ps.HostRegion(nbytes, device=device, chunk_bytes=CHUNK_BYTES, **options)

        def release() -> None:
            full = resident()
            region.close()  # and another thread frees it
            while resident() > full - 0.99 * nbytes:
                time.sleep(0.001)

        return Held(region.synchronize, release)

    return allocate


VARIANTS = (
    Variant("HostRegion", _region, "`ps.HostRegion(n)`", ours=True),
    Variant(
        "HostRegion_shared",
        partial(_region, shared=True),
        "`ps.HostRegion(n, shared=True)`",
        ours=True,
    ),
    Variant(
        "torch_pin_memory", torch_pin_memory, "`torch.empty(n, pin_memory=True)`", needs_cuda=True
    ),
)


# -- witnesses -------------------------------------------------------------------------------------


class Worst:
    """The longest call since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def time(self, call: Callable[[], object]) -> None:
        """Time a call."""
        began = time.perf_counter()
        call()
        self._seconds = max(self._seconds, time.perf_counter() - began)

    def take(self) -> float:
        """Return the longest, and reset it."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def neighbour(device: str) -> None:
    """Run as the other process: call ``cudaMemGetInfo``, and answer each line with the longest call
    so far.
    """
    torch.zeros(1, device=device)
    worst, asked = Worst(), threading.Event()
    threading.Thread(target=lambda: [asked.set() for _ in sys.stdin] and None, daemon=True).start()
    print("ready", flush=True)
    while True:
        worst.time(lambda: torch.cuda.mem_get_info(device))
        if asked.is_set():
            asked.clear()
            print(worst.take(), flush=True)


@contextlib.contextmanager
def meanwhile(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread, until its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def witnesses(device: str) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Let a neighbour and our own thread call CUDA meanwhile; yield functions that return the worst
    call of each.
    """
    command = [sys.executable, "-c", f"import page_locking; page_locking.neighbour({device!r})"]
    worst = Worst()

    def launch(over: threading.Event) -> None:
        stream, ones = torch.cuda.Stream(device), torch.ones(1024, device=device)

        def once() -> None:
            ones.add_(1)
            stream.synchronize()

        with torch.cuda.device(device), torch.cuda.stream(stream):
            once()
            worst.take()
            while not over.is_set():
                worst.time(once)

    pipe, folder = subprocess.PIPE, Path(__file__).parent
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder) as other,
        meanwhile(launch),
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        asking, answering = other.stdin, other.stdout
        answering.readline()

        def ask() -> float:
            asking.write("\n")
            asking.flush()
            return float(answering.readline())

        try:
            yield ask, worst.take
        finally:
            other.kill()


@contextlib.contextmanager
def kernels(device: str) -> Iterator[None]:
    """Keep the GPU busy meanwhile, with kernels of `KERNEL_SECONDS`."""
    began = threading.Event()

    def run(over: threading.Event) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            run_kernel = kernel(torch.device(device), KERNEL_SECONDS)
            events: list[torch.cuda.Event] = []
            while not over.is_set():
                run_kernel()
                events.append(stream.record_event())
                began.set()
                if len(events) == 4:
                    events.pop(0).synchronize()
            stream.synchronize()

    with meanwhile(run):
        began.wait()
        yield


# -- measuring -------------------------------------------------------------------------------------


def once(
    allocate: Allocate,
    nbytes: int,
    neighbours: Callable[[], float],
    launches: Callable[[], float],
) -> dict[str, float]:
    """Page-lock memory and free it; return the seconds of each part, and the resident share."""
    found: dict[str, float] = {}
    neighbours()
    launches()
    before, began = resident(), time.perf_counter()
    held = allocate(nbytes)
    found[FIRST] = time.perf_counter() - began
    held.wait()
    found[LAST] = time.perf_counter() - began
    found[RESIDENT] = (resident() - before) / nbytes
    found |= {NEIGHBOUR: neighbours(), LAUNCH: launches()}
    began = time.perf_counter()
    held.release()
    found[BACK] = time.perf_counter() - began
    return found


def measure(variant: Variant, args: Args, _: Size) -> dict[str, Outcome]:
    """Measure `repeats` times in each state of the GPU; return the outcomes of all cases."""
    samples: dict[str, list[float]] = {}
    device, cuda = str(args.device), args.device.type == "cuda"
    allocate = variant.setup(device)
    states = {"idle": contextlib.nullcontext, "busy": partial(kernels, device)}
    with witnesses(device) if cuda else contextlib.nullcontext((float, float)) as others:
        for _ in range(args.repeats):
            for state in args.gpu.split(",") if cuda else ["idle"]:
                with states[state]():
                    found = once(allocate, args.nbytes, *others)
                for what, value in found.items():
                    samples.setdefault(f"{what}, {state}", []).append(value)
    return {name: ok(total) for name, total in samples.items()}


def touched(args: Args) -> contextlib.AbstractContextManager[None]:
    """Touch more memory than a process needs, before the first one."""
    if not args.smoke:
        torch.empty(max(TOUCHED_FIRST, args.nbytes), dtype=torch.uint8).zero_()
    return contextlib.nullcontext()


def cases(args: Args) -> list[Size]:
    """Return what is measured, on an idle GPU and on a busy one."""
    if args.device.type != "cuda":
        return [Size(f"{what}, idle", args.nbytes) for what in (FIRST, LAST, RESIDENT, BACK)]
    return [
        Size(f"{what}, {state}", args.nbytes) for state in args.gpu.split(",") for what in MEASURED
    ]


def _share_resident(rows: list[Row]) -> None:
    """Convert resident memory to percent of the requested bytes, and remove rates from rows that
    have none.
    """
    for row in rows:
        what = row.case.partition(",")[0]
        if what == RESIDENT and row.unit == "ms" and row.median is not None:
            row.unit = "%"
            for name in ("median", "p10", "p90", "minimum", "maximum"):
                setattr(row, name, getattr(row, name) / 10)
        if what != LAST:
            row.gb_per_s = None


PROGRAM = Program.of(
    globals(),
    title="idle and busy: ms, resident in %",
    cases=cases,
    at_once=True,
    options={
        "repeats": (1, "runs of each way, on an idle GPU and on a busy one"),
        "nbytes": (48 * GIB, "bytes to page-lock"),
        "gpu": ("idle,busy", "idle, busy or both; without a GPU idle"),
    },
    small={"nbytes": 256 * MIB},
    judge=_share_resident,
    around=touched,
)
PROGRAM.run(__name__)
