"""What all benchmarks do around their cases and ways: options, processes, passes, the result file,
and tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from comparison import harness, record, table, timing
from comparison.errors import BenchError
from comparison.harness import Outcome, Pair, Variant
from comparison.record import Row

Args = argparse.Namespace
Result = dict[str, Any]
INTERNAL = ("out", "only", "child", "settings", "timeout", "within", "plot", "read", "folder")
"""Options that aren't settings of a measurement."""
PICTURES = (".png", ".svg", ".pdf")
OF_MODULE = {
    "path": "__file__",
    "about": "__doc__",
    "ways": "VARIANTS",
    "cases": "CASES",
    "small_cases": "SMALL_CASES",
    "measure": "measure",
}
"""What a module has for its program, by the names there."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A benchmark.

    Attributes:
        path: The program, which runs itself as the child of each way.
        about: What it asks, as its help.
        title: What the figures are.
        ways: The ways to measure.
        cases: What they are measured on, or a function that chooses it.
        measure: Returns the outcome of a way on a case, in a process of the way.
        at_once: Whether that returns the outcomes of all cases by their ids, given the first one.
        options: Further options, each with its default and help.
        small_cases: The cases of a smoke run.
        small: The most that options have in a smoke run.
        benchmark: The name in the rows and in the result file; by default that of the program.
        rounds: Passes, in which each way is measured once.
        lasting: Whether a way has one process for all passes, and not one for each: where starting
            it, its imports and the data take longer than the measurement.
        in_turn: Whether all ways are measured in one process, call by call in turn, and not in a
            process for each. `measure` then has the suitable ways instead of one, and returns an
            outcome or an exception by way.
        limits: Ways that show a limit, and are no rivals.
        unit: The unit of the figures.
        judge: Changes the rows before they are compared.
        around: Prepares the measurement, in the parent.
        begin: Prepares a process of a way.
        settings: Returns more for the settings of the result.
        draw: Draws results into a file.
    """

    path: str
    about: str | None
    title: str
    ways: Sequence[Variant]
    cases: Sequence[Any] | Callable[[Args], Sequence[Any]]
    measure: Any = None
    at_once: bool = False
    options: dict[str, tuple[Any, str]] = field(default_factory=dict)
    small_cases: Sequence[Any] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    benchmark: str = ""
    rounds: int = 1
    lasting: bool = False
    in_turn: bool = False
    limits: Sequence[str] = ()
    unit: str = "ms"
    judge: Callable[[list[Row]], None] = lambda rows: None  # noqa: ARG005
    around: Callable[[Args], AbstractContextManager[Any]] = nullcontext
    begin: Callable[[Args], None] = lambda args: None  # noqa: ARG005
    settings: Callable[[Args], dict[str, Any]] = lambda args: {}  # noqa: ARG005
    draw: Callable[[Sequence[Result], Path], None] | None = None

    @classmethod
    def of(cls, module: Mapping[str, Any], **said: Any) -> Program:
        """Return the program of a module whose `globals()` are given, and what they don't say."""
        return cls(**of_module(module) | said)

    @property
    def name(self) -> str:
        """The name in the rows and in the result file."""
        return self.benchmark or Path(self.path).stem

    def run(self, name: str) -> None:
        """Run the program if its module, of this `__name__`, was started."""
        if name == "__main__":
            sys.exit(self.main())

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the program; return 1 if a way failed or gave wrong results, 2 for a wrong option."""
        try:
            args = self.parsed(argv)
            if args.child:
                self._work(args)
                return 0
            return self._run(args)
        except BenchError as error:
            sys.stderr.write(f"{Path(self.path).stem}: {error}\n")
            return 2

    def parsed(self, argv: Sequence[str] | None = None) -> Args:
        """Return the options; a child has those of its parent."""
        args = self._parser().parse_args(argv)
        if args.settings:
            vars(args).update(json.loads(args.settings), child=args.child)
        elif args.smoke:
            for name, most in self.small.items():
                setattr(args, name, min(most, getattr(args, name)))
        args.device = choose_device(args.device, smoke=args.smoke)
        return args

    def _parser(self) -> argparse.ArgumentParser:
        found = argparse.ArgumentParser(
            description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = found.add_argument
        add("--device", default="auto", help="cpu, cuda or cuda:1; auto: a GPU if there is one")
        add("--only", help="these ways, separated by commas")
        add(
            *("--cases", "--batches", "--loops", "--scenario"),
            dest="cases",
            help="these cases, separated by commas: what their ids begin with",
        )
        add("--out", type=Path, help="write the results to this JSON file")
        passes = "passes over the ways; every second one runs backwards"
        add("--rounds", type=positive, default=self.rounds, help=passes)
        add("--timeout", type=float, default=600.0, help="seconds that a process's pass may take")
        within = "begin no further pass that would end after these seconds"
        add("--within", type=float, default=math.inf, help=within)
        add("--smoke", action="store_true", help="small and short, on the CPU by default")
        for name, (default, said) in self.options.items():
            kind = positive if name == "repeats" else str if default is None else type(default)
            add(f"--{name.replace('_', '-')}", type=kind, default=default, help=said)
        add("--plot", type=Path, help="draw the results into this file, where there is a picture")
        add(
            "--from",
            dest="read",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help="show a result file, and measure nothing; with several, --out joins them",
        )
        for internal in ("--child", "--settings"):
            add(internal, help=argparse.SUPPRESS)
        return found

    def chosen_cases(self, args: Args) -> list[Any]:
        """Return the cases that the options choose.

        Raises:
            BenchError: there is no such case.
        """
        if callable(self.cases):
            return list(self.cases(args))
        known = (args.smoke and self.small_cases) or self.cases
        if args.cases is None:
            return list(known)
        wanted = args.cases.split(",")
        kinds = {case.id: case.id.replace(":", ",").partition(",")[0] for case in known}
        unknown = set(wanted) - {*kinds, *kinds.values()}
        if unknown:
            names = dict.fromkeys(kinds.values())
            raise BenchError(
                f"no such case: {', '.join(sorted(unknown))}; known: {', '.join(names)}"
            )
        return [case for case in known if {case.id, kinds[case.id]} & set(wanted)]

    def measured(self, args: Args) -> Result:
        """Measure, and return the content of a result file; write the rows so far after each
        process.
        """
        ways = harness.chosen(args.only, self.ways, "variant")
        cases = self.chosen_cases(args)
        settings = {name: value for name, value in vars(args).items() if name not in INTERNAL}
        settings |= {"device": str(args.device), "in_turn": self.in_turn, **self.settings(args)}
        settings["variants"] = {way.id: way.about for way in ways}
        with self.around(args):

            def result_of(rows: list[Row], incomplete: str | None = None) -> Result:
                self.judge(rows)
                if args.device.type == "cuda":  # on the CPU `.to()` moves nothing
                    record.compare([row for row in rows if row.variant not in self.limits])
                return record.result_of(self.name, settings, rows, incomplete)

            def keep(rows: list[Row], incomplete: str) -> None:
                if args.out is not None:
                    record.save(args.out, result_of(rows, incomplete))

            rows = harness.collect(
                self.name,
                self.command(args),
                ways,
                cases,
                device=args.device,
                rounds=args.rounds,
                timeout=args.timeout,
                at_once=harness.SMOKE_AT_ONCE if args.smoke else 1,
                lasting=self.lasting,
                in_turn=self.in_turn,
                within=args.within,
                unit=self.unit,
                keep=keep,
            )
        return result_of(rows)

    def command(self, args: Args) -> list[str]:
        """Return the command of a child with these options."""
        return [sys.executable, self.path, "--settings", json.dumps(vars(args), default=str)]

    def _run(self, args: Args) -> int:
        """Measure or read, show, and write; return the exit status."""
        _check_targets(args)
        results = [self._read(path) for path in args.read] or [self.measured(args)]
        if args.out is not None:
            record.save(args.out, joined(results))
            sys.stderr.write(f"written: {args.out}\n")
        rows, shown = [], []
        for result in results:
            of_table = result["settings"].get("table")  # if it has a series too, only these
            found = record.rows_of(result)
            rows += found
            shown += [row for row in found if not of_table or row.case in of_table]
        table.report(self.title, shown)
        if args.plot is not None and self.draw is not None:
            self.draw(results, args.plot)
            sys.stderr.write(f"written: {args.plot}\n")
        return int(any(row.status in ("error", "incorrect") for row in rows))

    def _read(self, path: Path) -> Result:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BenchError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BenchError(f"{path} is not JSON: {error}") from error
        if not isinstance(result, dict) or result.get("benchmark") != self.name:
            raise BenchError(f"{path} is not a result of this benchmark")
        if "incomplete" in result:
            sys.stderr.write(f"{path} is incomplete: {result['incomplete']}\n")
        known = {way.id for way in self.ways}  # older files have ways that were removed
        return result | {"rows": [row for row in result["rows"] if row["variant"] in known]}

    def _work(self, args: Args) -> None:
        """In the child: measure its ways, and emit their outcomes for each case."""
        ways = harness.chosen(args.child, self.ways, "variant")
        self.begin(args)
        harness.start_device(args.device)
        pairs = [(way, case) for case in self.chosen_cases(args) for way in ways if way.suits(case)]
        of_cases = groupby(pairs, key=lambda pair: str(pair[1].id))
        groups = [pairs] if self.at_once else [list(group) for _, group in of_cases]
        empty_caches = partial(timing.empty_caches, args.device)
        harness.work(groups, partial(self._measured_group, args), empty_caches)

    def _measured_group(
        self, args: Args, group: Sequence[Pair]
    ) -> dict[tuple[str, str], Outcome | Exception]:
        """Return the outcomes of ways and cases that are measured together."""
        way, case = group[0]
        if self.in_turn:
            found = self.measure([way for way, _ in group], args, case)
            return {(name, case.id): outcome for name, outcome in found.items()}
        found = self.measure(way, args, case)
        if self.at_once:
            return {(way.id, name): outcome for name, outcome in found.items()}
        return {(way.id, case.id): found}


def of_module(module: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module says about its program, by `OF_MODULE`."""
    return {field: module[name] for field, name in OF_MODULE.items() if name in module}


def joined(results: Sequence[Result]) -> Result:
    """Return one result of several, whose cases or ways are measured apart.

    Raises:
        BenchError: they are of different commits or machines.
    """
    first = results[0]
    if any(result[name] != first[name] for result in results for name in ("commit", "machine")):
        raise BenchError("--out joins results of one commit and one machine, and these differ")
    variants: dict[str, str] = {}
    for result in results:
        variants |= result["settings"].get("variants", {})
    settings = first["settings"] | {"variants": variants}
    return first | {"settings": settings, "rows": [row for one in results for row in one["rows"]]}


def positive(text: str) -> int:
    """Return a number that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


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


def _check_targets(args: Args) -> None:
    """Check before minutes of measuring that the results can be written afterwards."""
    for path in filter(None, (args.out, args.plot)):
        if path.is_dir():
            raise BenchError(f"{path} is a folder; name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(
                f"{path} cannot be written: {error.strerror}; name another place"
            ) from error
    if args.plot is not None:
        if args.plot.suffix.lower() not in PICTURES:
            raise BenchError(f"{args.plot}: a picture is one of {', '.join(PICTURES)}")
        if find_spec("matplotlib") is None:
            raise BenchError("matplotlib is not installed; run: pip install -e . --group bench")
