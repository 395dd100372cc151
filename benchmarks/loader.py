"""Time until batches of a DataLoader are on the device: with torch, SPDL, tensordict and pinstage.

    python benchmarks/loader.py --out benchmarks/results/loader.json
    python benchmarks/loader.py --scenario ready --only torch_pin,pinstage

Three scenarios, each for every variant, with `--workers` processes and torch's default collation:

- ``ready``: samples are in memory, and the batches are not used. The loop waits for each batch on
  the device. ``main`` is the CPU time of the main thread per batch: `next` and, if separate,
  `.to()`, without freeing the previous batch.
- ``step``: the same with a training step, a chain of `--products` matrix products on the GPU, which
  the loop doesn't wait for. ``detail`` has the share of the time in which the GPU was idle;
  ``main`` is the time that the loop spent in `next` and `.to()`. It has one shape: batches of
  134 MB would take half a minute more.
- ``decode``: workers decode JPEG images, so they are the bottleneck and there is little to gain.

A figure is the time of the whole loop over its batches (`comparison/loop_timer.py`). Each variant
has a process, which measures it in each of the `--rounds` passes. The first batch is compared bit
for bit with the default collation of the same samples, outside the timer.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import loader_by_hand
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from comparison import (
    Args,
    Incorrect,
    LoopTimer,
    Outcome,
    Program,
    Variant,
    importable,
    synchronize,
)
from comparison.batches import differences
from comparison.rivals import spdl_transfer

KEPT = 128
"""Samples in memory; the dataset repeats them, but no batch has a sample twice."""
STEP_SIZE = 4096
SETTLE_SECONDS_PER_BYTE = 5e-9
"""Untimed at least: to page-lock slabs for 24 batches of so many bytes takes so long."""

Sample = dict[str, torch.Tensor]
Batches = Iterable[Sample]


class Kept(Dataset[Any]):
    """Samples stored in memory, again and again.

    Args:
        samples: the samples.
        length: the number of items.
        copy: makes an item of a sample. Without default collation, torch's workers would move the
            samples themselves to shared memory, and only once.
    """

    def __init__(
        self, samples: Sequence[Any], length: int, copy: Callable[[Any], Any] | None = None
    ) -> None:
        self._samples, self._length, self._copy = samples, length, copy

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index % len(self._samples)]
        return sample if self._copy is None else self._copy(sample)


@cache
def samples(shape: tuple[int, ...], fields: int) -> list[Sample]:
    """Return samples of some fields."""
    generator = torch.Generator().manual_seed(0)
    # Each field has its own storage: SPDL pickles the samples, and a tensor's pickle contains its
    # whole storage.
    return [
        {f"field_{i:03}": torch.rand(shape, generator=generator) for i in range(fields)}
        for _ in range(KEPT)
    ]


@cache
def _images(side: int) -> list[bytes]:
    """Return images as JPEG."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    low = torch.rand(KEPT, 3, side // 8, side // 8, generator=generator)
    images = torch.nn.functional.interpolate(low, (side, side), mode="bicubic").clamp(0, 1)
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images.mul(255).byte().permute(0, 2, 3, 1), files, strict=True):
        Image.fromarray(image.numpy()).save(file, "JPEG", quality=90)
    return [file.getvalue() for file in files]


class Decoded(Dataset[Sample]):
    """Images that are decoded for each sample."""

    def __init__(self, side: int, length: int) -> None:
        self._length = length
        self._side = side
        self._coded = _images(side)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        raw = Image.open(io.BytesIO(self._coded[index % KEPT])).convert("RGB").tobytes()
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

    @property
    def id(self) -> str:
        return f"{self.scenario}: {self.name}"

    @property
    def nbytes(self) -> int:
        if self.scenario == "decode":
            return self.batch_size * (4 * 3 * self.shape[0] ** 2 + 8)
        return self.batch_size * self.leaves * 4 * math.prod(self.shape)

    def dataset(self, length: int) -> Dataset[Sample]:
        if self.scenario == "decode":
            return Decoded(self.shape[0], length)
        return Kept(samples(self.shape, self.leaves), length)


CASES = (
    Case("ready", "32 fields, 134 MB", 64, 32, (64, 256)),
    Case("ready", "200 fields, 13 MB", 64, 200, (256,)),
    Case("ready", "4 fields, 154 MB", 64, 4, (3, 224, 224)),
    Case("ready", "10 fields, 164 kB", 64, 10, (64,)),  # for the main thread's time
    Case("step", "200 fields, 13 MB", 64, 200, (256,)),
    Case("decode", "64 images", 64, 2, (256,)),
)
SMALL_CASES = (
    Case("ready", "5 fields", 4, 5, (64,)),
    Case("step", "5 fields", 4, 5, (64,)),
    Case("decode", "4 images", 4, 2, (32,)),
)


def _torch(dataset: Any, batch_size: int, workers: int, device: torch.device, pin: bool) -> Batches:
    loader = DataLoader(dataset, batch_size, num_workers=workers, pin_memory=pin)
    return (
        {key: leaf.to(device, non_blocking=pin) for key, leaf in batch.items()} for batch in loader
    )


def pinstage(dataset: Any, batch_size: int, workers: int, device: torch.device) -> Batches:
    import pinstage as ps

    return ps.DataLoader(dataset, batch_size, num_workers=workers, device=device, max_bytes="16GiB")


def _consolidated(samples: list[Sample]) -> Any:
    from tensordict import TensorDict

    return TensorDict(default_collate(samples), batch_size=[len(samples)]).consolidate()


def _tensordict(dataset: Any, batch_size: int, workers: int, device: torch.device) -> Batches:
    pin = device.type == "cuda"
    loader = DataLoader(
        dataset, batch_size, num_workers=workers, collate_fn=_consolidated, pin_memory=pin
    )
    return (batch.to(device, non_blocking=True) for batch in loader)


@contextmanager
def _spdl(dataset: Any, batch_size: int, workers: int, device: torch.device) -> Iterator[Batches]:
    from spdl.dataloader import get_pytorch_dataloader
    from spdl.pipeline import PipelineBuilder

    transfer = spdl_transfer(device)
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
        "no loader, but fixed shared slots, one byte for a batch, one copy, the views",
    ),
    Variant("pinstage", pinstage, "`ps.DataLoader(device=device)`", ours=True),
)


class Step:
    """A training step: a chain of matrix products on the device, which reads a leaf of the batch.

    The number of products is fixed, so that all ways have the same step.
    """

    def __init__(self, device: torch.device, products: int) -> None:
        size, dtype = (STEP_SIZE, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        self._weight = torch.randn(size, size, device=device, dtype=dtype) / size
        self._products = products

    def __call__(self, leaf: torch.Tensor) -> None:
        value = self._weight + leaf.view(-1)[:1].to(self._weight.dtype)
        for _ in range(self._products):
            value = value @ self._weight


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return one variant's status on one case, the seconds per batch, and those of each `next`."""
    if case.scenario == "decode" and not importable("PIL"):
        return {"status": "not installed", "detail": "Pillow"}
    with variant.open(*arguments(args, case)) as batches:
        return timed_loop(iter(batches), args, case)


def timer_of(args: Args, workers: int, nbytes: int) -> LoopTimer:
    """Return the timer of a loop over batches of some bytes."""
    settle = 0 if args.smoke else SETTLE_SECONDS_PER_BYTE * nbytes
    limits = {"repeats": args.repeats, "seconds": args.seconds, "settle_seconds": settle}
    return LoopTimer(args.device, workers, **limits)


def arguments(args: Args, case: Case, further: int = 0) -> tuple[Any, int, int, torch.device]:
    """Return a loader's arguments: the dataset, of some batches more than are timed, and so on."""
    length = (timer_of(args, args.workers, case.nbytes).steps + 1 + further) * case.batch_size
    return case.dataset(length), case.batch_size, args.workers, args.device


def timed_loop(iterator: Iterator[Sample], args: Args, case: Case) -> Outcome:
    """Compare the first batch, and time the others."""
    timer = timer_of(args, args.workers, case.nbytes)
    dataset = case.dataset(case.batch_size)
    expected = default_collate([dataset[index] for index in range(case.batch_size)])
    for wrong in differences(expected, next(iterator), args.device):
        raise Incorrect(wrong)
    step = Step(args.device, args.products) if case.scenario == "step" else None
    clock = time.perf_counter if step else time.thread_time
    main_thread: list[float] = []
    goes_on = True
    while goes_on:
        batch = None  # freed now, not in the next line
        before = clock()
        batch = next(iterator)
        if timer.timing:
            main_thread.append(clock() - before)
        timer.begin()
        if step:
            step(next(iter(batch.values())))
        else:
            synchronize(args.device)
        goes_on = timer.end()
    outcome = timer.outcome() | {"main": main_thread}
    return outcome if step else outcome | {"detail": ""}


def begin(args: Args) -> None:
    """Leave the CPUs to the workers: the threads of a step on the CPU would wait for them."""
    if args.device.type == "cpu":
        torch.set_num_threads(1)


REPEATS = "timed batches, or as many as workers hold ready, if that is more"
SECONDS = "end a pass of a case after this time untimed, and as much timed"
PROGRAM = Program.of(
    globals(),
    title="ms per batch",
    options={
        "repeats": (160, REPEATS),
        "seconds": (0.4, SECONDS),
        "workers": (8, "worker processes"),
        "products": (50, "matrix products of a training step; 50 take 9 ms on an H100"),
    },
    small={"repeats": 4, "seconds": 0.0, "workers": 2, "rounds": 1},
    rounds=3,
    lasting=True,
    limits=("by_hand",),  # which isn't a loader
    begin=begin,
)
PROGRAM.run(__name__)
