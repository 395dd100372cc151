"""Train for an epoch with one way of staging, and measure that way.

Three separate measurements, so that none disturbs another: the epoch (which waits for the device
only at its start and end), the time until a batch has arrived (alone, the median of many), and the
copies (under a profiler). Each way is timed on batches that it hasn't staged before: no two of
these ragged batches have the same layout, and a repeated layout would favour a stager that caches
layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from demo.batch import RaggedBatch
from demo.errors import LossMismatchError
from demo.model import DelayModel
from demo.ways import HostMemory, Way

LEARNING_RATE = 2e-3
WARM_UP_BATCHES = 5
MEASURED_BATCHES = 200
PROFILED_BATCHES = 5


@dataclass(frozen=True)
class Outcome:
    """The results of one way.

    Attributes:
        way: The way.
        losses: float32 `[batches]` on the host, in order.
        epoch_seconds: The whole epoch, training included.
        call_seconds: The part of it that the host spent in staging calls.
        batch_seconds: Staging alone: median over batches, from the call until the batch has
            arrived; for a way that works ahead, the mean.
        leaf_seconds: The same for each leaf: median over batches of time over leaves.
        copies: Host-to-device copies per batch, median.
        copies_profiled: Whether a profiler counted `copies`; otherwise they are the requested ones.
        nbytes: Bytes per batch copied to the device, median.
        memory: The memory held at the end of the epoch.
    """

    way: Way
    losses: torch.Tensor
    epoch_seconds: float
    call_seconds: float
    batch_seconds: float
    leaf_seconds: float
    copies: float
    copies_profiled: bool
    nbytes: float
    memory: HostMemory


def warm_up(way: Way, batches: Sequence[RaggedBatch], device: torch.device) -> None:
    """Stage and train a few batches with a throw-away model, so that the first way doesn't pay for
    the others.
    """
    _epoch(way, batches, device, seed=0, epochs=1, on_batch=lambda: None)


def measure(
    way: Way,
    batches: Sequence[RaggedBatch],
    others: Sequence[RaggedBatch],
    device: torch.device,
    *,
    seed: int,
    epochs: int,
    on_batch: Callable[[], None],
) -> Outcome:
    """Train on `batches` in order, then time the staging alone of `others`."""
    losses, epoch_seconds, call_seconds = _epoch(
        way, batches, device, seed=seed, epochs=epochs, on_batch=on_batch
    )
    memory = way.memory()
    batch_seconds, leaf_seconds = _staging_alone(way, others, device)
    issued = [way.issued(batch) for batch in batches[:MEASURED_BATCHES]]
    return Outcome(
        way=way,
        losses=losses,
        epoch_seconds=epoch_seconds,
        call_seconds=call_seconds,
        batch_seconds=batch_seconds,
        leaf_seconds=leaf_seconds,
        copies=median(copies for copies, _ in issued),
        copies_profiled=False,
        nbytes=median(nbytes for _, nbytes in issued),
        memory=memory,
    )


def profile_copies(
    outcome: Outcome, batches: Sequence[RaggedBatch], device: torch.device
) -> Outcome:
    """Replace the number of requested copies with the number that the GPU made, where a profiler
    can count them.

    Call it after all timing: the profiler's hooks stay in the driver once it has been started.
    """
    seen = _profiled_copies(outcome.way, batches[:PROFILED_BATCHES], device)
    return replace(outcome, copies=median(seen), copies_profiled=True) if seen else outcome


def check_losses(outcomes: Sequence[Outcome]) -> None:
    """Compare the loss curves bit for bit with the first.

    Raises:
        LossMismatchError: Two curves differ, or a loss is not a number.
    """
    first, *others = outcomes
    if not first.losses.isfinite().all():
        where = int((~first.losses.isfinite()).nonzero()[0])
        raise LossMismatchError(
            f"the loss of {first.way.title!r} is {first.losses[where]} at batch {where}"
        )
    for other in others:
        if torch.equal(first.losses, other.losses):
            continue
        differs = (first.losses != other.losses).nonzero().flatten()
        where = int(differs[0])
        raise LossMismatchError(
            f"losses differ: {other.way.title!r} is not {first.way.title!r} bit for bit: "
            f"{len(differs):,} of {len(first.losses):,} batches, first batch {where} "
            f"({other.losses[where]:.9g}, not {first.losses[where]:.9g}); "
            "a batch arrived changed: please report this with the output above"
        )


def _epoch(
    way: Way,
    batches: Sequence[RaggedBatch],
    device: torch.device,
    *,
    seed: int,
    epochs: int,
    on_batch: Callable[[], None],
) -> tuple[torch.Tensor, float, float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DelayModel()  # on the host, so that the weights are the same numbers everywhere
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    call_seconds = 0.0
    _wait_for(device)
    start = perf_counter()
    for _ in range(epochs):
        called = perf_counter()
        for staged in way.staged(batches):
            call_seconds += perf_counter() - called
            optimizer.zero_grad()
            loss = model.loss(staged)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            on_batch()
            called = perf_counter()
    _wait_for(device)
    seconds = perf_counter() - start
    return torch.stack(losses).cpu(), seconds, call_seconds


def _staging_alone(
    way: Way, batches: Sequence[RaggedBatch], device: torch.device
) -> tuple[float, float]:
    sizes = [len(batch.fragments()) for batch in batches]
    seconds = []
    arriving = way.staged(batches)
    for _ in batches:
        _wait_for(device)
        start = perf_counter()
        staged = next(arriving)
        _wait_for(device)
        seconds.append(perf_counter() - start)
        del staged  # outside the timer for every way
    if way.works_ahead and len(seconds) > 1:
        # Batches come in bursts, as workers finish; and the first one waits for the workers to
        # start.
        seconds = [sum(seconds[1:]) / len(seconds[1:])] * len(seconds)
    return median(seconds), median(time / size for time, size in zip(seconds, sizes, strict=True))


def _profiled_copies(way: Way, batches: Sequence[RaggedBatch], device: torch.device) -> list[int]:
    """Count the host-to-device copies that the GPU made, batch by batch; empty where no profiler
    can count.
    """
    if device.type != "cuda":
        return []
    counts = []
    for batch in batches:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            way.stage(batch)
            _wait_for(device)
        events = profiler.events() or []
        counts.append(sum(event.name.startswith("Memcpy HtoD") for event in events))
    return counts if any(counts) else []


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
