"""Time until a batch of rows of tensors in memory is on the device, by loaders and by hand.

    python benchmarks/in_memory.py --out benchmarks/results/in_memory.json

Each case is a `TensorDataset` that is read in random order, without workers. A figure is the time
of one step, until the batch is on the device, in the steady state: the first step of each pass,
which makes the permutation, is left out. Ways by hand get
slices of a permutation that was made outside the timer; the variant `permutation` is the time of
making it. `C gather` is code as one would write it for this purpose, compiled here: all tensors are
gathered into one page-locked slab in one OpenMP region, with the number of threads that is quickest
in the warm-up, and copied at once. torch's loader takes 20 steps at most. A way's first batch is
compared bit for bit with indexing, outside the timer.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from comparison import Args, Outcome, Program, Variant, bus, compare, ok, synchronize, timed, turns

WARM_UPS = 5
SEED = 3
THREADS = (1, 4, 12)
SLOW_STEPS = 20
"""The most steps of torch's loader, which takes up to a second for each."""

Tensors = list[torch.Tensor]
Step = Callable[[torch.Tensor], Any]
Pass = Callable[[], Iterator[Any]]


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
        """Make the tensors: all values of a row depend on its number."""
        numbers, made = torch.arange(self.length), []
        for column, (dtype, shape) in enumerate(self.columns):
            kind = torch.uint8 if dtype is torch.bool else dtype
            low, high = (
                part.to(kind).view(-1, *[1] * len(shape))
                for part in (numbers % 251, numbers // 251)
            )
            factors = (torch.arange(torch.Size(shape).numel()) % 64 + column + 1).to(kind)
            made.append(torch.addcmul(low, high, factors.view(shape)).to(dtype))
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


CASES, SMALL_CASES = cases(1), cases(1000)

# -- ways by hand ----------------------------------------------------------------------------------


@contextmanager
def _rows(device: torch.device, tensors: Tensors, batch: int) -> Iterator[Step]:  # noqa: ARG001
    import pinstage as ps

    with ps.Stager(device, max_bytes="2GiB") as stager:
        yield lambda index: stager.to_device([ps.rows(x, index) for x in tensors])


def _index(device: torch.device, tensors: Tensors, batch: int) -> Step:  # noqa: ARG001
    return lambda index: [x[index].pin_memory().to(device, non_blocking=True) for x in tensors]


def _index_select(device: torch.device, tensors: Tensors, batch: int) -> Step:
    is_cuda = device.type == "cuda"
    places = [
        torch.empty((batch, *x.shape[1:]), dtype=x.dtype, pin_memory=is_cuda) for x in tensors
    ]

    def step(index: torch.Tensor) -> Tensors:
        for source, place in zip(tensors, places, strict=True):
            torch.index_select(source, 0, index, out=place)
        return [place.to(device, non_blocking=True) for place in places]

    return step


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


def compiled() -> Any:
    """Compile `SOURCE`, and return its function."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "gather.c"), Path(folder, "gather.so")
        source.write_text(SOURCE)
        command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([*command, source, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).gather
    function.restype = None
    return function


def _c_gather(device: torch.device, tensors: Tensors, batch: int) -> Step:
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
    function = compiled()

    def run(index: torch.Tensor, threads: int) -> None:
        rows = ctypes.c_void_p(index.data_ptr()), ctypes.c_int64(len(index))
        count = ctypes.c_int64(len(tensors))
        function(count, addresses, places, row_bytes, distances, *rows, ctypes.c_int(threads))

    def seconds(threads: int) -> float:
        found = []
        for _ in range(7):
            index = torch.randint(len(tensors[0]), (batch,))
            began = perf_counter()
            run(index, threads)
            found.append(perf_counter() - began)
        return median(found)

    cores = len(os.sched_getaffinity(0))
    threads = min((count for count in THREADS if count <= cores), key=seconds)

    def step(index: torch.Tensor) -> Tensors:
        run(index, threads)
        there = slab.to(device, non_blocking=True)
        return [
            there[at : at + size * batch].view(x.dtype).view(batch, *x.shape[1:])
            for x, at, size in zip(tensors, offsets, sizes, strict=False)
        ]

    return step


# -- loaders ---------------------------------------------------------------------------------------


def _torchs(device: torch.device, dataset: TensorDataset, batch: int, sampler: Any) -> Pass:
    loader = DataLoader(dataset, batch, sampler=sampler, pin_memory=device.type == "cuda")
    return lambda: ([x.to(device, non_blocking=True) for x in leaves] for leaves in loader)


def _ours(device: torch.device, dataset: TensorDataset, batch: int, sampler: Any) -> Pass:
    import pinstage as ps

    loader = ps.DataLoader(dataset, batch, sampler=sampler, device=device, max_bytes="2GiB")
    return lambda: iter(loader)


LIMITS = ("bus", "permutation")

VARIANTS = (
    Variant("torch_loader", _torchs, "`DataLoader(dataset, batch, shuffle=True)`, `.to()`"),
    Variant(
        "pinstage_loader",
        _ours,
        "`ps.DataLoader(dataset, batch, shuffle=True, device=device)`",
        ours=True,
    ),
    Variant("rows", _rows, "`stager.to_device(ps.rows(x, index))`", ours=True),
    Variant("index", _index, "`x[index].pin_memory().to()`", needs_cuda=True),
    Variant("index_select", _index_select, "`index_select` into page-locked memory, `.to()`"),
    Variant("c_gather", _c_gather, "C with OpenMP into one page-locked slab, one copy"),
    Variant("bus", lambda device, case: bus(device, case.nbytes, case.nbytes)[0], "the copy alone"),
    Variant(
        "permutation",
        lambda _, case: lambda: torch.randperm(case.length),
        "`torch.randperm` of the dataset, which is not in the others",
    ),
)


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return the seconds of each step."""
    limits = {"repeats": args.repeats, "seconds": args.seconds}
    if variant.id in LIMITS:
        with variant.open(args.device, case) as call:
            return timed(call, args.device, **limits)
    tensors = case.make()
    if variant.id.endswith("loader"):
        return measure_passes(variant, args, case, tensors)
    fresh = _indices(len(tensors[0]), case.batch)
    indices = list(islice(fresh, 1 + WARM_UPS + args.repeats))
    with variant.open(args.device, tensors, case.batch) as step:
        index = indices.pop()
        compare(step(index), [source[index] for source in tensors])
        return timed(lambda: step(indices.pop()), args.device, **limits, warm_ups=WARM_UPS)


def _indices(length: int, batch: int) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.randperm(length)[: length // batch * batch].split(batch)


def measure_passes(variant: Variant, args: Args, case: Case, tensors: Tensors) -> Outcome:
    """Measure a loader: the steps of several passes, but not the first of each."""
    dataset, length = TensorDataset(*tensors), len(tensors[0])
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(SEED))
    expected = torch.randperm(length, generator=torch.Generator().manual_seed(SEED))[: case.batch]
    later: list[float] = []
    most = WARM_UPS + (args.repeats if variant.ours else min(args.repeats, SLOW_STEPS))
    with variant.open(args.device, dataset, case.batch, sampler) as begin:
        for turn in turns(most, fewest=WARM_UPS, seconds=args.seconds):
            number = turn % (length // case.batch)
            if not number:
                batches = begin()
            began = perf_counter()
            got = next(batches)
            synchronize(args.device)
            took = perf_counter() - began
            if number:
                later.append(took)
            if not turn:
                compare(got, [source[expected] for source in tensors])
    return ok(later[min(WARM_UPS, len(later) // 2) :])


PROGRAM = Program.of(
    globals(),
    title="ms until a batch of rows is on the device",
    options={
        "repeats": (200, "timed steps for each variant and case, at most"),
        "seconds": (3.0, "stop after this time, once a few are done"),
    },
    small={"repeats": 3, "seconds": 0.5},
    limits=LIMITS,
    settings=lambda args: {"batches": {case.id: case.batch for case in PROGRAM.chosen_cases(args)}},
)
PROGRAM.run(__name__)
