"""Stage the eight batch shapes with every variant, and say how each stands beside the best rival.

    python benchmarks/run.py --out benchmarks/results/staging.json

One fresh process for each variant, which runs all shapes: a process for each pair would cost 64 starts of torch and
CUDA, more than the measurement itself. Between shapes the variant is closed and set up again and torch's caches are
emptied, so that no shape sees another's slabs.

A sample is the time from the call until every leaf is ready on the device: the call, then a device synchronise. The
time until the call returned is kept beside it. Before the timer starts, a few batches are staged back to back and
compared bit for bit. A staged batch is dropped before the next call, outside the timer.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import batches
import harness
import record
import rivals
import torch
from harness import Outcome, Variant
from record import Row

FEWEST_REPEATS = 7
FEWEST_WARM_UPS = 3
WARM_UP_SECONDS = 0.3
CHECKED_IN_A_ROW = 3


def measure(variant: Variant, args: argparse.Namespace, shape: batches.BatchShape) -> Outcome:
    """Return one variant's status on one shape, and its samples in seconds."""
    device = torch.device(args.device)
    instances = batches.build_instances(shape)
    sources = [variant.prepare(batch) if variant.prepare else batch for batch in instances]
    gc.collect()
    gc.freeze()  # a collection during a call shall not walk the benchmark's own batches
    try:
        with variant.setup(device) as stage:
            wrong = check(stage, instances, sources, device)
            if wrong:
                return {"status": "incorrect", "detail": wrong}
            total, main_thread = timed(stage, sources, synchronizer(device), args.repeats, args.seconds)
    finally:
        gc.unfreeze()
    return {"status": "ok", "detail": "", "total": total, "main": main_thread}


def check(stage: rivals.Stage, instances: Sequence[Any], sources: Sequence[Any], device: torch.device) -> str:
    """Stage some batches back to back, with no wait in between, and return how they differ from their sources."""
    staged = [stage(source) for source in sources[:CHECKED_IN_A_ROW]]
    for instance, result in zip(instances, staged, strict=False):
        wrong = list(islice(batches.differences(instance, result, device), 3))
        if wrong:
            return "; ".join(wrong)
    return ""


def timed(
    stage: rivals.Stage, sources: Sequence[Any], synchronize: Callable[[], None], repeats: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Warm up, then return samples of the whole time and of the time until the call returned."""
    began = time.perf_counter()
    for i, source in enumerate(sources):
        if i >= FEWEST_WARM_UPS and time.perf_counter() - began > WARM_UP_SECONDS:
            break
        stage(source)
        synchronize()
    total: list[float] = []
    main_thread: list[float] = []
    began = time.perf_counter()
    for i in range(repeats):
        if i >= FEWEST_REPEATS and time.perf_counter() - began > seconds:
            break
        source = sources[i % len(sources)]
        start = time.perf_counter()
        staged = stage(source)
        returned = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        total.append(done - start)
        main_thread.append(returned - start)
        del staged
    return total, main_thread


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits for the device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def empty_caches(device: torch.device) -> None:
    """Give torch's cached device and page-locked memory back, so that each shape starts alike."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


def report(rows: Sequence[Row]) -> None:
    """Print the medians, the main thread's part of them, and how we stand on each shape."""
    record.grid("median ms until every leaf is ready on the device", rows, "median")
    record.grid("median ms until the call returned", rows, "main_median")
    standing = []
    for row in rows:
        if row.ours and row.status == "ok":
            best = record.best_rival(rows, row.case) if row.vs_best_rival else None
            figures = [record.cell(row, field) for field in ("p10", "median", "p90", "gb_per_s", "vs_best_rival")]
            rival = [best.variant, record.cell(best, "median")] if best else ["-", "-"]
            standing.append([row.case, row.variant, *figures, *rival])
    header = ["batch", "variant", "p10 ms", "median ms", "p90 ms", "GB/s", "times faster than", "best rival", "its ms"]
    if standing:
        record.show("beside the best rival", header, standing)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 if a variant failed or gave wrong bits."""
    parser = harness.parser(__doc__, repeats=50, repeats_help="timed calls for each variant and shape, at most")
    parser.add_argument("--batches", help="these shapes, separated by commas: 64x1KiB,1000x256B")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help=f"stop after so long, once {FEWEST_REPEATS} are done"
    )
    args = parser.parse_args(argv)
    harness.settle_device(args)
    if args.smoke:
        args.repeats, args.seconds = min(args.repeats, FEWEST_REPEATS), 0.0
    default = batches.SMOKE_SHAPES if args.smoke else batches.SHAPES
    shapes = harness.chosen(
        args.batches, (*batches.SHAPES, *batches.SMOKE_SHAPES) if args.batches else default, "batch"
    )
    if args.child:
        (variant,) = harness.chosen(args.child, rivals.VARIANTS, "variant")
        device = torch.device(args.device)
        harness.start_device(device)
        harness.work(shapes, partial(measure, variant, args), partial(empty_caches, device))
        return 0
    variants = harness.chosen(args.only, rivals.VARIANTS, "variant")
    further = ["--batches", ",".join(shape.id for shape in shapes), "--seconds", str(args.seconds)]
    rows = harness.collect("staging", __file__, variants, shapes, args, further)
    if torch.device(args.device).type == "cuda":  # on the CPU `.to()` moves nothing, and there is no race to win
        record.compare(rows)
    report(rows)
    return harness.finish("staging", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
