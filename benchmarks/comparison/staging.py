"""The work of a child process: stage the shapes with one variant, check the bits, time the calls.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch

from comparison import batches
from comparison.harness import Outcome, Variant
from comparison.rivals import Stage

FEWEST_REPEATS = 7
FEWEST_WARM_UPS = 3
WARM_UP_SECONDS = 0.1
CHECKED_IN_A_ROW = 3
BUSY_MILLISECONDS = 100
BUSY_KERNELS = 10
BUSY_REPEATS = 3


def measure(
    variant: Variant, device: torch.device, repeats: int, seconds: float, shape: batches.BatchShape
) -> Outcome:
    """Return one variant's status on one shape, and its samples in seconds.

    Args:
        variant: The way to stage.
        device: The target.
        repeats: The most timed calls.
        seconds: Time limit for these calls, once `FEWEST_REPEATS` are done.
        shape: The batches to stage.
    """
    instances = batches.build_instances(shape)
    gc.collect()
    gc.freeze()  # so that a collection during a call doesn't walk the benchmark's own batches
    try:
        with set_up(variant, device, shape) as (stage, place):
            placed = [place(batch) for batch in instances]
            sources = [variant.prepare(batch) if variant.prepare else batch for batch in placed]
            wrong = check(stage, instances, sources, device)
            if wrong:
                return {"status": "incorrect", "detail": wrong}
            total, main_thread = timed(stage, sources, synchronizer(device), repeats, seconds)
            busy = timed_beside_kernels(stage, sources, device) if device.type == "cuda" else []
            del placed, sources  # views of leases keep their slabs in use
    finally:
        gc.unfreeze()
    return {"status": "ok", "detail": "", "total": total, "main": main_thread, "busy": busy}


@contextmanager
def set_up(
    variant: Variant, device: torch.device, shape: batches.BatchShape
) -> Iterator[tuple[Stage, Stage]]:
    """Yield a function that stages a batch, and one that first puts it where the shape has it."""
    if shape.in_place and variant.in_place:
        with variant.in_place(device) as both:
            yield both
        return
    with variant.setup(device, *([shape.most_slab_bytes] if variant.sized else [])) as stage:
        if shape.in_place and device.type == "cuda":
            yield stage, lambda batch: batches.map_leaves(batch, torch.Tensor.pin_memory)
        else:
            yield stage, lambda batch: batch


def check(
    stage: Stage, instances: Sequence[Any], sources: Sequence[Any], device: torch.device
) -> str:
    """Stage some batches back to back, with no wait in between, and return how they differ from
    their sources.
    """
    staged = [stage(source) for source in sources[:CHECKED_IN_A_ROW]]
    for instance, result in zip(instances, staged, strict=False):
        wrong = list(islice(batches.differences(instance, result, device), 3))
        if wrong:
            return "; ".join(wrong)
    return ""


def timed(
    stage: Stage,
    sources: Sequence[Any],
    synchronize: Callable[[], None],
    repeats: int,
    seconds: float,
) -> tuple[list[float], list[float]]:
    """Warm up, then return samples of the whole time and of the time until the call returned."""
    began = time.perf_counter()
    # A small batch hundreds of times, as a training loop does.
    for i, source in enumerate(cycle(sources)):
        if i >= FEWEST_WARM_UPS and time.perf_counter() - began > WARM_UP_SECONDS:
            break
        stage(source)
        synchronize()
    total: list[float] = []
    main_thread: list[float] = []
    began = time.perf_counter()
    for i in range(repeats):
        if i >= FEWEST_REPEATS and time.perf_counter() - began > seconds:
            break
        source = sources[i % len(sources)]
        start = time.perf_counter()
        staged = stage(source)
        returned = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        total.append(done - start)
        main_thread.append(returned - start)
        del staged
    return total, main_thread


def timed_beside_kernels(stage: Stage, sources: Sequence[Any], device: torch.device) -> list[float]:
    """Return samples of the time until the call returned while the current stream has kernels to
    run before it.
    """
    synchronize = synchronizer(device)
    run_kernel: Callable[[int], None] = torch.cuda._sleep
    for cycles in (1000, 10_000_000):  # the first turn loads the kernel
        began = time.perf_counter()
        run_kernel(cycles)
        synchronize()
        milliseconds = (time.perf_counter() - began) * 1e3
    cycles = int(cycles * BUSY_MILLISECONDS / BUSY_KERNELS / milliseconds)
    took: list[float] = []
    for i in range(BUSY_REPEATS):
        for _ in range(BUSY_KERNELS):
            run_kernel(cycles)
        start = time.perf_counter()
        staged = stage(sources[i % len(sources)])
        took.append(time.perf_counter() - start)
        synchronize()
        del staged
    return took


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def empty_caches(device: torch.device) -> None:
    """Free torch's cached device and page-locked memory, so that all shapes start from the same
    state.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # torch 2.11 has only its private name.
        private = getattr(torch._C, "_host_emptyCache", lambda: None)
        getattr(torch.accelerator, "empty_host_cache", private)()
