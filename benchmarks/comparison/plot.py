"""Draw how the time to stage a batch grows with its leaves and with its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comparison.batches import SERIES
from comparison.errors import BenchError
from comparison.record import Row, rows_of, source
from comparison.rivals import NAMES

OURS = ("#e41a1c",)
RIVALS = (
    "#4c9be8",
    "#2ca02c",
    "#9467bd",
    "#8c564b",
    "#17becf",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#1f5fa8",
)
"""Distinct on light and dark pages. For colour-blind readers the markers differ too."""
DARK: Any = {  # Any: matplotlib names each key in its type
    "figure.facecolor": "#1e2129",
    "axes.facecolor": "#1e2129",
    "text.color": "#e0e0e0",
    "axes.labelcolor": "#e0e0e0",
    "axes.edgecolor": "#9e9e9e",
    "xtick.color": "#c0c0c0",
    "ytick.color": "#c0c0c0",
    "grid.color": "#444a58",
}
LIGHT: Any = {"grid.color": "#dddddd"}
MARKERS = "osv^D<>PhX*p"


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw a panel for each measured series, and write the picture for light and for dark pages.

    Args:
        results: Contents of result files; one file may have a whole series, or several files its
            variants.
        out: The file; its suffix sets the format. The dark one has ``-dark`` after its stem.

    Raises:
        BenchError: No series was measured.
    """
    series = {name: rows for name in SERIES if (rows := _rows_of_series(results, name))}
    if not series:
        raise BenchError(
            "no series was measured, so there is nothing to draw; --series all measures both"
        )
    title = "\n".join(dict.fromkeys(map(source, results)))
    in_both_colours(lambda path: _draw(series, title, path), out)


def in_both_colours(draw_one: Callable[[Path], None], out: Path) -> None:
    """Draw for light and for dark pages."""
    from matplotlib import rc_context

    for colours, path in ((LIGHT, out), (DARK, dark(out))):
        with rc_context(colours):
            draw_one(path)


def dark(out: Path) -> Path:
    """Return the path of the picture for dark pages."""
    return out.with_stem(f"{out.stem}-dark")


def _draw(series: dict[str, list[Row]], title: str, out: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: needs no display, leaves no state

    style = _styles([row for rows in series.values() for row in rows])
    # Stacked, for phones.
    figure = Figure(figsize=(7.2, 4.6 * len(series) + 1), layout="constrained")
    axes = figure.subplots(len(series), 1, squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, series.items(), strict=True):
        _panel(axis, rows, style, by_leaves=name == "leaves")
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=9)
    figure.savefig(out, dpi=140)


def in_words(nbytes: int) -> str:
    """Return a power of two with its unit."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes, units = nbytes // 1024, units[1:]
    return f"{nbytes} {units[0]}"


def _rows_of_series(results: Sequence[dict[str, Any]], name: str) -> list[Row]:
    found = []
    for result in results:
        cases = result["settings"].get("series", {}).get(name, ())
        found += [row for row in rows_of(result) if row.case in cases and row.status == "ok"]
    return found


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return how each variant is drawn, alike in all panels."""
    rivals, ours = iter(RIVALS), iter(OURS)
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.variant not in styles:
            marker = MARKERS[len(styles) % len(MARKERS)]
            weight, order, colours = (2.4, 3, ours) if row.ours else (1.2, 2, rivals)
            styles[row.variant] = {
                "marker": marker,
                "lw": weight,
                "zorder": order,
                "color": next(colours, "#000000"),
            }
    return styles


def _panel(
    axis: Any, rows: Sequence[Row], styles: dict[str, dict[str, Any]], *, by_leaves: bool
) -> None:
    """Draw the median of each variant, and the range of 80% of our calls."""
    field = "leaves" if by_leaves else "nbytes"
    for variant, style in styles.items():
        line = sorted(
            (row for row in rows if row.variant == variant), key=lambda row: getattr(row, field)
        )
        if not line:
            continue
        x = [getattr(row, field) for row in line]
        axis.plot(
            x,
            [row.median for row in line],
            ms=4,
            label=NAMES.get(variant, variant).replace("`", ""),
            **style,
        )
        if line[0].ours:
            axis.fill_between(
                x,
                [row.p10 for row in line],
                [row.p90 for row in line],
                color=style["color"],
                alpha=0.2,
                lw=0,
            )
    _label(axis, rows, by_leaves=by_leaves)


def _label(axis: Any, rows: Sequence[Row], *, by_leaves: bool) -> None:
    """Set the scales, and what they are."""
    axis.set_xscale("log", base=10 if by_leaves else 2)
    axis.set_yscale("log")
    axis.set_ylabel("ms until every leaf is ready on the device, median")
    leaves = rows[0].leaves or 1
    if by_leaves:
        axis.set_xlabel(f"leaves of {rows[0].nbytes // leaves} bytes in a batch")
    else:
        axis.set_xlabel(f"bytes of a batch of {leaves} leaves")
        ticks = sorted({row.nbytes for row in rows})[::2]
        axis.set_xticks(ticks, [in_words(tick) for tick in ticks])
        axis.minorticks_off()
    axis.grid(visible=True, which="major", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
