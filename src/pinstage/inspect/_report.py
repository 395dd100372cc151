"""What the three tools print: a list of lines and tables, as plain text or by rich.

A finding is data first (`to_dict`), and a list of blocks second; how a block is drawn is known here alone, so that a
pipe, a log and a machine without rich get the same words as a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "info": "cyan", "": ""}
"""What a style is called here, and what rich calls it."""

_KEPT_WIDTH = 14


@dataclass(frozen=True)
class Line:
    """A line, or paragraph, of text."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Attributes:
        columns: the head; a name that begins with ``>`` stands over numbers, which are set to the right.
        rows: as many cells each as there are columns.
        title: stands above; may be empty.
        styles: the style of each row; empty: none has one.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Sequence[str] = field(default=())


Block = Line | Table


def as_text(blocks: Iterable[Block]) -> str:
    """Draw blocks as plain text, without escapes; no line is wrapped or cut."""
    parts = [block.text if isinstance(block, Line) else _table_text(block) for block in blocks]
    return "\n".join(parts)


def as_rich(blocks: Iterable[Block]) -> Any:
    """Draw blocks as one renderable of rich.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(Text(block.text, style=STYLES[block.style]) if isinstance(block, Line) else _Drawn(block) for block in blocks)
    )


def _table_text(table: Table) -> str:
    names = [column.removeprefix(">") for column in table.columns]
    rows = [names, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        )
        return "  ".join(cells).rstrip()

    ruler = "  ".join("-" * width for width in widths)
    lines = [line(names), ruler, *map(line, table.rows)]
    return "\n".join(["", table.title, *lines, ""] if table.title else ["", *lines, ""])


class _Drawn:
    """A table that knows, when it is printed, how wide it may be.

    Numbers are never cut: what has to give way on a narrow terminal is first the space between columns, then texts,
    which are folded.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = self._table
        names = [column.removeprefix(">") for column in table.columns]
        widest = [max(map(len, cells)) for cells in zip(names, *table.rows, strict=True)]
        roomy = sum(widest) + 3 * (len(names) - 1) <= options.max_width
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if roomy else 0))
        for name, column, width in zip(names, table.columns, widest, strict=True):
            kept = width if column.startswith(">") or width <= _KEPT_WIDTH else None
            drawn.add_column(
                name, justify="right" if column.startswith(">") else "left", min_width=kept, overflow="fold"
            )
        styles = table.styles or [""] * len(table.rows)
        for row, style in zip(table.rows, styles, strict=True):
            drawn.add_row(*map(Text, row), style=STYLES[style])
        if table.title:
            yield Text(table.title, style="bold")
        yield drawn
