"""What the tools print: lines and tables, as plain text or by rich, and figures as people read them.

A finding is data first (`to_dict`), and a list of sections second. How a section is drawn is known here alone, so a
pipe, a log and a machine without rich get the same words as a terminal. Sizes are written by `_sizes.format_bytes`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "info": "cyan", "": ""}
"""What a style is called here, and what rich calls it."""

_KEPT_WIDTH = 14


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""


@dataclass(frozen=True)
class TextTable:
    columns: Sequence[str]  # the head; a name that begins with ">" stands over numbers, which are set to the right
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Sequence[str] = ()  # of each row; empty: none has one


Section = Line | TextTable


def clean(text: str) -> str:
    """Return a text of somebody else's that is safe to print: without control sequences and lone surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def table_of(
    items: Iterable[T],
    columns: Mapping[str, Callable[[T], str]],
    title: str = "",
    style: Callable[[T], str] = lambda _: "",
) -> TextTable:
    """Make a table with a row for each item; `columns` says what stands under each name of the head."""
    items = list(items)
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return TextTable(list(columns), rows, title, [style(item) for item in items])


def as_text(sections: Iterable[Section]) -> str:
    """Draw sections as plain text, without escapes; no line is wrapped or cut."""
    return "\n".join(section.text if isinstance(section, Line) else _table_text(section) for section in sections)


def _table_text(table: TextTable) -> str:
    names = [column.removeprefix(">") for column in table.columns]
    widths = [max(map(len, cells)) for cells in zip(names, *table.rows, strict=True)]
    lines = []
    for row in (names, ["-" * width for width in widths], *table.rows):
        cells = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(["", *filter(None, [table.title]), *lines, ""])


def as_rich(sections: Iterable[Section]) -> Any:
    """Draw sections as one renderable of rich, which has to be installed."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(
            Text(section.text, style=STYLES[section.style]) if isinstance(section, Line) else _RichTable(section)
            for section in sections
        )
    )


@dataclass(frozen=True)
class _RichTable:
    """A table drawn by rich when its width is known.

    Numbers are never cut. On a narrow terminal the space between columns goes first, then texts are folded.
    """

    table: TextTable

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = self.table
        names = [column.removeprefix(">") for column in table.columns]
        widths = [max(map(len, cells)) for cells in zip(names, *table.rows, strict=True)]
        roomy = sum(widths) + 3 * (len(names) - 1) <= options.max_width
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if roomy else 0))
        for name, column, width in zip(names, table.columns, widths, strict=True):
            is_number = column.startswith(">")
            kept = width if is_number or width <= _KEPT_WIDTH else None
            drawn.add_column(name, justify="right" if is_number else "left", min_width=kept, overflow="fold")
        for row, style in zip(table.rows, table.styles or [""] * len(table.rows), strict=True):
            drawn.add_row(*map(Text, row), style=STYLES[style])
        if table.title:
            yield Text(table.title, style="bold")
        yield drawn


# -- where it goes -----------------------------------------------------------------------------------------------------


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
    console = _console()
    with suppress(KeyboardInterrupt):
        if console is None:
            clear = "" if os.environ.get("TERM") == "dumb" else "\x1b[H\x1b[J"
            while True:
                sys.stdout.write(f"{clear}{as_text(draw())}\n")
                sys.stdout.flush()
                time.sleep(pause)
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(as_rich(draw()), refresh=True)
                time.sleep(pause)


def _console() -> Any:
    """Return rich's console for stdout; None where plain text is wanted, or rich is not installed."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


def say(text: str, *, only_on_terminal: bool = False) -> None:
    """Write a line about the progress to stderr."""
    if sys.stderr.isatty() or not only_on_terminal:
        sys.stderr.write(f"{text}\n")


# -- figures -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Write a time with three digits or more: ``7.50 us``, ``12.3 ms``, ``2.50 s``."""
    if seconds == 0:
        return "0"
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e-3), ("us", 0.0)) if abs(seconds) >= 0.9995 * f)
    value = seconds / (factor or 1e-6)
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def rate(bytes_per_second: float) -> str:
    """Write a bandwidth in GB/s, powers of 1000: ``55.3 GB/s``; whole from 100 on."""
    value = bytes_per_second / 1e9
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f} GB/s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent; ``-`` where there is no whole."""
    return f"{part / whole:.0%}" if whole else "-"
