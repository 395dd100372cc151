"""A loader with pinning, and a nested batch that stays pageable: the audit, the fix, and profiles
of both.

    python examples/weather_batch.py --out weather_batch.json --traces traces

The batches are the demo's: hours of weather and flights in custom classes. The same model trains on
them twice, from a DataLoader with `pin_memory=True`; only the line that brings a batch to the
device differs. torch's profiler records a few steps of each run, and `pinstage trace` reads them.
The losses must be equal bit for bit. Without a GPU nothing crosses a bus: the audit and the losses
are real, but there are no times to compare.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

import pinstage as ps
from demo.batch import RaggedBatch
from demo.data import Archive, make_batches
from demo.model import DelayModel, deterministic

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from comparison import record, table
from comparison.record import Row

WAIT, WARM_UP = 3, 3
FIGURES = {
    "staging": "staging_seconds",
    "GPU waits for staging": "stall_seconds",
    "step, profiled": "seconds",
}
"""Figures of a step, and their names in the JSON of `pinstage trace`."""

Loader = DataLoader[RaggedBatch]
Bring = Callable[[Any, torch.device], Iterator[RaggedBatch]]


def make_batch() -> RaggedBatch:
    """Return one batch, for `pinstage audit examples/weather_batch.py:make_batch`."""
    return make_batches(Archive.read(), batch_size=8, seed=0, limit=1)[0]


def before(loader: Loader, device: torch.device) -> Iterator[RaggedBatch]:
    """Bring batches to the device, leaf by leaf."""

    def move(leaf: Any) -> torch.Tensor:
        return torch.as_tensor(leaf).to(device, non_blocking=True)

    for batch in loader:
        yield batch.map_tensors(move)


def after(loader: Loader, device: torch.device) -> Iterator[RaggedBatch]:
    """Bring batches to the device as one slab each."""
    with ps.Stager(device, max_bytes="256MiB") as stager:
        for batch in loader:
            yield stager.to_device(batch)


WAYS: dict[str, Bring] = {"before": before, "after": after}


def train(
    bring: Bring, batches: list[RaggedBatch], device: torch.device, stepped: Callable[[], Any]
) -> list[float]:
    """Train one step per batch, starting from the same weights every time; return the losses."""
    loader: Any = DataLoader(batches, batch_size=None, pin_memory=device.type == "cuda")  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = DelayModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for batch in bring(loader, device):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stepped()
    return losses


def timed(
    bring: Bring, batches: list[RaggedBatch], device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the losses, and the seconds of each step after the warm-up."""
    ends: list[float] = []
    losses = train(bring, batches, device, lambda: ends.append(time.perf_counter()))
    return losses, [
        end - start for start, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)
    ]


def traced(bring: Bring, batches: list[RaggedBatch], device: torch.device, path: Path) -> None:
    """Write the profiler's trace of the steps on these batches, except the first ones."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    plan = schedule(wait=WAIT, warmup=WARM_UP, active=len(batches) - WAIT - WARM_UP, repeat=1)
    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as p:
        train(bring, batches, device, p.step)


def read(path: Path) -> dict[str, Any]:
    """Return the report of `pinstage trace` on a trace."""
    command = [sys.executable, "-m", "pinstage", "trace", str(path), "--json"]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return found


def rows_of(way: str, steps: list[float], report: dict[str, Any] | None) -> list[Row]:
    """Return the results of one way, as rows of a result file."""
    rows = [Row("weather_batch", case, way, "needs CUDA", ours=way == "after") for case in FIGURES]
    if report is not None:
        uploads = [group for group in report["trace"]["copies"] if group["direction"] == "HtoD"]
        pageable = sum(group["nbytes"] for group in uploads if group["kind"] == "pageable")
        copies = median(step["copies"] for step in report["trace"]["steps"])
        share = pageable / max(sum(group["nbytes"] for group in uploads), 1)
        counted = f"{copies:.0f} {'copy' if copies == 1 else 'copies'}"
        for row, name in zip(rows, FIGURES.values(), strict=True):
            row.status, row.detail = "ok", f"{counted}, {share:.0%} of the bytes pageable"
            row.fill([step[name] for step in report["trace"]["steps"]])
    rows.append(Row("weather_batch", "step", way, "ok", ours=way == "after"))
    rows[-1].fill(steps)
    return rows


def compare(rows: list[Row], reports: dict[str, dict[str, Any]]) -> Row:
    """Print both ways side by side; return the saving per step that the first trace predicts, as a
    row.
    """
    table.grid("ms, medians of a step", rows, "median")
    for way, report in reports.items():
        print(f"\n{way}: {report['verdict']}")
    predicted = Row("weather_batch", "saving, predicted", "before", "ok")
    predicted.fill([reports["before"]["packing"]["saved_seconds"]])
    then, now = (row.median or 0.0 for row in rows if row.case == "step")
    print(
        f"\nsaved, ms of a step: {predicted.median:.3g} predicted, {then - now:.3g} measured "
        "without the profiler"
    )
    return predicted


def main() -> int:
    """Audit, train both ways, compare; return 1 if the losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    parser.add_argument(
        "--traces", type=Path, default=Path("traces"), help="folder for the two traces"
    )
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60, help="steps timed without the profiler")
    parser.add_argument("--traced-steps", type=int, default=10)
    args = parser.parse_args()
    device = torch.device(args.device)
    args.traces.mkdir(parents=True, exist_ok=True)

    timed_steps, traced_steps = args.steps + WARM_UP, args.traced_steps + WAIT + WARM_UP
    batches = make_batches(Archive.read(), batch_size=8, seed=0, limit=timed_steps + traced_steps)
    print(ps.audit(batches[0]))

    losses, steps, rows, reports = {}, {}, [], {}
    with deterministic(device):
        for way, bring in WAYS.items():
            losses[way], steps[way] = timed(bring, batches[:timed_steps], device)
        # After all timing: the profiler's hooks may stay in the driver and slow down every later
        # call.
        for way, bring in WAYS.items():
            path = args.traces / f"{way}.json.gz"
            # Other batches, so that no layout repeats.
            traced(bring, batches[timed_steps:], device, path)
            if device.type == "cuda":
                reports[way] = read(path)
            rows += rows_of(way, steps[way], reports.get(way))
    equal = losses["before"] == losses["after"]
    how = "equal bit for bit" if equal else "NOT equal"
    print(f"\n{len(losses['before'])} losses, before and after: {how}")
    print(f"written: {args.traces / 'before.json.gz'} and {args.traces / 'after.json.gz'}")
    if reports:
        rows.append(compare(rows, reports))
    else:
        print("no GPU: nothing crosses a bus, so pinstage trace has nothing to compare")
    if args.out:
        settings = {"batch_size": 8, "steps": args.steps, "traced_steps": args.traced_steps}
        record.save(args.out, record.result_of("weather_batch", settings, rows))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
