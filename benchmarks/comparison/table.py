"""Rows as tables, in plain text."""

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
    notes: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.detail or row.status != "ok":
            notes.setdefault((row.variant, row.status, row.detail), []).append(row.case)
    for (variant, status, detail), cases in notes.items():
        say(f"{variant} on {'; '.join(cases)}: {status}: {detail}".rstrip(": "))


def cell(row: Row, field: str) -> str:
    """Return a figure of a row to three digits, or the row's status if it has no figures."""
    return row.status if row.status != "ok" else figure(getattr(row, field))


def figure(value: float | None) -> str:
    """Three digits are all that a median on a shared machine is worth."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"
