"""Rows as tables: with rich on a terminal, as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from comparison.record import Row

FIGURES = {
    "main_median": "until the call returned, or of the main thread: median",
    "busy_median": "until the call returned while the GPU has 100 ms of kernels to run first: median",
    "gb_per_s": "GB/s",
    "vs_best_rival": "speed-up over the best rival",
}
"""Further figures of a row, and what they are."""


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def show(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is text, the others are figures."""
    if sys.stdout.isatty():
        try:
            _show_on_terminal(title, header, lines)
        except ModuleNotFoundError:  # the scripts of benchmarks/ do without rich
            pass
        else:
            return
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    say(f"\n{title}")
    for line in (header, *lines):
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        say("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())


def grid(title: str, rows: Sequence[Row], field: str, *spread: str) -> None:
    """Print a table with a line per variant and a column per case: one figure, and its spread in
    brackets.
    """
    cases = list(dict.fromkeys(row.case for row in rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        between = (
            f" [{' .. '.join(cell(row, name) for name in spread)}]"
            if spread and row.status == "ok"
            else ""
        )
        lines.setdefault(row.variant, {})[row.case] = cell(row, field) + between
    show(
        title,
        ["variant", *cases],
        [[variant, *(cells.get(case, "-") for case in cases)] for variant, cells in lines.items()],
    )


def report(title: str, rows: Sequence[Row]) -> None:
    """Print whatever figures the rows have, and what they say."""
    grid(f"{title}: median", rows, "median", "p10", "p90")
    for field, said in FIGURES.items():
        of_field = [row for row in rows if getattr(row, field) is not None]
        if field == "vs_best_rival":
            of_field = [row for row in of_field if row.ours]
        if of_field:
            grid(said, of_field, field)
    for row in rows:
        if row.detail or row.status in ("error", "incorrect"):
            say(f"{row.variant} on {row.case}: {row.status}: {row.detail}")


def cell(row: Row, field: str) -> str:
    """Return a figure of a row to three digits, or the row's status if it has no figures."""
    return row.status if row.status != "ok" else digits(getattr(row, field))


def digits(value: float | None) -> str:
    """Return a figure to three digits; a median on a shared machine isn't more precise."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def comparison(rows: Sequence[Row]) -> None:
    """Print the table of a comparison: a line per way, with its median on each case and the best
    rival's over it.

    Ways that could not run, and failures, are listed below the table with the reason.
    """
    ran = list(
        dict.fromkeys(
            row.variant for row in rows if row.status not in ("not installed", "needs CUDA")
        )
    )
    by_pair = {(row.case, row.variant): row for row in rows}
    cases = list(dict.fromkeys(row.case for row in rows))
    compared = any(row.vs_best_rival for row in rows)
    lines = []
    for variant in ran:
        line = [variant]
        for case in cases:
            row = by_pair.get((case, variant))
            ratio = (
                ""
                if row is None or row.vs_best_rival is None
                else f" {f'{row.vs_best_rival:.2f}x':>6}"
            )
            line.append("" if row is None else cell(row, "median") + ratio)
        lines.append(line)
    if lines:
        meaning = (
            "; the best rival's time over it, above 1.00x is faster than every rival"
            if compared
            else ""
        )
        show(f"median ms until every leaf is ready on the device{meaning}", ["", *cases], lines)
    if any(row.busy_median for row in rows):
        grid(
            "median ms until the call returns while the GPU has 100 ms of kernels to run first",
            rows,
            "busy_median",
        )
    if lines and not compared:
        say("no ratios: these take a GPU, since on the CPU .to() moves nothing, and a rival")
    for reason in ("not installed", "needs CUDA"):
        absent = dict.fromkeys(row.variant for row in rows if row.status == reason)
        if absent:
            say(f"{reason}: {', '.join(absent)}")
    for row in rows:
        if row.status in ("error", "incorrect"):
            say(f"{row.variant} on {row.case}: {row.status}: {row.detail}")


def _show_on_terminal(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(text) for text in line))
    Console().print(table)
