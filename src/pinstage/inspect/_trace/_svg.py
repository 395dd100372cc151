"""Drawings of the HTML report, as SVG text: a timeline and bars. Nothing is fetched, nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from .. import _report as fmt
from ._analysis import Analysis, SizeBucket, Step
from ._intervals import Intervals, within

_WIDTH, _LEFT, _RIGHT = 1000, 150, 40
_ROW, _BAR = 30, 20
_LEVELS, _FAINTEST = 8, 0.2
"""A pixel is drawn the stronger the more of its time is taken: 10,000 copies make no more shapes than there are
pixels, and short ones with gaps between them do not look like one long one."""


def timeline(analysis: Analysis, start: float, end: float) -> str:
    """Draw kernels, copies, staging, stalls and steps between two moments, in seconds."""
    spans = analysis.spans
    rows: list[tuple[str, str, Intervals]] = [("kernels", "kernel", spans.kernels)]
    rows += [(name, "pageable" if "pageable" in name else "pinned", value) for name, value in spans.copies.items()]
    rows += [
        ("host stages", "host", spans.host),
        ("loader wait", "wait", spans.waits),
        ("GPU stalls", "stall", spans.stalls),
    ]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - start, 1e-12)
    height = _ROW * len(rows) + 50
    parts = []
    for index, (name, style, intervals) in enumerate(rows):
        y = 24 + index * _ROW
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 15}" class="name">{escape(name)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}" class="lane"/>')
        parts += [
            f'<rect x="{_LEFT + x}" y="{y}" width="{width}" height="{_BAR}" class="{style}" opacity="{opacity:.2g}"/>'
            for x, width, opacity in _pixels(intervals, start, end, _WIDTH - _LEFT - _RIGHT)
        ]
    bottom = 24 + len(rows) * _ROW
    if analysis.annotated:
        for step in analysis.steps:
            if start <= step.start < end:
                x = _LEFT + (step.start - start) * scale
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{bottom}" class="step"/>')
                parts.append(f'<text x="{x + 3:.1f}" y="14" class="tick">step {step.number}</text>')
    for tick in range(6):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * tick / 5
        label = fmt.duration((end - start) * tick / 5)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" class="tick middle">{label}</text>')
    return _svg(height, parts, "Timeline of kernels, copies and host staging")


def sizes(buckets: Sequence[SizeBucket]) -> str:
    """Draw how many copies there are of each size, and how fast they went."""
    parts: list[str] = []
    most = max((bucket.copies for bucket in buckets), default=1)
    fastest = max((bucket.bytes_per_second for bucket in buckets), default=1.0) or 1.0
    half = (_WIDTH - _LEFT - 140) / 2
    for index, bucket in enumerate(buckets):
        y = 24 + index * _ROW
        name = f"{bucket.direction} {bucket.label}"
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 15}" class="name">{escape(name)}</text>')
        width = half * bucket.copies / most
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" class="pageable"/>')
        parts.append(f'<text x="{_LEFT + width + 5:.1f}" y="{y + 15}" class="tick">{bucket.copies:,}</text>')
        x, width = _LEFT + half + 70, (half - 20) * bucket.bytes_per_second / fastest
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" class="pinned"/>')
        speed = fmt.rate(bucket.bytes_per_second)
        parts.append(f'<text x="{x + width + 5:.1f}" y="{y + 15}" class="tick">{speed}</text>')
    parts.append(f'<text x="{_LEFT}" y="14" class="tick">number of copies</text>')
    parts.append(f'<text x="{_LEFT + half + 70:.1f}" y="14" class="tick">speed while they ran</text>')
    return _svg(40 + _ROW * len(buckets), parts, "Copies by size")


def steps(all_steps: Sequence[Step]) -> str:
    """Draw each step as a bar: kernels, stall for staging, loader wait, and the rest."""
    parts: list[str] = []
    longest = max(step.seconds for step in all_steps) or 1.0
    inner = _WIDTH - _LEFT - _RIGHT
    slot = inner / len(all_steps)
    height = 160
    for index, step in enumerate(all_steps):
        x, top = _LEFT + index * slot, float(height)
        rest = step.seconds
        for style, wanted in (
            ("kernel", step.kernel_seconds),
            ("stall", step.stall_seconds),
            ("wait", step.wait_seconds),
            ("other", rest),
        ):
            seconds = min(wanted, rest)  # a wait may overlap with kernels: no bar is longer than its step
            rest -= seconds
            tall = (height - 24) * seconds / longest
            top -= tall
            if tall > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{max(slot - 2, 0.5):.1f}" height="{tall:.1f}" '
                    f'class="{style}">'
                    f"<title>step {step.number}: {fmt.duration(seconds)} of {fmt.duration(step.seconds)}</title></rect>"
                )
    parts.append(f'<text x="{_LEFT - 10}" y="34" class="name">{fmt.duration(longest)}</text>')
    parts.append(f'<text x="{_LEFT - 10}" y="{height}" class="name">0</text>')
    for index in sorted({0, len(all_steps) // 2, len(all_steps) - 1}):
        number = all_steps[index].number
        parts.append(f'<text x="{_LEFT + index * slot:.1f}" y="{height + 16}" class="tick">{number}</text>')
    return _svg(height + 24, parts, "Where the time of each step goes")


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


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n{inner}\n</svg>'
