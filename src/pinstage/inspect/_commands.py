"""What ``pinstage audit``, ``doctor`` and ``trace`` do, behind their options.

Findings go to stdout: tables on a terminal, plain text elsewhere, or JSON. Progress goes to stderr, if that is a
terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ._audit import audit, first_batch
from ._bus import Bus
from ._errors import InspectError
from ._report import Block, as_rich, as_text


def run_audit(target: str, *, bus: str | None, as_json: bool, every_leaf: bool) -> int:
    """Audit the batch that ``module:callable`` gives; return the exit status."""
    figures = None if bus is None else Bus.parse(bus)
    found = audit(first_batch(target), bus=figures)
    _show(found.to_dict() if as_json else found.blocks(None if every_leaf else 40))
    return 0


def run_doctor(*, device: str | None, measuring: bool, plot: Path | None, as_json: bool) -> int:
    """Look at this machine; return the exit status: 1 if anything is a problem."""
    from ._doctor import POINTS, diagnose, link_rate, save_plot

    index = None if device is None else _device_index(device)
    if plot is not None:
        import_module("matplotlib")  # if it is missing, say so before seconds are spent on measuring
    with _progress("measuring copies", POINTS, unit=False) as advance:
        diagnosis = diagnose(device=index, measuring=measuring, advance=lambda: advance(1))
    _show(diagnosis.to_dict() if as_json else diagnosis.blocks())
    if plot is not None:
        measured = diagnosis.measured
        if measured is None:
            raise InspectError(f"nothing was measured, so {plot} is not drawn; that takes a GPU, and no --no-measure")
        save_plot(measured.points, plot, title=measured.gpu.name, link_rate=link_rate(measured.gpu))
        _say(f"written: {plot}")
    return int(diagnosis.has_problem)


def run_trace(path: Path, *, bus: str | None, html_file: Path | None, as_json: bool, every_step: bool) -> int:
    """Read a trace, or a folder of them; return the exit status."""
    from ._trace import blocks, html, trace_files, trace_report

    figures = None if bus is None else Bus.parse(bus)
    total = sum(file.stat().st_size for file in trace_files(path))
    with _progress(f"reading {path.name}", total, unit=True) as advance:
        report = trace_report(path, bus=figures, advance=advance)
    _show(report.to_dict() if as_json else blocks(report, **({"steps": None} if every_step else {})))
    if html_file is not None:
        html_file.write_text(html(report), encoding="utf-8")
        _say(f"written: {html_file}")
    return 0


def _show(findings: dict[str, Any] | Sequence[Block]) -> None:
    if isinstance(findings, dict):
        sys.stdout.write(json.dumps(findings, indent=2) + "\n")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(as_rich(findings))
    else:
        sys.stdout.write(as_text(findings) + "\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@contextmanager
def _progress(title: str, total: int, *, unit: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the body runs, if that is a terminal; `unit`: the total is bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    done = DownloadColumn() if unit else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


def _device_index(device: str) -> int:
    name, _, index = device.partition(":")
    if name != "cuda" or not (index or "0").isdecimal():
        raise InspectError(f"not a CUDA device: {device!r}; write cuda or cuda:1")
    return int(index or 0)
