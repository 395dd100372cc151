"""The work of a child process: stage a shape with one variant, check the bits, time the calls.

Each variant has a fresh process, which runs all shapes: with a process per pair, starting torch and
CUDA would take longer than the measurement itself. Between shapes the variant is closed and set up
again, and torch's caches are emptied, so that no shape sees another's slabs.

A sample is the time from the call until every leaf is ready on the device: the call, then a device
synchronise. The time until the call returned is recorded too. On a GPU it is also recorded with 100
ms of kernels queued on the current stream, as in a training loop: a call that waits for the device
then takes 100 ms longer. Before the timer starts, a few batches are staged back to back and
compared bit for bit. A staged batch is dropped before the next call, outside the timer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from comparison import batches
from comparison.errors import Incorrect
from comparison.harness import Outcome, Variant
from comparison.program import Args
from comparison.rivals import Stage
from comparison.timing import beside_kernels, timed

FEWEST_REPEATS = 7
WARM_UP_SECONDS = 0.1
"""A small batch hundreds of times, as a training loop does."""
CHECKED_IN_A_ROW = 3


def measure(variant: Variant, args: Args, shape: batches.BatchShape) -> Outcome:
    """Return one variant's status on one shape, and its samples in seconds."""
    device, instances = args.device, batches.build_instances(shape)
    gc.collect()
    gc.freeze()  # so that a collection during a call doesn't walk the benchmark's own batches
    try:
        with set_up(variant, device, shape) as (stage, place):
            sources = [place(batch) for batch in instances]
            check(stage, instances, sources, device)
            inputs = [(source,) for source in sources]
            outcome = timed(
                stage,
                device,
                repeats=args.repeats,
                seconds=args.seconds,
                fewest=FEWEST_REPEATS,
                warm_seconds=WARM_UP_SECONDS,
                inputs=inputs,
            )
            outcome["busy"] = beside_kernels(stage, device, inputs)
            del sources, inputs  # views of leases keep their slabs in use
    finally:
        gc.unfreeze()
    return outcome


@contextmanager
def set_up(
    variant: Variant, device: torch.device, shape: batches.BatchShape
) -> Iterator[tuple[Stage, Stage]]:
    """Yield a function that stages a batch, and one that first puts it where the shape has it."""
    in_place = shape.kind == "in-place"
    if in_place and variant.in_place:
        with variant.in_place(device) as both:
            yield both
        return
    with variant.open(device) as stage:
        if in_place and device.type == "cuda":
            yield stage, lambda batch: batches.map_leaves(batch, torch.Tensor.pin_memory)
        else:
            yield stage, lambda batch: batch


def check(
    stage: Stage, instances: Sequence[Any], sources: Sequence[Any], device: torch.device
) -> None:
    """Stage some batches back to back, with no wait in between.

    Raises:
        Incorrect: they differ from their sources.
    """
    staged = [stage(source) for source in sources[:CHECKED_IN_A_ROW]]
    for instance, result in zip(instances, staged, strict=False):
        wrong = list(islice(batches.differences(instance, result, device), 3))
        if wrong:
            raise Incorrect("; ".join(wrong))
