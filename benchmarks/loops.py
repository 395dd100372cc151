"""Whole training loops: steps/s, and how busy the GPU is.

    python benchmarks/loops.py --out benchmarks/results/loops.json
    python benchmarks/loops.py --only torch_pin,pinstage

Three loops, each with `--workers` processes and a model of a fixed time on the GPU (a chain of
matrix products that the loop doesn't wait for):

- ``detection``: 32 samples of an image, boxes, labels and masks, all of different sizes, as a list
  of dicts.
- ``images``: 64 images of 3 x 224 x 224 floats, stacked by default collation.
- ``tokens``: three tensors of 32 x 2048 integers.

Samples are in memory, so only the way of batches to the GPU differs. Each way runs in a fresh
process. `median` is the mean time of a step, from the first timed one to the end of the last;
`detail` has the share of that time in which the GPU was idle. The first batch is compared with the
collation of the same samples.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import loader
import script
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from comparison import harness, table
from comparison.harness import Outcome, Variant
from comparison.record import Row

KEPT = 64
"""Samples in memory, which the dataset repeats."""
WARM_UP_SECONDS = 4.0
"""Or eight batches per worker: in these steps both loaders allocate their page-locked memory."""


def detection_sample(rng: torch.Generator, scale: int) -> Any:
    """Return an image, and the boxes, labels and masks of its objects."""
    height, width, objects = (
        int(torch.randint(*span, (), generator=rng)) for span in ((24, 40), (32, 48), (1, 12))
    )
    height, width = height * scale, width * scale
    return {
        "image": torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=rng),
        "boxes": torch.rand(objects, 4, generator=rng),
        "labels": torch.randint(0, 90, (objects,), generator=rng),
        "masks": torch.randint(
            0, 2, (objects, height // 4, width // 4), dtype=torch.uint8, generator=rng
        ).bool(),
        "name": f"{height}x{width}",
    }


def image_sample(rng: torch.Generator, scale: int) -> Any:
    """Return an image and its class."""
    return torch.rand(3, 14 * scale, 14 * scale, generator=rng), torch.randint(
        0, 1000, (), generator=rng
    )


def token_sample(rng: torch.Generator, scale: int) -> Any:
    """Return tokens, their mask, and the labels."""
    tokens = torch.randint(0, 50_000, (128 * scale,), generator=rng)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.roll(-1),
    }


@dataclass(frozen=True)
class Case:
    """A loop."""

    id: str
    make: Callable[[torch.Generator, int], Any]
    batch_size: int
    step_ms: float
    collate: Callable[[Any], Any] | None = None
    scale: int = 16

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def leaves(self) -> int | None:
        return None


CASES = (
    Case("detection", detection_sample, 32, 5.0, list),
    Case("images", image_sample, 64, 8.0),
    Case("tokens", token_sample, 32, 2.5),
)
SMOKE_CASES = tuple(Case(case.id, case.make, 4, case.step_ms, case.collate, 1) for case in CASES)


class Kept(Dataset[Any]):
    """Samples stored in memory."""

    def __init__(self, case: Case, length: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self._samples = [case.make(rng, case.scale) for _ in range(KEPT)]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % KEPT]


def tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def moved(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    """Return a batch whose tensors were moved one by one."""

    def move(leaf: Any) -> Any:
        return (
            leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf
        )

    return tree_map(move, batch)


@contextmanager
def _torch(
    dataset: Any, case: Case, workers: int, device: torch.device, pin: bool
) -> Iterator[Iterable[Any]]:
    batches = DataLoader(
        dataset, case.batch_size, num_workers=workers, collate_fn=case.collate, pin_memory=pin
    )
    yield (moved(batch, device, pin) for batch in batches)


@contextmanager
def _stager(
    dataset: Any,
    case: Case,
    workers: int,
    device: torch.device,
    background: bool,
    pin: bool = False,
) -> Iterator[Iterable[Any]]:
    import pinstage as ps

    batches = DataLoader(
        dataset, case.batch_size, num_workers=workers, collate_fn=case.collate, pin_memory=pin
    )
    with ps.Stager(device, max_bytes="4GiB") as stager:
        yield stager.prefetch(batches, background=background)


@contextmanager
def _thread(
    dataset: Any, case: Case, workers: int, device: torch.device
) -> Iterator[Iterable[Any]]:
    import pinstage as ps

    batches = DataLoader(dataset, case.batch_size, num_workers=workers, collate_fn=case.collate)
    ready: queue.Queue[Any] = queue.Queue(2)
    left = threading.Event()
    copies = (
        torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    )
    with ps.Stager(device, max_bytes="4GiB") as stager:
        # Fork workers here: a fork during the loop's first calls into torch can copy a locked lock
        # of glibc.
        source = iter(batches)

        def read() -> None:
            with copies:
                for batch in source:
                    if left.is_set():
                        return
                    ready.put(stager.stage(batch))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        yield (transfer.wait() for transfer in iter(ready.get, None))
        left.set()
        while thread.is_alive():
            with suppress(queue.Empty):
                ready.get(timeout=0.01)


@contextmanager
def _pinstage(
    dataset: Any, case: Case, workers: int, device: torch.device
) -> Iterator[Iterable[Any]]:
    import pinstage as ps

    yield ps.DataLoader(
        dataset,
        case.batch_size,
        num_workers=workers,
        collate_fn=case.collate,
        device=device,
        max_bytes="8GiB",
    )


VARIANTS = (
    Variant(
        "torch_to",
        partial(_torch, pin=False),
        "torch's DataLoader, then `.to(device)` for each tensor",
    ),
    Variant(
        "torch_pin",
        partial(_torch, pin=True),
        "torch's DataLoader with pin_memory=True, then `.to(device, non_blocking=True)` for each "
        "tensor",
        needs_cuda=True,
    ),
    Variant(
        "stager",
        partial(_stager, background=False),
        "torch's DataLoader, then `Stager.prefetch(background=False)`",
        package="pinstage",
        ours=True,
    ),
    Variant(
        "thread_by_hand",
        _thread,
        "torch's DataLoader, then `Stager.stage` in a thread of ten lines",
        package="pinstage",
    ),
    Variant(
        "stager_background",
        partial(_stager, background=True),
        "torch's DataLoader, then `Stager.prefetch(background=True)`",
        package="pinstage",
        ours=True,
    ),
    Variant(
        "stager_background_pin",
        partial(_stager, background=True, pin=True),
        "torch's DataLoader with pin_memory=True, then `Stager.prefetch(background=True)`",
        package="pinstage",
        needs_cuda=True,
        ours=True,
    ),
    Variant("pinstage", _pinstage, "`ps.DataLoader(device=device)`", package="pinstage", ours=True),
)


class Model(loader.Step):
    """A model of a fixed time that reads one number of the batch."""

    def __call__(self, batch: Any) -> None:
        super().__call__(batch if batch is None else {"": tensors(batch)[0]})


def measure(variant: Variant, args: argparse.Namespace, case: Case) -> Outcome:
    """Return one way's status on one loop, and the seconds per step."""
    device = torch.device(args.device)
    warm_ups = 4 if args.smoke else 8 * max(args.workers, 1)
    dataset = Kept(case, (args.repeats + warm_ups) * case.batch_size)
    model = Model(device, case.step_ms)
    with variant.setup(dataset, case, args.workers, device) as batches:
        iterator = iter(batches)
        expected = (case.collate or default_collate)(
            [dataset[index] for index in range(case.batch_size)]
        )
        pairs = list(zip(tensors(next(iterator)), tensors(expected), strict=True))
        if not all(torch.equal(found.cpu(), leaf) for found, leaf in pairs):
            return {"status": "incorrect", "detail": "other values"}
        began = time.perf_counter()
        for count in range(1, warm_ups):
            if count >= 4 and time.perf_counter() - began > WARM_UP_SECONDS:
                break
            model.run(next(iterator))
        loader.synchronize(device)
        model.forget()
        began, done = time.perf_counter(), 0
        while done < args.repeats and (done < 4 or time.perf_counter() - began < args.seconds):
            model.run(next(iterator))
            done += 1
        loader.synchronize(device)
        mean = (time.perf_counter() - began) / done
    detail = f"GPU idle {model.idle(mean):.1%} beside steps of {model.seconds * 1e3:.1f} ms"
    return {"status": "ok", "detail": detail, "total": [mean], "main": []}


def report(rows: Sequence[Row]) -> None:
    """Print the time per step, and how busy the GPU was."""
    table.grid("ms per step", rows, "median")
    table.show(
        "the GPU",
        ["way, loop", "said"],
        [[f"{row.variant}, {row.case}", row.detail or "-"] for row in rows],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loops; return 1 if a way failed or gave wrong batches."""
    parser = script.parser(
        __doc__, repeats=400, repeats_help="timed steps of each way and loop, at most"
    )
    parser.add_argument("--workers", type=int, default=8, help="worker processes")
    parser.add_argument("--seconds", type=float, default=3.0, help="stop after this time")
    args = parser.parse_args(argv)
    script.settle_device(args)
    if args.smoke:
        args.repeats, args.seconds, args.workers = min(args.repeats, 4), 0.0, min(args.workers, 2)
    cases = SMOKE_CASES if args.smoke else CASES
    if args.child:
        (variant,) = script.chosen(args.child, VARIANTS)
        device = torch.device(args.device)
        harness.start_device(device)
        if device.type == "cpu":
            torch.set_num_threads(1)  # otherwise the model's threads wait for the workers' CPUs
        harness.work(cases, partial(measure, variant, args), lambda: None)
        return 0
    variants = script.chosen(args.only, VARIANTS)
    further = [
        "--workers",
        str(args.workers),
        "--seconds",
        str(args.seconds),
        *(["--smoke"] if args.smoke else []),
    ]
    judge = script.compare_on_a_gpu(args)
    rows = script.collect("loops", __file__, variants, cases, args, further, judge=judge)
    report(rows)
    return script.finish("loops", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())
