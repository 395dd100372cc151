"""The command `pinstage`: audit a batch, look at this machine, read a trace, watch a host.

Its libraries (typer, rich, matplotlib) come with extras: without them doctor runs plainly, the other commands say
which one to install, and importing `pinstage` is never affected.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pinstage as ps

EXTRA_OF = {"typer": "cli", "rich": "cli", "matplotlib": "plot"}
"""Packages that a plain installation does without, and the extra that brings them."""
MOVED = {"demo": "examples/demo", "bench": "benchmarks/comparison"}
"""What were commands, and are programs of the source repository."""
TRACEBACK_VARIABLE = "PINSTAGE_TRACEBACK"

HELP = """
A pool of page-locked staging buffers for PyTorch.

Any nested batch is packed into one page-locked slab and sent to the GPU asynchronously:

\b
    import pinstage as ps
    stager = ps.Stager("cuda:0", max_bytes="2GiB")
    for batch in loader:
        batch = stager.to_device(batch)

To find out why a program of yours is slow, before you change it:

\b
    pinstage audit train.py:make_loader    its batches: what is pinned, what is not, what copies cost
    pinstage doctor                        this machine: driver, bus, limits
    pinstage trace trace.json.gz           a trace that the PyTorch profiler wrote
    pinstage top                           this host: who holds what of a HostBudget
"""

AUDIT_HELP = """
Say what a batch is made of, what pin_memory=True would really pin of it, and what moving it costs.

TARGET is module:callable, or path/to/file.py:callable. It is called without arguments and returns a batch, or a
DataLoader or other iterable, whose first batch is taken. Nothing is moved or changed.

\b
    pinstage audit train.py:make_loader
    pinstage audit mypackage.data:example_batch --bus pageable=8,pinned=55
"""

DOCTOR_HELP = """
Look at this machine: CUDA, driver, PCIe, page-locked memory, limits of memory and CPUs; say what to do.

Where there is a GPU, copies are measured by size, direction and kind of memory, which takes some seconds and wants
an idle machine. Each line is ok, info, WARNING or PROBLEM. The exit status is 1 if anything is a PROBLEM.

\b
    pinstage doctor --plot bandwidth.png
    pinstage doctor --json
"""

TRACE_HELP = """
Read a trace of the PyTorch profiler, and say what copies between host and device cost.

PATH is a .json or .json.gz file, or a folder with one for each rank. A trace is recorded like this:

\b
    from torch.profiler import ProfilerActivity, profile, schedule
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
                 schedule=schedule(wait=5, warmup=5, active=20, repeat=1),
                 on_trace_ready=lambda p: p.export_chrome_trace("trace.json.gz")) as profiler:
        for batch in loader:
            train_step(batch)
            profiler.step()             # so that the trace knows the steps

\b
    pinstage trace trace.json.gz --html report.html
    pinstage trace trace.json.gz --step-ms 1.7    what a step takes without the profiler: a closer estimate
    pinstage trace --example                      a trace that comes with pinstage
"""

TOP_HELP = """
Show who holds what of each HostBudget on this host: process, pool, owner, bytes, waits.

On a terminal the picture is drawn anew each second, until Ctrl-C. Into a pipe it is printed once.

\b
    pinstage top
    pinstage top --once
    pinstage top --json
"""

BUS_HELP = 'The bus, if it is another machine\'s: GB/s and microseconds a call, "pageable=8,pinned=55,call=7.5".'
STEP_HELP = "Milliseconds of a step without the profiler, if you measured them; else they are estimated."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused or not installed.

    Errors are one message on stderr; set PINSTAGE_TRACEBACK=1 to see where one came from.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in MOVED:
        _exit(f"{given[0]} is no longer a command; in a clone of the repository: python {MOVED[given[0]]}", 2)
    try:
        if given and given[0] == "doctor" and not all(map(importlib.util.find_spec, ("typer", "rich"))):
            _plain_doctor(given[1:])
        build_app()(args=given, prog_name="pinstage")
    except Exception as error:  # the last frame: whatever it is, the user gets a message
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _fail(error)


def build_app() -> Any:
    """Return the typer application; needs typer and rich."""
    import typer

    app = typer.Typer(
        name="pinstage",
        help=HELP,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(value: bool) -> None:
        if value:
            typer.echo(f"pinstage {ps.__version__}")
            raise typer.Exit

    @app.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
        ] = False,
    ) -> None:
        pass  # with a callback, the only command there is still has to be named

    json_option = typer.Option("--json", help="Print JSON for programs; sizes in bytes, times in seconds.")

    @app.command(help=AUDIT_HELP)
    def audit(
        target: Annotated[str, typer.Argument(metavar="TARGET", help="module:callable or file.py:callable.")],
        bus: Annotated[str | None, typer.Option(help=BUS_HELP)] = None,
        every_leaf: Annotated[bool, typer.Option("--all", help="Show all leaves, not the first 40.")] = False,
        as_json: Annotated[bool, json_option] = False,
    ) -> None:
        from pinstage.inspect._commands import run_audit

        raise typer.Exit(run_audit(target, bus=bus, as_json=as_json, every_leaf=every_leaf))

    @app.command(help=DOCTOR_HELP)
    def doctor(
        device: Annotated[str | None, typer.Option(help="The GPU to measure, such as cuda:1.")] = None,
        measure: Annotated[bool, typer.Option(help="Measure copies, where there is a GPU.")] = True,
        plot: Annotated[Path | None, typer.Option(help="Draw the bandwidth into this PNG file.")] = None,
        as_json: Annotated[bool, json_option] = False,
    ) -> None:
        from pinstage.inspect._commands import run_doctor

        raise typer.Exit(run_doctor(device=device, measuring=measure, plot=plot, as_json=as_json))

    @app.command(help=TRACE_HELP)
    def trace(
        path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="A trace, or a folder of them.")] = None,
        html: Annotated[
            Path | None, typer.Option(help="Write a report with a timeline and all tables; one file, no network.")
        ] = None,
        bus: Annotated[str | None, typer.Option(help=BUS_HELP)] = None,
        step_ms: Annotated[float | None, typer.Option(help=STEP_HELP)] = None,
        every_step: Annotated[bool, typer.Option("--all", help="Show all steps, not the worst 12.")] = False,
        as_json: Annotated[bool, json_option] = False,
        example: Annotated[bool, typer.Option("--example", help="Read the trace that comes with pinstage.")] = False,
    ) -> None:
        from pinstage.inspect._commands import run_trace

        status = run_trace(
            path,
            bus=bus,
            html_file=html,
            as_json=as_json,
            every_step=every_step,
            step_ms=step_ms,
            example=example,
        )
        raise typer.Exit(status)

    @app.command(help=TOP_HELP)
    def top(
        once: Annotated[bool, typer.Option("--once", help="Print it once, as plain text.")] = False,
        as_json: Annotated[bool, json_option] = False,
    ) -> None:
        from pinstage.inspect._top import run_top

        raise typer.Exit(run_top(once=once, as_json=as_json))

    return app


def _plain_doctor(arguments: Sequence[str]) -> NoReturn:
    """Run doctor where the extra is not installed: a machine is looked at before it is set up."""
    parser = argparse.ArgumentParser("pinstage doctor", description=DOCTOR_HELP.replace("\b\n", ""))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", help="the GPU to measure, such as cuda:1")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="measure copies")
    parser.add_argument("--plot", type=Path, help="draw the bandwidth into this PNG file")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON for programs")
    options = vars(parser.parse_args(arguments))
    from pinstage.inspect._commands import run_doctor

    sys.exit(run_doctor(measuring=options.pop("measure"), **options))


def _fail(error: Exception) -> None:
    known = getattr(error, "exit_status", None)
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRA_OF:
        message, status = f'{package} is not installed; run: pip install "pinstage[{EXTRA_OF[package]}]"', 2
    elif isinstance(known, int):
        message, status = str(error), known
    else:
        message, status = f"{type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows where)", 1
    _exit(message, status)


def _exit(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"pinstage: {message}\n")
    sys.exit(status)
