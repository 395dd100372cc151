"""Record the traces that the tests of `pinstage trace` read, on a machine with a GPU.

    python scripts/record_traces.py --out tests/traces

One training loop over the same nested batches, brought to the device in three ways: `.to()` on each leaf; a DataLoader
with ``pin_memory=True`` and then `.to(non_blocking=True)` on each leaf; `pinstage.Stager`. For each way a trace of a
few steps, ``<way>.json.gz``; and ``times.json`` with the median time of a step without the profiler, for the docs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import pinstage as ps

Batch = dict[str, list[torch.Tensor]]
WAYS = ("naive", "pin_memory", "pinstage")
WIDTH = 2048  # of the model: its kernels take about as long as staging, on an H200
WARM_UP = 5


def main() -> None:
    """Record all three."""
    parser = argparse.ArgumentParser(description="Record the traces that the tests of pinstage trace read.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--leaves", type=int, default=96)
    parser.add_argument("--leaf-bytes", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6, help="in each trace")
    parser.add_argument("--timed-steps", type=int, default=60)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    batches = [make_batch(options.leaves, options.leaf_bytes, seed) for seed in range(8)]
    layers = [torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5 for _ in range(4)]
    # First of all: what the profiler puts into the driver may stay there, and make every later call slower.
    medians = {way: statistics.median(timed(way, batches, layers, device, options.timed_steps)) for way in WAYS}
    for way in WAYS:
        path = options.out / f"{way}.json.gz"
        record(path, way, batches, layers, device, options.steps)
        print(f"{way}: {medians[way] * 1e3:.3f} ms a step, {path} has {path.stat().st_size:,} bytes")  # noqa: T201
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "leaves": options.leaves,
        "leaf_bytes": options.leaf_bytes,
        "step_seconds_without_profiler": medians,
    }
    (options.out / "times.json").write_text(json.dumps(about, indent=2) + "\n")


def make_batch(leaves: int, leaf_bytes: int, seed: int) -> Batch:
    """Return a nested batch of float32 leaves of one size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(leaf_bytes // 4, generator=generator) for _ in range(leaves)]
    return {f"stream_{first}": tensors[first::8] for first in range(min(8, leaves))}


def staged(way: str, batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device, brought there in one of the ways."""
    cuda = device.type == "cuda"
    if way == "naive":
        for batch in batches:
            yield {name: [leaf.to(device) for leaf in leaves] for name, leaves in batch.items()}
    elif way == "pin_memory":
        loader: Any = torch.utils.data.DataLoader(list(batches), batch_size=None, num_workers=2, pin_memory=cuda)
        for batch in loader:
            yield {name: [leaf.to(device, non_blocking=True) for leaf in leaves] for name, leaves in batch.items()}
    else:
        with ps.Stager(device, max_bytes="64MiB") as stager:
            for batch in batches:
                yield stager.to_device(batch)


def train_step(batch: Batch, layers: list[torch.Tensor]) -> float:
    """Do some work that depends on all leaves, and wait for its result, as a loop does that prints its loss."""
    features = torch.stack([leaf for leaves in batch.values() for leaf in leaves])
    hidden = torch.nn.functional.pad(features, (0, max(0, WIDTH - features.shape[1])))[:, :WIDTH]
    for layer in layers * 4:
        hidden = torch.relu(hidden @ layer)
    return float(hidden.mean().item())


def loop(
    way: str,
    batches: list[Batch],
    layers: list[torch.Tensor],
    device: torch.device,
    steps: int,
    after: Callable[[], None],
) -> None:
    """Train for some steps; call `after` at the end of each."""
    endless = [batches[step % len(batches)] for step in range(steps)]
    for batch in staged(way, endless, device):
        train_step(batch, layers)
        after()


def timed(way: str, batches: list[Batch], layers: list[torch.Tensor], device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each step, without the profiler; the first ones left out."""
    ends: list[float] = []
    loop(way, batches, layers, device, steps + WARM_UP, lambda: ends.append(time.perf_counter()))
    return [end - start for start, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]


def record(
    path: Path, way: str, batches: list[Batch], layers: list[torch.Tensor], device: torch.device, steps: int
) -> None:
    """Write the trace of some steps."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    plan = schedule(wait=WARM_UP, warmup=3, active=steps, repeat=1)
    plain = path.with_suffix("")
    with profile(activities=activities, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(plain))) as p:
        loop(way, batches, layers, device, WARM_UP + 3 + steps, p.step)
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=9) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


if __name__ == "__main__":
    main()
