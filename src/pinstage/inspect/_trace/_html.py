"""The report as one HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import pinstage as ps

from .._report import Table
from . import _show, _svg
from ._analysis import Analysis
from ._ranks import RankReport, TraceReport
from ._verdict import is_stalled

_STYLE = """
:root { --ink: #1c2733; --paper: #fff; --soft: #eef1f4; --line: #c9d1d9; --kernel: #2f9e6e; --pageable: #e07b39;
  --pinned: #3b7dd8; --host: #8a63d2; --wait: #b8a13a; --stall: #d1344b; --other: #c4ccd4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe6ee; --paper: #14191f; --soft: #222a33; --line: #3a4552;
  --other: #4a5663; } }
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
.other { fill: var(--other); } .step { stroke: var(--ink); stroke-dasharray: 3 3; opacity: .5; }
.key span { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; vertical-align: -1px; }
footer { margin-top: 3rem; opacity: .7; font-size: .85rem; }
"""
_SHOWN_STEPS = 3


def html(report: TraceReport) -> str:
    """Return the whole file: verdict, timeline, plots, tables, assumptions; all ranks."""
    worst = report.worst
    parts = [f"<h1>Copies between host and device</h1>\n{_verdict(worst)}"]
    if len(report.ranks) > 1:
        parts.append(_table(_show.ranks_table(report)))
        parts.append(f"<p>Rank {worst.rank} is the one whose GPU waits most for staging.</p>")
    parts.append("\n".join(_rank(worst)))
    for rank in report.ranks:
        if rank is not worst:
            body = "\n".join([_verdict(rank), *_rank(rank)])
            parts.append(f"<details><summary>{escape(_show.heading(rank))}</summary>\n{body}\n</details>")
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
    start, end, what = _window(analysis)
    drawn = _svg.timeline(analysis, start, end)
    yield f"<h2>Timeline: {what}</h2>\n<p>The paler a stretch, the less of its time is taken.</p>\n{drawn}"
    if analysis.annotated:
        key = (("kernel", "kernels"), ("stall", "stall for staging"), ("wait", "loader wait"), ("other", "the rest"))
        spans = "".join(f'<span><i style="background: var(--{style})"></i>{text}</span>' for style, text in key)
        yield f'<h2>Steps</h2>\n<p class="key">{spans}</p>\n{_svg.steps(analysis.steps)}'
    if analysis.buckets:
        yield f"<h2>Sizes</h2>\n{_svg.sizes(analysis.buckets)}"
    yield _table(_show.copies_table(analysis, rank.packing.bus_bytes_per_second))
    yield _table(_show.calls_table(analysis))
    yield _table(_show.steps_table(analysis.steps, None, annotated=analysis.annotated))
    items = "\n".join(f"<li>{escape(text)}</li>" for text in rank.packing.assumptions)
    yield f"<h2>What packing would save rests on this</h2>\n<ul>\n{items}\n</ul>"


def _verdict(rank: RankReport) -> str:
    fine = "" if is_stalled(rank.packing) else " fine"
    return f'<p class="verdict{fine}">{escape(rank.verdict)}</p>'


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


def _table(table: Table) -> str:
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
