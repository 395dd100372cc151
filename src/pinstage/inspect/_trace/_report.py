"""What `pinstage trace` is given, a file or a folder with a file for each rank, and what it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._sizes import count, format_bytes
from .._bus import Bus
from .._cost import Cost, cost_of
from .._errors import TraceError
from .._report import Line, Section, TextTable, duration, rate, share, table_of
from ._analysis import Analysis, CopyGroup, HostCall, SizeBucket, Step, analyse
from ._events import TO_DEVICE, TO_HOST, read
from ._model import Downloads, Packing, download_verdict, downloads, packing, verdict
from ._stream import TraceFile

_SUFFIXES = (".json", ".json.gz")
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
_STEPS = 12
_CALLS = 10
_WAYS = (TO_DEVICE, TO_HOST)


@dataclass(frozen=True)
class RankReport:
    """What the trace of one process says, and what packing would change in it."""

    rank: int
    analysis: Analysis
    packing: Packing
    downloads: Downloads

    @property
    def verdict(self) -> str:
        """It in a few sentences: what cannot be gained, what staging costs, what packing would change."""
        return " ".join(verdict(self.analysis, self.packing))

    @property
    def download_verdict(self) -> str:
        """The same of copies to the host; empty if there are none."""
        return download_verdict(self.analysis, self.downloads)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data. Seconds and bytes."""
        found = {"rank": self.rank, "verdict": self.verdict, "download_verdict": self.download_verdict}
        figures: dict[str, Any] = {"packing": self.packing, "downloads": self.downloads, "trace": self.analysis}
        return found | {name: figure.to_dict() for name, figure in figures.items()}


@dataclass(frozen=True)
class TraceReport:
    """What the traces of all ranks say."""

    ranks: tuple[RankReport, ...]  # one for each file, by rank

    @property
    def worst(self) -> RankReport:
        """The rank whose GPU waits longest for staging in a step: what the others wait for."""
        return max(self.ranks, key=lambda rank: rank.packing.stall_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON. Seconds and bytes."""
        return {
            "verdict": self.worst.verdict,
            "worst_rank": self.worst.rank,
            "ranks": [rank.to_dict() for rank in self.ranks],
        }


def trace_report(
    path: Path | str,
    *,
    bus: Bus | None = None,
    step_seconds: float | None = None,
    cost: Cost | None = None,
    advance: Callable[[int], None] | None = None,
) -> TraceReport:
    """Read the trace or traces at a path and say what copies cost.

    Args:
        path: a file that the PyTorch profiler wrote, ``.json`` or ``.json.gz``, or a folder with one for each rank.
        bus: of the machine that it is from.
        step_seconds: of a step without the profiler, if that was measured.
        cost: of staging; None: what ``pinstage doctor`` kept for such a GPU, else the reference.
        advance: called with the bytes of the files that were read since the last call.

    Raises:
        TraceError: there is no such file, or it is broken, or it is something else.
    """
    reports = []
    for index, file in enumerate(trace_files(Path(path))):
        trace = read(TraceFile(file, advance=advance))
        costs = cost_of(trace.device_name) if cost is None else cost
        analysis = analyse(trace)
        rank = analysis.rank
        if rank is None:
            named = _RANK.search(file.name)
            rank = int(named[1]) if named else index
        reports.append(RankReport(rank, analysis, packing(analysis, costs, bus, step_seconds), downloads(analysis)))
    return TraceReport(tuple(sorted(reports, key=lambda report: report.rank)))


def trace_files(path: Path) -> Sequence[Path]:
    """Return the file at a path, or the traces in the folder at it, by name.

    Raises:
        TraceError: there is nothing there.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        if not files:
            raise TraceError(f"no .json or .json.gz in the folder {path}; give the file, or the folder of all ranks")
        return files
    if not path.exists():
        raise TraceError(f"no file {path}")
    return [path]


# -- tables ------------------------------------------------------------------------------------------------------------


def sections(report: TraceReport, *, every_step: bool = False) -> list[Section]:
    """Return what is printed: of all ranks a table, of the one that waits most everything."""
    worst = report.worst
    analysis = worst.analysis
    shown: list[Section] = list(verdict_lines(worst))
    if len(report.ranks) > 1:
        shown.insert(0, Line(f"rank {worst.rank}, whose GPU waits most for staging:"))
        shown.append(ranks_table(report))
    counted = count(len(analysis.steps), "step") if analysis.annotated else "no steps annotated"
    device = f"{analysis.device_name or 'GPU'} (device {analysis.device})" if analysis.has_gpu else "no GPU"
    shown.append(Line(f"\n{analysis.path}: {duration(analysis.seconds)}, {counted}, {device}"))
    if not analysis.has_gpu:
        return shown
    shown += [
        *tables(worst, None if every_step else _STEPS),
        Line("What packing would save rests on this:"),
        *(Line(f"- {assumption}", "info") for assumption in worst.packing.assumptions),
    ]
    return shown


def tables(rank: RankReport, steps: int | None) -> list[TextTable]:
    """Return what there is of one rank, in text as in HTML; so many steps at most."""
    analysis = rank.analysis
    return [
        copies_table(analysis, rank.packing.bus_bytes_per_second),
        sizes_table(analysis),
        calls_table(analysis),
        steps_table(analysis.steps, steps, annotated=analysis.annotated),
    ]


def verdict_lines(rank: RankReport) -> list[Line]:
    """Return what is said first."""
    style = "warning" if rank.packing.is_stalled else "ok"
    lines = [Line(text, style) for text in verdict(rank.analysis, rank.packing)]
    return [*lines, Line(rank.download_verdict, "info")] if rank.download_verdict else lines


def ranks_table(report: TraceReport) -> TextTable:
    """Return a row for each rank; medians over its steps."""

    def share_of(name: str) -> Callable[[RankReport], str]:
        return lambda rank: share(rank.analysis.middle(name), rank.analysis.middle("seconds"))

    columns: dict[str, Callable[[RankReport], str]] = {
        "rank": lambda rank: str(rank.rank),
        ">steps": lambda rank: str(len(rank.analysis.steps)),
        ">step": lambda rank: duration(rank.analysis.middle("seconds")),
        ">copies": lambda rank: f"{rank.analysis.middle('copies'):,.0f}",
        ">bytes": lambda rank: format_bytes(rank.analysis.middle("nbytes")),
        ">kernels": share_of("kernel_seconds"),
        ">staging": lambda rank: duration(rank.analysis.middle("staging_seconds")),
        ">stall": share_of("stall_seconds"),
        ">loader wait": share_of("wait_seconds"),
        ">packing saves": lambda rank: duration(rank.packing.saved_seconds),
    }
    title = "by rank, medians of a step"
    return table_of(report.ranks, columns, title, lambda rank: "warning" if rank.packing.is_stalled else "")


def copies_table(analysis: Analysis, bus: float) -> TextTable:
    """Return a row for each direction and kind of copy."""
    columns: dict[str, Callable[[CopyGroup], str]] = {
        "copies": lambda group: group.direction,
        "kind": lambda group: group.kind,
        ">number": lambda group: f"{group.copies:,}",
        ">bytes": lambda group: format_bytes(group.nbytes),
        ">median": lambda group: format_bytes(group.median_bytes),
        ">time": lambda group: duration(group.seconds),
        ">speed": lambda group: rate(group.bytes_per_second),
        ">of bus": lambda group: share(group.bytes_per_second, bus) if group.direction in _WAYS else "-",
        ">hidden": lambda group: share(group.hidden_seconds, group.hidden_seconds + group.exposed_seconds),
        ">exposed": lambda group: duration(group.exposed_seconds),
    }
    title = f"copies; hidden: behind kernels; the bus gives {rate(bus)}"
    return table_of(analysis.groups, columns, title, lambda group: "warning" if group.kind == "pageable" else "")


def sizes_table(analysis: Analysis) -> TextTable:
    """Return a row for each direction and class of size."""
    whole = {way: max(analysis.sum_of("copies", way), 1) for way in _WAYS}
    columns: dict[str, Callable[[SizeBucket], str]] = {
        "copies": lambda bucket: bucket.direction,
        "size": lambda bucket: bucket.label,
        ">number": lambda bucket: f"{bucket.copies:,}",
        ">share": lambda bucket: share(bucket.copies, whole[bucket.direction]),
        ">bytes": lambda bucket: format_bytes(bucket.nbytes),
        ">speed": lambda bucket: rate(bucket.bytes_per_second),
        "": lambda bucket: "#" * math.ceil(20 * bucket.copies / whole[bucket.direction]),
    }
    return table_of(analysis.buckets, columns, "sizes")


def calls_table(analysis: Analysis) -> TextTable:
    """Return the host calls that took most time."""
    columns: dict[str, Callable[[HostCall], str]] = {
        "for": lambda call: call.group,
        "host call": lambda call: call.name,
        ">calls": lambda call: f"{call.calls:,}",
        ">time": lambda call: duration(call.seconds),
        ">longest": lambda call: duration(call.longest_seconds),
    }
    return table_of(analysis.calls[:_CALLS], columns, "host time in calls, all threads")


def steps_table(steps: Sequence[Step], limit: int | None, *, annotated: bool) -> TextTable:
    """Return a row for each step, the longest stalls if there are more than `limit`, in order."""
    chosen = sorted(steps, key=lambda step: -step.stall_seconds)[:limit]
    columns: dict[str, Callable[[Step], str]] = {
        "step": lambda step: str(step.number) if annotated else "whole",
        ">time": lambda step: duration(step.seconds),
        ">copies": lambda step: f"{step.copies:,}",
        ">bytes": lambda step: format_bytes(step.nbytes),
        ">copying": lambda step: duration(step.copy_seconds),
        ">kernels": lambda step: duration(step.kernel_seconds),
        ">staging": lambda step: duration(step.staging_seconds),
        ">stall": lambda step: duration(step.stall_seconds),
        ">sync": lambda step: duration(step.synchronise_seconds),
        ">loader": lambda step: duration(step.wait_seconds),
    }
    title = "steps; stall: the host stages or a copy runs, and no kernel does"
    if len(chosen) < len(steps):
        title = f"the {len(chosen)} of {len(steps)} " + title
    return table_of(sorted(chosen, key=lambda step: step.start), columns, title)
