"""The program of the comparison: which batches it measures, and how it shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison import batches, harness, plot, rivals, staging
from comparison.batches import BatchShape
from comparison.errors import BenchError
from comparison.program import Args, Program

ABOUT = """
Stage batches of many shapes with pinstage and with every rival that is installed, and compare the times.

All timings include packing, results are compared bit for bit outside the timer, and each way runs in a fresh process.
The tables have medians in ms and, on a GPU, the best rival's time over ours. A run takes some minutes and needs an idle
machine. The output names missing rivals; pip install -e . --group bench installs the ones on PyPI.

    python benchmarks/comparison --out staging.json
    python benchmarks/comparison --only to,pin_to,pinstage --batches 1000x256B,300x1MiB --rounds 3
    python benchmarks/comparison --series all --plot scaling.png --out series.json
    python benchmarks/comparison --from series.json --plot scaling.svg      draws again, measures nothing
    python benchmarks/comparison --smoke                                    seconds, on the CPU; its times mean nothing
"""


def chosen_shapes(args: Args) -> tuple[list[BatchShape], dict[str, list[BatchShape]]]:
    """Return the shapes of the table, and the shapes of each series.

    Raises:
        BenchError: There is no such shape or series.
    """
    known = {
        name: list(shapes[: batches.SMOKE_POINTS] if args.smoke else shapes)
        for name, shapes in batches.SERIES.items()
    }
    if args.series not in (None, "all", *known):
        raise BenchError(f"no such series: {args.series}; known: {', '.join(known)}, all")
    if args.series in known:
        series = {args.series: known[args.series]}
    else:
        series = known if args.series or args.plot else {}
    if args.cases is not None:
        return harness.chosen(args.cases, batches.every_shape(), "batch"), series
    if args.series is not None:
        return [], series
    return list(batches.SMOKE_SHAPES if args.smoke else batches.SHAPES), series


def all_shapes(args: Args) -> list[BatchShape]:
    """Return the shapes of the table and of all series, each once."""
    of_table, series = chosen_shapes(args)
    return list(dict.fromkeys([*of_table, *(shape for some in series.values() for shape in some)]))


def settings(args: Args) -> dict[str, Any]:
    """Return which batches are the table's, and which are of a series."""
    of_table, series = chosen_shapes(args)
    return {
        "table": [shape.id for shape in of_table],
        "series": {name: [shape.id for shape in shapes] for name, shapes in series.items()},
    }


PROGRAM = Program(
    path=str(Path(__file__).parent),
    about=ABOUT,
    title="ms until every leaf is ready on the device",
    benchmark="staging",
    ways=rivals.VARIANTS,
    cases=all_shapes,
    measure=staging.measure,
    options={
        "repeats": (300, "timed calls of each way and batch, at most"),
        "seconds": (0.4, "time limit for these, once a few are done"),
        "series": (None, "measure how time grows with leaves or bytes: leaves, bytes or all"),
        "busy": (0, "other processes that compute meanwhile, one CPU each"),
    },
    small={"repeats": staging.FEWEST_REPEATS, "seconds": 0.0},
    around=lambda args: harness.busy_cpus(args.busy),
    settings=settings,
    draw=plot.draw,
)
