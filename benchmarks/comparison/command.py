"""The command line of the comparison. With `--child` it is a child process: one variant on some
shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from comparison import batches, harness, rivals, staging
from comparison.errors import BenchError
from comparison.run import Settings, run_bench

PROGRAM = "python benchmarks/comparison"
ABOUT = f"""
Stage batches of many shapes with pinstage and with every rival that is installed, and compare the times.

All timings include packing, results are compared bit for bit outside the timer, and each way runs in a fresh process.
The table has medians in ms and, on a GPU, the best rival's time over each. A run takes some minutes and needs an idle
machine. The output names missing rivals; pip install -e . --group bench installs the ones on PyPI.

    {PROGRAM} --out staging.json
    {PROGRAM} --only to,pin_to,pinstage --batches 1000x256B,300x1MiB --rounds 3
    {PROGRAM} --series all --plot scaling.png --out series.json
    {PROGRAM} --from series.json --plot scaling.svg      draws again, measures nothing
    {PROGRAM} --smoke                                    seconds, on the CPU; its times mean nothing
"""
BROUGHT_BY_THE_EXTRA = ("rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 0, 1 if a variant failed or gave wrong bits, 2 for a usage
    error.
    """
    args = parser().parse_args(arguments)
    child = args.__dict__.pop("child")
    if child is not None:
        work(child, torch.device(args.device), args.batches, args.repeats, args.seconds)
        return 0
    args.read = tuple(args.read)
    try:
        return run_bench(Settings(**vars(args)))
    except BenchError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BROUGHT_BY_THE_EXTRA:
            raise
        message = f"{missing} is not installed; run: pip install -e . --group bench"
    sys.stderr.write(f"comparison: {message}\n")
    return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser; its destinations are the fields of `Settings`, and `child`."""
    known = Settings()
    found = argparse.ArgumentParser(
        PROGRAM, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add(
        "--device",
        default=known.device,
        help='"cpu", "cuda" or "cuda:1"; "auto" takes a GPU if there is one',
    )
    add("--only", help="these ways, separated by commas: to,pinstage")
    add(
        "--batches",
        help="these batches, tensors x bytes of each, separated by commas: 64x1KiB,1000x256B",
    )
    add("--series", help="measure how time grows with leaves or bytes: leaves, bytes or all")
    add("--plot", type=Path, help="draw the series into this file; measures them if needed")
    add("--out", type=Path, help="write the results to this JSON file")
    add(
        "--from",
        dest="read",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="show a result file, and measure nothing; can be repeated",
    )
    add(
        "--rounds",
        type=positive,
        default=known.rounds,
        help="processes per way; every second round runs backwards",
    )
    add(
        "--repeats",
        type=positive,
        default=known.repeats,
        help="timed calls of each way and batch, at most",
    )
    add(
        "--seconds",
        type=float,
        default=known.seconds,
        help="time limit for these, once a few are done",
    )
    add("--timeout", type=float, default=known.timeout, help="seconds that one process may take")
    add(
        "--busy",
        type=int,
        default=known.busy,
        help="other processes that compute meanwhile, one CPU each",
    )
    add("--smoke", action="store_true", help="a small, short run on the CPU, to test the program")
    add("--child", help=argparse.SUPPRESS)
    return found


def positive(text: str) -> int:
    """Return a number that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def work(
    variant_id: str, device: torch.device, shape_ids: str, repeats: int, seconds: float
) -> None:
    """In the child: measure what the parent asked for, one outcome per line on stdout."""
    (variant,) = harness.chosen(variant_id, rivals.VARIANTS, "variant")
    shapes = harness.chosen(shape_ids, batches.every_shape(), "batch")
    harness.start_device(device)
    measure = partial(staging.measure, variant, device, repeats, seconds)
    harness.work(
        [shape for shape in shapes if variant.suits(shape)],
        measure,
        partial(staging.empty_caches, device),
    )
