"""The report of `pinstage trace`, in words and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..._sizes import count, format_bytes
from .._bus import REFERENCE, Bus, Cost
from .._report import Line, Section, TextTable, duration, rate, share
from ._analysis import SMALL_BYTES, Analysis
from ._events import Trace, TraceFile
from ._model import SMALL, Packing

_TIMES = {
    ">time": "seconds", ">kernels": "kernel_seconds", ">staging": "staging_seconds",
    ">stall": "stall_seconds", ">sync": "synchronise_seconds", ">loader": "wait_seconds",
}  # fmt: skip


class TraceReport(NamedTuple):
    """Figures from a trace, and the predicted effect of packing."""

    analysis: Analysis
    packing: Packing

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON, in seconds and bytes."""
        return {
            "verdict": self.verdict,
            "packing": self.packing.to_dict(),
            "assumptions": self.packing.assumptions(),
            "trace": self.analysis.to_dict(),
        }

    @property
    def verdict(self) -> str:
        """The report in a few sentences: the limit of any gain, the cost of staging, and the effect
        of packing.
        """
        return " ".join(_verdict(self.analysis, self.packing))

    def sections(self) -> list[Section]:
        """Return the report, which fits on one screen."""
        analysis, packing = self.analysis, self.packing
        style = "warning" if packing.is_stalled else "ok"
        steps = count(len(analysis.steps), "step") if analysis.annotated else "no steps annotated"
        device = f"{analysis.device_name or 'GPU'} (device {analysis.device})"
        medians = [duration(analysis.middle(name)) for name in _TIMES.values()]
        title = "a step, medians; stall: staging, and no kernel runs"
        return [
            *(Line(text, style) for text in _verdict(analysis, packing)),
            Line(f"\n{analysis.path}: {duration(analysis.seconds)}, {steps}, {device}"),
            _copies(analysis),
            TextTable(list(_TIMES), [medians], title),
            Line("The prediction assumes:"),
            *(Line(f"- {assumption}", "info") for assumption in packing.assumptions()),
        ]


def _copies(analysis: Analysis) -> TextTable:
    rows = [
        [
            group["direction"],
            group["kind"],
            f"{group['copies']:,}",
            format_bytes(group["nbytes"]),
            duration(group["seconds"]),
            rate(group["bytes_per_second"]),
            share(group["hidden_seconds"], group["hidden_seconds"] + group["exposed_seconds"]),
        ]
        for group in analysis.groups
    ]
    columns = ("copies", "kind", ">number", ">bytes", ">time", ">speed", ">hidden")
    styles = ["warning" if group["kind"] == "pageable" else "" for group in analysis.groups]
    return TextTable(columns, rows, "copies; hidden: behind kernels", styles)


def trace_report(
    path: Path | str,
    *,
    bus: Bus | None = None,
    step_seconds: float | None = None,
    cost: Cost = REFERENCE,
) -> TraceReport:
    """Read a trace and report the cost of copies.

    Args:
        path: a file that the PyTorch profiler wrote, ``.json`` or ``.json.gz``.
        bus: the bus of the machine that recorded the trace.
        step_seconds: the time of a step without the profiler, if it was measured.
        cost: the cost of staging.

    Raises:
        TraceError: the file is missing or broken, or isn't a trace of a GPU.
    """
    analysis = Analysis(Trace(TraceFile(Path(path))))
    return TraceReport(analysis, Packing(analysis, cost, bus, step_seconds))


def _verdict(analysis: Analysis, packing: Packing) -> list[str]:
    """Return sentences on the limit of any gain, the cost of staging, the effect of packing, the
    cost of downloads.
    """
    step = "step" if analysis.annotated else "trace"
    sentences = ["No host-to-device copy is in this trace: packing can't improve anything in it."]
    if analysis.sum_of("copies"):
        limit, finding = _limit(analysis, packing, step), _finding(analysis, packing, step)
        sentences = [limit, finding, packing.advice()]
    downloads = round(analysis.middle("downloads"))
    if downloads:
        copies = count(downloads, "device-to-host copy", "device-to-host copies")
        nbytes, seconds = analysis.middle("download_bytes"), analysis.middle("download_seconds")
        waiting = max(seconds - analysis.middle("exposed_download_seconds"), 0.0)
        sentences.append(
            f"Downloads (.item(), .cpu()): {copies} per {step}, {format_bytes(nbytes)}, block the "
            f"host for {duration(seconds)}, {duration(waiting)} of it waiting for queued kernels. "
            "Stager.fetch copies them together, and lets the host run ahead until it needs them."
        )
    return sentences


def _limit(analysis: Analysis, packing: Packing, step: str) -> str:
    real, kernels = packing.real_seconds, packing.kernel_seconds
    if packing.waits_for_loader:
        wait = share(analysis.middle("idle_wait_seconds"), packing.step_seconds)
        return (
            f"The loop waits {wait} of the time for its loader, whose workers or pinning thread "
            "set its pace: packing in this process doesn't help. Give the loader more workers, or "
            "let them pack (pinstage.DataLoader)."
        )
    if real - kernels < SMALL * real:
        most = duration(max(real - kernels, 0.0))
        return (
            f"The GPU is at work for {share(kernels, real)} of a {step}: staging can save {most} "
            "at most."
        )
    return (
        f"A {step} cannot be shorter than its kernels, {duration(kernels)}; it takes "
        f"{duration(packing.step_seconds)} here, and about {duration(real)} without the profiler."
    )


def _finding(analysis: Analysis, packing: Packing, step: str) -> str:
    copies, nbytes = analysis.sum_of("copies"), analysis.sum_of("nbytes")
    nature = "the trace does not record their bytes"  # as on AMD's GPUs
    if nbytes:
        pageable = analysis.sum_of("nbytes", kind="pageable")
        small = f"{share(analysis.small_copies, copies)} below {format_bytes(SMALL_BYTES)}"
        nature = f"{small}, {share(pageable, nbytes)} of the bytes from pageable memory"
    leaves = count(packing.leaves, "host-to-device copy", "host-to-device copies")
    what, stall = f"{leaves} per {step} ({nature})", packing.stall_seconds
    part = f"{share(stall, packing.step_seconds)} of a {step}"
    if packing.is_stalled:
        return f"The GPU idles for {part} ({duration(stall)}) while the host stages: {what}."
    hidden, exposed = analysis.sum_of("hidden_seconds"), analysis.sum_of("exposed_seconds")
    behind = share(hidden, hidden + exposed)
    return f"The GPU waits for staging for only {part}: {what}, {behind} of it behind kernels."
