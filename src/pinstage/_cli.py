"""A pool of page-locked staging buffers for PyTorch.

Any nested batch is packed into one page-locked slab and sent to the GPU asynchronously:

    import pinstage as ps
    stager = ps.Stager("cuda:0", max_bytes="2GiB")
    for batch in loader:
        batch = stager.to_device(batch)

The commands show why a program is slow, before you change it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

import pinstage as ps

TRACEBACK_VARIABLE = "PINSTAGE_TRACEBACK"
_BUS = (
    'another machine\'s bus: GB/s, and microseconds per call, as in "pageable=8,pinned=55,call=7.5"'
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 1 for failure, 2 for wrong usage or a missing
    package.

    Errors are one line on stderr; set PINSTAGE_TRACEBACK=1 to see where an error came from.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        sys.exit(2)
    try:
        status = options.run(options)
        sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except Exception as error:  # the user gets a message for any error
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        if isinstance(error, ps.errors.TargetError | ps.errors.TraceError):
            _exit(str(error))
        _exit(f"{type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows where)", 1)


class _Formatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description, and keeps its indented examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part
            if part.startswith(" ")
            else super(_Formatter, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        message = re.sub("^the following arguments are required: ", "missing ", message)
        message = re.sub("^argument COMMAND: invalid choice: ", "no command ", message)
        _exit(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. A command is a function; its docstring is the help."""
    parser = _Parser("pinstage", description=__doc__, formatter_class=_Formatter)
    version = f"pinstage {ps.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = cleandoc(run.__doc__ or "")
        summary = text.partition("\n")[0]
        subparser = commands.add_parser(
            run.__name__, help=summary, description=text, formatter_class=_Formatter
        )
        subparser.set_defaults(run=run)
        json_help = "print JSON for programs; sizes in bytes, times in seconds"
        subparser.add_argument("--json", action="store_true", help=json_help)
        return subparser

    add = command(audit).add_argument
    add("target", metavar="TARGET", help="module:callable or file.py:callable")
    add("--bus", type=_bus, help=_BUS)
    add("--all", action="store_true", help="show all leaves, not only the first 40")
    add = command(doctor).add_argument
    add("--device", type=_device, help="the GPU to measure, such as cuda:1")
    text = "measure copies if there is a GPU"
    add("--measure", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--plot", type=Path, metavar="FILE", help="draw the bandwidth into this PNG file")
    subparser = command(trace)
    source = subparser.add_mutually_exclusive_group(required=True).add_argument
    text = "a .json or .json.gz file of the profiler"
    source("path", metavar="PATH", nargs="?", type=Path, help=text)
    source("--example", action="store_true", help="read the trace that comes with pinstage")
    add = subparser.add_argument
    add("--bus", type=_bus, help=_BUS)
    text = "milliseconds per step without the profiler; estimated by default"
    add("--step-ms", type=float, metavar="MS", help=text)
    command(top).add_argument("--once", action="store_true", help="print it once, as plain text")
    return parser


def _bus(text: str) -> Any:
    """Read ``"pageable=8,pinned=55"``, optionally with ``call=7.5``."""
    from .inspect import Bus

    try:
        pairs = [part.split("=") for part in text.split(",")]
        figures: dict[str, Any] = {name.strip(): float(value) for name, value in pairs}
        return Bus(**figures) if len(figures) == len(pairs) else Bus(0, 0)
    except (TypeError, ValueError):
        example = "pageable=8,pinned=55,call=7.5"
        raise argparse.ArgumentTypeError(
            f"not a bus: {text!r}; write GB/s and microseconds, as in {example}"
        ) from None


def _device(text: str) -> int:
    """Return the index of a GPU."""
    match = re.fullmatch(r"cuda(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a CUDA device: {text!r}; write cuda or cuda:1")
    return int(match[1] or 0)


def audit(options: argparse.Namespace) -> int:
    """Show what a batch is made of, what pin_memory=True really pins, and what copying it costs.

    TARGET is module:callable, or path/to/file.py:callable. It is called without arguments and
    returns a batch, or a DataLoader or other iterable, whose first batch is taken. Nothing is moved
    or changed.

        pinstage audit train.py:make_loader
        pinstage audit mypackage.data:example_batch --bus pageable=8,pinned=55
    """
    from .inspect import _audit, _report, _target

    with _target.prints_on_stderr():
        batch, advice = _target.first_batch(options.target)
        findings = _audit.audit(batch, bus=options.bus)
    sections = _audit.sections_of(findings, every_leaf=options.all)
    if advice:
        sections.insert(0, _report.Line(advice, "warning"))
    _report.show(findings.to_dict() if options.json else sections)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Check this machine: CUDA, driver, PCIe, page-locked memory, limits of memory and CPUs.

    If there is a GPU, copies are measured by size, direction and kind of memory. That takes a few
    seconds and needs an idle machine. Each line is ok, info, WARNING or PROBLEM. The exit status is
    1 if anything is a PROBLEM.

        pinstage doctor --plot bandwidth.png
        pinstage doctor --json
    """
    from .inspect import _doctor, _report

    # Before measuring.
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        _exit('matplotlib is not installed; run: pip install "pinstage[plot]"')
    diagnosis = _doctor.diagnose(device=options.device, measuring=options.measure)
    _report.show(diagnosis.to_dict() if options.json else diagnosis.sections())
    if options.plot is not None:
        gpu = diagnosis.gpu
        if gpu is None:
            _exit(
                f"nothing was measured, so {options.plot} is not drawn; that needs a GPU, and no "
                "--no-measure"
            )
        _doctor.save_plot(diagnosis.points, options.plot, title=gpu.name, link_rate=gpu.link_rate)
        sys.stderr.write(f"written: {options.plot}\n")
    return int(diagnosis.has_problem)


def trace(options: argparse.Namespace) -> int:
    """Read a trace of the PyTorch profiler, and show what copies between host and device cost.

    A trace is recorded like this:

        from torch.profiler import ProfilerActivity, profile, schedule
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
                     schedule=schedule(wait=5, warmup=5, active=20, repeat=1),
                     on_trace_ready=lambda p: p.export_chrome_trace("trace.json.gz")) as profiler:
            for batch in loader:
                train_step(batch)
                profiler.step()             # so that the trace knows the steps

        pinstage trace trace.json.gz
        pinstage trace trace.json.gz --step-ms 1.7  # a step without the profiler: a closer estimate
        pinstage trace --example                    # a trace that comes with pinstage
    """
    from .inspect import _report, _trace

    if options.step_ms is not None and not 0 < options.step_ms < math.inf:
        _exit(
            f"--step-ms must be above zero: {options.step_ms:g}; milliseconds of a step without "
            "the profiler"
        )
    path = options.path or Path(__file__).with_name("inspect") / "example.json.gz"
    step_seconds = options.step_ms and options.step_ms / 1e3
    report = _trace.trace_report(path, bus=options.bus, step_seconds=step_seconds)
    _report.show(report.to_dict() if options.json else report.sections())
    return 0


def top(options: argparse.Namespace) -> int:
    """Show each HostBudget of this host: the bytes that the pools of each process hold.

    On a terminal, the table is redrawn every second until Ctrl-C. Into a pipe, it is printed once.

        pinstage top
        pinstage top --once
        pinstage top --json
    """
    from .inspect._top import run_top

    return run_top(once=options.once, as_json=options.json)


def _exit(message: str, status: int = 2) -> NoReturn:
    sys.stderr.write(f"pinstage: {message}\n")
    sys.exit(status)
