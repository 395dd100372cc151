"""The demo from first line to last: choose a device, make the batches, train four ways, compare,
report.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from demo.data import Archive, make_batches
from demo.errors import DemoError
from demo.model import deterministic
from demo.report import Report
from demo.train import (
    MEASURED_BATCHES,
    WARM_UP_BATCHES,
    Outcome,
    check_losses,
    measure,
    profile_copies,
    warm_up,
)
from demo.ways import Loaded, PinThenTo, PlainTo, Staged, Way
from demo.workers import batch_milliseconds


@dataclass(frozen=True)
class Settings:
    """The options.

    Attributes:
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        batch_size: Hours per batch.
        batches: Number of batches; None for the whole year.
        epochs: Passes over the batches.
        seed: Fixes the order of the hours and the weights of the model.
        max_bytes: Cap on the Stager's memory.
    """

    device: str = "auto"
    batch_size: int = 8
    batches: int | None = None
    epochs: int = 1
    seed: int = 0
    max_bytes: str = "256MiB"


def run_demo(settings: Settings, report: Report | None = None) -> list[Outcome]:
    """Run the demo and print it.

    Raises:
        DemoError: The device is missing, or the data is not installed.
        LossMismatchError: The ways did not train to the same losses.
    """
    report = report or Report()
    device = choose_device(settings.device)
    report.device(device, asked=settings.device == "cpu")
    archive = Archive.read()
    report.audit(
        make_batches(archive, batch_size=settings.batch_size, seed=settings.seed, limit=1)[0]
    )
    report.line(
        "training on the same batches, staged in four ways; the whole year takes about a minute"
    )
    total = -(-len(archive.hours) // settings.batch_size)
    if settings.batches is not None:
        total = min(total, settings.batches)
    with report.progress("preparing batches", total) as on_batch:
        batches = make_batches(
            archive,
            batch_size=settings.batch_size,
            seed=settings.seed,
            limit=settings.batches,
            on_batch=on_batch,
        )
        # From another shuffle, so that these batches are new to every way when it is timed.
        others = make_batches(
            archive,
            batch_size=settings.batch_size,
            seed=settings.seed + 1,
            limit=WARM_UP_BATCHES + min(total, MEASURED_BATCHES),
        )
        warming, others = others[:WARM_UP_BATCHES], others[WARM_UP_BATCHES:] or others
    report.data(archive, batches)

    with ExitStack() as stack:
        stack.enter_context(deterministic(device))
        ways = make_ways(device, settings.max_bytes, stack)
        # The batches are a million objects that are kept to the end: keep the collector from
        # walking them.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        outcomes = []
        for way in ways:
            warm_up(way, warming, device)
            with report.progress(way.title, len(batches) * settings.epochs) as on_batch:
                outcomes.append(
                    measure(
                        way,
                        batches,
                        others,
                        device,
                        seed=settings.seed,
                        epochs=settings.epochs,
                        on_batch=on_batch,
                    )
                )
        outcomes = [profile_copies(outcome, batches, device) for outcome in outcomes]
    report.table(outcomes)
    check_losses(outcomes)
    if device.type == "cpu":
        report.workers(batch_milliseconds(batches))
    report.verdict(outcomes)
    return outcomes


def make_ways(device: torch.device, max_bytes: str, stack: ExitStack) -> Sequence[Way]:
    """Return the four ways, ours last; `stack` closes them.

    Raises:
        DemoError: `max_bytes` isn't a size.
    """
    try:
        staged = stack.enter_context(Staged(device, max_bytes))
    except ValueError as error:
        raise DemoError(f"--max-bytes: {error}") from error
    return [PlainTo(device), PinThenTo(device), staged, Loaded(device, max_bytes)]


def choose_device(text: str) -> torch.device:
    """Return the device to run on: for "auto", a GPU if there is one.

    Raises:
        DemoError: The device is unknown or missing.
    """
    if text == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f'unknown device {text!r}: say "auto", "cpu", "cuda" or "cuda:1"')
    if device.type == "cpu":
        return torch.device("cpu")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= present:
        raise DemoError(
            f"{text!r} is not there: torch sees {present} CUDA devices; "
            '"--device cpu" runs without one'
        )
    return torch.device("cuda", index)
