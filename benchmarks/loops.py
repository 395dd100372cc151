"""Whole training loops: the time of a step, and how busy the GPU is.

    python benchmarks/loops.py --out benchmarks/results/loops.json
    python benchmarks/loops.py --loops segmentation,tokens --only torch_pin,pinstage
    python benchmarks/loops.py --device cpu --only torch_to,pinstage --seconds 30 --rounds 5
        --out benchmarks/results/loops_cpu.json

Loops with a model of a fixed time on the GPU (a chain of matrix products that the loop doesn't wait
for):

- ``segmentation``: 32 images of 3 x 384 x 384 bytes and their masks, int64, stacked by default
  collation.
- ``lidar``: a list of 32 dataclasses of points, intensities, boxes and labels, all of different
  sizes.
- ``columns``: a dict of 120 columns of 512 floats, taken from a table.
- ``tokens``: two tensors of 16 x 4096 integers, stacked by default collation.

Samples are in memory, so only the way of batches to the GPU differs. ``model`` has one batch, which
is on the device before the loop begins.

A figure is the time of the whole loop over its steps (`comparison/loop_timer.py`). Each way has a
process, which measures it in each of the `--rounds` passes; `detail` has the share of the time in
which the GPU was idle. The first batch is compared with the samples. The limit of open files is raised as
far as the system allows: at 1,024, torch's loader fails on ``lidar``.
"""

from __future__ import annotations

import itertools
import queue
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import loader
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from comparison import Args, Outcome, Program, Variant, compare

KEPT = 64
"""Samples in memory, which a dataset repeats."""


@dataclass
class Sweep:
    """A lidar's points, and the objects among them."""

    points: torch.Tensor
    intensities: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor

    def each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Sweep:
        """Return the same with other tensors."""
        return Sweep(*map(move, vars(self).values()))

    def pin_memory(self) -> Sweep:
        """Return a copy in page-locked memory, for torch's `pin_memory=True`."""
        return self.each(torch.Tensor.pin_memory)


def parts(batch: Any) -> Iterable[Any]:
    """Return what a list, a dict or a sweep consists of."""
    if isinstance(batch, list):
        return batch
    return (vars(batch) if isinstance(batch, Sweep) else batch).values()


def tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [leaf for part in parts(batch) for leaf in tensors(part)]


def first(batch: Any) -> torch.Tensor:
    """Return the first tensor of a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(parts(batch)))
    return batch


def mapped(move: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch or sample with other tensors."""
    if isinstance(batch, list):
        return [mapped(move, part) for part in batch]
    if isinstance(batch, Sweep):
        return batch.each(move)
    return {name: move(leaf) for name, leaf in batch.items()}


def segmentation_sample(rng: torch.Generator, scale: int) -> Any:
    """Return an image and its mask."""
    side = 24 * scale
    return {
        "image": torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=rng),
        "mask": torch.randint(0, 19, (side, side), generator=rng),
    }


def lidar_sample(rng: torch.Generator, scale: int) -> Any:
    """Return a sweep of 20,000 to 30,000 points, with up to 40 objects."""
    points = int(torch.randint(1250 * scale, 1875 * scale, (), generator=rng))
    objects = int(torch.randint(1, 40, (), generator=rng))
    return Sweep(
        torch.randn(points, 3, generator=rng),
        torch.rand(points, generator=rng),
        torch.randn(objects, 7, generator=rng),
        torch.randint(0, 10, (objects,), generator=rng),
    )


def token_sample(rng: torch.Generator, scale: int) -> Any:
    """Return tokens and labels."""
    tokens = torch.randint(0, 50_000, (256 * scale,), generator=rng)
    return {"input_ids": tokens, "labels": tokens.roll(-1)}


@cache
def samples(make: Callable[[torch.Generator, int], Any], scale: int) -> list[Any]:
    """Return what a dataset repeats."""
    rng = torch.Generator().manual_seed(0)
    return [make(rng, scale) for _ in range(KEPT)]


def kept(
    make: Callable[[torch.Generator, int], Any],
    scale: int,
    length: int,
    copy: Callable[[Any], Any] | None = None,
) -> loader.Kept:
    """Return samples in memory."""
    return loader.Kept(samples(make, scale), length, copy)


@cache
def table(rows: int) -> tuple[torch.Tensor, ...]:
    """Return the columns of a table."""
    return torch.randn(120, rows, generator=torch.Generator().manual_seed(0)).unbind()


class Columns(Dataset[Any]):
    """Batches of rows of a table, by columns."""

    def __init__(self, scale: int, length: int) -> None:
        self._rows = 32 * scale
        self._columns = table(KEPT * self._rows)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        rng = torch.Generator().manual_seed(index)
        rows = torch.randint(len(self._columns[0]), (self._rows,), generator=rng)
        return {f"column_{number:03}": column[rows] for number, column in enumerate(self._columns)}


@dataclass(frozen=True)
class Case:
    """A loop.

    Attributes:
        name: the data; `id` has the number of workers, too.
        dataset: makes it for a scale and a length.
        batch_size: None if the dataset's items are batches.
        products: matrix products of the model; one takes 0.2 ms on an H100.
    """

    name: str
    dataset: Callable[[int, int], Dataset[Any]]
    batch_size: int | None
    workers: int
    products: int
    collate: Callable[[Any], Any] | None = None
    scale: int = 16

    @property
    def id(self) -> str:
        return f"{self.name}, {self.workers or 'no'} workers"

    @cached_property
    def batch(self) -> Any:
        """The first batch, on the host."""
        dataset, collate = self.dataset(self.scale, 1), self.collate or default_collate
        if self.batch_size is None:
            return dataset[0]
        return collate([dataset[index] for index in range(self.batch_size)])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in tensors(self.batch))

    @property
    def leaves(self) -> int:
        return len(tensors(self.batch))

    def small(self) -> Case:
        """Return the case for a smoke run."""
        return replace(
            self, batch_size=self.batch_size and 4, workers=min(self.workers, 2), scale=1
        )

    def loader(self, length: int, **options: Any) -> DataLoader[Any]:
        """Return torch's loader of `length` batches."""
        return DataLoader(**self.arguments(length), **options)

    def arguments(self, length: int) -> dict[str, Any]:
        """Return the arguments of torch's loader, or ours, for `length` batches."""
        return {
            "dataset": self.dataset(self.scale, length * (self.batch_size or 1)),
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "collate_fn": self.collate,
        }


segmentation = partial(kept, segmentation_sample)
lidar = partial(kept, lidar_sample, copy=partial(mapped, torch.Tensor.clone))
tokens = partial(kept, token_sample)
CASES = (
    Case("segmentation", segmentation, 32, 8, 9),
    Case("lidar", lidar, 32, 8, 6, list),
    Case("columns", Columns, None, 6, 2),
    Case("tokens", tokens, 16, 4, 2),
    Case("segmentation", segmentation, 32, 0, 9),
    Case("lidar", lidar, 32, 0, 6, list),
    Case("columns", Columns, None, 0, 2),
    Case("tokens", tokens, 16, 0, 2),
)


def _moved(batches: Iterable[Any], device: torch.device, non_blocking: bool) -> Iterator[Any]:
    for batch in batches:
        yield mapped(lambda leaf: leaf.to(device, non_blocking=non_blocking), batch)


def _torch(case: Case, length: int, device: torch.device, pin: bool) -> Iterable[Any]:
    return _moved(case.loader(length, pin_memory=pin), device, pin)


@contextmanager
def _thread(case: Case, length: int, device: torch.device) -> Iterator[Iterable[Any]]:
    # Fork workers here: a fork during the loop's first calls into torch can copy a locked lock of
    # glibc.
    source = iter(case.loader(length))
    ready: queue.Queue[Any] = queue.Queue(2)
    left = threading.Event()
    is_cuda = device.type == "cuda"
    copies = torch.cuda.Stream(device) if is_cuda else None

    def move(leaf: torch.Tensor) -> torch.Tensor:
        return (leaf.pin_memory() if is_cuda else leaf).to(device, non_blocking=True)

    def read() -> None:
        try:
            with torch.cuda.stream(copies):
                for batch in source:
                    ready.put((mapped(move, batch), copies and copies.record_event()))
                    if left.is_set():
                        return
        finally:
            ready.put(None)

    def taken() -> Iterator[Any]:
        for batch, event in iter(ready.get, None):
            if event is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(event)
                for leaf in tensors(batch):
                    leaf.record_stream(current)
            yield batch

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield taken()
    left.set()
    while thread.is_alive():
        with suppress(queue.Empty):
            ready.get(timeout=0.01)


@contextmanager
def _prefetch(
    case: Case, length: int, device: torch.device, pin: bool = False
) -> Iterator[Iterable[Any]]:
    import pinstage as ps

    with ps.Stager(device, max_bytes="4GiB") as stager:
        yield stager.prefetch(case.loader(length, pin_memory=pin))


def _wrapped(case: Case, length: int, device: torch.device) -> Iterable[Any]:
    import pinstage as ps

    return ps.wrap_loader(case.loader(length), device=device, max_bytes="8GiB")


def _pinstage(case: Case, length: int, device: torch.device) -> Iterable[Any]:
    import pinstage as ps

    return ps.DataLoader(**case.arguments(length), device=device, max_bytes="8GiB")


def _model(case: Case, length: int, device: torch.device) -> Iterable[Any]:  # noqa: ARG001
    return itertools.repeat(mapped(lambda leaf: leaf.to(device), case.batch))


VARIANTS = (
    Variant(
        "torch_pin",
        partial(_torch, pin=True),
        "torch's DataLoader with pin_memory=True, then `.to(device, non_blocking=True)` for each "
        "tensor",
        needs_cuda=True,
    ),
    Variant(
        "torch_to",
        partial(_torch, pin=False),
        "torch's DataLoader, then `.to(device)` for each tensor",
    ),
    Variant(
        "thread",
        _thread,
        "torch's DataLoader, then `.pin_memory().to(device, non_blocking=True)` for each tensor, in "
        "a thread of ten lines with a stream of its own",
    ),
    Variant(
        "prefetch",
        _prefetch,
        "torch's DataLoader, then `Stager.prefetch(loader)`",
        ours=True,
    ),
    Variant(
        "prefetch_pin",
        partial(_prefetch, pin=True),
        "torch's DataLoader with pin_memory=True, then `Stager.prefetch(loader)`",
        needs_cuda=True,
        ours=True,
    ),
    Variant(
        "wrap_loader",
        _wrapped,
        "torch's DataLoader, then `ps.wrap_loader(loader, device=device)`",
        ours=True,
    ),
    Variant("pinstage", _pinstage, "`ps.DataLoader(device=device)`", ours=True),
    Variant("model", _model, "the model alone, with one batch that is on the device"),
)


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return one way's status on one loop, and the seconds per step."""
    timer = loader.timer_of(args, case.workers, case.nbytes)
    step = loader.Step(args.device, case.products)
    with variant.open(case, timer.steps + 1, args.device) as batches:
        iterator = iter(batches)
        compare(tensors(next(iterator)), tensors(case.batch))
        timer.run(iterator, lambda batch: step(first(batch)))
        return timer.outcome()


def begin(args: Args) -> None:
    """Raise the limit of open files: torch's loader opens one for each tensor on its way, and
    `lidar` has 128 in a batch.
    """
    loader.begin(args)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


PROGRAM = Program.of(
    globals(),
    title="ms per step",
    options={
        "repeats": (160, loader.REPEATS),
        "seconds": (0.6, loader.SECONDS),
    },
    small_cases=[case.small() for case in CASES],
    small={"repeats": 4, "seconds": 0.0, "rounds": 1},
    rounds=3,
    lasting=True,
    limits=("model",),  # which brings nothing to the device
    begin=begin,
)
PROGRAM.run(__name__)
