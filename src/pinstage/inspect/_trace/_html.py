"""The report as one HTML file: nothing is fetched and nothing runs when it is opened. Drawings are SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

import pinstage as ps

from .._report import TextTable, duration
from ._analysis import Analysis
from ._intervals import Intervals, within
from ._report import RankReport, TraceReport, ranks_table, tables

_STYLE = """
:root { --ink: #1c2733; --paper: #fff; --soft: #eef1f4; --line: #c9d1d9; --kernel: #2f9e6e; --pageable: #e07b39;
  --pinned: #3b7dd8; --host: #8a63d2; --wait: #b8a13a; --stall: #d1344b; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe6ee; --paper: #14191f; --soft: #222a33; --line: #3a4552; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid var(--stall); padding: .5rem 1rem; background: var(--soft); }
.verdict.fine { border-color: var(--kernel); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.number, td.number { text-align: right; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
.name { text-anchor: end; } .tick { font-size: 11px !important; opacity: .8; } .middle { text-anchor: middle; }
.lane { fill: var(--soft); } .kernel { fill: var(--kernel); } .pageable { fill: var(--pageable); }
.pinned { fill: var(--pinned); } .host { fill: var(--host); } .wait { fill: var(--wait); }
.stall { fill: var(--stall); }
.step { stroke: var(--ink); stroke-dasharray: 3 3; opacity: .5; }
footer { margin-top: 3rem; opacity: .7; font-size: .85rem; }
"""
_SHOWN_STEPS = 3
_WIDTH, _LEFT, _RIGHT = 1000, 150, 40
_ROW, _BAR = 30, 20
_LEVELS, _FAINTEST = 8, 0.2
"""A pixel is drawn the stronger the more of its time is taken: 10,000 copies make no more shapes than there are
pixels, and short ones with gaps between them do not look like one long one."""


def html(report: TraceReport) -> str:
    """Return the whole file: verdict, timeline, tables, assumptions; all ranks."""
    worst = report.worst
    parts = [f"<h1>Copies between host and device</h1>\n{_verdict(worst)}"]
    if len(report.ranks) > 1:
        parts.append(_table(ranks_table(report)))
        parts.append(f"<p>Rank {worst.rank} is the one whose GPU waits most for staging.</p>")
    parts.append("\n".join(_rank(worst)))
    for rank in report.ranks:
        if rank is not worst:
            body = "\n".join([_verdict(rank), *_rank(rank)])
            parts.append(
                f"<details><summary>rank {rank.rank}: {escape(rank.analysis.path)}</summary>\n{body}\n</details>"
            )
    parts.append(
        f"<footer>pinstage {ps.__version__}, pinstage trace. One file, nothing is loaded from elsewhere.</footer>"
    )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>pinstage trace: {escape(worst.analysis.path)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _rank(rank: RankReport) -> Iterator[str]:
    analysis = rank.analysis
    name = analysis.device_name or "GPU"
    yield f"<p>{escape(analysis.path)}, {escape(name)} (device {analysis.device})</p>"
    if not analysis.has_gpu:
        return
    start, end, what = _window(analysis)
    drawn = _timeline(analysis, start, end)
    yield f"<h2>Timeline: {what}</h2>\n<p>The paler a stretch, the less of its time is taken.</p>\n{drawn}"
    yield from map(_table, tables(rank, None))
    items = "\n".join(f"<li>{escape(text)}</li>" for text in rank.packing.assumptions)
    yield f"<h2>What packing would save rests on this</h2>\n<ul>\n{items}\n</ul>"


def _verdict(rank: RankReport) -> str:
    told = [(rank.verdict, rank.packing.is_stalled), (rank.download_verdict, False)]
    return "\n".join(f'<p class="verdict{"" if bad else " fine"}">{escape(text)}</p>' for text, bad in told if text)


def _window(analysis: Analysis) -> tuple[float, float, str]:
    """Return what the timeline shows: some steps around the one of median stall, or everything."""
    steps = analysis.steps
    if not analysis.annotated:
        return steps[0].start, steps[0].start + steps[0].seconds, "the whole trace"
    by_stall = sorted(range(len(steps)), key=lambda index: steps[index].stall_seconds)
    first = max(0, min(by_stall[len(steps) // 2], len(steps) - _SHOWN_STEPS))
    shown = steps[first : first + _SHOWN_STEPS]
    what = f"steps {shown[0].number} to {shown[-1].number}" if len(shown) > 1 else f"step {shown[0].number}"
    return shown[0].start, shown[-1].start + shown[-1].seconds, what


def _table(table: TextTable) -> str:
    classes = [' class="number"' if column.startswith(">") else "" for column in table.columns]
    head = "".join(
        f"<th{kind}>{escape(column.removeprefix('>'))}</th>"
        for kind, column in zip(classes, table.columns, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    title = f"<h2>{escape(table.title[:1].upper() + table.title[1:])}</h2>\n" if table.title else ""
    return f'{title}<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'


# -- drawings ----------------------------------------------------------------------------------------------------------


def _timeline(analysis: Analysis, start: float, end: float) -> str:
    """Draw kernels, copies, staging, stalls and steps between two moments, in seconds."""
    spans = analysis.spans
    rows: list[tuple[str, str, Intervals]] = [("kernels", "kernel", spans.kernels)]
    rows += [(name, "pageable" if "pageable" in name else "pinned", value) for name, value in spans.copies.items()]
    rows += [
        ("host stages", "host", spans.host),
        ("loader wait", "wait", spans.waits),
        ("GPU stalls", "stall", spans.stalls),
    ]
    inner = _WIDTH - _LEFT - _RIGHT
    scale = inner / max(end - start, 1e-12)
    parts = []
    for index, (name, style, intervals) in enumerate(rows):
        y = 24 + index * _ROW
        parts += [_text(_LEFT - 10, y + 15, name, "name"), _bar(_LEFT, y, inner, "lane")]
        parts += [
            _bar(_LEFT + x, y, width, style, f' opacity="{opacity:.2g}"')
            for x, width, opacity in _pixels(intervals, start, end, inner)
        ]
    bottom = 24 + len(rows) * _ROW
    for step in analysis.steps if analysis.annotated else ():
        if start <= step.start < end:
            x = _LEFT + (step.start - start) * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{bottom}" class="step"/>')
            parts.append(_text(x + 3, 14, f"step {step.number}", "tick"))
    for tick in range(6):
        parts.append(_text(_LEFT + inner * tick / 5, bottom + 16, duration((end - start) * tick / 5), "tick middle"))
    drawn = "\n".join(parts)
    label = "Timeline of kernels, copies and host staging"
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + 26}" role="img" aria-label="{label}">\n{drawn}\n</svg>'


def _pixels(intervals: Intervals, start: float, end: float, pixels: int) -> list[tuple[int, int, float]]:
    """Return runs of pixels, as first one, number and opacity: how much of their time lies in the intervals."""
    edges = np.linspace(start, max(end, start + 1e-9), pixels + 1)
    share = within(intervals, edges[:-1], edges[1:]) / np.diff(edges)
    level = np.ceil(np.clip(share, 0, 1) * _LEVELS - 1e-6).astype(int)
    begins = np.flatnonzero(np.diff(level, prepend=-1))
    lengths = np.diff(begins, append=pixels)
    return [
        (int(first), int(length), _FAINTEST + (1 - _FAINTEST) * level[first] / _LEVELS)
        for first, length in zip(begins, lengths, strict=True)
        if level[first]
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{style}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, style: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" class="{style}"{more}/>'
