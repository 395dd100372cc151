"""Output of the commands: lines and tables, as plain text or by rich, and figures in readable form.

Findings are data (`to_dict`) and a list of sections. Only this module draws sections, so a pipe, a
log and a machine without rich get the same words as a terminal. `_sizes.format_bytes` writes sizes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "info": "cyan", "": ""}
"""Names of styles here and in rich."""

_KEPT_WIDTH = 14


class Line(NamedTuple):
    text: str
    style: str = ""


class TextTable(NamedTuple):
    # The head; a name that begins with ">" marks a column of numbers, aligned right.
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Sequence[str] = ()  # one for each row; empty if there are no styles


Section = Line | TextTable


def clean(text: str) -> str:
    """Return text from outside, made safe to print: without control sequences and lone
    surrogates.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def as_text(sections: Iterable[Section]) -> str:
    """Draw sections as plain text, without escapes; no line is wrapped or cut."""
    return "\n".join(
        section.text if isinstance(section, Line) else _table_text(section) for section in sections
    )


def _table_text(table: TextTable) -> str:
    names = [column.removeprefix(">") for column in table.columns]
    widths = [max(map(len, cells)) for cells in zip(names, *table.rows, strict=True)]
    lines = ["", table.title] if table.title else [""]
    for row in (names, ["-" * width for width in widths], *table.rows):
        cells = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, ""])


def as_rich(sections: Iterable[Section]) -> Any:
    """Draw sections as one renderable of rich, which has to be installed. A narrow terminal folds
    texts.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    drawn: list[Any] = []
    for section in sections:
        if isinstance(section, Line):
            drawn.append(Text(section.text, style=STYLES[section.style]))
            continue
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column, *cells in zip(section.columns, *section.rows, strict=True):
            name = column.removeprefix(">")
            is_number, width = name != column, max(map(len, (name, *cells)))
            table.add_column(
                name,
                justify="right" if is_number else "left",
                min_width=width if is_number or width <= _KEPT_WIDTH else None,  # never cut
                overflow="fold",
            )
        for row, style in zip_longest(section.rows, section.styles, fillvalue=""):
            table.add_row(*map(Text, row), style=STYLES[style])
        if section.title:
            drawn.append(Text(section.title, style="bold"))
        drawn.append(table)
    return Group(*drawn)


# -- where it goes ---------------------------------------------------------------------------------


def show(findings: dict[str, Any] | Sequence[Section]) -> None:
    """Print findings on stdout: JSON, tables on a terminal if rich is installed, or plain text."""
    console = _console()
    if isinstance(findings, dict):
        sys.stdout.write(json.dumps({"schema": 1, **findings}, indent=2) + "\n")
    elif console is None:
        sys.stdout.write(as_text(findings) + "\n")
    else:
        console.print(as_rich(findings))


def watch(draw: Callable[[], Sequence[Section]], pause: float) -> None:
    """Draw sections on the terminal again and again, `pause` seconds apart, until Ctrl-C."""
    clear = "" if os.environ.get("TERM") == "dumb" else "\x1b[H\x1b[J"
    with suppress(KeyboardInterrupt):
        while True:
            sys.stdout.write(clear)
            show(draw())
            sys.stdout.flush()
            time.sleep(pause)


def _console() -> Any:
    """Return rich's console for stdout; None if plain text is wanted, or rich is not installed."""
    is_plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    if is_plain or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


# -- figures ---------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Write a time with three digits or more: ``7.50 us``, ``12.3 ms``, ``2.50 s``."""
    if seconds == 0:
        return "0"
    unit, value = "us", seconds * 1e6
    if seconds >= 0.9995:
        unit, value = "s", seconds
    elif seconds >= 0.9995e-3:
        unit, value = "ms", seconds * 1e3
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def about(seconds: float) -> str:
    """Write an estimate above zero with two digits: ``about 14 us``, ``about 2.6 ms``."""
    value, unit = duration(float(f"{seconds:.1e}")).split()
    return f"about {float(value):g} {unit}"


def rate(bytes_per_second: float) -> str:
    """Write a bandwidth in GB/s, powers of 1000: ``55.3 GB/s``; without decimals from 100 on."""
    value = bytes_per_second / 1e9
    digits = 0 if value >= 100 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} GB/s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent; ``-`` if the whole is 0."""
    return f"{part / whole:.0%}" if whole else "-"
