"""The trace in two sentences."""

from __future__ import annotations

from ..._sizes import format_bytes
from .. import _report as fmt
from ._analysis import SMALL_BYTES, Analysis
from ._events import TO_DEVICE
from ._model import Packing

_SMALL_SHARE = 0.05
"""Stalls below this share of a step are not worth a change."""
_SMALL_SAVING = 0.02
"""Nor are savings below this share: the model is not as exact."""


def verdict(analysis: Analysis, packing: Packing) -> str:
    """Say what staging costs, and what packing would change; two sentences."""
    return f"{_finding(analysis, packing)} {_advice(analysis, packing)}"


def is_stalled(packing: Packing) -> bool:
    """Whether the GPU waits for staging long enough to matter."""
    return packing.stall_seconds >= _SMALL_SHARE * packing.step_seconds


def _finding(analysis: Analysis, packing: Packing) -> str:
    step = "step" if analysis.annotated else "trace"
    if not analysis.sum_of("copies"):
        return "No host-to-device copy is in this trace."
    what = f"{fmt.count(packing.leaves, 'host-to-device copy', 'host-to-device copies')} a {step} ({_nature(analysis)})"
    if not is_stalled(packing):
        hidden, seconds = analysis.sum_of("hidden_seconds"), analysis.sum_of("exposed_seconds")
        return (
            f"Staging holds the GPU up for {fmt.share(packing.stall_seconds, packing.step_seconds)} of a {step} only: "
            f"{what}, {fmt.share(hidden, hidden + seconds)} of their time behind kernels."
        )
    return (
        f"The GPU stands still for {fmt.share(packing.stall_seconds, packing.step_seconds)} of a {step} "
        f"({fmt.duration(packing.stall_seconds)} of {fmt.duration(packing.step_seconds)}) while the host stages: "
        f"{what}."
    )


def _nature(analysis: Analysis) -> str:
    copies, nbytes = analysis.sum_of("copies"), analysis.sum_of("nbytes")
    if not nbytes:
        return "the trace does not tell their bytes"  # as those of AMD's GPUs do not
    small = sum(
        bucket.copies
        for bucket in analysis.buckets
        if bucket.direction == TO_DEVICE and bucket.label in ("< 4 KiB", "4 to 64 KiB")
    )
    pageable = sum(
        group.nbytes for group in analysis.groups if group.direction == TO_DEVICE and group.kind == "pageable"
    )
    return (
        f"{fmt.share(small, copies)} below {format_bytes(SMALL_BYTES)}, "
        f"{fmt.share(pageable, nbytes)} of the bytes from pageable memory"
    )


def _advice(analysis: Analysis, packing: Packing) -> str:
    wait, step = analysis.middle("wait_seconds"), analysis.middle("seconds")
    if wait > max(0.2 * step, packing.stall_seconds):
        return (
            f"The loop waits {fmt.share(wait, step)} of the time for its loader, which packing in this process does "
            "not cure: give the loader more workers, or let them pack (pinstage.DataLoader)."
        )
    if not analysis.sum_of("copies"):
        return "There is nothing in it that packing could improve."
    if packing.saved_seconds < _SMALL_SAVING * packing.step_seconds:
        return "Packing them into one slab would change nothing worth having."
    return (
        f"One slab would take about {fmt.duration(packing.packed_seconds)} to stage, where this takes "
        f"{fmt.duration(packing.staging_seconds)}, and save about {fmt.duration(packing.saved_seconds)}: "
        f"{packing.speedup:.2f} times as fast."
    )
