"""Time until batches of a DataLoader are on the device where CUDA refuses to register memory.

    python benchmarks/loader_refused.py --out benchmarks/results/loader_refused.json

Batches of 16 and of 128 MiB, as in ``ready`` of loader.py, and two more ways: CUDA refuses to
register any memory, as it does on GB10 or in confidential computing, or refuses the third block and
all later ones. ``detail`` has what the loader holds, and the resident memory, before and after 2,000
more batches of 16 MiB; if either grows, the row is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import loader
import torch
from loader import Batches, Sample

from comparison import MIB, Args, Outcome, Variant, chosen, of_module, resident, synchronize

GROWTH = 64 * MIB
"""Bytes by which memory may differ between two moments of a steady loop: four of 2,000 batches."""


@dataclass(frozen=True)
class Case(loader.Case):
    """Batches, and how many more are taken after the timed ones, over which our memory must not
    grow.
    """

    watched: int = 0


CASES = (
    Case("refused", "8 x 2 MiB", 8, 8, (65_536,), watched=2000),
    Case("refused", "8 x 16 MiB", 64, 8, (65_536,)),
)
SMALL_CASES = (Case("refused", "8 x 8 KiB", 8, 8, (256,), watched=20),)


@contextmanager
def _refused(
    dataset: Any, batch_size: int, workers: int, device: torch.device, **refusal: Any
) -> Iterator[Batches]:
    refusals = registering_refused(**refusal) if device.type == "cuda" else nullcontext()
    with refusals, loader.pinstage(dataset, batch_size, workers, device) as batches:
        yield batches


@contextmanager
def registering_refused(allowed: int = 0, error: str = "cudaErrorNotSupported") -> Iterator[None]:
    """Let CUDA refuse to register memory in this process, until the end of the block.

    Args:
        allowed: number of calls that succeed before.
        error: name of CUDA's error; by default that of platforms that register nothing.
    """
    from cuda.bindings import runtime

    register, calls = runtime.cudaHostRegister, itertools.count()

    def refuse(*args: Any) -> Any:
        if next(calls) < allowed:
            return register(*args)
        return (getattr(runtime.cudaError_t, error),)

    with mock.patch.object(runtime, "cudaHostRegister", refuse):
        yield


VARIANTS = (
    *chosen("torch_pin,pinstage", loader.VARIANTS, "variant"),
    Variant(
        "pinstage_refused", _refused, "the same where CUDA refuses to register memory", ours=True
    ),
    Variant(
        "pinstage_third",
        partial(_refused, allowed=2, error="cudaErrorInvalidValue"),
        "the same where CUDA refuses the third and later blocks",
        ours=True,
    ),
)


def measure(variant: Variant, args: Args, case: Case) -> Outcome:
    """Return the outcome of the loop, and what our memory is before and after more batches."""
    with variant.open(*loader.arguments(args, case, case.watched * 11 // 10)) as batches:
        iterator = iter(batches)
        outcome = loader.timed_loop(iterator, args, case)
        if variant.ours and outcome["status"] == "ok":
            outcome |= watched(batches, iterator, case, args.device)
        return outcome


def watched(loader: Any, iterator: Iterator[Sample], case: Case, device: torch.device) -> Outcome:
    """Take further batches, and return the memory before and after as the detail; an error if it
    grew.
    """

    def memory() -> tuple[int, int, int]:
        pool = loader.stats().pool
        return pool.held_bytes, pool.pinned_bytes, resident()

    def take(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            next(iterator)
            synchronize(device)
        return memory()

    before = take(case.watched // 10)  # all slabs have been needed once
    after = take(case.watched)
    texts = [
        "{:.0f} MiB held, {:.0f} page-locked, {:.0f} resident".format(*(n / MIB for n in numbers))
        for numbers in (before, after)
    ]
    grew = after[0] > before[0] + GROWTH or after[2] > before[2] + GROWTH
    detail = f"{texts[0]}; after {case.watched} more batches {texts[1]}"
    return {"status": "error" if grew else "ok", "detail": detail}


PROGRAM = replace(
    loader.PROGRAM,
    **of_module(globals()),
    options=loader.PROGRAM.options
    | {"workers": (4, "worker processes"), "seconds": (2.0, loader.SECONDS)},
    limits=(),
)
PROGRAM.run(__name__)
