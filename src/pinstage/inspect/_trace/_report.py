"""The report of `pinstage trace`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._sizes import count, format_bytes
from .._bus import Bus
from .._cost import REFERENCE, Cost
from .._report import Line, Section, TextTable, duration, rate, share
from ._analysis import Analysis
from ._events import read
from ._model import Packing, verdict
from ._stream import TraceFile

_TIMES = {
    ">time": "seconds", ">kernels": "kernel_seconds", ">staging": "staging_seconds", ">stall": "stall_seconds",
    ">sync": "synchronise_seconds", ">loader": "wait_seconds",
}  # fmt: skip


@dataclass(frozen=True)
class TraceReport:
    """What a trace says, and what packing would change in it."""

    analysis: Analysis
    packing: Packing

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON. Seconds and bytes."""
        found = {"verdict": self.verdict, "packing": self.packing.to_dict(), "assumptions": self.packing.assumptions()}
        return found | {"trace": self.analysis.to_dict()}

    @property
    def verdict(self) -> str:
        """It in a few sentences: what cannot be gained, what staging costs, what packing would change."""
        return " ".join(verdict(self.analysis, self.packing))

    def sections(self) -> list[Section]:
        """Return what is printed: one screen."""
        analysis = self.analysis
        style = "warning" if self.packing.is_stalled else "ok"
        shown: list[Section] = [Line(text, style) for text in verdict(analysis, self.packing)]
        steps = count(len(analysis.steps), "step") if analysis.annotated else "no steps annotated"
        device = f"{analysis.device_name or 'GPU'} (device {analysis.device})" if analysis.has_gpu else "no GPU"
        shown.append(Line(f"\n{analysis.path}: {duration(analysis.seconds)}, {steps}, {device}"))
        if not analysis.has_gpu:
            return shown
        rows = [
            [
                *(group["direction"], group["kind"], f"{group['copies']:,}", format_bytes(group["nbytes"])),
                *(duration(group["seconds"]), rate(group["bytes_per_second"])),
                share(group["hidden_seconds"], group["hidden_seconds"] + group["exposed_seconds"]),
            ]
            for group in analysis.groups
        ]
        styles = ["warning" if group["kind"] == "pageable" else "" for group in analysis.groups]
        columns = ("copies", "kind", ">number", ">bytes", ">time", ">speed", ">hidden")
        medians = [duration(analysis.middle(name)) for name in _TIMES.values()]
        return [
            *shown,
            TextTable(columns, rows, "copies; hidden: behind kernels", styles),
            TextTable(list(_TIMES), [medians], "a step, medians; stall: staging, and no kernel runs"),
            Line("The prediction assumes:"),
            *(Line(f"- {assumption}", "info") for assumption in self.packing.assumptions()),
        ]


def trace_report(
    path: Path | str, *, bus: Bus | None = None, step_seconds: float | None = None, cost: Cost = REFERENCE
) -> TraceReport:
    """Read a trace and say what copies cost.

    Args:
        path: a file that the PyTorch profiler wrote, ``.json`` or ``.json.gz``.
        bus: of the machine that it is from.
        step_seconds: of a step without the profiler, if that was measured.
        cost: of staging.

    Raises:
        TraceError: there is no such file, or it is broken, or it is something else.
    """
    trace = read(TraceFile(Path(path)))
    analysis = Analysis(trace)
    return TraceReport(analysis, Packing(analysis, cost, bus, step_seconds))
