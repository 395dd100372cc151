"""Measure each variant in a fresh process, and make rows of what comes back.

No variant sees another's warm allocator, threads, streams or imported packages, and one that crashes takes only its own
rows along. A script calls `collect` in the parent, which starts the same script with `--child`, which calls `work`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import record
import torch
from record import Row

MARK = "@outcome "
Outcome = dict[str, Any]
"""`status`, `detail`, and where it is "ok" the samples in seconds: `total`, and `main` until the call returned."""


class Case(Protocol):
    """What variants are measured on."""

    @property
    def id(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Size:
    """The case of a benchmark that knows bytes only."""

    id: str
    nbytes: int


@dataclass(frozen=True)
class Variant:
    """One way of doing what a benchmark measures: what it needs, and how to set it up."""

    id: str
    setup: Callable[..., Any]
    about: str
    package: str | None = None
    """The module to import; None where torch alone will do."""
    needs_cuda: bool = False
    ours: bool = False
    prepare: Callable[[Any], Any] | None = None
    """Applied to a batch before the timer starts."""

    def obstacle(self, device: torch.device) -> str | None:
        """Return why this variant cannot run here, as the status of its rows, or None."""
        if self.package and not _importable(self.package):
            return "not installed"
        if self.needs_cuda and device.type != "cuda":
            return "needs CUDA"
        return None


def parser(description: str | None, *, repeats: int, repeats_help: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks have."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, help="write the rows here, as JSON")
    arguments.add_argument("--device", help="cuda:0 where there is one, else cpu")
    arguments.add_argument("--only", help="these variants, separated by commas")
    arguments.add_argument("--repeats", type=int, default=repeats, help=repeats_help)
    arguments.add_argument(
        "--rounds", type=int, default=1, help="processes for each variant; each second round backwards"
    )
    arguments.add_argument("--timeout", type=float, default=240.0, help="seconds that one process may take")
    arguments.add_argument("--smoke", action="store_true", help="small and short, on the CPU by default")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    return arguments


def settle_device(args: argparse.Namespace) -> None:
    """Fill in the device that was not named, and the index that was not given."""
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() and not args.smoke else "cpu"
    args.device = "cuda:0" if args.device == "cuda" else args.device


def chosen(names: str | None, known: Sequence[Any], what: str) -> list[Any]:
    """Return those of `known` whose ids are in the comma-separated `names`, all of them for None."""
    if names is None:
        return list(known)
    ids = names.split(",")
    unknown = sorted(set(ids) - {item.id for item in known})
    if unknown:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; known: {', '.join(item.id for item in known)}")
    return [item for item in known if item.id in ids]


def collect(
    benchmark: str,
    script: str,
    variants: Sequence[Variant],
    cases: Sequence[Case],
    args: argparse.Namespace,
    child_arguments: Sequence[str] = (),
    unit: str = "ms",
) -> list[Row]:
    """Run every variant `--rounds` times, each in a fresh process, and return a row for each variant and case."""

    def outcomes_of(variant: Variant) -> dict[str, Outcome]:
        obstacle = variant.obstacle(torch.device(args.device))
        if obstacle:
            return {case.id: {"status": obstacle, "detail": variant.package or ""} for case in cases}
        began = time.perf_counter()
        common = ["--child", variant.id, "--device", args.device, "--repeats", str(args.repeats)]
        emitted, failure = _run_fresh(script, [*common, *child_arguments], args.timeout)
        print(f"{variant.id}: {time.perf_counter() - began:.1f} s {failure}", file=sys.stderr, flush=True)
        missing = {"status": "error", "detail": failure[:300] or "no result"}
        return {case.id: missing for case in cases} | {outcome["case"]: outcome for outcome in emitted}

    rounds: list[dict[str, dict[str, Outcome]]] = []
    for turn in range(args.rounds):
        order = variants if turn % 2 == 0 else variants[::-1]  # what drifts on the machine then touches all alike
        rounds.append({variant.id: outcomes_of(variant) for variant in order})
    rows = []
    for variant in variants:
        for case in cases:
            outcomes = [by_variant[variant.id][case.id] for by_variant in rounds]
            first = next((outcome for outcome in outcomes if outcome["status"] != "ok"), outcomes[0])
            row = Row(benchmark, case.id, variant.id, first["status"], first["detail"], variant.ours)
            row.nbytes, row.leaves, row.unit = case.nbytes, getattr(case, "leaves", None), unit
            if row.status == "ok":
                total, main = ([s for outcome in outcomes for s in outcome.get(part, [])] for part in ("total", "main"))
                row.fill(total, main)
            rows.append(row)
    return rows


def start_device(device: torch.device) -> None:
    """In the child: create the CUDA context, outside every timer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def work(cases: Sequence[Case], measure: Callable[[Case], Outcome], between: Callable[[], None]) -> None:
    """In the child: measure each case, and emit its outcome at once, so that it survives a later crash."""
    for case in cases:
        try:
            outcome = measure(case)
        except Exception as error:  # noqa: BLE001 - whatever a variant raises is its result
            outcome = {"status": "error", "detail": f"{type(error).__name__}: {error}"[:300]}
        print(MARK + json.dumps({"case": case.id, **outcome}), flush=True)
        between()


def finish(benchmark: str, rows: Sequence[Row], variants: Sequence[Variant], args: argparse.Namespace) -> int:
    """Print what failed, write the result file if one is wanted, and return the exit status."""
    failed = [row for row in rows if row.status in ("error", "incorrect")]
    for row in failed:
        print(f"{row.variant} on {row.case}: {row.status}: {row.detail}")
    if args.out:
        internal = ("out", "only", "child", "timeout", "batches")
        settings = {name: value for name, value in vars(args).items() if name not in internal}
        settings["variants"] = {variant.id: variant.about for variant in variants}
        record.save(args.out, benchmark, settings, rows)
    return 1 if failed else 0


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _run_fresh(script: str, arguments: Sequence[str], timeout: float) -> tuple[list[Outcome], str]:
    """Run `script` and return the outcomes it emitted, and what went wrong or an empty string."""
    command = [sys.executable, script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout)
        said = [line.strip() for line in err.splitlines() if line.strip()] or ["no message"]
        failure = "" if process.returncode == 0 else f"exit status {process.returncode}: {said[-1]}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        failure = f"took more than {timeout:g} s"
    return [json.loads(line[len(MARK) :]) for line in out.splitlines() if line.startswith(MARK)], failure
