"""Shared parts of the scripts in this folder: their arguments, and how they begin and end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from comparison import harness, record
from comparison.errors import BenchError
from comparison.harness import Case, Variant
from comparison.record import Row


def parser(description: str | None, *, repeats: int, repeats_help: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all scripts have."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--out", type=Path, help="write the rows here, as JSON")
    arguments.add_argument("--device", help="cuda:0 where there is one, else cpu")
    arguments.add_argument("--only", help="these variants, separated by commas")
    arguments.add_argument("--repeats", type=int, default=repeats, help=repeats_help)
    arguments.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="passes: processes per variant, in turn; every second round runs backwards",
    )
    arguments.add_argument(
        "--timeout", type=float, default=240.0, help="seconds that one process may take"
    )
    arguments.add_argument(
        "--smoke", action="store_true", help="small and short, on the CPU by default"
    )
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    return arguments


def settle_device(args: argparse.Namespace) -> None:
    """Fill in a missing device, and a missing index."""
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() and not args.smoke else "cpu"
    args.device = "cuda:0" if args.device == "cuda" else args.device


def chosen(names: str | None, known: Sequence[Variant]) -> list[Variant]:
    """Return the variants with these ids, all of them for None; exit if an id is unknown."""
    try:
        return harness.chosen(names, known, "variant")
    except BenchError as error:
        raise SystemExit(str(error)) from error


def named(names: str | None, known: Sequence[str], what: str) -> list[str]:
    """Return the names of `known` that the comma-separated `names` has, all of them for None; exit
    if one is unknown.
    """
    wanted = list(known) if names is None else names.split(",")
    if set(wanted) - set(known):
        raise SystemExit(f"no such {what}: {names}; known: {', '.join(known)}")
    return [name for name in known if name in wanted]


def collect(
    benchmark: str,
    path: str,
    variants: Sequence[Variant],
    cases: Sequence[Case],
    args: argparse.Namespace,
    further: Sequence[str] = (),
    unit: str = "ms",
    judge: Callable[[list[Row]], None] = lambda rows: None,  # noqa: ARG005
) -> list[Row]:
    """Run the script at `path` as the child of each variant, and return a row for each variant and
    case.

    After each process the rows so far are written to the result file, marked as incomplete, so that
    a killed run keeps what it has measured. `judge` compares the rows with one another, also the
    partial ones.
    """

    def keep(rows: list[Row], incomplete: str) -> None:
        if args.out:
            judge(rows)
            _save(benchmark, rows, variants, args, incomplete)

    command = [
        sys.executable,
        path,
        "--device",
        args.device,
        "--repeats",
        str(args.repeats),
        *further,
    ]
    device = torch.device(args.device)
    rows = harness.collect(
        benchmark,
        command,
        variants,
        cases,
        device=device,
        rounds=args.rounds,
        timeout=args.timeout,
        at_once=harness.SMOKE_AT_ONCE if args.smoke else 1,
        unit=unit,
        keep=keep,
    )
    judge(rows)
    return rows


def finish(
    benchmark: str, rows: Sequence[Row], variants: Sequence[Variant], args: argparse.Namespace
) -> int:
    """Print the failures, write the result file if `args` names one, and return the exit status."""
    failed = [row for row in rows if row.status in ("error", "incorrect")]
    for row in failed:
        print(f"{row.variant} on {row.case}: {row.status}: {row.detail}")
    if args.out:
        _save(benchmark, rows, variants, args)
    return 1 if failed else 0


def _save(
    benchmark: str,
    rows: Sequence[Row],
    variants: Sequence[Variant],
    args: argparse.Namespace,
    incomplete: str | None = None,
) -> None:
    internal = ("out", "only", "child", "timeout")
    settings: dict[str, Any] = {
        name: value for name, value in vars(args).items() if name not in internal
    }
    settings["variants"] = {variant.id: variant.about for variant in variants}
    record.save(args.out, record.result_of(benchmark, settings, rows, incomplete))


def compare_on_a_gpu(args: argparse.Namespace, *left_out: str) -> Callable[[list[Row]], None]:
    """Return a function that compares all variants except these, on a GPU only: on the CPU `.to()`
    moves nothing.
    """

    def judge(rows: list[Row]) -> None:
        if torch.device(args.device).type == "cuda":
            record.compare([row for row in rows if row.variant not in left_out])

    return judge
