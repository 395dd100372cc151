"""Measure each variant in a fresh process, or all of them in turn in one, and make rows of the
results.

In a process of its own no variant sees another's warm allocator, threads, streams or imported
packages, and a crash loses only the variant's own rows. But processes on one machine differ by 20%
and more in calls of less than a millisecond. A benchmark calls `collect` in the parent, which starts
a command with `--child` and the variants, which calls `work`. That measures all cases for each line
that it is sent.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from comparison.errors import BenchError, Incorrect
from comparison.record import Row, quantile

MARK = "@outcome "
DONE = "@done\n"
"""The end of a pass, in what a child prints."""
SMOKE_AT_ONCE = 2
"""Processes at a time in a smoke run, which should be short on two cores."""
Outcome = dict[str, Any]
"""`status`, `detail`, and for "ok" the samples in seconds: `total`, `main` until the call returned,
and `busy` until it returned with a busy GPU."""


def ok(total: Sequence[float], detail: str = "", main: Sequence[float] = ()) -> Outcome:
    """Return the outcome of a way that was measured."""
    return {"status": "ok", "detail": detail, "total": total, "main": main}


class Case(Protocol):
    """The data or operation that variants are measured on."""

    @property
    def id(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Size:
    """A case that is only a number of bytes."""

    id: str
    nbytes: int


@dataclass(frozen=True)
class Variant:
    """One way of doing what a benchmark measures: its requirements, and its set-up."""

    id: str
    setup: Callable[..., Any]
    about: str
    package: str | None = None
    """The module to import, or several with spaces between them; None if torch is enough."""
    needs_cuda: bool = False
    ours: bool = False
    in_place: Callable[..., Any] | None = None
    """Set-up for a case whose data is written in place; None if `setup` takes torch's page-locked
    tensors.
    """
    where: Callable[[Any], Any] | None = None
    """Whether this variant applies to a case; None if it applies to all."""

    @contextmanager
    def open(self, *given: Any) -> Iterator[Any]:
        """Set the variant up for the body; what it returns may be closed at the end."""
        made = self.setup(*given)
        with made if hasattr(made, "__exit__") else nullcontext(made) as ready:
            yield ready

    def suits(self, case: Case) -> bool:
        """Return whether this variant applies to a case."""
        return self.where is None or bool(self.where(case))

    def obstacle(self, device: torch.device) -> str | None:
        """Return why this variant cannot run here, as the status of its rows, or None."""
        if self.package and not all(map(importable, self.package.split())):
            return "not installed"
        if self.needs_cuda and device.type != "cuda":
            return "needs CUDA"
        return None


Pair = tuple[Variant, Any]
"""A way and a case that it applies to."""


def importable(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def chosen(names: str | None, known: Sequence[Any], what: str) -> list[Any]:
    """Return the items of `known` whose ids are in the comma-separated `names`, all of them for
    None.

    Raises:
        BenchError: There is no such id.
    """
    if names is None:
        return list(known)
    ids = [name.strip() for name in names.split(",")]
    unknown = sorted(set(ids) - {item.id for item in known})
    if unknown:
        raise BenchError(
            f"no such {what}: {', '.join(unknown)}; known: {', '.join(item.id for item in known)}"
        )
    return [item for item in known if item.id in ids]


def collect(
    benchmark: str,
    command: Sequence[str],
    variants: Sequence[Variant],
    cases: Sequence[Case],
    *,
    device: torch.device,
    rounds: int = 1,
    timeout: float = 240.0,
    at_once: int = 1,
    lasting: bool = False,
    in_turn: bool = False,
    within: float = math.inf,
    unit: str = "ms",
    keep: Callable[[list[Row], str], None] | None = None,
) -> list[Row]:
    """Run every variant `rounds` times, and return a row for each variant and case.

    Our variants run first, so that a run that ends early only lacks a rival or two.

    Args:
        benchmark: Its name in the rows.
        command: The command of a child process; `--child` and its variants are appended.
        variants: The variants to run.
        cases: The cases that the child measures; `command` must name them.
        device: The device; the rows of variants that cannot run there give the reason.
        rounds: Passes over the variants; every second one runs backwards.
        timeout: Seconds that a process's pass may take.
        at_once: Processes that run at a time; use more than one only if times don't matter.
        lasting: Whether a process lasts for all passes, and not for one.
        in_turn: Whether one process measures all variants, and not one for each.
        within: No further pass begins that would end after these seconds, if it took as long as the
            one before.
        unit: Unit of the times in the rows: "s", "ms" or "us".
        keep: Called after each pass of a process except the last, with the rows so far and the
            progress as text, so that a killed run keeps them.
    """

    def outcomes_of(group: Sequence[Variant]) -> dict[tuple[str, str], Outcome]:
        able = [way for way in group if not way.obstacle(device) and any(map(way.suits, cases))]
        emitted, failure = run_child(",".join(way.id for way in able)) if able else ([], "")
        missing = {
            (way.id, case.id): _missing(way, device, failure)
            for way in group
            for case in cases
            if way.suits(case)
        }
        return missing | {(outcome["way"], outcome["case"]): outcome for outcome in emitted}

    def run_child(ways: str) -> tuple[list[Outcome], str]:
        began = time.perf_counter()
        if ways not in children:
            children[ways] = Child([*command, "--child", ways])
        emitted, failure = children[ways].outcomes(timeout)
        if failure or not lasting:
            children.pop(ways).end()
        took = time.perf_counter() - began
        sys.stderr.write(f"{ways}: {took:.1f} s {failure}".rstrip() + "\n")
        return emitted, failure

    def rows() -> list[Row]:
        return [
            _row(benchmark, way, case, outcomes[way.id, case.id], unit)
            for way in variants
            for case in cases
            if (way.id, case.id) in outcomes
        ]

    children: dict[str, Child] = {}
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    ours_first = sorted(variants, key=lambda variant: not variant.ours)
    groups = [ours_first] if in_turn else [[way] for way in ours_first]
    done, most = 0, rounds * len(groups)
    first = time.perf_counter()
    try:
        for turn in range(rounds):
            began = time.perf_counter()
            # A drift of the machine then affects all alike.
            order = groups if turn % 2 == 0 else groups[::-1]
            with ThreadPoolExecutor(at_once) as executor:
                run = map if at_once == 1 else executor.map
                for found in run(outcomes_of, order):
                    for pair, outcome in found.items():
                        outcomes.setdefault(pair, []).append(outcome)
                    done += 1
                    if keep is not None and done < most:
                        keep(rows(), f"{done} of {most} passes")
            now = time.perf_counter()
            if (now - first) + (now - began) > within:
                break
    finally:  # after Ctrl-C, too: no process may keep computing
        for child in children.values():
            child.end()
    return rows()


def _missing(variant: Variant, device: torch.device, failure: str) -> Outcome:
    """Return the outcome on a case for which the process of a variant has none."""
    obstacle = variant.obstacle(device)
    if obstacle:
        return {"status": obstacle, "detail": variant.package or ""}
    return {"status": "error", "detail": failure[:300] or "no result"}


def _row(
    benchmark: str, variant: Variant, case: Case, outcomes: Sequence[Outcome], unit: str
) -> Row:
    """Return the row of a variant's outcomes on a case, one per round."""
    first = next((outcome for outcome in outcomes if outcome["status"] != "ok"), outcomes[0])
    row = Row(benchmark, case.id, variant.id, first["status"], first["detail"], variant.ours)
    row.nbytes, row.leaves, row.unit = case.nbytes, getattr(case, "leaves", None), unit
    if row.status == "ok":
        parts = ("total", "main", "busy")
        row.fill(*([s for outcome in outcomes for s in outcome.get(part, [])] for part in parts))
        row.detail = _middle(outcomes)["detail"]
    return row


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the median of all medians, so that its detail suits the figures."""
    ordered = sorted(outcomes, key=lambda outcome: quantile(outcome["total"], 0.5))
    return ordered[len(ordered) // 2]


@contextmanager
def busy_cpus(processes: int) -> Iterator[None]:
    """Run other processes meanwhile, each computing on one CPU, like the workers of a
    DataLoader.
    """
    command = [
        sys.executable,
        "-c",
        "import numpy as np\nones = np.ones(1 << 20)\nwhile True: ones * 1.5",
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running += (subprocess.Popen(command) for _ in range(processes))
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def start_device(device: torch.device) -> None:
    """In the child: create the CUDA context, outside every timer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def work(
    groups: Sequence[Sequence[Pair]],
    measure: Callable[[Sequence[Pair]], Mapping[tuple[str, str], Outcome | Exception]],
    between: Callable[[], None],
) -> None:
    """In the child: measure each group of ways and cases in each pass, and emit its outcomes at
    once, so that they survive a later crash.
    """
    for _ in sys.stdin:
        for group in groups:
            try:
                _emit(measure(group))
            except Exception as error:  # noqa: BLE001 - whatever a variant raises is its result
                _emit({(way.id, case.id): error for way, case in group})
            # A trainer's cycles keep CUDA events. If a worker that the next case forks collected
            # them, it would call CUDA there.
            gc.collect()
            between()
        sys.stdout.write(DONE)
        sys.stdout.flush()


def _emit(outcomes: Mapping[tuple[str, str], Outcome | Exception]) -> None:
    for (way, case), found in outcomes.items():
        outcome = _failed(found) if isinstance(found, Exception) else found
        sys.stdout.write(MARK + json.dumps({"way": way, "case": case, **outcome}) + "\n")
    sys.stdout.flush()


def _failed(error: Exception) -> Outcome:
    if isinstance(error, Incorrect):
        return {"status": "incorrect", "detail": str(error)[:300]}
    return {"status": "error", "detail": with_causes(error)[:300]}


def with_causes(error: BaseException) -> str:
    """Return an error and what caused it: torch says only there which signal ended a worker."""
    said = f"{type(error).__name__}: {error}"
    return f"{said}, from {with_causes(error.__cause__)}" if error.__cause__ else said


def _kill(pid: int) -> None:
    """Kill a process and its forked workers, which would keep its stdout open."""
    with suppress(FileNotFoundError, ProcessLookupError):
        workers = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        os.kill(pid, signal.SIGKILL)
        for worker in " ".join(workers).split():
            _kill(int(worker))


class Child(subprocess.Popen[str]):
    """A process of some variants, which measures their cases in each pass that it is asked for."""

    def __init__(self, command: Sequence[str]) -> None:
        # A pipe could fill up while only stdout is read.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def outcomes(self, timeout: float) -> tuple[list[Outcome], str]:
        """Return the outcomes of one more pass, and the error or an empty string."""
        assert self.stdin is not None
        assert self.stdout is not None
        outcomes: list[Outcome] = []
        began = time.perf_counter()
        timer = threading.Timer(timeout, _kill, [self.pid])
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it ended early, which its status tells
                os.write(self.stdin.fileno(), b"\n")
            for line in self.stdout:
                if line == DONE:
                    return outcomes, ""
                if line.startswith(MARK):
                    outcomes.append(json.loads(line[len(MARK) :]))
            status = self.wait()
        finally:
            timer.cancel()
        if time.perf_counter() - began > timeout:
            return outcomes, f"took more than {timeout:g} s"
        if status == 0:
            return outcomes, ""
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()] or ["no message"]
        return outcomes, f"exit status {status}: {said[-1]}"

    def end(self) -> None:
        """Kill the process, of which no results are expected any more."""
        _kill(self.pid)
        with self, self._errors:
            pass  # closes the pipes
