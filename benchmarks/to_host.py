"""From the device to the host: many small tensors, large ones, both directions at once, and frames
there and back.

    python benchmarks/to_host.py --out benchmarks/results/to_host.json

| case | sample |
|---|---|
| `1000x256B` | 1000 tensors of 64 floats on the host |
| `64MiB`, `512MiB` | one tensor on the host |
| `8x64MiB` | eight tensors, two of them in flight at a time |
| `256MiB both ways` | one tensor on the host, during a copy of the same size to the device |
| `frames` | batches of ten frames of 3 x 3840 x 2160 floats to the device, one operation, and back, in the manner of
  the forum's round-trip script; time and bytes of one batch, both ways |

`bus` is the limit of the hardware: existing page-locked buffers, no packing and nothing to return.
On large tensors our figure in the last table is a share of the bus. Bits are checked outside the
timer. The round trip checks some elements of each frame in each batch, so that it detects a buffer
that is reused too early.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import script
import torch

from comparison import harness, table
from comparison.harness import Outcome, Variant

MIB = 1 << 20
FEWEST_REPEATS, WARM_UPS = 3, 2
OF_FRAMES = 2, 1  # the same: a sample of the slowest way takes two seconds
IN_FLIGHT = 2
FRAMES_OF_A_BATCH, BATCHES = 10, 4

Sample = Callable[[], Any]
"""The timed work: returns everything for the check, once it is on the host."""


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


CASES = (
    Case("1000x256B", "small", 1000, 64),
    Case("64MiB", "large", 1, 16 * MIB),
    Case("512MiB", "large", 1, 128 * MIB),
    Case("8x64MiB", "series", 8, 16 * MIB),
    Case("256MiB both ways", "both", 1, 64 * MIB),
    Case("frames", "frames", FRAMES_OF_A_BATCH, 3 * 3840 * 2160),
)
SMOKE_CASES = tuple(Case(case.id, case.kind, min(case.leaves, 10), 1000) for case in CASES)


class Device:
    """Streams and page-locked memory, or their stand-ins on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device) if self.cuda else None

    def pinned(self, *sizes: int) -> list[torch.Tensor]:
        return [torch.empty(size, pin_memory=self.cuda) for size in sizes]

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Any, after: Any = None
    ) -> Any:
        """Copy on a stream, after an event, and return the event after the copy."""
        if not self.cuda:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def wait(self, event: Any) -> None:
        if event is not None:
            event.synchronize()

    def wait_here(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def on_device(case: Case, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors to fetch, all different; made on the CPU, since a GPU's large floats
    differ.
    """
    first = torch.arange(case.elements, dtype=torch.float32)
    return [(first + i).to(device) for i in range(case.leaves)]


def frame_batches(case: Case) -> list[list[torch.Tensor]]:
    """Return two batches of frames on the host, each frame of one value."""
    return [
        [torch.full((case.elements,), float(10 * b + i)) for i in range(case.leaves)]
        for b in range(2)
    ]


def seen(batch: int, fetched: Sequence[torch.Tensor]) -> None:
    """Check some elements of a returned batch of frames, each one larger than it was sent."""
    for i, frame in enumerate(fetched):
        expected = float(10 * (batch % 2) + i + 1)
        if {float(frame[0]), float(frame[frame.numel() // 2]), float(frame[-1])} != {expected}:
            raise AssertionError(
                f"batch {batch}: frame {i} holds {float(frame[0])}, not {expected}"
            )


# -- the ways --------------------------------------------------------------------------------------


@contextmanager
def _cpu_each(device: Device, case: Case) -> Iterator[Sample]:
    if case.kind == "frames":
        batches = frame_batches(case)

        def sample() -> None:
            for number in range(BATCHES):
                there = [frame.to(device.device) + 1 for frame in batches[number % 2]]
                seen(number, [frame.cpu() for frame in there])

        yield sample
        return
    tensors = on_device(case, device.device)
    with _beside(device, case) as beside:

        def fetch() -> list[torch.Tensor]:
            beside()
            return [tensor.cpu() for tensor in tensors]

        yield fetch


@contextmanager
def _pinned_each(device: Device, case: Case) -> Iterator[Sample]:
    """Pinned torch targets, made in each call since the caller keeps them; one synchronise."""
    if case.kind == "frames":
        batches = frame_batches(case)

        def sample() -> None:
            for number in range(BATCHES):
                pin = (lambda frame: frame.pin_memory()) if device.cuda else (lambda frame: frame)
                there = [
                    pin(frame).to(device.device, non_blocking=True) + 1
                    for frame in batches[number % 2]
                ]
                here = [_to_pinned(device, frame) for frame in there]
                device.wait(device.mark())
                seen(number, here)

        yield sample
        return
    tensors = on_device(case, device.device)
    with _beside(device, case) as beside:

        def fetch() -> list[torch.Tensor]:
            beside()
            here = [_to_pinned(device, tensor) for tensor in tensors]
            device.wait(device.mark())
            return here

        yield fetch


def _to_pinned(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, pin_memory=device.cuda).copy_(tensor, non_blocking=True)


@contextmanager
def _bus(device: Device, case: Case) -> Iterator[Sample]:
    """Existing buffers; nothing is packed. The small tensors are one tensor here."""
    back = device.stream()
    if case.kind == "frames":
        yield _frames_by_hand(device, case, pack=False)
        return
    if case.kind == "small":
        (tensor,) = on_device(Case(case.id, "large", 1, case.leaves * case.elements), device.device)
        (here,) = device.pinned(tensor.numel())

        def fetch_one() -> None:
            device.wait(device.copy(here, tensor, back, device.mark()))

        yield fetch_one
        return
    tensors = on_device(case, device.device)
    buffers = device.pinned(*[case.elements] * min(IN_FLIGHT, case.leaves))
    with _beside(device, case) as beside:

        def fetch() -> list[torch.Tensor] | None:
            beside()
            after, events = device.mark(), deque[Any]()
            for i, tensor in enumerate(tensors):
                if len(events) == IN_FLIGHT:
                    device.wait(events.popleft())
                events.append(device.copy(buffers[i % len(buffers)], tensor, back, after))
            while events:
                device.wait(events.popleft())
            return buffers if len(buffers) == len(tensors) else None

        yield fetch


@contextmanager
def _by_hand(device: Device, case: Case) -> Iterator[Sample]:
    """Careful code by hand: buffers made once, two of each, and an event before each reuse."""
    if case.kind == "frames":
        yield _frames_by_hand(device, case, pack=True)
        return
    if case.kind != "small":
        with _bus(device, case) as sample:
            yield sample
        return
    tensors, back = on_device(case, device.device), device.stream()
    (here,) = device.pinned(case.leaves * case.elements)

    def fetch() -> list[torch.Tensor]:
        together = torch.cat(tensors)
        device.wait(device.copy(here, together, back, device.mark()))
        return list(here.split(case.elements))

    yield fetch


def _frames_by_hand(device: Device, case: Case, *, pack: bool) -> Sample:
    batches, size = frame_batches(case), case.leaves * case.elements
    sent, fetched = device.pinned(size, size), device.pinned(size, size)
    slabs = [torch.empty(size, device=device.device) for _ in range(2)]
    forth, back = device.stream(), device.stream()
    if not pack:
        for buffer, batch in zip(sent, batches, strict=True):
            torch.cat(batch, out=buffer)

    def sample() -> None:
        arrived: list[Any] = [None, None]
        returned: deque[Any] = deque()

        def look() -> None:
            number, event = returned.popleft()
            device.wait(event)
            seen(number, fetched[number % 2].split(case.elements))

        for number in range(BATCHES):
            turn = number % 2
            if len(returned) == IN_FLIGHT:
                look()  # after it, this turn's slab and buffers are free
            if pack:
                device.wait(arrived[turn])
                for part, frame in zip(sent[turn].split(case.elements), batches[turn], strict=True):
                    part.copy_(frame)
            arrived[turn] = device.copy(slabs[turn], sent[turn], forth)
            device.wait_here(arrived[turn])
            slabs[turn].add_(1)
            returned.append((number, device.copy(fetched[turn], slabs[turn], back, device.mark())))
        while returned:
            look()

    return sample


@contextmanager
def _pinstage(device: Device, case: Case, *, copy: bool = False) -> Iterator[Sample]:
    import pinstage as ps

    with ps.Stager(device.device, max_bytes="8GiB") as stager:
        if case.kind == "frames":
            batches = frame_batches(case)

            def sample() -> None:
                returned: deque[Any] = deque()
                numbers = range(BATCHES)
                for staged in stager.prefetch((batches[number % 2] for number in numbers), depth=1):
                    returned.append(stager.fetch([frame + 1 for frame in staged], copy=copy))
                    if len(returned) == IN_FLIGHT:
                        seen(numbers[0], returned.popleft().result())
                        numbers = numbers[1:]
                while returned:
                    seen(numbers[0], returned.popleft().result())
                    numbers = numbers[1:]

            yield sample
            return
        tensors = on_device(case, device.device)
        if case.kind == "series":

            def series() -> None:
                transfers: deque[Any] = deque()
                for tensor in tensors:
                    if len(transfers) == IN_FLIGHT:
                        transfers.popleft().result()
                    transfers.append(stager.fetch([tensor], copy=copy))
                while transfers:
                    transfers.popleft().result()

            yield series
            return
        with _beside(device, case) as beside:

            def fetch() -> list[torch.Tensor]:
                beside()
                return stager.fetch(tensors, copy=copy).result()  # type: ignore[no-any-return]

            yield fetch


@contextmanager
def _beside(device: Device, case: Case) -> Iterator[Callable[[], None]]:
    """Yield a function that starts a copy to the device in the case of both ways, and otherwise
    does nothing.
    """
    if case.kind != "both":
        yield lambda: None
        return
    (source,), forth = device.pinned(case.elements), device.stream()
    target = torch.empty(case.elements, device=device.device)

    def start() -> None:
        device.copy(target, source, forth)

    yield start


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
        "pinstage",
        _pinstage,
        "`stager.fetch(tensors, copy=False).result()`",
        package="pinstage",
        ours=True,
    ),
    Variant(
        "pinstage_copy",
        partial(_pinstage, copy=True),
        "`stager.to_host(tensors)`",
        package="pinstage",
        ours=True,
    ),
)


def measure(variant: Variant, args: Any, case: Case) -> Outcome:
    """Return the samples of one variant on one case, in seconds; for the frames, per batch."""
    device = Device(torch.device(args.device))
    with variant.setup(device, case) as sample:
        result = sample()
        expected = (
            on_device(case, torch.device("cpu"))
            if case.kind != "frames" and result is not None
            else []
        )
        if any(
            not torch.equal(one, other) for one, other in zip(expected, result or [], strict=True)
        ):
            return {"status": "incorrect", "detail": "other bytes"}
        del result, expected
        fewest, warm_ups = OF_FRAMES if case.kind == "frames" else (FEWEST_REPEATS, WARM_UPS)
        for _ in range(warm_ups):
            sample()
        device.synchronize()
        total: list[float] = []
        began = time.perf_counter()
        while len(total) < args.repeats:
            if len(total) >= fewest and time.perf_counter() - began > args.seconds:
                break
            start = time.perf_counter()
            kept = sample()
            device.synchronize()  # also waits for the other direction
            total.append((time.perf_counter() - start) / (BATCHES if case.kind == "frames" else 1))
            del kept
    return {"status": "ok", "detail": "", "total": total}


def forget(device: torch.device) -> None:
    """Free cached memory, so that all cases start from the same state."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or gave wrong bits."""
    parser = script.parser(
        __doc__, repeats=100, repeats_help="samples for each variant and case, at most"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.4,
        help=f"stop after this time, once {FEWEST_REPEATS} are done",
    )
    parser.set_defaults(rounds=1)
    args = parser.parse_args(argv)
    script.settle_device(args)
    cases = SMOKE_CASES if args.smoke else CASES
    if args.smoke:
        args.repeats, args.seconds = FEWEST_REPEATS, 0.0
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        harness.work(cases, partial(measure, variant, args), partial(forget, device))  # type: ignore[arg-type]
        return 0
    variants = script.chosen(args.only, VARIANTS)
    further = ["--seconds", str(args.seconds), *(["--smoke"] if args.smoke else [])]
    judge = script.compare_on_a_gpu(args)
    rows = script.collect("to_host", __file__, variants, cases, args, further, judge=judge)
    table.grid(
        "median ms until all is on the host (frames: for a batch, there and back)", rows, "median"
    )
    table.grid("GB/s", rows, "gb_per_s")
    table.grid(
        "speed-up over the best rival; on large tensors, the share of the bus",
        rows,
        "vs_best_rival",
    )
    return script.finish("to_host", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
