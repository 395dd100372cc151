"""What packing would save: a model with few figures, each of them said.

It knows how long the host and the copies are at it in a step, how much of that the GPU stands still for, and how long
pinstage takes for a batch of so many leaves and bytes. The part of the stall that goes is the part of the time that
goes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import _report as fmt
from .._bus import Bus
from ._analysis import Analysis

FIXED_SECONDS = 90e-6
LEAF_SECONDS = 1.0e-6
RAGGED_LEAF_SECONDS = 5.2e-6
PACK_BYTES_PER_SECOND = 35e9
"""What one stage takes: so much, so much for each leaf, and so much for each byte, packing and copy together. They were
fitted to the medians of commit 92efc1c beside an H200. Of those in docs/performance.md, from a slower hour, they
reproduce six of nine within 20%; the others are 23 to 37% dearer. Ragged batches are described anew each time: the
demo's cost so much a leaf."""

_KNOWN_BUSES = (
    (("H100", "H200", "H800", "B100", "B200", "B300", "RTX PRO", "5090"), 55.0),
    (("A100", "A800", "A10", "A30", "A40", "A6000", "L40", "4090", "3090"), 25.0),
    (("V100", "T4", "P100", "2080", "TITAN"), 12.0),
)
"""GB/s of large page-locked copies over 16 lanes of PCIe 5, 4 and 3, by words in the GPU's name."""


@dataclass(frozen=True)
class Packing:
    """What one slab a step would change. Medians over the steps, in seconds and bytes.

    Attributes:
        leaves: copies to the device that one slab would replace.
        nbytes: that they carry.
        step_seconds: a step now.
        staging_seconds: of it, the host stages or a copy runs.
        stall_seconds: of that, no kernel runs.
        packed_seconds: staging as one slab would take so long.
        saved_seconds: a step would be shorter by this.
        bus_bytes_per_second: what the bus was taken to give.
        assumptions: what the model rests on, as sentences.
    """

    leaves: int
    nbytes: int
    step_seconds: float
    staging_seconds: float
    stall_seconds: float
    packed_seconds: float
    saved_seconds: float
    bus_bytes_per_second: float
    assumptions: tuple[str, ...]

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
    rate, source = _bus_rate(analysis, bus)
    ragged = len({(step.copies, step.nbytes) for step in analysis.steps}) > 1
    leaf_seconds = RAGGED_LEAF_SECONDS if ragged else LEAF_SECONDS
    packed = FIXED_SECONDS + leaves * leaf_seconds + max(nbytes / PACK_BYTES_PER_SECOND, nbytes / rate)
    saved = stall * max(0.0, 1 - packed / staging) if staging and leaves > 1 else 0.0
    assumptions = (
        _stage_costs(leaf_seconds, "ragged, as steps copy different amounts" if ragged else "like those before them"),
        f"the bus gives {fmt.rate(rate)}: {source}",
        "each copy to the device is one leaf, and one step stages one batch"
        if analysis.annotated
        else "each copy to the device is one leaf, and the whole trace stages one batch, as no steps are annotated",
        "the GPU's stall shrinks as staging does; prefetching, which can hide the rest, is not counted",
        "the profiler's own cost, some microseconds a call, is in the times of now",
    )
    return Packing(leaves, nbytes, analysis.middle("seconds"), staging, stall, packed, saved, rate, assumptions)


def _stage_costs(leaf_seconds: float, batches: str) -> str:
    return (
        f"staging as one slab takes {fmt.duration(FIXED_SECONDS)}, {fmt.duration(leaf_seconds)} for each leaf, and its "
        f"bytes at {fmt.rate(PACK_BYTES_PER_SECOND)} or the bus's speed if that is less, as measured beside an H200 "
        f"with 16 cores for batches that are {batches}"
    )


def _bus_rate(analysis: Analysis, bus: Bus | None) -> tuple[float, str]:
    if bus is not None:
        return bus.pinned_bytes_per_second, bus.source
    seen = analysis.fastest_pinned
    if seen:
        return seen, "the fastest page-locked copy of 1 MiB or more in this trace"
    name = analysis.device_name or ""
    for words, rate in _KNOWN_BUSES:
        if any(word in name for word in words):
            return rate * 1e9, f"what 16 lanes of PCIe give such a GPU ({name}); --bus states another figure"
    return 25e9, "16 lanes of PCIe 4, as the trace does not tell; --bus states another figure"
