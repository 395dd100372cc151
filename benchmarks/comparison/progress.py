"""The progress of a benchmark: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from comparison.harness import Lines, Watcher, importable

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """A bar that counts cases; failures are printed above it."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def case_done(self, variant: str) -> None:
        """Advance by one case."""
        self._bar.update(self._task, advance=1, description=variant)

    def process_done(self, variant: str, missed: int, seconds: float, failure: str) -> None:  # noqa: ARG002
        """Advance by the cases that a process missed; the bar shows the time."""
        if failure:
            self._bar.console.print(f"{variant}: {failure}", markup=False, highlight=False)
        self._bar.update(self._task, advance=missed, description=variant)


@contextmanager
def watching(total: int) -> Iterator[Watcher]:
    """Show on stderr the progress of the body, which measures `total` cases of all variants and
    rounds: with rich on a terminal.
    """
    if not (sys.stderr.isatty() and importable("rich")):
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar, total)
