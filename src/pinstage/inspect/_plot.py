"""The bandwidth as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._sizes import format_bytes
from ._bus import PAGEABLE, PINNED, REGISTERED, Point

# Two kinds are often alike, as they should be: a thick line stays visible behind a thin one.
_STYLES = {PAGEABLE: ("#e07b39", "s", 1.5), PINNED: ("#3b7dd8", "o", 5.0), REGISTERED: ("#2f9e6e", "^", 1.5)}


def save_plot(points: Sequence[Point], path: Path | str, *, title: str, link_rate: float | None = None) -> None:
    """Write a PNG: a panel for each direction, a line for each kind of memory and for the link on paper.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # without pyplot: no display is looked for, no state is left

    directions = list(dict.fromkeys(point.direction for point in points))
    sizes = sorted({point.nbytes for point in points})
    figure = Figure(figsize=(5.4 * len(directions), 4.2), layout="constrained")
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axis, direction in zip(axes, directions, strict=True):
        for kind in dict.fromkeys(point.kind for point in points):
            mine = [point for point in points if (point.direction, point.kind) == (direction, kind)]
            line = sorted((point.nbytes, point.bytes_per_second / 1e9) for point in mine)
            color, marker, width = _STYLES[kind]
            axis.plot(*zip(*line, strict=True), label=kind, color=color, marker=marker, lw=width, ms=5.5 + width)
        if link_rate is not None:
            axis.axhline(link_rate / 1e9, color="gray", linestyle=":", label="the link on paper")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [format_bytes(nbytes) for nbytes in sizes], rotation=45, ha="right")
        axis.minorticks_off()
        axis.set_title(direction)
        axis.set_xlabel("bytes in one copy")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=130)
