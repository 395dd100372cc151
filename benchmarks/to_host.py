"""From the device to the host: results of all sizes, both directions at once, and frames there and
back.

    python benchmarks/to_host.py --out benchmarks/results/to_host.json
    python benchmarks/to_host.py --cases results --only cpu_each,pinned_each,pinstage_copy

| case | sample |
|---|---|
| `results, 8x4KiB` | 8 tensors of 4 KiB on the host, and so on |
| `1000x256B` | 1000 tensors of 64 floats on the host |
| `64MiB`, `512MiB` | one tensor on the host |
| `8x64MiB` | eight tensors, two of them in flight at a time |
| `256MiB both ways` | one tensor on the host, during a copy of the same size to the device |
| `frames` | batches of ten frames of 3 x 3840 x 2160 floats to the device, one operation, and back, in the manner of
  the forum's round-trip script; time and bytes of one batch, both ways |

`bus` is the limit of the hardware: existing page-locked buffers, no packing and nothing to return.
`fill` is the limit of tensors with memory of their own: threads fill new memory of that size from
page-locked memory, with huge pages. `main` is the time until `fetch` returned. Bits are checked
outside the timer. The round trip checks some elements of each frame in each batch, so that it
detects a buffer that is reused too early.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import Any

import torch

from comparison import (
    MIB,
    Args,
    BatchShape,
    Incorrect,
    Outcome,
    Program,
    Variant,
    compare,
    shapes,
    timed,
)

IN_FLIGHT = 2
BATCHES = 4
FILLING_THREADS = 12

Tensors = list[torch.Tensor]
Finish = Callable[[], Any]
"""Returns tensors, once they are on the host; None if they are not to be checked."""
Start = Callable[[Tensors], Finish]


@dataclass(frozen=True)
class Case:
    """Tensors of one size in float32, and what is done with them."""

    id: str
    kind: str
    leaves: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of a sample, in both directions if there are two."""
        return self.leaves * self.elements * 4 * (2 if self.kind in ("both", "frames") else 1)


def result(shape: BatchShape) -> Case:
    """Return the case of a result."""
    return Case(f"results, {shape.id}", "result", shape.leaves, shape.leaf_bytes // 4)


RESULTS = shapes("""
    1x4B 8x4B 200x4B 8x4KiB 64x1KiB 1x256KiB 1x1MiB 8x1MiB 64x256KiB 1000x4KiB 1x64MiB 16x16MiB
""")
CASES = (
    *map(result, RESULTS),
    Case("1000x256B", "result", 1000, 64),
    Case("64MiB", "large", 1, 16 * MIB),
    Case("512MiB", "large", 1, 128 * MIB),
    Case("8x64MiB", "series", 8, 16 * MIB),
    Case("256MiB both ways", "both", 1, 64 * MIB),
    Case("frames", "frames", 10, 3 * 3840 * 2160),
)
SMALL_CASES = (
    *map(result, shapes("1x4B 8x4B 10x4KiB 1x4MiB")),
    *(Case(case.id, case.kind, min(case.leaves, 10), 1000) for case in CASES[-6:]),
)


class Device:
    """Streams and page-locked memory, or their stand-ins on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._streams: Any = torch.cuda if self.cuda else torch.cpu

    def stream(self) -> Any:
        return self._streams.Stream(self.device)

    def pinned(self, *sizes: int) -> Tensors:
        return [torch.empty(size, pin_memory=self.cuda) for size in sizes]

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any = None
    ) -> Any:
        """Copy on a stream, after an event, and return the event after the copy."""
        with self._streams.stream(stream):
            if after is not None:
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def mark(self) -> Any:
        return self._streams.current_stream(self.device).record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            event.synchronize()

    def wait_here(self, event: Any) -> None:
        self._streams.current_stream(self.device).wait_event(event)


def on_device(case: Case, device: torch.device) -> Tensors:
    """Return the tensors to fetch, all different; made on the CPU, since a GPU's large floats
    differ.
    """
    first = torch.arange(case.elements, dtype=torch.float32)
    return [(first + i).to(device) for i in range(case.leaves)]


def frame_batches(case: Case) -> list[Tensors]:
    """Return two batches of frames on the host, each frame of one value."""
    return [
        [torch.full((case.elements,), float(10 * b + i)) for i in range(case.leaves)]
        for b in range(2)
    ]


def in_flight(finishes: Iterable[Finish]) -> Iterator[Any]:
    """Yield what is fetched, in order, with some in flight."""
    waiting: deque[Finish] = deque()
    for finish in finishes:
        waiting.append(finish)
        if len(waiting) == IN_FLIGHT:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def look(fetched: Iterable[Sequence[torch.Tensor]]) -> None:
    """Check some elements of each returned batch of frames, each one larger than it was sent."""
    deque(map(seen, count(), fetched), maxlen=0)  # keeps none of them


def seen(batch: int, fetched: Sequence[torch.Tensor]) -> None:
    """Check a returned batch."""
    for i, frame in enumerate(fetched):
        expected = float(10 * (batch % 2) + i + 1)
        if {float(frame[0]), float(frame[frame.numel() // 2]), float(frame[-1])} != {expected}:
            raise Incorrect(f"batch {batch}: frame {i} holds {float(frame[0])}, not {expected}")


def round_trip(there: Iterator[Tensors], start: Start) -> None:
    """Fetch all batches of frames, and look at them."""
    look(in_flight(start([frame + 1 for frame in frames]) for frames in there))


# -- the ways: a function that starts to fetch tensors, and one that sends frames -------------------

Way = tuple[Start, Callable[[list[Tensors]], Any]]


def _cpu_each(device: Device, case: Case) -> Way:  # noqa: ARG001
    return (
        lambda tensors: lambda: [tensor.cpu() for tensor in tensors],
        lambda batches: ([frame.to(device.device) for frame in batch] for batch in batches),
    )


def _pinned_each(device: Device, case: Case) -> Way:  # noqa: ARG001
    """Pinned torch targets, made in each call since the caller keeps them; one synchronise."""

    def start(tensors: Tensors) -> Finish:
        here = [
            torch.empty(tensor.shape, pin_memory=device.cuda).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        event = device.mark()
        return lambda: (device.wait(event), here)[1]

    def send(frame: torch.Tensor) -> torch.Tensor:
        pinned = frame.pin_memory() if device.cuda else frame
        return pinned.to(device.device, non_blocking=True)

    return start, lambda batches: (list(map(send, batch)) for batch in batches)


def _bus(device: Device, case: Case) -> Way:
    """Existing buffers; nothing is packed. The tensors of a result are one tensor here."""
    together = case.kind == "result"
    size = case.elements * (case.leaves if together else 1)
    buffers, back = cycle(device.pinned(*[size] * min(IN_FLIGHT, case.leaves))), device.stream()
    one = torch.zeros(size, device=device.device)

    def start(tensors: Tensors) -> Finish:
        for tensor in [one] if together else tensors:
            here = next(buffers)
            event = device.copy(here, tensor, back, device.mark())
        return lambda: (device.wait(event), None if together else [here])[1]

    return start, iter


def _by_hand(device: Device, case: Case) -> Way:
    """Careful code by hand: buffers made once, two of each, and an event before each reuse."""
    if case.kind != "result":
        return _bus(device, case)
    (here,), back = device.pinned(case.leaves * case.elements), device.stream()

    def start(tensors: Tensors) -> Finish:
        event = device.copy(here, torch.cat(tensors), back, device.mark())
        return lambda: (device.wait(event), list(here.split(case.elements)))[1]

    return start, iter


def _frames_by_hand(device: Device, case: Case, *, pack: bool) -> Callable[[], None]:
    batches, size = frame_batches(case), case.leaves * case.elements
    sent, fetched = device.pinned(size, size), device.pinned(size, size)
    slabs = [torch.empty(size, device=device.device) for _ in range(2)]
    forth, back = device.stream(), device.stream()
    for buffer, batch in zip(sent, batches, strict=True):
        torch.cat(batch, out=buffer)

    def sample() -> None:
        arrived: list[Any] = [None, None]

        def start(number: int) -> Finish:
            turn = number % 2
            if pack:
                device.wait(arrived[turn])
                for part, frame in zip(sent[turn].split(case.elements), batches[turn], strict=True):
                    part.copy_(frame)
            arrived[turn] = device.copy(slabs[turn], sent[turn], forth)
            device.wait_here(arrived[turn])
            slabs[turn].add_(1)
            event = device.copy(fetched[turn], slabs[turn], back, device.mark())
            return lambda: (device.wait(event), fetched[turn].split(case.elements))[1]

        look(in_flight(map(start, range(BATCHES))))  # after a look, slab and buffers are free

    return sample


@contextmanager
def _pinstage(device: Device, case: Case, *, copy: bool, waits: bool = False) -> Iterator[Way]:
    import pinstage as ps

    with ps.Stager(device.device, max_bytes="8GiB") as stager:

        def start(tensors: Tensors) -> Finish:
            if waits and case.kind not in ("series", "frames"):
                return partial(stager.to_host, tensors)
            return stager.fetch(tensors, copy=copy).result

        yield start, partial(stager.prefetch, depth=1)


def _fill(device: Device, case: Case) -> Way:
    (source,) = device.pinned(case.leaves * case.elements)
    torch.set_num_threads(min(FILLING_THREADS, torch.get_num_threads()))

    def fill() -> None:
        memory = mmap.mmap(-1, source.nbytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=source.dtype).copy_(source)

    return lambda _: fill, iter


VARIANTS = (
    Variant("cpu_each", _cpu_each, "`tensor.cpu()` for each; frames by `.to(device)` and `.cpu()`"),
    Variant(
        "pinned_each",
        _pinned_each,
        "a pinned tensor for each, `copy_(non_blocking=True)`, one synchronise",
    ),
    Variant("by_hand", _by_hand, "one `torch.cat`, buffers made once and used again with events"),
    Variant("bus", _bus, "page-locked buffers filled before, copies only"),
    Variant(
        "fill",
        _fill,
        "threads fill new memory of that size",
        where=lambda case: case.kind == "result" and case.nbytes >= 4 * MIB,
    ),
    Variant(
        "pinstage",
        partial(_pinstage, copy=False),
        "`stager.fetch(tensors, copy=False).result()`",
        ours=True,
    ),
    Variant(
        "pinstage_copy",
        partial(_pinstage, copy=True, waits=True),
        "`stager.to_host(tensors)`",
        ours=True,
    ),
    Variant(
        "fetch",
        partial(_pinstage, copy=True),
        "`stager.fetch(tensors).result()`",
        ours=True,
        where=lambda case: case.kind == "result",
    ),
)


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return the samples of one variant on one case, in seconds; for the frames, per batch."""
    device = Device(args.device)
    limits = {"repeats": args.repeats, "seconds": args.seconds}
    if case.kind == "frames":
        # A sample of the slowest way takes two seconds.
        frames = limits | {"fewest": 2, "warm_ups": 1, "steps": BATCHES}
        if variant.id in ("bus", "by_hand"):
            by_hand = _frames_by_hand(device, case, pack=variant.id == "by_hand")
            return timed(by_hand, args.device, **frames)
        batches = frame_batches(case) * (BATCHES // 2)
        with variant.open(device, case) as (start, send):
            return timed(lambda: round_trip(send(batches), start), args.device, **frames)
    size = case.elements if case.kind == "both" else 0
    (source,), forth = device.pinned(size), device.stream()
    target = torch.empty_like(source, device=args.device)
    tensors = on_device(case, args.device)
    with variant.open(device, case) as (start, _):
        started: list[float] = []

        def whole() -> Any:
            if case.kind == "both":
                device.copy(target, source, forth)
            began = time.perf_counter()
            finish = start(tensors)
            started.append(time.perf_counter() - began)
            return finish()

        def series() -> None:
            deque(in_flight(start([tensor]) for tensor in tensors), maxlen=0)

        expected = on_device(case, torch.device("cpu"))
        got = start(tensors)() or expected
        if len(got) == len(expected):
            compare(got, expected)
        del got
        call = series if case.kind == "series" else whole
        # A small result hundreds of times, as a training loop does.
        warm = {"warm_ups": 2, "warm_seconds": args.seconds / 4}
        outcome = timed(call, args.device, **limits, **warm)
        outcome["main"] = []
        if variant.id in ("pinstage", "fetch") and call is whole:
            outcome["main"] = started[-len(outcome["total"]) :]
    return outcome


PROGRAM = Program.of(
    globals(),
    title="ms until all is on the host (frames: for a batch, there and back)",
    options={
        "repeats": (100, "samples for each variant and case, at most"),
        "seconds": (0.1, "stop after this time, once 3 are done"),
    },
    small={"repeats": 3, "seconds": 0.0},
)
PROGRAM.run(__name__)
