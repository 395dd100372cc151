"""Packing and copying large leaves with native threads, as the limit of the hardware, compared with
pinstage.

    python benchmarks/native_threads.py --out benchmarks/results/native_threads.json

Needs CUDA and its compiler. native_threads.cu describes its ways; pinstage doesn't use that file.
Each native way is shown with its fastest number of threads.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from comparison import (
    Args,
    BatchShape,
    BenchError,
    Outcome,
    Program,
    Variant,
    chosen,
    ok,
    rivals,
    shapes,
    staging,
)
from comparison.record import quantile

CASES = shapes("16x1MiB 64x1MiB 16x16MiB 300x1MiB 1000x256KiB 1x512MiB")
NATIVE = tuple(
    Variant(name, nullcontext, about, needs_cuda=True)
    for name, about in (
        ("bus", "no packing: copies from page-locked memory alone"),
        ("spinning", "C++ threads that wait awake for work, as OpenMP's do"),
        ("sleeping", "C++ threads that are woken for each batch"),
        ("non-temporal", "the same, with stores that bypass the caches"),
    )
)


@contextmanager
def native(args: Args) -> Iterator[None]:
    """Build and run the program; write its lines into a file, each with case, way, threads and the
    milliseconds of each repetition.
    """
    if args.device.type != "cuda":
        yield
        return
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        raise BenchError(
            "needs nvcc, CUDA's compiler: it is neither on the PATH nor in /usr/local/cuda/bin"
        )
    with tempfile.TemporaryDirectory() as folder:
        program, source = f"{folder}/native_threads", str(Path(__file__).with_suffix(".cu"))
        build = [compiler, "-O3", "-std=c++17", "-o", program, source, "-lpthread"]
        subprocess.run(build, check=True)
        words = [str(word) for case in CASES for word in (case.id, case.leaves, case.leaf_bytes)]
        run = [program, str(args.repeats), *words]
        printed = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
        args.native = f"{folder}/printed.json"
        Path(args.native).write_text(json.dumps(printed.splitlines()))
        yield


def measure(variant: Variant, args: Args, case: BatchShape) -> Outcome:
    """Return the samples of a way of Python's, or of a native way with its fastest number of threads."""
    if variant not in NATIVE:
        return staging.measure(variant, args, case)
    found = []
    for line in json.loads(Path(args.native).read_text()):
        name, way, threads, *times = line.split()
        if (name, way) == (case.id, variant.id):
            detail = f"{threads} threads" if int(threads) > 1 else ""
            found.append(ok([float(ms) / 1e3 for ms in times], detail))
    return min(found, key=lambda outcome: quantile(outcome["total"], 0.5))


PROGRAM = Program.of(
    globals(),
    title="ms until all is on the device",
    ways=(*NATIVE, *chosen("pin_to,pinstage", rivals.VARIANTS, "variant")),
    options={"repeats": (30, "timed repetitions"), "seconds": (1.0, "time limit for these")},
    limits=[variant.id for variant in NATIVE],
    around=native,
)
PROGRAM.run(__name__)
