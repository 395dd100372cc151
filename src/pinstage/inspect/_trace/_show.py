"""A trace's findings as lines and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..._sizes import format_bytes
from .. import _report as fmt
from .._report import Block, Line, Table
from ._analysis import Analysis, Step
from ._events import TO_DEVICE, TO_HOST
from ._ranks import RankReport, TraceReport
from ._verdict import is_stalled

_STEPS = 12
_CALLS = 10
_WAYS = (TO_DEVICE, TO_HOST)


def blocks(report: TraceReport, *, steps: int | None = _STEPS) -> list[Block]:
    """Return what is printed: of all ranks a table, of the one that waits most everything.

    Args:
        report: the findings.
        steps: rows of the table of steps at most; None for all.
    """
    shown: list[Block] = []
    worst = report.worst
    if len(report.ranks) > 1:
        shown += [ranks_table(report), Line(f"rank {worst.rank}, whose GPU waits most for staging:")]
    analysis = worst.analysis
    counted = fmt.count(len(analysis.steps), "step") if analysis.annotated else "no steps annotated"
    name = analysis.device_name or "GPU"
    shown += [
        Line(f"{analysis.path}: {fmt.duration(analysis.seconds)}, {counted}, {name} (device {analysis.device})"),
        copies_table(analysis, worst.packing.bus_bytes_per_second),
        sizes_table(analysis),
        calls_table(analysis),
        steps_table(analysis.steps, steps, annotated=analysis.annotated),
        Line(worst.verdict, "warning" if is_stalled(worst.packing) else "ok"),
        Line(""),
        Line("What packing would save rests on this:"),
        *(Line(f"- {assumption}", "info") for assumption in worst.packing.assumptions),
    ]
    return shown


def ranks_table(report: TraceReport) -> Table:
    """Return a row for each rank; medians over its steps."""
    columns = [
        "rank", ">steps", ">step", ">copies", ">bytes", ">kernels", ">staging", ">stall", ">loader wait",
        ">packing saves",
    ]  # fmt: skip
    rows = []
    for rank in report.ranks:
        of = rank.analysis.middle
        rows.append(
            (
                str(rank.rank),
                str(len(rank.analysis.steps)),
                fmt.duration(of("seconds")),
                f"{of('copies'):,.0f}",
                format_bytes(of("nbytes")),
                fmt.share(of("kernel_seconds"), of("seconds")),
                fmt.duration(of("staging_seconds")),
                fmt.share(of("stall_seconds"), of("seconds")),
                fmt.share(of("wait_seconds"), of("seconds")),
                fmt.duration(rank.packing.saved_seconds),
            )
        )
    styles = ["warning" if is_stalled(rank.packing) else "" for rank in report.ranks]
    return Table(columns, rows, "by rank, medians of a step", styles)


def copies_table(analysis: Analysis, bus: float) -> Table:
    """Return a row for each direction and kind of copy."""
    rows = [
        (
            group.direction,
            group.kind,
            f"{group.copies:,}",
            format_bytes(group.nbytes),
            format_bytes(group.median_bytes),
            fmt.duration(group.seconds),
            fmt.rate(group.bytes_per_second),
            fmt.share(group.bytes_per_second, bus) if group.direction in _WAYS else "-",
            fmt.share(group.hidden_seconds, group.hidden_seconds + group.exposed_seconds),
            fmt.duration(group.exposed_seconds),
        )
        for group in analysis.groups
    ]
    styles = ["warning" if group.kind == "pageable" else "" for group in analysis.groups]
    columns = ["copies", "kind", ">number", ">bytes", ">median", ">time", ">speed", ">of bus", ">hidden", ">exposed"]
    return Table(columns, rows, f"copies; hidden: behind kernels; the bus gives {fmt.rate(bus)}", styles)


def sizes_table(analysis: Analysis) -> Table:
    """Return a row for each direction and class of size."""
    whole = {way: max(analysis.sum_of("copies", way), 1) for way in _WAYS}
    rows = [
        (
            bucket.direction,
            bucket.label,
            f"{bucket.copies:,}",
            fmt.share(bucket.copies, whole[bucket.direction]),
            format_bytes(bucket.nbytes),
            fmt.rate(bucket.bytes_per_second),
            "#" * math.ceil(20 * bucket.copies / whole[bucket.direction]),
        )
        for bucket in analysis.buckets
    ]
    return Table(["copies", "size", ">number", ">share", ">bytes", ">speed", ""], rows, "sizes")


def calls_table(analysis: Analysis) -> Table:
    """Return the host calls that took most time."""
    rows = [
        (call.group, call.name, f"{call.calls:,}", fmt.duration(call.seconds), fmt.duration(call.longest_seconds))
        for call in analysis.calls[:_CALLS]
    ]
    return Table(["for", "host call", ">calls", ">time", ">longest"], rows, "host time in calls, all threads")


def steps_table(steps: Sequence[Step], limit: int | None, *, annotated: bool) -> Table:
    """Return a row for each step, the longest stalls if there are more than `limit`, in order."""
    chosen = sorted(steps, key=lambda step: -step.stall_seconds)[:limit]
    rows = [
        (
            str(step.number) if annotated else "whole",
            fmt.duration(step.seconds),
            f"{step.copies:,}",
            format_bytes(step.nbytes),
            fmt.duration(step.copy_seconds),
            fmt.duration(step.kernel_seconds),
            fmt.duration(step.staging_seconds),
            fmt.duration(step.stall_seconds),
            fmt.duration(step.synchronise_seconds),
            fmt.duration(step.wait_seconds),
        )
        for step in sorted(chosen, key=lambda step: step.start)
    ]
    title = "steps; stall: the host stages or a copy runs, and no kernel does"
    if len(chosen) < len(steps):
        title = f"the {len(chosen)} of {len(steps)} " + title
    columns = [
        "step", ">time", ">copies", ">bytes", ">copying", ">kernels", ">staging", ">stall", ">sync", ">loader",
    ]  # fmt: skip
    return Table(columns, rows, title)


def heading(rank: RankReport) -> str:
    """Return what stands above one rank."""
    return f"rank {rank.rank}: {rank.analysis.path}"
