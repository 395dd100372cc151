"""Packing and copying large leaves with native threads, as the limit of the hardware, compared with
pinstage.

    python benchmarks/native_threads.py --out benchmarks/results/native_threads.json

Needs CUDA and its compiler. native_threads.cu describes its ways; pinstage doesn't use that file.
Each native way is shown with its fastest number of threads.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import script
import torch

import pinstage as ps
from comparison import table
from comparison.harness import Variant
from comparison.record import Row, quantile

KIB, MIB = 1 << 10, 1 << 20
WARM_UPS = 5

CASES = {
    "16x1MiB": (16, MIB),
    "64x1MiB": (64, MIB),
    "16x16MiB": (16, 16 * MIB),
    "300x1MiB": (300, MIB),
    "1000x256KiB": (1000, 256 * KIB),
    "1x512MiB": (1, 512 * MIB),
}


def native(repeats: int) -> Iterator[tuple[str, str, int, list[float]]]:
    """Build and run the program; yield case, way, threads and the seconds of each repetition."""
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        raise SystemExit(
            "needs nvcc, CUDA's compiler: it is neither on the PATH nor in /usr/local/cuda/bin"
        )
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "native_threads")
        source = str(Path(__file__).with_suffix(".cu"))
        subprocess.run(
            [compiler, "-O3", "-std=c++17", "-o", program, source, "-lpthread"], check=True
        )
        words = [
            str(word) for name, (leaves, nbytes) in CASES.items() for word in (name, leaves, nbytes)
        ]
        done = subprocess.run(
            [program, str(repeats), *words], check=True, stdout=subprocess.PIPE, text=True
        )
    for line in done.stdout.splitlines():
        name, way, threads, *times = line.split()
        yield name, way, int(threads), [float(ms) / 1e3 for ms in times]


def by_python(name: str, device: torch.device, repeats: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the seconds of each repetition of the Python ways."""
    leaves, nbytes = CASES[name]
    batch = [torch.randint(0, 100, (nbytes,), dtype=torch.uint8) for _ in range(leaves)]

    def pin_to() -> Any:
        return [leaf.pin_memory().to(device, non_blocking=True) for leaf in batch]

    with ps.Stager(device, max_bytes="4GiB") as stager:
        for variant, stage in (("pin_to", pin_to), ("pinstage", lambda: stager.to_device(batch))):
            times = []
            for repeat in range(-WARM_UPS, repeats):
                began = time.perf_counter()
                staged = stage()
                torch.cuda.synchronize(device)
                if repeat >= 0:
                    times.append(time.perf_counter() - began)
                if repeat == -1 and not all(
                    map(torch.equal, (leaf.cpu() for leaf in staged), batch)
                ):
                    raise SystemExit(f"{variant} on {name}: other bytes arrived")
                del staged
            yield variant, times


VARIANTS = (
    Variant("bus", native, "no packing: copies from page-locked memory alone"),
    Variant("spinning", native, "C++ threads that wait awake for work, as OpenMP's do"),
    Variant("sleeping", native, "C++ threads that are woken for each batch"),
    Variant("non-temporal", native, "the same, with stores that bypass the caches"),
    Variant("pin_to", by_python, "`.pin_memory().to(device, non_blocking=True)` for each leaf"),
    Variant("pinstage", by_python, "`Stager(device).to_device(batch)`", ours=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    args = script.parser(__doc__, repeats=30, repeats_help="timed repetitions").parse_args(argv)
    script.settle_device(args)
    if torch.device(args.device).type != "cuda":
        raise SystemExit("needs a CUDA device")
    rows: dict[tuple[str, str], Row] = {}

    def add(name: str, variant: str, times: list[float], detail: str) -> None:
        leaves, nbytes = CASES[name]
        before = rows.get((variant, name))
        if before is None or quantile(times, 0.5) * 1e3 < (before.median or 0.0):
            row = Row(
                "native_threads",
                name,
                variant,
                "ok",
                detail,
                variant == "pinstage",
                leaves * nbytes,
                leaves,
            )
            row.fill(times)
            rows[variant, name] = row

    for name, way, threads, times in native(args.repeats):
        add(name, way, times, f"{threads} threads" if threads > 1 else "")
    for name in CASES:
        for variant, times in by_python(name, torch.device(args.device), args.repeats):
            add(name, variant, times, "")
    table.grid("ms until all is on the device", list(rows.values()), "median", "p10", "p90")
    table.grid("GB/s", list(rows.values()), "gb_per_s")
    return script.finish("native_threads", list(rows.values()), VARIANTS, args)


if __name__ == "__main__":
    sys.exit(main())
