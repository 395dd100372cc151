"""Time until batches of a DataLoader are on the device: with torch, SPDL, tensordict and pinstage.

    python benchmarks/loader.py --out benchmarks/results/loader.json
    python benchmarks/loader.py --scenario ready --only torch_pin,pinstage

Three scenarios, each for every variant, with `--workers` processes and torch's default collation:

- ``ready``: samples are in memory, and the batches are not used. A time sample covers as many
  batches as there are workers, divided by their number; the loop waits for each batch on the
  device. ``main`` is the CPU time of the main thread per batch: `next` and, if separate, `.to()`,
  without freeing the previous batch.
- ``step``: the same with a training step, a chain of matrix products of `--step-ms` on the GPU,
  which the loop doesn't wait for. ``detail`` has the share of the time in which the GPU was idle;
  ``main`` is the time that the loop spent in `next` and `.to()`.
- ``decode``: workers decode JPEG images, so they are the bottleneck and there is little to gain.

Each variant runs in a fresh process. The first batch is compared bit for bit with the default
collation of the same samples, outside the timer.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import loader_by_hand
import script
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from comparison import harness, table
from comparison.harness import Outcome, Variant
from comparison.record import Row

KEPT = 128
"""Samples in memory; the dataset repeats them, but no batch has a sample twice."""
STEP_SIZE = 4096
FEWEST = 8
"""The fewest timed batches, and the fewest untimed ones."""
WARM_UPS = 12
"""Untimed batches per worker, in which both loaders allocate their page-locked memory."""
WARM_UP_SECONDS = 4.0
"""After this time, timing starts anyway. The largest slabs are 7.4 GB, and take longer than this to
page-lock.
"""

Sample = dict[str, torch.Tensor]
Batches = Iterable[Sample]


class Ready(Dataset[Sample]):
    """Samples stored in memory."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, fields: int, length: int
    ) -> None:
        self._length = length
        generator = torch.Generator().manual_seed(0)
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        rows = torch.randint(0, 120, (KEPT, fields, nbytes), dtype=torch.uint8, generator=generator)
        self._samples = [
            # Each has its own storage: SPDL pickles the samples, and a tensor's pickle contains its
            # whole storage.
            {f"field_{i:03}": row.view(dtype).view(shape).clone() for i, row in enumerate(rows[k])}
            for k in range(KEPT)
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index % KEPT]


class Decoded(Dataset[Sample]):
    """Images that are decoded for each sample; without Pillow, decompressed and scaled noise."""

    def __init__(self, side: int, length: int) -> None:
        self._length = length
        self._side = side
        generator = torch.Generator().manual_seed(0)
        low = torch.rand(KEPT, 3, side // 8, side // 8, generator=generator)
        images = (
            torch.nn.functional.interpolate(low, (side, side), mode="bicubic")
            .clamp(0, 1)
            .mul(255)
            .byte()
        )
        self._coded = [self._encode(image.permute(1, 2, 0).contiguous()) for image in images]

    @staticmethod
    def kind() -> str:
        return (
            "JPEG by Pillow"
            if harness.importable("PIL")
            else "no Pillow here: zlib instead of JPEG"
        )

    def _encode(self, image: torch.Tensor) -> bytes:
        if not harness.importable("PIL"):
            return zlib.compress(image.numpy().tobytes())
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(image.numpy()).save(file, "JPEG", quality=90)
        return file.getvalue()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        coded = self._coded[index % KEPT]
        if harness.importable("PIL"):
            from PIL import Image

            raw = Image.open(io.BytesIO(coded)).convert("RGB").tobytes()
        else:
            raw = zlib.decompress(coded)
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(self._side, self._side, 3)
        return {
            "image": image.permute(2, 0, 1).float().div_(255),
            "label": torch.tensor(index % 1000),
        }


@dataclass(frozen=True)
class Case:
    """Batches of one shape in one scenario."""

    scenario: str
    name: str
    batch_size: int
    leaves: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        return f"{self.scenario}: {self.name}"

    @property
    def nbytes(self) -> int:
        if self.scenario == "decode":
            return self.batch_size * (4 * 3 * self.shape[0] ** 2 + 8)
        return (
            self.batch_size
            * self.leaves
            * torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes
        )

    def dataset(self, length: int) -> Dataset[Sample]:
        if self.scenario == "decode":
            return Decoded(self.shape[0], length)
        return Ready(self.shape, self.dtype, self.leaves, length)


CASES = (
    Case("ready", "32 fields, 134 MB", 64, 32, (64, 256)),
    Case("ready", "200 fields, 13 MB", 64, 200, (256,)),
    Case("ready", "4 fields, 308 MB", 128, 4, (3, 224, 224)),
    Case("ready", "10 fields, 164 kB", 64, 10, (64,)),  # for the main thread's time
    Case("step", "32 fields, 134 MB", 64, 32, (64, 256)),
    Case("step", "200 fields, 13 MB", 64, 200, (256,)),
    Case("decode", "64 images", 64, 2, (256,)),
)
SMOKE_CASES = (
    Case("ready", "5 fields", 4, 5, (64,)),
    Case("step", "5 fields", 4, 5, (64,)),
    Case("decode", "4 images", 4, 2, (32,)),
)
SCENARIOS = ("ready", "step", "decode")


@contextmanager
def _torch(
    dataset: Any, batch_size: int, workers: int, device: torch.device, pin: bool
) -> Iterator[Batches]:
    loader = DataLoader(dataset, batch_size, num_workers=workers, pin_memory=pin)
    yield (
        {key: leaf.to(device, non_blocking=pin) for key, leaf in batch.items()} for batch in loader
    )


@contextmanager
def _pinstage(
    dataset: Any, batch_size: int, workers: int, device: torch.device
) -> Iterator[Batches]:
    import pinstage as ps

    yield ps.DataLoader(dataset, batch_size, num_workers=workers, device=device, max_bytes="16GiB")


def _consolidated(samples: list[Sample]) -> Any:
    from tensordict import TensorDict

    return TensorDict(default_collate(samples), batch_size=[len(samples)]).consolidate()


@contextmanager
def _tensordict(
    dataset: Any, batch_size: int, workers: int, device: torch.device
) -> Iterator[Batches]:
    pin = device.type == "cuda"
    loader = DataLoader(
        dataset, batch_size, num_workers=workers, collate_fn=_consolidated, pin_memory=pin
    )
    yield (batch.to(device, non_blocking=True) for batch in loader)


@contextmanager
def _spdl(dataset: Any, batch_size: int, workers: int, device: torch.device) -> Iterator[Batches]:
    import os

    # The only place where SPDL looks for the device.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    import spdl.io
    from spdl.dataloader import get_pytorch_dataloader
    from spdl.pipeline import PipelineBuilder

    transfer = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor
    loader = get_pytorch_dataloader(dataset, batch_size, num_workers=workers, in_order=True)
    pipeline = PipelineBuilder().add_source(loader).pipe(transfer).add_sink(2).build(num_threads=1)
    with pipeline.auto_stop():
        yield pipeline.get_iterator()


VARIANTS = (
    Variant(
        "torch_to",
        partial(_torch, pin=False),
        "torch's DataLoader, then `.to(device)` for each leaf",
    ),
    Variant(
        "torch_pin",
        partial(_torch, pin=True),
        "torch's DataLoader with pin_memory=True, then `.to(device, non_blocking=True)` for each "
        "leaf",
        needs_cuda=True,
    ),
    Variant(
        "tensordict",
        _tensordict,
        "workers consolidate the collated batch as a TensorDict, pin_memory=True, one "
        "`.to(device, non_blocking=True)`",
        package="tensordict",
    ),
    Variant(
        "spdl",
        _spdl,
        "`spdl.dataloader.get_pytorch_dataloader`, then `spdl.io.transfer_tensor_h2d` in a "
        "background thread",
        package="spdl.dataloader",
        needs_cuda=True,
    ),
    Variant(
        "by_hand",
        loader_by_hand.loaded,
        "no loader, but the least that one can do: fixed shared slots, one byte for a batch, one "
        "copy, the views",
    ),
    Variant("pinstage", _pinstage, "`ps.DataLoader(device=device)`", package="pinstage", ours=True),
)


class Step:
    """A chain of matrix products that takes about `milliseconds` on the device, and reads the
    batch.
    """

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        self._device = device
        size, dtype = (STEP_SIZE, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        self._weight = torch.randn(size, size, device=device, dtype=dtype) / size
        self._products = 50
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        once = min(self._seconds() for _ in range(5)) / self._products  # the first ones warm up
        self._products = max(1, round(milliseconds / 1e3 / once))
        self.seconds = min(self._seconds() for _ in range(3))

    def run(self, batch: Any) -> None:
        """Use a batch, and record when the device does so."""
        if self._device.type != "cuda":
            self(batch)
            return
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        self(batch)
        marks[1].record()
        self._marks.append(marks)

    def forget(self) -> None:
        """Drop the recorded steps."""
        self._marks.clear()

    def idle(self, mean: float) -> float:
        """Return the share of the time in which the device was idle between the recorded steps.

        Args:
            mean: seconds per iteration of the loop, used without a GPU.
        """
        if len(self._marks) < 2:
            return max(0.0, 1 - self.seconds / mean)
        gaps = sum(
            end.elapsed_time(start) for (_, end), (start, _) in itertools.pairwise(self._marks)
        )
        return gaps / self._marks[0][0].elapsed_time(self._marks[-1][1])

    def __call__(self, batch: Any) -> None:
        value = self._weight
        if batch is not None:
            first = next(iter(batch.values()))
            value = value + first.view(-1)[:1].to(value.dtype)
        for _ in range(self._products):
            value = value @ self._weight

    def _seconds(self) -> float:
        synchronize(self._device)
        began = time.perf_counter()
        self(None)
        synchronize(self._device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use(batch: Any, step: Step | None, device: torch.device) -> None:
    """Start a training step on a batch, or wait until it is on the device."""
    if step:
        step.run(batch)
    else:
        synchronize(device)


def measure(variant: Variant, args: argparse.Namespace, case: Case) -> Outcome:
    """Return one variant's status on one case, and its samples in seconds."""
    device = torch.device(args.device)
    warm_ups = FEWEST if args.smoke else max(FEWEST, WARM_UPS * args.workers)
    dataset = case.dataset((args.repeats + warm_ups) * case.batch_size)
    expected = default_collate([dataset[index] for index in range(case.batch_size)])
    step = Step(device, args.step_ms) if case.scenario == "step" else None
    clock = time.perf_counter if step else time.thread_time
    ends: list[float] = []
    main_thread: list[float] = []
    with variant.setup(dataset, case.batch_size, args.workers, device) as batches:
        iterator = iter(batches)
        wrong = differences(next(iterator), expected)
        if wrong:
            return {"status": "incorrect", "detail": wrong}
        began = time.perf_counter()
        for count in range(1, warm_ups):
            if count >= FEWEST and time.perf_counter() - began > WARM_UP_SECONDS:
                break
            use(next(iterator), step, device)
        synchronize(device)
        if step:
            step.forget()
        ends.append(time.perf_counter())
        while len(main_thread) < args.repeats:
            if len(main_thread) >= FEWEST and ends[-1] - ends[0] > args.seconds:
                break
            batch = None  # freed now, not in the next line
            before = clock()
            batch = next(iterator)
            main_thread.append(clock() - before)
            use(batch, step, device)
            ends.append(time.perf_counter())
        synchronize(device)
        end = time.perf_counter()
    detail = Decoded.kind() if case.scenario == "decode" else ""
    if step:
        # The last step's end: single steps are not waited for.
        total = [(end - ends[0]) / len(main_thread)]
        detail = f"GPU idle {step.idle(total[0]):.1%} beside steps of {step.seconds * 1e3:.1f} ms"
    else:
        # Workers finish together: their batches come in bursts.
        group = min(args.workers, len(ends) - 1)
        total = [(ends[i + group] - ends[i]) / group for i in range(len(ends) - group)]
    return {"status": "ok", "detail": detail, "total": total, "main": main_thread}


def differences(batch: Any, expected: Sample) -> str:
    """Return how a batch differs from the expected one, or an empty string."""
    if set(batch.keys()) != set(expected):
        return f"other keys: {sorted(batch.keys())[:3]}"
    for key, leaf in expected.items():
        found = batch[key].cpu()
        if found.dtype != leaf.dtype or not torch.equal(found, leaf):
            return f"{key}: other values"
    return ""


def report(rows: Sequence[Row]) -> None:
    """Print the medians, the time of the main thread, and the share of the time in which the GPU
    was idle.
    """
    for scenario in dict.fromkeys(row.case.partition(":")[0] for row in rows):
        some = [row for row in rows if row.case.startswith(scenario)]
        table.grid("ms per batch", some, "median", "p10", "p90")
        table.grid("ms of the main thread per batch", some, "main_median")
        if scenario != "ready":
            lines = [[f"{row.variant}, {row.case}", row.detail or "-"] for row in some]
            table.show(f"{scenario}", ["variant", "said"], lines)
    if any(row.vs_best_rival for row in rows):
        table.grid(
            "speed-up over the best rival", [row for row in rows if row.ours], "vs_best_rival"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or gave wrong batches."""
    parser = script.parser(
        __doc__, repeats=64, repeats_help="timed batches for each variant and case, at most"
    )
    parser.add_argument("--scenario", help=f"these, separated by commas: {', '.join(SCENARIOS)}")
    parser.add_argument("--workers", type=int, default=8, help="worker processes")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="length of a training step on the GPU"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.6, help=f"stop after this time, once {FEWEST} are done"
    )
    args = parser.parse_args(argv)
    script.settle_device(args)
    if args.smoke:
        args.repeats, args.seconds, args.workers = (
            min(args.repeats, FEWEST),
            0.0,
            min(args.workers, 2),
        )
    wanted = args.scenario.split(",") if args.scenario else SCENARIOS
    if set(wanted) - set(SCENARIOS):
        raise SystemExit(f"no such scenario: {args.scenario}; known: {', '.join(SCENARIOS)}")
    cases = [case for case in (SMOKE_CASES if args.smoke else CASES) if case.scenario in wanted]
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        if device.type == "cpu":
            torch.set_num_threads(1)  # else the step's threads wait for the workers' CPUs
        harness.work(cases, partial(measure, variant, args), lambda: None)
        return 0
    variants = script.chosen(args.only, VARIANTS)
    further = [
        "--scenario",
        ",".join(wanted),
        "--workers",
        str(args.workers),
        "--step-ms",
        str(args.step_ms),
    ]
    further += ["--seconds", str(args.seconds), *(["--smoke"] if args.smoke else [])]
    judge = script.compare_on_a_gpu(args, "by_hand")  # which isn't a loader
    rows = script.collect("loader", __file__, variants, cases, args, further, judge=judge)
    report(rows)
    return script.finish("loader", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
