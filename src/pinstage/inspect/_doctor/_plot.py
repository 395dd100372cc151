"""The bandwidth as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._sizes import format_bytes
from .._bandwidth import PAGEABLE, PINNED, REGISTERED, Point

_COLORS = {PAGEABLE: "#e07b39", PINNED: "#3b7dd8", REGISTERED: "#2f9e6e"}
_MARKERS = {PAGEABLE: "s", PINNED: "o", REGISTERED: "^"}
_WIDTHS = {PINNED: 5.0}  # where two kinds are alike, as they should be, both are to be seen
_DOTS_PER_INCH = 130


def save_plot(points: Sequence[Point], path: Path | str, *, title: str, link_rate: float | None = None) -> None:
    """Write a PNG: a panel for each direction, bandwidth over size, a line for each kind of memory.

    Args:
        points: what was measured.
        path: the file, overwritten.
        title: stands above; the machine.
        link_rate: bytes per second of the link on paper, drawn as a line.

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
            line = sorted(
                (p.nbytes, p.bytes_per_second / 1e9) for p in points if (p.direction, p.kind) == (direction, kind)
            )
            width = _WIDTHS.get(kind, 1.5)
            axis.plot(
                *zip(*line, strict=True), label=kind, color=_COLORS.get(kind), marker=_MARKERS.get(kind, "o"),
                linewidth=width, markersize=5 + width,
            )  # fmt: skip
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
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
