"""The saving by packing, as a range, and advice in a few sentences.

The trace shows how long the host stages, how long the GPU is idle in that time, and how much the
profiler adds to it. `Cost` is pinstage's time for a batch of the same leaves and bytes. Two kinds
of loops gain differently:

- A loop that waits for the device in each step (``.item()``) alternates between host and GPU. It
  gains the reduction of staging time, but at most the time in which the GPU was idle.
- A loop that doesn't wait runs ahead of the GPU. It gains the reduction of host time, until the
  kernels or the bus take longer.

A loop that waits for worker processes gains nothing, since the workers set its pace. The model has
two constants, `_analysis.EVENT_UNITS` and `SPREAD`. It was tested on the loops of
tests/traces/loops; it predicts nothing beyond their sizes.
"""

from __future__ import annotations

from typing import Any

from ..._sizes import format_bytes
from .._bus import MIB, Bus, Cost
from .._report import duration, rate
from ._analysis import Analysis

SPREAD = 1.4
"""The costs of the profiler and of pinstage are known within this factor, which gives the range of
the saving.
"""
MOST_LEAVES, MOST_BYTES = 1000, 40 * MIB
"""Limits for a batch, from the loops that the model was tested on."""
SMALL = 0.05
"""A stall or saving below this share of a step isn't worth a change."""
_WAITING, _WAITING_SECONDS = 0.1, 0.2e-3
"""A loop that waits longer than both, as a share of a step and in seconds, is held up by its
loader. Taking a batch that is ready costs less than the seconds."""


class Packing:
    """The effect of one slab per step. Medians over the steps, in seconds and bytes."""

    def __init__(
        self, analysis: Analysis, cost: Cost, bus: Bus | None, step_seconds: float | None
    ) -> None:
        """Estimate the effect.

        Args:
            analysis: the figures of the trace.
            cost: the cost of staging with pinstage.
            bus: the bus of the machine that recorded the trace. None takes the rate of the fastest
                large page-locked copy in the trace, else `cost`'s.
            step_seconds: the time of a step without the profiler, if it was measured.
        """
        middle = analysis.middle
        self._given, self._cost = step_seconds, cost
        self.leaves = round(middle("copies"))  # copies that one slab would replace
        self.nbytes = round(middle("nbytes"))  # of these copies
        self.step_seconds = middle("seconds")  # in the trace
        self.kernel_seconds = middle("kernel_seconds")  # a step cannot be shorter
        self.stall_seconds = middle("stall_seconds")  # of staging, in the trace: no kernel runs
        # In each step.
        self.waits_for_device = bool(middle("synchronise_seconds") or middle("downloads"))
        # For worker processes, which set the pace.
        longest_wait = max(_WAITING * self.step_seconds, _WAITING_SECONDS)
        self.waits_for_loader = analysis.has_workers and middle("idle_wait_seconds") > longest_wait
        self.is_ours = analysis.uses_pinstage and self.leaves <= 1  # the batch is one slab already
        self.is_measured = self.leaves <= MOST_LEAVES and self.nbytes <= MOST_BYTES
        bus_rate = bus.pinned * 1e9 if bus else analysis.fastest_pinned
        self.bytes_per_second = min(bus_rate or cost.bytes_per_second, cost.bytes_per_second)
        # As one slab.
        self.packed_seconds = cost.seconds(self.leaves, self.nbytes, self.bytes_per_second)
        # The profiler's part of a step, and the staging. If the host waits for the device, only
        # while that is idle.
        profiler, staging = "profiler_seconds", "host_staging_seconds"
        if self.waits_for_device:
            profiler, staging = "profiler_idle_seconds", "staging_seconds"
        self.profiler_seconds, self._staging = middle(profiler), middle(staging)
        self._profiled = middle("profiler_staging_seconds"), middle("profiler_stall_seconds")
        self.real_seconds, self.real_staging_seconds, _ = self._without(1.0)  # without the profiler
        self._predict()

    def _predict(self) -> None:
        can_save = self.is_measured and not self.is_ours
        can_now = can_save and not self.waits_for_loader
        spread = SPREAD if self._given is None else 1.0
        self.saved_seconds = self._saved(1.0, 1.0) if can_now else 0.0  # of each step
        self.least_saved_seconds = self._saved(spread, SPREAD) if can_now else 0.0
        self.most_saved_seconds = self._saved(1 / spread, 1 / SPREAD) if can_save else 0.0

    def _without(self, profiler: float) -> tuple[float, float, float]:
        """Return the step, its staging and the stall without the profiler, at a factor times its
        estimate.
        """
        real = max(self.step_seconds - profiler * self.profiler_seconds, self.kernel_seconds)
        pace = 1.0
        if self._given is not None:
            # The rest of the difference is the host's speed, which differs from hour to hour; the
            # GPU's doesn't.
            gpu = self.kernel_seconds if self.waits_for_device else 0.0
            pace = max(self._given - gpu, 0.0) / max(real - gpu, 1e-9)
            real = self._given
        of_staging, of_stall = self._profiled
        staging = max(self._staging - profiler * of_staging, 0.0) * pace
        stall = max(self.stall_seconds - profiler * of_stall, 0.0) * pace
        return real, staging, stall

    def _saved(self, profiler: float, ours: float) -> float:
        """Return the time saved per step, with both estimates multiplied by factors."""
        real, staging, stall = self._without(profiler)
        # The GPU gains at most its idle time. No step is shorter than its kernels, or than its
        # bytes on the bus.
        limit = stall if self.waits_for_device else real - self.nbytes / self.bytes_per_second
        less_staging = staging - ours * self.packed_seconds
        return max(0.0, min(less_staging, limit, real - self.kernel_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def is_stalled(self) -> bool:
        """Whether the GPU waits for staging long enough to matter."""
        return self.stall_seconds >= SMALL * self.step_seconds

    def assumptions(self) -> list[str]:
        """Return the assumptions of the prediction, as sentences."""
        cost = self._cost
        way = "doesn't wait for the GPU outside staging: its time is saved, down to the kernels'"
        if self.waits_for_device:
            way = "waits for the GPU in each step: part of the GPU's stall is saved"
        profiler = f"the profiler takes {duration(self.profiler_seconds)} of a step"
        if self._given is not None:
            profiler = f"without the profiler a step takes {duration(self._given)}, as given"
        slab = f"{duration(cost.fixed_seconds)}, {duration(cost.leaf_seconds)} for each leaf"
        speed = rate(self.bytes_per_second)
        one_each = "each copy to the device is one leaf, and one step stages one batch"
        return [
            f"staging one slab takes {slab}, and its bytes at {speed}: measured on {cost.source}",
            f"{profiler}; for the range, costs are known within a factor of {SPREAD:g}",
            f"{one_each}, without prefetching",
            f"the host {way}",
        ]

    def advice(self) -> str:
        """Return a sentence about the effect of packing."""
        least, most, real = self.least_saved_seconds, self.most_saved_seconds, self.real_seconds
        ours, theirs = duration(self.packed_seconds), duration(self.real_staging_seconds)
        if self.is_ours:
            return "pinstage stages it as one slab already."
        if not self.is_measured:
            return (
                f"The saving isn't predicted: no loop with more than {MOST_LEAVES:,} copies or "
                f"{format_bytes(MOST_BYTES)} per step was measured. Try Stager.to_device, and time "
                "it."
            )
        if self.waits_for_loader:
            return (
                f"If the loader were fast enough, one slab would save up to {duration(most)} of a "
                "step."
            )
        if self.is_stalled and self.packed_seconds > self.real_staging_seconds:
            return (
                f"One slab would take about {ours} to stage, longer than the {theirs} now: leave "
                "it as it is."
            )
        if most < SMALL * real:
            return "Packing them into one slab wouldn't help."
        text = f"One slab would take about {ours} to stage, instead of {theirs}, and save"
        if least < SMALL * real:
            text += f" up to {duration(most)}, perhaps nothing."
        else:
            text += f" {duration(least)} to {duration(most)} of a step."
        if self._given:
            return text
        return f"{text} --step-ms, a step's time without the profiler, narrows this."
