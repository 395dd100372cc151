"""The whole comparison: choose what to measure, measure it, print the table, write the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from comparison import batches, harness, plot, record, rivals, table
from comparison.batches import BatchShape
from comparison.errors import BenchError
from comparison.staging import FEWEST_REPEATS

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Settings:
    """The options.

    Attributes:
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        only: Ids of variants, separated by commas; None for all.
        batches: Ids of batch shapes, separated by commas; None for the table's shapes.
        series: Measure this series of shapes, or `"all"`, instead of the table's.
        plot: A picture of the series to write; if `series` is None, both series are measured for
            it, after the table.
        out: A result file to write, as JSON.
        read: Result files to show and draw; then nothing is measured.
        rounds: Processes for each variant.
        repeats: Timed calls for each variant and shape in a process, at most.
        seconds: Time limit for these calls, once a few are done.
        timeout: Seconds that one process may take.
        busy: Other processes that compute meanwhile.
        smoke: Small and short, on the CPU unless another device is named.
    """

    device: str = "auto"
    only: str | None = None
    batches: str | None = None
    series: str | None = None
    plot: Path | None = None
    out: Path | None = None
    read: tuple[Path, ...] = ()
    rounds: int = 1
    repeats: int = 300
    seconds: float = 0.4
    timeout: float = 600.0
    busy: int = 0
    smoke: bool = False


def run_bench(settings: Settings) -> int:
    """Run the comparison, or read one; return the exit status: 1 if a variant failed or gave wrong
    bits.

    Raises:
        BenchError: An option names something unknown or missing, or a file cannot be read or
            written.
    """
    _check_targets(settings)
    results = [_read(path) for path in settings.read] or [measured(settings)]
    for path, result in zip(settings.read, results, strict=False):
        if "incomplete" in result:
            sys.stderr.write(f"{path} is incomplete: {result['incomplete']}\n")
    if settings.out is not None:
        record.save(settings.out, results[0])
        sys.stderr.write(f"written: {settings.out}\n")
    rows = [row for result in results for row in _rows_of_table(result)]
    table.comparison(rows)
    if settings.plot is not None:
        plot.draw(results, settings.plot)
        sys.stderr.write(f"written: {settings.plot}\n")
    return int(
        any(row["status"] in ("error", "incorrect") for result in results for row in result["rows"])
    )


def measured(settings: Settings) -> dict[str, Any]:
    """Measure, and return the content of a result file; write the rows so far after each
    process.
    """
    from comparison.progress import watching

    device = choose_device(settings.device, smoke=settings.smoke)
    of_table, series = chosen_shapes(settings)
    shapes = list(
        dict.fromkeys([*of_table, *(shape for shapes in series.values() for shape in shapes)])
    )
    variants = harness.chosen(settings.only, rivals.VARIANTS, "variant")
    repeats, seconds = settings.repeats, settings.seconds
    if settings.smoke:
        repeats, seconds = min(repeats, FEWEST_REPEATS), 0.0
    command = [sys.executable, str(Path(__file__).parent), "--device", str(device)]
    command += ["--batches", ",".join(shape.id for shape in shapes), "--repeats", str(repeats)]
    command += ["--seconds", str(seconds)]
    able = [variant for variant in variants if variant.obstacle(device) is None]
    total = settings.rounds * sum(variant.suits(shape) for variant in able for shape in shapes)
    internal = ("out", "plot", "read", "only", "batches", "series", "timeout")
    noted: dict[str, Any] = {
        name: value for name, value in asdict(settings).items() if name not in internal
    }
    noted |= {"device": str(device), "repeats": repeats, "seconds": seconds}
    noted["table"] = [shape.id for shape in of_table]
    noted["series"] = {name: [shape.id for shape in shapes] for name, shapes in series.items()}
    noted["variants"] = {variant.id: variant.about for variant in variants}

    def result_of(rows: list[record.Row], incomplete: str | None = None) -> dict[str, Any]:
        if device.type == "cuda":  # on the CPU `.to()` moves nothing, and there is no race to win
            record.compare(rows)
        return record.result_of("staging", noted, rows, incomplete)

    def keep(rows: list[record.Row], incomplete: str) -> None:
        if settings.out is not None:
            record.save(settings.out, result_of(rows, incomplete))

    with harness.busy_cpus(settings.busy), watching(total) as watcher:
        rows = harness.collect(
            "staging",
            command,
            variants,
            shapes,
            device=device,
            rounds=settings.rounds,
            timeout=settings.timeout,
            at_once=harness.SMOKE_AT_ONCE if settings.smoke else 1,
            watcher=watcher,
            keep=keep,
        )
    return result_of(rows)


def chosen_shapes(settings: Settings) -> tuple[list[BatchShape], dict[str, list[BatchShape]]]:
    """Return the shapes of the table, and the shapes of each series.

    Raises:
        BenchError: There is no such shape or series.
    """
    known = {
        name: list(shapes[: batches.SMOKE_POINTS] if settings.smoke else shapes)
        for name, shapes in batches.SERIES.items()
    }
    if settings.series not in (None, "all", *known):
        raise BenchError(f"no such series: {settings.series}; known: {', '.join(known)}, all")
    if settings.series in known:
        series = {settings.series: known[settings.series]}
    else:
        series = known if settings.series or settings.plot else {}
    if settings.batches is not None:
        return harness.chosen(settings.batches, batches.every_shape(), "batch"), series
    if settings.series is not None:
        return [], series
    return list(batches.SMOKE_SHAPES if settings.smoke else batches.SHAPES), series


def choose_device(text: str, *, smoke: bool = False) -> torch.device:
    """Return the device to measure on; for "auto" a GPU if there is one, but not in a smoke run.

    Raises:
        BenchError: The device is unknown or missing.
    """
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        text = "cuda:0" if present and not smoke else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BenchError(f'unknown device {text!r}: say "auto", "cpu", "cuda" or "cuda:1"')
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    if index >= present:
        raise BenchError(
            f"{text!r} is not there: torch sees {present} CUDA devices; --device cpu runs without "
            "one"
        )
    return torch.device("cuda", index)


def _check_targets(settings: Settings) -> None:
    """Check before minutes of measuring that the results can be written afterwards."""
    if settings.read and settings.out:
        raise BenchError(
            "--out writes what was measured, and with --from nothing is: leave one of them out"
        )
    for path in filter(None, (settings.out, settings.plot)):
        if path.is_dir():
            raise BenchError(f"{path} is a folder; name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(
                f"{path} cannot be written: {error.strerror}; name another place"
            ) from error
    if settings.plot is not None:
        if settings.plot.suffix.lower() not in PICTURES:
            raise BenchError(f"{settings.plot}: a picture is one of {', '.join(PICTURES)}")
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != "staging":
        raise BenchError(f"{path} is not a result of this comparison")
    known = {variant.id for variant in rivals.VARIANTS}  # older files have ways that were removed
    return result | {"rows": [row for row in result["rows"] if row["variant"] in known]}


def _rows_of_table(result: dict[str, Any]) -> Sequence[record.Row]:
    """Return the rows of the table, or of a series if nothing else was measured."""
    rows = record.rows_of(result)
    shown = result["settings"].get("table")
    return [row for row in rows if row.case in shown] if shown else rows
