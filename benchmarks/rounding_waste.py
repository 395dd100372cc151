"""Host memory that a batch wastes by rounding: the pool's slabs compared with torch's pinned
allocator.

    python benchmarks/rounding_waste.py --out benchmarks/results/rounding_waste.json

The batches are the demo's: a year of weather and flights, eight hours each, hundreds of ragged
leaves. The requested bytes are the layout's or, where each leaf is pinned by itself, the leaves'.
`pinstage_padding` counts the padding between the leaves of a slab as waste too. Results are in
percent of the allocated bytes: `all batches` together, the `mean batch` and the `worst batch`.
Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pinstage as ps
from comparison import Args, Outcome, Program, Size, Variant, ok

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from demo.data import Archive, make_batches

CASES = tuple(Size(name, 0) for name in ("all batches", "mean batch", "worst batch"))
BATCH_SIZE, SEED, SMOKE_BATCHES = 8, 0, 20  # of the demo

Taken = Callable[[Any], tuple[int, int]]
"""Stages a batch and returns the requested and the allocated bytes."""


@contextmanager
def _pinstage(with_padding: bool, device: torch.device) -> Iterator[Taken]:
    with ps.SlabPool("256MiB", memory=ps.memory.default_memory(device)) as pool:

        def taken(batch: Any) -> tuple[int, int]:
            nbytes = ps.Layout.of(batch).nbytes
            with pool.acquire(nbytes) as lease:
                return _leaf_bytes(batch) if with_padding else nbytes, lease.capacity

        yield taken


def _torch(device: torch.device, *, each: bool) -> Taken:
    def taken(batch: Any) -> tuple[int, int]:
        before, nbytes = _lent_by_torch(), ps.Layout.of(batch).nbytes
        if each:
            nbytes = _leaf_bytes(batch)
            batch.map_tensors(
                lambda leaf: torch.as_tensor(leaf).pin_memory().to(device, non_blocking=True)
            )
        else:
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).to(device, non_blocking=True)
        return nbytes, _lent_by_torch() - before

    return taken


def _leaf_bytes(batch: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in batch.fragments())


def _lent_by_torch() -> int:
    return int(torch.cuda.host_memory_stats().get("active_bytes.allocated", 0))


VARIANTS = (
    Variant(
        "torch_each", partial(_torch, each=True), "each leaf by `pin_memory()`", needs_cuda=True
    ),
    Variant(
        "torch_once",
        partial(_torch, each=False),
        "`torch.empty(layout.nbytes, pin_memory=True)` a batch",
        needs_cuda=True,
    ),
    Variant(
        "pinstage", partial(_pinstage, False), "`ps.SlabPool`: one slab for a batch", ours=True
    ),
    Variant(
        "pinstage_padding",
        partial(_pinstage, True),
        "the same, padding between leaves counted",
        ours=True,
    ),
)


def shares(variant: Variant, device: torch.device, limit: int | None) -> tuple[float, list[float]]:
    """Return the wasted share of all allocated bytes, and of each batch."""
    asked_in_all = taken_in_all = 0
    of_batches = []
    with variant.open(device) as taken:
        for batch in make_batches(Archive.read(), batch_size=BATCH_SIZE, seed=SEED, limit=limit):
            asked, took = taken(batch)
            asked_in_all, taken_in_all = asked_in_all + asked, taken_in_all + took
            of_batches.append(1 - asked / took)
    return 1 - asked_in_all / taken_in_all, of_batches


def measure(variant: Variant, args: Args, case: Size) -> dict[str, Outcome]:  # noqa: ARG001
    """Return each figure, as a sample."""
    in_all, of_batches = shares(variant, args.device, SMOKE_BATCHES if args.smoke else None)
    figures = in_all, sum(of_batches) / len(of_batches), max(of_batches)
    return {
        case.id: ok([figure], f"{len(of_batches)} batches")
        for case, figure in zip(CASES, figures, strict=True)
    }


PROGRAM = Program.of(
    globals(),
    title="percent of the allocated host memory that is wasted",
    at_once=True,
    unit="%",
)
PROGRAM.run(__name__)
