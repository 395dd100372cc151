"""Why is a reused pinned buffer slower than no pinning at all, and how fast is the bus really?

    python examples/frame_bandwidth.py --out frame_bandwidth.json

One and ten frames of 3 x 3840 x 2160 floats are sent to the device in the ways that people usually
try in turn. One forum thread is
https://discuss.pytorch.org/t/how-to-maximize-cpu-gpu-memory-transfer-speeds/173855. Each way runs
in a fresh process, and does its untimed work in a function `before`. Without a GPU the frames are
small and are copied within host memory: this shows that the script works, and nothing about a bus.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pinstage as ps

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from comparison import harness, record, table
from comparison.harness import Outcome, Variant
from comparison.record import Row

FRAME, SMALL_FRAME = (3, 2160, 3840), (3, 216, 384)
FEWEST_REPEATS, WARM_UPS = 5, 2

Frames = list[torch.Tensor]
Timed = tuple[Callable[[], Any], Callable[[], Any]]
"""The untimed work before, and the timed work, which returns the frames on the device."""


@dataclass(frozen=True)
class Case:
    """Several frames of one shape."""

    id: str
    frames: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.frames * 4 * torch.Size(self.shape).numel()

    def make(self) -> Frames:
        """Return the frames in pageable memory, each of one value."""
        return [torch.full(self.shape, 1.0 + number) for number in range(self.frames)]


# -- the ways --------------------------------------------------------------------------------------


@contextmanager
def pageable(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """The driver copies through its own page-locked memory, and the call waits."""

    def run() -> Frames:
        return [frame.to(device, copy=True) for frame in frames]

    yield nothing, run


@contextmanager
def pinned_anew(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """Page-lock memory for each frame, copy into it, and send that."""
    # Otherwise torch reuses the memory of the last run.
    before = getattr(torch._C, "_host_emptyCache", nothing)
    yield before, partial(pin_each, device, frames)


@contextmanager
def pinned_each(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """The same; torch caches the memory and reuses it."""
    yield nothing, partial(pin_each, device, frames)


def pin_each(device: torch.device, frames: Frames) -> Frames:
    """Pin and send each frame, for both ways above."""
    return [frame.pin_memory().to(device, non_blocking=True) for frame in frames]


@contextmanager
def reused(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """One buffer for all frames."""
    buffer, arrived = pinned_like(frames[0], device), event_on(device)

    def run() -> Frames:
        there = []
        for frame in frames:
            buffer.copy_(frame)  # the CPU writes all bytes once
            # the bus reads them
            there.append(buffer.to(device, non_blocking=True, copy=True))
            arrived.record()
            arrived.synchronize()  # and only then may the CPU write again
        return there

    yield nothing, run


@contextmanager
def reused_by_one_thread(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """The same with one torch thread, as in the workers of a DataLoader."""
    torch.set_num_threads(1)
    with reused(device, frames) as timed:
        yield timed


@contextmanager
def reused_in_turn(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """Two buffers, so that the CPU writes one while the bus reads the other."""
    buffers = [pinned_like(frames[0], device) for _ in range(2)]
    arrived = [event_on(device) for _ in range(2)]

    def run() -> Frames:
        there = []
        for number, frame in enumerate(frames):
            turn = number % 2
            arrived[turn].synchronize()  # the frame before last; the last one is still being copied
            buffers[turn].copy_(frame)
            there.append(buffers[turn].to(device, non_blocking=True, copy=True))
            arrived[turn].record()
        return there

    yield nothing, run


@contextmanager
def filled_before(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """Buffers that already hold the frames: the speed of the bus."""
    buffers = [pinned_like(frame, device) for frame in frames]

    def before() -> None:
        for buffer, frame in zip(buffers, frames, strict=True):
            buffer.copy_(frame)

    def run() -> Frames:
        return [buffer.to(device, non_blocking=True, copy=True) for buffer in buffers]

    yield before, run


@contextmanager
def staged(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """One call; the frames are in pageable memory."""
    with ps.Stager(device, max_bytes="4GiB") as stager:

        def run() -> Frames:
            return stager.to_device(frames)

        yield nothing, run


@contextmanager
def written_in_place(device: torch.device, frames: Frames) -> Iterator[Timed]:
    """The frames are made in page-locked memory, so they needn't be copied into it."""
    with ps.SlabPool("4GiB", memory=ps.memory.default_memory(device)) as pool:
        leases: list[ps.Lease] = []

        def before() -> None:
            leases.append(lease := pool.acquire(sum(frame.nbytes for frame in frames)))
            host = lease.tensor((len(frames), *frames[0].shape), torch.float32)
            for target, frame in zip(host, frames, strict=True):
                target.copy_(frame)  # a decoder would write its pixels here

        def run() -> Frames:
            lease = leases.pop()
            host = lease.tensor((len(frames), *frames[0].shape), torch.float32)
            there = host.to(device, non_blocking=True, copy=True)
            del host  # a living view keeps the slab out of the pool
            lease.release(after=recorded(device))
            return list(there)

        yield before, run


VARIANTS = (
    Variant("pageable", pageable, "`.to(device)`, from pageable memory"),
    Variant(
        "pinned_anew",
        pinned_anew,
        "`pin_memory()` for each, page-locked each time, then `.to(device, non_blocking=True)`",
        needs_cuda=True,
    ),
    Variant(
        "pinned_each",
        pinned_each,
        "the same, in memory that torch kept from last time",
        needs_cuda=True,
    ),
    Variant("reused", reused, "one pinned buffer: `copy_` into it, `.to(device)`, wait"),
    Variant("reused_by_one_thread", reused_by_one_thread, "the same where torch has one thread"),
    Variant("reused_in_turn", reused_in_turn, "two pinned buffers in turn, an event for each"),
    Variant(
        "filled_before", filled_before, "pinned buffers filled before the timer starts: the bus"
    ),
    Variant("pinstage", staged, "`stager.to_device(frames)`", ours=True),
    Variant(
        "pinstage_lease",
        written_in_place,
        "frames written in place into a lease: nothing to pack",
        ours=True,
    ),
)


# -- what goes wrong without the wait --------------------------------------------------------------


def read_too_early(device: torch.device) -> float:
    """Send a pinned buffer full of 1.0, fill it with 2.0 without waiting, and return the value that
    arrived.

    The GPU has other work before the copy, and the buffer is filled again before that work is done.
    So the copy starts only afterwards, and reads a known value.
    """
    stream = torch.cuda.Stream(device)
    buffer = torch.empty(1 << 20, pin_memory=True)
    there, square = torch.zeros(1 << 20, device=device), torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    for work in (16, 128, 1024, 8192):
        buffer.fill_(1.0)
        with torch.cuda.stream(stream):
            for _ in range(work):
                torch.mm(square, square)
            before_the_copy = stream.record_event()
            there.copy_(buffer, non_blocking=True)  # returns at once
        buffer.fill_(2.0)  # the next frame
        had_not_begun = not before_the_copy.query()
        stream.synchronize()
        if had_not_begun:
            return float(there[0])
    raise RuntimeError("this GPU finished all its work before the CPU had filled 4 MiB")


def staged_in_time(device: torch.device) -> float:
    """Stage a frame full of 1.0, fill it with 2.0 at once, and return the value that arrived."""
    frame = torch.full((1 << 20,), 1.0)
    with ps.Stager(device, max_bytes="64MiB") as stager:
        transfer = stager.stage(frame)
        frame.fill_(2.0)  # it is yours again when stage() returns
        return float(transfer.wait()[0])


# -- measuring -------------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing before the timer starts."""


class NoEvent:
    """On the CPU, a copy is done when the call returns."""

    def record(self) -> None:
        """Do nothing: the copy is done."""

    def synchronize(self) -> None:
        """Do nothing: the copy is done."""


def event_on(device: torch.device) -> Any:
    """Return an event, or its stand-in on the CPU."""
    return torch.cuda.Event() if device.type == "cuda" else NoEvent()


def recorded(device: torch.device) -> Any:
    """Return an event after all work so far; None on the CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def pinned_like(frame: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a buffer for a frame, page-locked if there is a GPU."""
    return torch.empty_like(frame, pin_memory=device.type == "cuda")


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(variant: Variant, args: argparse.Namespace, case: Case) -> Outcome:
    """Return the samples of one way, in seconds, from the first call until all frames are on the
    device.
    """
    device, frames, total = torch.device(args.device), case.make(), []
    with variant.setup(device, frames) as (before, run):
        before()
        if not all(torch.equal(one.cpu(), frame) for one, frame in zip(run(), frames, strict=True)):
            return {"status": "incorrect", "detail": "other bytes arrived"}
        began = time.perf_counter()
        while len(total) < FEWEST_REPEATS + WARM_UPS or (
            len(total) < args.repeats + WARM_UPS and time.perf_counter() - began < args.seconds
        ):
            before()
            synchronize(device)
            start = time.perf_counter()
            there = run()
            synchronize(device)
            total.append(time.perf_counter() - start)
            del there
    return {"status": "ok", "detail": "", "total": total[WARM_UPS:]}


def forget(device: torch.device) -> None:
    """Free cached memory, so that all cases start from the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def main() -> int:
    """Measure all ways; return 1 if one failed or delivered wrong bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--repeats", type=int, default=30, help="timed runs of each way and case, at most"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"limit once {FEWEST_REPEATS} are done: 2; 0.2 on the CPU"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    shape = FRAME if cuda else SMALL_FRAME
    if args.seconds is None:
        args.seconds = 2.0 if cuda else 0.2
    cases = (Case("one frame", 1, shape), Case("ten frames", 10, shape))
    if args.child:
        (variant,) = harness.chosen(args.child, VARIANTS, "way")
        harness.start_device(device)

        def measured(group: Sequence[harness.Pair]) -> dict[tuple[str, str], Outcome]:
            ((way, case),) = group
            return {(way.id, case.id): measure(way, args, case)}

        harness.work([[(variant, case)] for case in cases], measured, partial(forget, device))
        return 0

    command = [sys.executable, __file__, "--device", args.device]
    command += ["--repeats", str(args.repeats), "--seconds", str(args.seconds)]
    at_once = 1 if cuda else harness.SMOKE_AT_ONCE
    rows = harness.collect(
        "frame_bandwidth", command, VARIANTS, cases, device=device, at_once=at_once
    )
    if cuda:
        record.compare(rows)  # the fastest way that isn't ours is the bus
        print(
            f"\n{torch.cuda.get_device_name(device)}, frames of {' x '.join(map(str, shape))} "
            "floats"
        )
    else:
        print(
            f"\nno GPU: frames of {' x '.join(map(str, shape))} floats, copied within the host; no "
            "bus is measured"
        )
    show(rows)
    failed = [row for row in rows if row.status in ("error", "incorrect")]
    for row in failed:
        print(f"{row.variant}, {row.case}: {row.status}: {row.detail}")

    rows.append(early := too_early(device))
    print(f"\nthe buffer filled again without waiting: {early.detail}")
    print(
        "the frame filled again as soon as stage() returns: 1.0 was sent, "
        f"{staged_in_time(device)} arrived"
    )
    if args.out:
        settings = {"frame": shape, "repeats": args.repeats, "seconds": args.seconds}
        settings["variants"] = {variant.id: variant.about for variant in VARIANTS}
        record.save(args.out, record.result_of("frame_bandwidth", settings, rows))
    return 1 if failed or early.status == "error" else 0


def show(rows: list[Row]) -> None:
    """Print a line for each way: milliseconds, GB/s and, where there is one, the share of the
    bus.
    """
    cases = list(dict.fromkeys(row.case for row in rows))
    compared = any(row.vs_best_rival for row in rows)
    header = [
        "way",
        *(f"{case}, {unit}" for case in cases for unit in ("ms", "GB/s", *["of bus"] * compared)),
    ]
    lines: dict[str, list[str]] = {}
    for row in rows:
        share = "-" if row.vs_best_rival is None else f"{row.vs_best_rival:.0%}"
        cells = [table.cell(row, "median"), table.figure(row.gb_per_s), *[share] * compared]
        lines.setdefault(row.variant, []).extend(cells)
    table.show(
        "until all frames are on the device, medians",
        header,
        [[way, *cells] for way, cells in lines.items()],
    )


def too_early(device: torch.device) -> Row:
    """Return, as a row, the result of refilling a pinned buffer before its copy starts."""
    row = Row("frame_bandwidth", "filled again too early", "reused", "needs CUDA")
    if device.type != "cuda":
        row.detail = "on the CPU a copy is done when the call returns, so nothing goes wrong"
        return row
    arrived = read_too_early(device)
    row.status = "incorrect" if arrived == 2.0 else "error"
    row.detail = f"1.0 was sent, {arrived} arrived"
    return row


if __name__ == "__main__":
    sys.exit(main())
