"""What packing would save in a step, as a range, and the trace in a few sentences.

The trace tells how long the host stages, how long the GPU stands still meanwhile, and what the profiler added to that
time. `Cost` tells what pinstage takes for a batch of as many leaves and bytes. Two kinds of loops gain differently:

- One that waits for the device in each step (``.item()``) has both one after the other. It gains what staging takes
  less, as far as the GPU stood still meanwhile.
- One that does not wait runs ahead of the GPU. It gains what the host does less, until the kernels, or the bus, are
  what takes longest.

A loop that waits for worker processes gains nothing: they set its pace.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..._sizes import count, format_bytes
from .._bus import Bus
from .._cost import Cost
from .._report import duration, rate, share
from ._analysis import SMALL_BYTES, Analysis
from ._events import TO_DEVICE

_PROFILER_SPREAD = (1.3, 0.65)
_GIVEN_SPREAD = (1.1, 0.9)
_COST_SPREAD = (1.6, 0.8)
"""From the least to the most saving: what the profiler's cost, and pinstage's, are multiplied with. The profiler's is
better known where the time of a step without it is given; without, the loops of tests/traces need this much. pinstage's
varies with the classes in a batch, and with what the caches still hold of it."""
FETCH_SECONDS, FETCH_LEAF_SECONDS = 60e-6, 1.5e-6
"""Of `Stager.to_host`: 1,000 tensors of 256 B take 1.48 ms (benchmarks/results/to_host.json)."""

_SMALL_STALL = 0.05
"""Stalls below this share of a step are not worth a change."""
_SMALL_SAVING = 0.02
"""Nor are savings below this share: the model is not as exact."""
_WIDE = 1.5
"""A range whose end is so many times its beginning needs a better known time of a step."""
_WAITING, _WAITING_SECONDS = 0.1, 0.2e-3
"""A loop that waits longer than both, as a share of a step and in seconds, is held up by its loader: to take a batch
that is there costs a part of the latter."""

_KNOWN_BUSES = (
    (("H100", "H200", "H800", "B100", "B200", "B300", "RTX PRO", "5090"), 55.0),
    (("A100", "A800", "A10", "A30", "A40", "A6000", "L40", "4090", "3090"), 25.0),
    (("V100", "T4", "P100", "2080", "TITAN"), 12.0),
)
"""GB/s of large page-locked copies over 16 lanes of PCIe 5, 4 and 3, by words in the GPU's name."""


@dataclass(frozen=True)
class Packing:
    """What one slab a step would change. Medians over the steps, in seconds and bytes."""

    leaves: int  # copies to the device that one slab would replace
    nbytes: int  # of these copies
    step_seconds: float  # in the trace
    real_seconds: float  # without the profiler, as estimated or as given
    kernel_seconds: float  # a step cannot be shorter
    staging_seconds: float  # of a step of the trace: the host stages or a copy runs
    stall_seconds: float  # of staging: no kernel runs
    real_staging_seconds: float  # without the profiler
    packed_seconds: float  # that staging would take as one slab
    saved_seconds: float  # by which a step would be shorter, without the profiler
    least_saved_seconds: float
    most_saved_seconds: float
    least_speedup: float  # how many times as fast a step would be
    most_speedup: float
    waits_for_device: bool  # whether the host waits for the GPU in each step, outside staging
    waits_for_loader: bool  # whether worker processes set the pace
    bus_bytes_per_second: float  # that the model assumes
    assumptions: tuple[str, ...]  # of the model, as sentences
    is_ours: bool = False  # whether the batch is one slab already
    is_given: bool = False  # whether the time without the profiler is

    @property
    def is_stalled(self) -> bool:
        """Whether the GPU waits for staging long enough to matter."""
        return self.stall_seconds >= _SMALL_STALL * self.step_seconds

    @property
    def speedup(self) -> float:
        """How many times as fast a step would be."""
        return _times(self.real_seconds, self.saved_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self) | {"speedup": self.speedup}


@dataclass(frozen=True)
class Downloads:
    """Copies to the host in a step: ``.cpu()``, ``.item()``. Medians over the steps, in seconds and bytes."""

    copies: int
    nbytes: int
    seconds: float  # in which the loop's thread was in them
    exposed_seconds: float  # of that, without a kernel; the rest waits for work that was asked for before
    saved_seconds: float  # by which a step would be shorter if all were fetched together

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


def packing(analysis: Analysis, cost: Cost, bus: Bus | None = None, step_seconds: float | None = None) -> Packing:
    """Estimate what packing each step's copies into one slab would save.

    Args:
        analysis: what the trace says.
        cost: of staging with pinstage.
        bus: of the machine that the trace is from; None: the fastest large page-locked copy in the trace, or what is
            known of such GPUs.
        step_seconds: of a step without the profiler, if that was measured.
    """
    middle = analysis.middle
    leaves, nbytes = round(middle("copies")), round(middle("nbytes"))
    bus_rate, source = _bus_rate(analysis, bus)
    waits_for_device = bool(middle("synchronise_seconds") or middle("downloads"))
    step, wait, kernels = middle("seconds"), middle("idle_wait_seconds"), middle("kernel_seconds")
    waits_for_loader = analysis.has_workers and wait > max(_WAITING * step, _WAITING_SECONDS)
    added = middle("profiler_idle_seconds" if waits_for_device else "profiler_seconds")
    staging = middle("staging_seconds" if waits_for_device else "host_staging_seconds")
    packed = cost.seconds(leaves, nbytes, bus_rate)
    factor, spread = 1.0, _PROFILER_SPREAD
    if step_seconds is not None:
        spread = _GIVEN_SPREAD
        factor = min(max((step - step_seconds) / (added or 1.0), _PROFILER_SPREAD[1]), _PROFILER_SPREAD[0])

    def without(profiler: float) -> tuple[float, float, float]:
        """Return the step, its staging and the stall in that without the profiler, which took so many times as much."""
        real = max(step - profiler * added, kernels)
        pace = 1.0
        if step_seconds is not None:
            # What the profiler cannot explain is the host's pace, which differs from hour to hour. The GPU keeps its.
            gpu = kernels if waits_for_device else 0.0
            pace = max(step_seconds - gpu, 0.0) / max(real - gpu, 1e-9)
            real = step_seconds
        mine = staging - profiler * middle("profiler_staging_seconds")
        stall = middle("stall_seconds") - profiler * middle("profiler_stall_seconds")
        return real, max(mine * pace, 0.0), max(stall * pace, 0.0)

    def saved(profiler: float, ours: float) -> tuple[float, float]:
        """Return by how much a step would be shorter, and how many times as fast."""
        real, mine, stall = without(factor * profiler)
        # The GPU gains what it stood still; and no step is shorter than its kernels, or than its bytes on the bus.
        limit = stall if waits_for_device else real - nbytes / min(bus_rate, cost.bytes_per_second)
        less = max(0.0, min(mine - ours * packed, limit, real - kernels))
        return less, _times(real, less)

    real, real_staging, _ = without(factor)
    is_ours = analysis.uses_pinstage and leaves <= 1
    cannot_save = is_ours or not analysis.has_gpu
    nothing = (0.0, 1.0)
    most = nothing if cannot_save else saved(spread[1], _COST_SPREAD[1])
    least = likely = nothing
    if not (cannot_save or waits_for_loader):
        least, likely = saved(spread[0], _COST_SPREAD[0]), saved(1.0, 1.0)
    return Packing(
        leaves=leaves,
        nbytes=nbytes,
        step_seconds=step,
        real_seconds=real,
        kernel_seconds=kernels,
        staging_seconds=middle("staging_seconds"),
        stall_seconds=middle("stall_seconds"),
        real_staging_seconds=real_staging,
        packed_seconds=packed,
        saved_seconds=likely[0],
        least_saved_seconds=least[0],
        most_saved_seconds=most[0],
        least_speedup=least[1],
        most_speedup=most[1],
        waits_for_device=waits_for_device,
        waits_for_loader=waits_for_loader,
        bus_bytes_per_second=bus_rate,
        assumptions=(
            *_costs(analysis, cost, step_seconds, added),
            f"the bus gives {rate(bus_rate)}: {source}",
            *_ways(analysis, waits_for_device),
        ),
        is_ours=is_ours,
        is_given=step_seconds is not None,
    )


def _times(real: float, saved: float) -> float:
    return real / max(real - saved, 1e-9)


def _costs(analysis: Analysis, cost: Cost, given: float | None, added: float) -> tuple[str, str]:
    """Say what pinstage and the profiler are taken to cost."""
    ours = (
        f"staging as one slab takes {duration(cost.fixed_seconds)}, {duration(cost.leaf_seconds)} for each leaf, and "
        f"its bytes at {rate(cost.bytes_per_second)} or the bus's speed if that is less, as measured on "
        f"{cost.source}; {_rough(_COST_SPREAD)}"
    )
    if given is not None:
        return ours, f"without the profiler a step takes {duration(given)}, as given"
    return ours, (
        f"the profiler adds {duration(analysis.op_seconds)} to each operator and {duration(analysis.call_seconds)} to "
        f"each call of CUDA, {duration(added)} a step; {_rough(_PROFILER_SPREAD)}; --step-ms states the time without it"
    )


def _ways(analysis: Analysis, waits_for_device: bool) -> tuple[str, str, str]:
    """Say what kind of loop this is taken for."""
    batches = "one step stages one batch"
    if not analysis.annotated:
        batches = "the whole trace stages one batch, as no steps are annotated"
    gain = "the host does not wait for the GPU outside staging: saved is the host's time, down to the kernels'"
    if waits_for_device:
        gain = "the host waits for the GPU in each step: saved is part of the GPU's stall"
    return (
        f"each copy to the device is one leaf, and {batches}",
        gain,
        "prefetching, which can hide the rest, is not counted",
    )


def downloads(analysis: Analysis) -> Downloads:
    """Estimate what fetching each step's copies to the host together would save."""
    middle = analysis.middle
    copies, exposed = round(middle("downloads")), middle("exposed_download_seconds")
    together = FETCH_SECONDS + copies * FETCH_LEAF_SECONDS
    saved = exposed - middle("profiler_download_seconds") - together if copies > 1 else 0.0
    nbytes, seconds = round(middle("download_bytes")), middle("download_seconds")
    return Downloads(copies, nbytes, seconds, exposed, max(saved, 0.0))


def _rough(spread: tuple[float, float]) -> str:
    return f"for the range, {spread[1]:g} to {spread[0]:g} times as much"


def _bus_rate(analysis: Analysis, bus: Bus | None) -> tuple[float, str]:
    if bus is not None:
        return bus.pinned_bytes_per_second, bus.source
    seen = analysis.fastest_pinned
    if seen:
        return seen, "the fastest page-locked copy of 1 MiB or more in this trace"
    name = analysis.device_name or ""
    for words, gb_per_second in _KNOWN_BUSES:
        if any(word in name for word in words):
            return gb_per_second * 1e9, f"what 16 lanes of PCIe give such a GPU ({name}); --bus states another figure"
    return 25e9, "16 lanes of PCIe 4, as the trace does not tell; --bus states another figure"


# -- in words ----------------------------------------------------------------------------------------------------------


def verdict(analysis: Analysis, packing: Packing) -> tuple[str, ...]:
    """Say what cannot be gained, what staging costs, and what packing would change."""
    if not analysis.has_gpu:
        return (_without_gpu(analysis),)
    if not analysis.sum_of("copies"):
        return ("No host-to-device copy is in this trace. There is nothing in it that packing could improve.",)
    return _limit(packing, analysis), _finding(analysis, packing), _advice(packing)


def download_verdict(analysis: Analysis, found: Downloads) -> str:
    """Say what copies to the host cost, and what `Stager.to_host` would save; empty if there are none."""
    if not found.copies:
        return ""
    what = f"{count(found.copies, 'device-to-host copy', 'device-to-host copies')} a {_step(analysis)}"
    hidden = max(found.seconds - found.exposed_seconds, 0.0)
    text = (
        f"Downloads (.item(), .cpu()): {what}, {format_bytes(found.nbytes)}, hold the host up for "
        f"{duration(found.seconds)}, {duration(hidden)} of it for kernels that were still to run."
    )
    if found.saved_seconds >= _SMALL_SAVING * analysis.middle("seconds"):
        return f"{text} Fetched together by Stager.to_host they would save up to {duration(found.saved_seconds)}."
    return (
        f"{text} To fetch them together would save nothing worth having; Stager.to_host with get() a step later lets "
        "the host run ahead."
    )


def _step(analysis: Analysis) -> str:
    return "step" if analysis.annotated else "trace"


def _without_gpu(analysis: Analysis) -> str:
    step, wait, moving = (analysis.middle(name) for name in ("seconds", "wait_seconds", "host_staging_seconds"))
    return (
        "Nothing of a GPU is in this trace, so it says nothing of copies to one, nor what packing would save. "
        f"Of a {_step(analysis)} of {duration(step)}, the loop waits {share(wait, step)} for its loader and is "
        f"{share(moving, step)} in operators that copy tensors (to, copy_, item). If it ran on a GPU, record it again "
        "with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
    )


def _limit(packing: Packing, analysis: Analysis) -> str:
    real, kernels, step = packing.real_seconds, packing.kernel_seconds, _step(analysis)
    if packing.waits_for_loader:
        wait = share(analysis.middle("idle_wait_seconds"), packing.step_seconds)
        return (
            f"The loop waits {wait} of the time for its loader, whose workers or pinning thread set its pace: packing "
            "in this process does not cure that. Give the loader more workers, or let them pack (pinstage.DataLoader)."
        )
    if real - kernels < _SMALL_STALL * real:
        return (
            f"The GPU is at work for {share(kernels, real)} of a {step}: staging cannot save more than "
            f"{duration(max(real - kernels, 0.0))} of {duration(real)}."
        )
    return (
        f"A {step} cannot be shorter than its kernels, {duration(kernels)}; it takes {duration(packing.step_seconds)} "
        f"here, and about {duration(real)} without the profiler."
    )


def _finding(analysis: Analysis, packing: Packing) -> str:
    step = _step(analysis)
    what = f"{count(packing.leaves, 'host-to-device copy', 'host-to-device copies')} a {step} ({_nature(analysis)})"
    if not packing.is_stalled:
        hidden, seconds = analysis.sum_of("hidden_seconds"), analysis.sum_of("exposed_seconds")
        return (
            f"Staging holds the GPU up for {share(packing.stall_seconds, packing.step_seconds)} of a {step} only: "
            f"{what}, {share(hidden, hidden + seconds)} of their time behind kernels."
        )
    return (
        f"The GPU stands still for {share(packing.stall_seconds, packing.step_seconds)} of a {step} "
        f"({duration(packing.stall_seconds)}) while the host stages: {what}."
    )


def _nature(analysis: Analysis) -> str:
    copies, nbytes = analysis.sum_of("copies"), analysis.sum_of("nbytes")
    if not nbytes:
        return "the trace does not tell their bytes"  # as those of AMD's GPUs do not
    small = sum(bucket.copies for bucket in analysis.buckets if bucket.direction == TO_DEVICE and bucket.is_small)
    uploads = [group for group in analysis.groups if group.direction == TO_DEVICE]
    pageable = sum(group.nbytes for group in uploads if group.kind == "pageable")
    return (
        f"{share(small, copies)} below {format_bytes(SMALL_BYTES)}, "
        f"{share(pageable, nbytes)} of the bytes from pageable memory"
    )


def _advice(packing: Packing) -> str:
    least, most, real = packing.least_saved_seconds, packing.most_saved_seconds, packing.real_seconds
    ours, theirs = duration(packing.packed_seconds), duration(packing.real_staging_seconds)
    if packing.waits_for_loader:
        return f"Were the loader fast enough, one slab would save up to {duration(most)} of a step."
    if packing.is_ours:
        return "pinstage stages it as one slab already."
    if packing.is_stalled and packing.packed_seconds > packing.real_staging_seconds:
        return f"One slab would take about {ours} to stage, longer than this, {theirs}: leave it as it is."
    if packing.saved_seconds < _SMALL_SAVING * real:
        return "Packing them into one slab would change nothing worth having."
    what = f"One slab would take about {ours} to stage, where this takes about {theirs}, and save"
    if least < _SMALL_SAVING * real:
        text = f"{what} up to {duration(most)}, perhaps nothing."
    else:
        times = _range(f"{packing.least_speedup:.1f}", f"{packing.most_speedup:.1f}")
        text = f"{what} {_range(duration(least), duration(most))} of a step: {times} times as fast."
    if packing.is_given or least > most / _WIDE:
        return text
    return f"{text} The profiler's own time makes this uncertain: --step-ms, a step's time without it, narrows it."


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"
