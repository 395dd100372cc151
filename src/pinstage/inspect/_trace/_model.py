"""What packing would save, by a model with few figures, and the trace in two sentences.

The trace gives the time of staging in a step, and how much of it is stall: the GPU waits. The model gives the time that
pinstage takes to stage a batch of as many leaves and bytes. The stall is taken to shrink by the same share as staging.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..._sizes import format_bytes
from .._bus import Bus
from .._report import count, duration, rate, share
from ._analysis import SMALL_BYTES, Analysis
from ._events import TO_DEVICE

FIXED_SECONDS = 90e-6
LEAF_SECONDS = 1.0e-6
RAGGED_LEAF_SECONDS = 5.2e-6
PACK_BYTES_PER_SECOND = 35e9
"""What it takes to stage a batch: a fixed time, a time for each leaf, and its bytes, packing and copy together.

They were fitted to the medians of commit 92efc1c beside an H200. Of the medians in docs/performance.md, from a slower
hour, they reproduce six of nine within 20%; the others are 23 to 37% slower. Ragged batches are described anew each
time: a leaf of the demo's takes 5.2 us."""

_SMALL_STALL = 0.05
"""Stalls below this share of a step are not worth a change."""
_SMALL_SAVING = 0.02
"""Nor are savings below this share: the model is not as exact."""

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
    step_seconds: float  # now
    staging_seconds: float  # of a step: the host stages or a copy runs
    stall_seconds: float  # of staging: no kernel runs
    packed_seconds: float  # that staging would take as one slab
    saved_seconds: float  # by which a step would be shorter
    bus_bytes_per_second: float  # that the model assumes
    assumptions: tuple[str, ...]  # of the model, as sentences

    @property
    def is_stalled(self) -> bool:
        """Whether the GPU waits for staging long enough to matter."""
        return self.stall_seconds >= _SMALL_STALL * self.step_seconds

    @property
    def speedup(self) -> float:
        """How many times as fast a step would be."""
        return self.step_seconds / max(self.step_seconds - self.saved_seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self) | {"speedup": self.speedup}


def packing(analysis: Analysis, bus: Bus | None = None) -> Packing:
    """Estimate what packing each step's copies into one slab would save.

    Args:
        analysis: what the trace says.
        bus: of the machine that the trace is from; None: the fastest large page-locked copy in the trace, or what is
            known of such GPUs.
    """
    leaves, nbytes = round(analysis.middle("copies")), round(analysis.middle("nbytes"))
    staging, stall = analysis.middle("staging_seconds"), analysis.middle("stall_seconds")
    bus_rate, source = _bus_rate(analysis, bus)
    ragged = len({(step.copies, step.nbytes) for step in analysis.steps}) > 1
    leaf_seconds = RAGGED_LEAF_SECONDS if ragged else LEAF_SECONDS
    packed = FIXED_SECONDS + leaves * leaf_seconds + max(nbytes / PACK_BYTES_PER_SECOND, nbytes / bus_rate)
    saved = stall * max(0.0, 1 - packed / staging) if staging and leaves > 1 else 0.0
    likeness = "ragged, as steps copy different amounts" if ragged else "like those before them"
    costs = (
        f"staging as one slab takes {duration(FIXED_SECONDS)}, {duration(leaf_seconds)} for each leaf, and its bytes "
        f"at {rate(PACK_BYTES_PER_SECOND)} or the bus's speed if that is less, as measured beside an H200 with 16 "
        f"cores for batches that are {likeness}"
    )
    assumptions = (
        costs,
        f"the bus gives {rate(bus_rate)}: {source}",
        "each copy to the device is one leaf, and one step stages one batch"
        if analysis.annotated
        else "each copy to the device is one leaf, and the whole trace stages one batch, as no steps are annotated",
        "the GPU's stall shrinks as staging does; prefetching, which can hide the rest, is not counted",
        "the profiler's own cost, some microseconds a call, is in the times of now",
    )
    return Packing(leaves, nbytes, analysis.middle("seconds"), staging, stall, packed, saved, bus_rate, assumptions)


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


def verdict(analysis: Analysis, packing: Packing) -> str:
    """Say what staging costs, and what packing would change; two sentences."""
    return f"{_finding(analysis, packing)} {_advice(analysis, packing)}"


def _finding(analysis: Analysis, packing: Packing) -> str:
    step = "step" if analysis.annotated else "trace"
    if not analysis.sum_of("copies"):
        return "No host-to-device copy is in this trace."
    what = f"{count(packing.leaves, 'host-to-device copy', 'host-to-device copies')} a {step} ({_nature(analysis)})"
    if not packing.is_stalled:
        hidden, seconds = analysis.sum_of("hidden_seconds"), analysis.sum_of("exposed_seconds")
        return (
            f"Staging holds the GPU up for {share(packing.stall_seconds, packing.step_seconds)} of a {step} only: "
            f"{what}, {share(hidden, hidden + seconds)} of their time behind kernels."
        )
    return (
        f"The GPU stands still for {share(packing.stall_seconds, packing.step_seconds)} of a {step} "
        f"({duration(packing.stall_seconds)} of {duration(packing.step_seconds)}) while the host stages: "
        f"{what}."
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


def _advice(analysis: Analysis, packing: Packing) -> str:
    wait, step = analysis.middle("wait_seconds"), analysis.middle("seconds")
    if wait > max(0.2 * step, packing.stall_seconds):
        return (
            f"The loop waits {share(wait, step)} of the time for its loader, which packing in this process does "
            "not cure: give the loader more workers, or let them pack (pinstage.DataLoader)."
        )
    if not analysis.sum_of("copies"):
        return "There is nothing in it that packing could improve."
    if packing.saved_seconds < _SMALL_SAVING * packing.step_seconds:
        return "Packing them into one slab would change nothing worth having."
    return (
        f"One slab would take about {duration(packing.packed_seconds)} to stage, where this takes "
        f"{duration(packing.staging_seconds)}, and save about {duration(packing.saved_seconds)}: "
        f"{packing.speedup:.2f} times as fast."
    )
