"""Time until a batch of rows of tensors in memory is on the device, by loaders and by hand.

    python benchmarks/in_memory.py --out benchmarks/results/in_memory.json

Each case is a `TensorDataset` that is read in random order, without workers. A figure is the time
of one step, until the batch is on the device, in the steady state: the first step of each pass,
which makes the permutation, is left out, and is the ``detail`` of the loaders. Ways by hand get
slices of a permutation that was made outside the timer; the variant `permutation` is the time of
making it. `C gather` is code as one would write it for this purpose, compiled here: all tensors are
gathered into one page-locked slab in one OpenMP region, with the number of threads that is quickest
in the warm-up, and copied at once. Slow ways end after `--seconds` for each case. Each variant runs
in a fresh process. A batch is compared bit for bit with indexing, outside the timer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import script
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from comparison import harness, table
from comparison.harness import Outcome, Variant
from comparison.record import Row

WARM_UPS = 5
SEED = 3
THREADS = (1, 4, 12)

Tensors = list[torch.Tensor]
Step = Callable[[Tensors, torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """A dataset, and how many of its rows a batch has."""

    id: str
    columns: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """The dtype and the shape of a row of each tensor."""
    length: int
    batch: int
    window: int = 0
    """The length of overlapping windows, if rows are these."""

    @property
    def nbytes(self) -> int:
        """Bytes of a batch."""
        rows = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.columns]
        return self.batch * sum(row.nbytes for row in rows) * max(self.window, 1)

    @property
    def leaves(self) -> int:
        """Tensors of a batch."""
        return len(self.columns)

    def make(self) -> Tensors:
        """Make the tensors."""
        made = []
        for number, (dtype, shape) in enumerate(self.columns):
            tensor = torch.arange(self.length * max(1, torch.Size(shape).numel()))
            made.append((tensor * 7 + number).to(dtype).view(self.length, *shape))
        return [tensor.unfold(0, self.window, 1) for tensor in made] if self.window else made


F32, I64, U8 = torch.float32, torch.int64, torch.uint8
LABEL = (I64, ())


def cases(scale: int) -> tuple[Case, ...]:
    """Return the cases, with datasets and batches that are smaller by a factor."""

    def case(name: str, columns: Any, length: int, batch: int, window: int = 0) -> Case:
        return Case(name, tuple(columns), length // scale, max(batch // scale, 2), window)

    frame = (U8, (4, 84, 84))
    small = [LABEL, (F32, ()), (torch.bool, ()), (F32, ())]
    return (
        case("13 floats, label", [(F32, (13,)), LABEL], 2_000_000, 8192),
        case("26 columns, 13 floats", [*[LABEL] * 26, (F32, (13,))], 1_000_000, 8192),
        case("images 3x64x64, label", [(U8, (3, 64, 64)), LABEL], 60_000, 1024),
        case("128 floats", [(F32, (128,))], 2_000_000, 100_000),
        case("replay", [frame, frame, *small], 20_000, 256),
        case("token windows", [LABEL], 20_000_000, 64, 1025),
    )


# -- ways by hand ----------------------------------------------------------------------------------


@contextmanager
def _rows(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:  # noqa: ARG001
    import pinstage as ps

    with ps.Stager(device, max_bytes="2GiB") as stager:
        yield lambda sources, index: stager.to_device([ps.rows(x, index) for x in sources])


@contextmanager
def _indexed(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:  # noqa: ARG001
    yield lambda sources, index: [
        x[index].pin_memory().to(device, non_blocking=True) for x in sources
    ]


def _slabs(device: torch.device, tensors: Tensors, batch: int) -> Tensors:
    """Return page-locked memory for a batch of each tensor."""
    is_cuda = device.type == "cuda"
    return [torch.empty((batch, *x.shape[1:]), dtype=x.dtype, pin_memory=is_cuda) for x in tensors]


@contextmanager
def _index_select(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:
    places = _slabs(device, tensors, batch)

    def step(sources: Tensors, index: torch.Tensor) -> Tensors:
        for source, place in zip(sources, places, strict=True):
            torch.index_select(source, 0, index, out=place)
        return [place.to(device, non_blocking=True) for place in places]

    yield step


SOURCE = """
#include <stdint.h>
#include <string.h>

void gather(int64_t count, const char **from, char **to, const int64_t *row_bytes,
            const int64_t *distance, const int64_t *index, int64_t rows, int threads) {
    #pragma omp parallel num_threads(threads)
    for (int64_t leaf = 0; leaf < count; leaf++) {
        const char *source = from[leaf];
        int64_t size = row_bytes[leaf], step = distance[leaf];
        if (size == 4) {
            #pragma omp for nowait
            for (int64_t i = 0; i < rows; i++)
                ((int32_t *)to[leaf])[i] = *(const int32_t *)(source + index[i] * step);
        } else if (size == 8) {
            #pragma omp for nowait
            for (int64_t i = 0; i < rows; i++)
                ((int64_t *)to[leaf])[i] = *(const int64_t *)(source + index[i] * step);
        } else {
            #pragma omp for nowait
            for (int64_t i = 0; i < rows; i++)
                memcpy(to[leaf] + i * size, source + index[i] * step, size);
        }
    }
}
"""


def compiled(folder: str) -> Any:
    """Compile `SOURCE`, and return its function."""
    source, library = Path(folder, "gather.c"), Path(folder, "gather.so")
    source.write_text(SOURCE)
    command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).gather
    function.restype = None
    return function


@contextmanager
def _c_gather(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:
    def numbers(values: Sequence[int]) -> Any:
        return (ctypes.c_int64 * len(values))(*values)

    sizes = [x[0].nbytes for x in tensors]
    offsets = [0]
    for size in sizes:
        offsets.append((offsets[-1] + size * batch + 15) // 16 * 16)
    slab = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    addresses = numbers([x.data_ptr() for x in tensors])
    places = numbers([slab.data_ptr() + offset for offset in offsets[:-1]])
    row_bytes, distances = numbers(sizes), numbers([x.stride(0) * x.itemsize for x in tensors])

    with tempfile.TemporaryDirectory() as folder:
        function = compiled(folder)

        def run(index: torch.Tensor, threads: int) -> None:
            rows = ctypes.c_void_p(index.data_ptr()), ctypes.c_int64(len(index))
            count = ctypes.c_int64(len(tensors))
            function(count, addresses, places, row_bytes, distances, *rows, ctypes.c_int(threads))

        def seconds(threads: int) -> float:
            found = []
            for seed in range(7):
                generator = torch.Generator().manual_seed(seed)
                index = torch.randint(len(tensors[0]), (batch,), generator=generator)
                began = time.perf_counter()
                run(index, threads)
                found.append(time.perf_counter() - began)
            return sorted(found)[3]

        cores = len(os.sched_getaffinity(0))
        threads = min((count for count in THREADS if count <= cores), key=seconds)

        def step(sources: Tensors, index: torch.Tensor) -> Tensors:
            run(index, threads)
            there = slab.to(device, non_blocking=True)
            pairs = zip(sources, offsets, sizes, strict=False)
            return [
                there[at : at + size * batch].view(x.dtype).view(batch, *x.shape[1:])
                for x, at, size in pairs
            ]

        yield step


@contextmanager
def _bus(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:
    nbytes = sum(x[0].nbytes for x in tensors) * batch
    slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    yield lambda _, __: slab.to(device, non_blocking=True)


# -- loaders ---------------------------------------------------------------------------------------


def _torchs(device: torch.device, dataset: TensorDataset, batch: int, sampler: Any) -> Any:
    loader = DataLoader(dataset, batch, sampler=sampler, pin_memory=device.type == "cuda")
    return ([x.to(device, non_blocking=True) for x in leaves] for leaves in loader)


def _ours(device: torch.device, dataset: TensorDataset, batch: int, sampler: Any) -> Any:
    import pinstage as ps

    return ps.DataLoader(dataset, batch, sampler=sampler, device=device, max_bytes="2GiB")


class Compiled(Variant):
    """A way that needs a C compiler."""

    def obstacle(self, device: torch.device) -> str | None:
        """Return why this variant cannot run here, or None."""
        return super().obstacle(device) if shutil.which("cc") else "not installed"


LOADERS = {"torch_loader": _torchs, "pinstage_loader": _ours}

VARIANTS = (
    Variant("torch_loader", _torchs, "`DataLoader(dataset, batch, shuffle=True)`, `.to()`"),
    Variant(
        "pinstage_loader",
        _ours,
        "`ps.DataLoader(dataset, batch, shuffle=True, device=device)`",
        package="pinstage",
        ours=True,
    ),
    Variant("rows", _rows, "`stager.to_device(ps.rows(x, index))`", "pinstage", ours=True),
    Variant("index", _indexed, "`x[index].pin_memory().to()`", needs_cuda=True),
    Variant("index_select", _index_select, "`index_select` into page-locked memory, `.to()`"),
    Compiled("c_gather", _c_gather, "C with OpenMP into one page-locked slab, one copy"),
    Variant("bus", _bus, "the copy alone"),
    Variant("permutation", _bus, "`torch.randperm` of the dataset, which is not in the others"),
)


def measure(
    variant: Variant, repeats: int, seconds: float, device: torch.device, case: Case
) -> Outcome:
    """Return the seconds of each step."""
    settle = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    tensors = case.make()
    if variant.id == "permutation":
        return _permutations(len(tensors[0]))
    if variant.id in LOADERS:
        return _passes(variant, repeats, seconds, device, case, tensors, settle)
    with variant.setup(device, tensors, case.batch) as step:
        times: list[float] = []
        ends = time.perf_counter() + seconds
        indices = _indices(len(tensors[0]), case.batch)
        while len(times) < WARM_UPS + repeats and (len(times) < 2 or time.perf_counter() < ends):
            index = next(indices)
            began = time.perf_counter()
            got = step(tensors, index)
            settle()
            times.append(time.perf_counter() - began)
    right = variant.id == "bus" or _is_right(got, tensors, index)
    return {"status": "ok" if right else "incorrect", "detail": "", "total": _steady(times)}


def _steady(times: list[float]) -> list[float]:
    return times[min(WARM_UPS, len(times) - 1) :]


def _permutations(length: int) -> Outcome:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.randperm(length)
        times.append(time.perf_counter() - began)
    return {"status": "ok", "detail": "", "total": times}


def _indices(length: int, batch: int) -> Iterator[torch.Tensor]:
    while True:
        permutation = torch.randperm(length)
        yield from permutation[: length // batch * batch].split(batch)


def _is_right(got: Any, tensors: Tensors, index: torch.Tensor) -> bool:
    pairs = zip(got, tensors, strict=True)
    return all(torch.equal(there.cpu(), source[index]) for there, source in pairs)


def _passes(
    variant: Variant,
    repeats: int,
    seconds: float,
    device: torch.device,
    case: Case,
    tensors: Tensors,
    settle: Callable[[], Any],
) -> Outcome:
    """Measure a loader: the steps of several passes, but not the first of each."""
    dataset, length = TensorDataset(*tensors), len(tensors[0])
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))
    expected = torch.randperm(length, generator=torch.Generator().manual_seed(SEED))[: case.batch]
    firsts: list[float] = []
    times: list[float] = []
    right = True
    ends = time.perf_counter() + seconds
    loader = variant.setup(device, dataset, case.batch, sampler)
    while len(times) < WARM_UPS + repeats and (len(times) < 2 or time.perf_counter() < ends):
        if firsts and variant.id == "torch_loader":
            loader = variant.setup(device, dataset, case.batch, sampler)
        iterator = iter(loader)
        for number in range(length // case.batch):
            began = time.perf_counter()
            got = next(iterator)
            settle()
            (times if number else firsts).append(time.perf_counter() - began)
            if not number and len(firsts) == 1:
                right = _is_right(got, tensors, expected)
            is_late = len(times) > 1 and time.perf_counter() > ends
            if len(times) >= WARM_UPS + repeats or is_late:
                break
    detail = f"first step {sorted(firsts)[len(firsts) // 2] * 1e3:.1f} ms"
    return {"status": "ok" if right else "incorrect", "detail": detail, "total": _steady(times)}


def judge(rows: list[Row]) -> None:
    """Compare our ways with the quicker of the ways by hand."""
    for case in {row.case for row in rows}:
        of_case = {row.variant: row for row in rows if row.case == case and row.median}
        rivals = [of_case[name].median for name in ("c_gather", "index_select") if name in of_case]
        for row in of_case.values():
            if row.ours and rivals:
                row.vs_best_rival = min(rivals) / row.median  # type: ignore[type-var, operator]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or delivered a wrong byte."""
    parser = script.parser(__doc__, repeats=200, repeats_help="steps for each variant and case")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds after which a slow case ends"
    )
    args = parser.parse_args(argv)
    script.settle_device(args)
    chosen = cases(1000 if args.smoke else 1)
    if args.smoke:
        args.repeats, args.seconds = min(args.repeats, 3), 2.0
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        run = partial(measure, variant, args.repeats, args.seconds, device)
        harness.work(chosen, run, lambda: None)
        return 0
    args.batches = {case.id: case.batch for case in chosen}
    variants = script.chosen(args.only, VARIANTS)
    further = ["--seconds", str(args.seconds), *(["--smoke"] if args.smoke else [])]
    rows = script.collect("in_memory", __file__, variants, chosen, args, further, judge=judge)
    table.grid("ms until a batch of rows is on the device", rows, "median", "p10", "p90")
    return script.finish("in_memory", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
