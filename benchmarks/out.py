"""Time until a batch is in existing tensors: weights, tensors that `to_device` returned, or separate tensors.

    python benchmarks/out.py --out benchmarks/results/out.json

Compares `Stager.to_device(batch, out=static)` with a loop of ``dst.copy_(src, non_blocking=True)``, with that loop from
page-locked memory, and with `to_device` without `out`. ``4GiB-weights`` has a cap of 256 MiB. Cases with ``pinned``
have page-locked sources, which pinstage borrows. Each variant runs in a fresh process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import script
import torch

from comparison import harness, table
from comparison.harness import Outcome, Variant

KIB, MIB = 1 << 10, 1 << 20
WARM_UPS = 3

Tensors = list[torch.Tensor]
Write = Callable[[Tensors, Tensors], Any]


@dataclass(frozen=True)
class Batch:
    """Leaves of one size, and their destinations."""

    id: str
    leaves: int
    leaf_bytes: int
    pinned: bool = False
    separate: bool = True
    """Whether each destination has its own memory; otherwise `to_device` made them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.leaves * self.leaf_bytes


class Way(NamedTuple):
    """How sources are prepared, once, and written."""

    prepare: Callable[[Tensors], Tensors]
    write: Write


CASES = (
    Batch("4GiB-weights", 64, 64 * MIB),
    Batch("1000x256B-returned", 1000, 256, separate=False),
    Batch("1000x256B-separate", 1000, 256),
    *(
        Batch(f"{leaves}x{name}{'-pinned' if pinned else ''}", leaves, nbytes, pinned=pinned)
        for pinned in (False, True)
        for leaves, name, nbytes in (
            (4, "1KiB", KIB),
            (64, "64KiB", 64 * KIB),
            (8, "1MiB", MIB),
            (300, "1MiB", MIB),
            (16, "16MiB", 16 * MIB),
        )
    ),
)
SMOKE_CASES = (
    Batch("4MiB-weights", 4, MIB),
    Batch("40x256B-returned", 40, 256, separate=False),
    Batch("40x256B-separate", 40, 256),
    Batch("2x1MiB", 2, MIB),
)


@contextmanager
def _out(device: torch.device, case: Batch) -> Iterator[Way]:
    import pinstage as ps

    cap = min(256 * MIB, case.nbytes // 4) if case.id.endswith("weights") else "2GiB"
    with ps.Stager(device, max_bytes=cap, borrow_pinned=case.pinned) as stager:
        yield Way(list, lambda sources, places: stager.to_device(sources, out=places))


@contextmanager
def _new(device: torch.device, case: Batch) -> Iterator[Way]:
    import pinstage as ps

    with ps.Stager(device, max_bytes=2 * case.nbytes + MIB, borrow_pinned=case.pinned) as stager:
        yield Way(list, lambda sources, _: stager.to_device(sources))


@contextmanager
def _copy(device: torch.device, case: Batch) -> Iterator[Way]:  # noqa: ARG001
    yield Way(list, _copy_each)


@contextmanager
def _pinned_copy(device: torch.device, case: Batch) -> Iterator[Way]:  # noqa: ARG001
    yield Way(lambda sources: [source.pin_memory() for source in sources], _copy_each)


def _copy_each(sources: Tensors, places: Tensors) -> Tensors:
    for place, source in zip(places, sources, strict=True):
        place.copy_(source, non_blocking=True)
    return places


VARIANTS = (
    Variant("pinstage_out", _out, "`stager.to_device(batch, out=places)`", package="pinstage", ours=True),
    Variant("pinstage", _new, "`stager.to_device(batch)`: new tensors", package="pinstage", ours=True),
    Variant("copy", _copy, "`place.copy_(leaf, non_blocking=True)` for each leaf"),
    Variant("pin_copy", _pinned_copy, "the same from memory that `pin_memory()` made before", needs_cuda=True),
)


def measure(variant: Variant, repeats: int, device: torch.device, case: Batch) -> Outcome:
    """Return the seconds of each write, until it is done on the device."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def make(seed: int) -> Tensors:
        made = [torch.full((case.leaf_bytes // 4,), seed + i, dtype=torch.int32) for i in range(case.leaves)]
        return [leaf.pin_memory() for leaf in made] if case.pinned and device.type == "cuda" else made

    sources = make(1)
    places = _places(device, case, sources)
    large = case.nbytes >= 1 << 30
    total = []
    with variant.setup(device, case) as way:
        began = time.perf_counter()
        ready = way.prepare(sources)
        prepared = time.perf_counter() - began
        for repeat in range(WARM_UPS + (min(repeats, 5) if large else repeats)):
            settle()
            start = time.perf_counter()
            got = way.write(ready, places)
            settle()
            if repeat >= WARM_UPS:
                total.append(time.perf_counter() - start)
        right = all(torch.equal(there.cpu(), here) for there, here in zip(got, sources, strict=True))
    detail = f"made ready in {prepared * 1e3:.0f} ms" if prepared > 1e-3 else ""
    return {"status": "ok" if right else "incorrect", "detail": detail, "total": total}


def _places(device: torch.device, case: Batch, sources: Tensors) -> Tensors:
    if case.separate:
        return [torch.empty_like(source, device=device) for source in sources]
    import pinstage as ps

    with ps.Stager(device, max_bytes="64MiB") as stager:
        return stager.to_device([torch.zeros_like(source) for source in sources])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or delivered a wrong byte."""
    parser = script.parser(__doc__, repeats=50, repeats_help="writes for each variant and case; 5 of the largest")
    args = parser.parse_args(argv)
    script.settle_device(args)
    cases = SMOKE_CASES if args.smoke else CASES
    if args.smoke:
        args.repeats = min(args.repeats, 2)
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        harness.work(cases, partial(measure, variant, args.repeats, device), lambda: None)
        return 0
    variants = script.chosen(args.only, VARIANTS)
    further = ["--smoke"] if args.smoke else []
    rows = script.collect("out", __file__, variants, cases, args, further)
    table.grid("ms until a batch is in its place", rows, "median", "p10", "p90")
    return script.finish("out", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
