r"""Page-lock a large range: its time, its resident memory, and the delay of other processes and
threads.

    python benchmarks/page_locking.py --out benchmarks/results/page_locking.json
    python benchmarks/page_locking.py --from benchmarks/results/page_locking.json \\
        --plot docs/images/page_locking.png

Each way runs in a fresh process, `--repeats` times in turn with an idle GPU and with kernels of 20
ms running. Meanwhile another process calls ``cudaMemGetInfo``, and another thread launches kernels;
the longest of these calls counts. Resident memory is VmRSS and HugetlbPages together. Before the
first process, the parent touches as much memory: a virtual machine may get it from its host on
first touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pinstage as ps
from comparison.harness import Outcome, Size, Variant
from comparison.plot import in_both_colours
from comparison.program import Args, Program
from comparison.record import Row
from comparison.timing import kernel, resident, synchronize

MIB, GIB = 1 << 20, 1 << 30
CHUNK_BYTES = 64 * MIB
COPIED_BYTES = TOUCHED_FIRST = 4 * GIB
KERNEL_SECONDS = 0.02

FIRST, LAST, RESIDENT, TO_DEVICE, BACK = (
    "first byte",
    "last byte",
    "resident",
    "host to device",
    "given back",
)
NEIGHBOUR, LAUNCH, LAUNCH_BACK = "neighbour's call", "own launch", "own launch, given back"
MEASURED = (FIRST, LAST, NEIGHBOUR, LAUNCH, RESIDENT, TO_DEVICE, BACK, LAUNCH_BACK)


class Held(NamedTuple):
    """Memory that is being page-locked."""

    wait: Callable[[], object]
    """Returns when the last byte is ready."""
    part: Callable[[int], torch.Tensor]
    """Returns a chunk's memory by its number."""
    release: Callable[[], object]
    """Gives the memory back."""


Allocate = Callable[[int], Held]


# -- ways ------------------------------------------------------------------------------------------


def _parts(held: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    return lambda number: held[0][number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def torch_pin_memory(device: str) -> Allocate:  # noqa: ARG001 - as the others
    def allocate(nbytes: int) -> Held:
        held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)]

        def release() -> None:
            held.clear()
            torch._C._host_emptyCache()

        return Held(int, _parts(held), release)

    return allocate


def resource(name: str, device: str) -> Allocate:
    from cuda.bindings import driver, runtime  # noqa: F401 - imported here, and not in the timer

    def allocate(nbytes: int) -> Held:
        memory = getattr(ps.memory, name)(device)
        block = memory.allocate(nbytes)
        whole = torch.frombuffer(
            (ctypes.c_ubyte * nbytes).from_address(block.ptr), dtype=torch.uint8
        )
        return Held(int, _parts([whole]), lambda: memory.deallocate(block))

    return allocate


def _region(device: str, **options: Any) -> Allocate:
    def allocate(nbytes: int) -> Held:
        region = ps.HostRegion(nbytes, device=device, chunk_bytes=CHUNK_BYTES, **options)

        def part(number: int) -> torch.Tensor:
            start = number * CHUNK_BYTES
            return region.tensor(min(CHUNK_BYTES, nbytes - start), offset=start)

        def release() -> None:
            full = resident()
            region.close()  # and another thread frees it
            while resident() > full - 0.99 * nbytes:
                time.sleep(0.001)

        return Held(region.synchronize, part, release)

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
        "one_registration",
        partial(resource, "RegisteredMemory"),
        "touched by 8 threads, then one `cudaHostRegister`",
        needs_cuda=True,
    ),
    Variant(
        "cuda_host_alloc", partial(resource, "HostAllocMemory"), "`cudaHostAlloc`", needs_cuda=True
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
def witnesses(device: str) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Let a neighbour and our own thread call CUDA meanwhile; yield functions that return the worst
    call of each.
    """
    command = [sys.executable, "-c", f"import page_locking; page_locking.neighbour({device!r})"]
    over, worst = threading.Event(), Worst()

    def launch() -> None:
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
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder)
    thread = threading.Thread(target=launch)
    thread.start()
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdout.readline()
    asking, answering = other.stdin, other.stdout

    def ask() -> float:
        asking.write("\n")
        asking.flush()
        return float(answering.readline())

    try:
        yield ask, worst.take
    finally:
        over.set()
        thread.join()
        other.kill()
        other.wait()


@contextlib.contextmanager
def kernels(device: str) -> Iterator[None]:
    """Keep the GPU busy meanwhile, with kernels of `KERNEL_SECONDS`."""
    over, began = threading.Event(), threading.Event()

    def run() -> None:
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

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- measuring -------------------------------------------------------------------------------------


def once(
    allocate: Allocate,
    nbytes: int,
    device: str,
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
    found[TO_DEVICE] = _copy(held, nbytes, device)
    launches()
    began = time.perf_counter()
    held.release()
    found |= {BACK: time.perf_counter() - began, LAUNCH_BACK: launches()}
    return found


def _copy(held: Held, nbytes: int, device: str) -> float:
    """Return the seconds of the copy of `COPIED_BYTES` at most, chunk by chunk."""
    count = max(min(nbytes, COPIED_BYTES) // CHUNK_BYTES, 1)
    there = torch.empty(min(nbytes, CHUNK_BYTES), dtype=torch.uint8, device=device)
    began = time.perf_counter()
    for number in range(count):
        there.copy_(held.part(number), non_blocking=True)
    synchronize(there.device)
    return time.perf_counter() - began


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
                    found = once(allocate, args.nbytes, device, *others)
                for what, value in found.items():
                    samples.setdefault(f"{what}, {state}", []).append(value)
    return {name: {"status": "ok", "detail": "", "total": total} for name, total in samples.items()}


def touched(args: Args) -> contextlib.AbstractContextManager[None]:
    """Touch more memory than a process needs, before the first one."""
    if not args.smoke:
        torch.empty(max(TOUCHED_FIRST, args.nbytes), dtype=torch.uint8).zero_()
    return contextlib.nullcontext()


def cases(args: Args) -> list[Size]:
    """Return what is measured, on an idle GPU and on a busy one."""
    if args.device.type != "cuda":
        return [Size(f"{what}, idle", args.nbytes) for what in (FIRST, LAST, RESIDENT, BACK)]
    copied = min(args.nbytes, COPIED_BYTES)
    return [
        Size(f"{what}, {state}", copied if what == TO_DEVICE else args.nbytes)
        for state in args.gpu.split(",")
        for what in MEASURED
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
        if what not in (LAST, TO_DEVICE):
            row.gb_per_s = None


# -- the picture -----------------------------------------------------------------------------------

_LABELS = {
    "torch_pin_memory": "torch, pin_memory=True",
    "cuda_host_alloc": "cudaHostAlloc",
    "one_registration": "one cudaHostRegister",
    "HostRegion_shared": "HostRegion, shared",
    "HostRegion": "HostRegion",
}


def _draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: seconds until the last byte is ready, and the worst calls of others meanwhile,
    on an idle GPU.
    """
    from matplotlib.figure import Figure

    found = {
        (row["variant"], row["case"]): row["median"]
        for row in result["rows"]
        if row["status"] == "ok"
    }
    ways = [way for way in _LABELS if (way, f"{LAST}, idle") in found]
    figure = Figure(figsize=(10.8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(ways))
    colors = ["#2f9e6e" if way.startswith("HostRegion") else "#9aa5b1" for way in ways]
    left.barh(places, [found[way, f"{LAST}, idle"] / 1e3 for way in ways], color=colors)
    first = [found[way, f"{FIRST}, idle"] / 1e3 for way in ways]
    left.plot(first, list(places), "|", color="#e07b39", ms=16, mew=3, label="first byte ready")
    left.set_yticks(list(places), [_LABELS[way] for way in ways])
    left.set_xlabel("seconds until the last byte is ready")
    left.legend(frameon=False, loc="upper right")
    for what, color, shift in ((NEIGHBOUR, "#3b7dd8", -0.2), (LAUNCH, "#e07b39", 0.2)):
        heights = [max(found.get((way, f"{what}, idle"), 0.0), 1e-3) for way in ways]
        right.barh(
            [place + shift for place in places], heights, height=0.38, color=color, label=what
        )
    right.set_xscale("log")
    right.set_xlabel("ms, the worst call meanwhile")
    right.legend(frameon=False, loc="upper right")
    gib = next(row["nbytes"] for row in result["rows"] if row["case"] == f"{LAST}, idle") / GIB
    figure.suptitle(f"Page-locking {gib:g} GiB, {result['machine']['gpu'] or 'no GPU'}")
    figure.savefig(path, format="png", dpi=130)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw for light and for dark pages."""
    in_both_colours(partial(_draw, results[0]), path)


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
    draw=draw,
)
PROGRAM.run(__name__)
