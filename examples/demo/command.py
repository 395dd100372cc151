"""The command line of the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from demo.errors import REMEDY, DemoError

ABOUT = """
Train a small model on one year of weather and flights, staged in four ways.

The data is nested, ragged and fragmented: hundreds of small numpy and torch arrays per batch, in
custom classes. The same batches are brought to the device by .to() on each leaf, by pin_memory()
and .to() on each leaf, by ps.Stager, and by the workers of ps.DataLoader. A table compares time,
copies, bytes and memory. The four loss curves must be equal bit for bit: the program fails (exit
status 1) if they are not.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 0, 1 if it failed, 2 for a usage error. Errors are reported in one
    line.
    """
    args = parser().parse_args(arguments)
    try:
        from demo.run import Settings, run_demo

        run_demo(Settings(**vars(args)))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        return _failed(f"rich is not installed; run: {REMEDY}", 2)
    except (DemoError, MemoryError) as error:  # a BudgetExceededError is a MemoryError
        return _failed(str(error), getattr(error, "exit_status", 1))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser; its destinations are the fields of `Settings`."""
    found = argparse.ArgumentParser(
        "python examples/demo",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add(
        "--device",
        default="auto",
        help='"cpu", "cuda" or "cuda:1"; "auto" takes a GPU if there is one',
    )
    add(
        "--batch-size", type=at_least(1), default=8, help="hours per batch; about 80 fragments each"
    )
    add("--batches", type=at_least(1), help="use this many batches, not the whole year")
    add("--epochs", type=at_least(1), default=1, help="passes over the batches")
    add(
        "--seed",
        type=at_least(0),
        default=0,
        help="fixes the order of the hours and the model's weights",
    )
    add("--max-bytes", default="256MiB", help="cap on the Stager's memory")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an integer option with a minimum."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not {least} or more")
        return int(text)

    return number


def _failed(message: str, status: int) -> int:
    sys.stderr.write(f"demo: {message}\n")
    return status
