"""Compare the savings that `pinstage trace` predicts with measured ones, for several loops on a
machine with a GPU.

    python scripts/record_traces.py --out tests/traces/loops    # two minutes of an idle GPU
    python scripts/record_traces.py --out /tmp/loops --smoke    # a test of the script, on the CPU
    python scripts/record_traces.py --check tests/traces/loops  # prints the table from the files

Each loop is timed with its own line (`.to()` on each leaf) and with `Stager.to_device` instead, in
turn, without the profiler. Half-way through, another process records a trace of the loop's own
line: a host's speed varies from minute to minute, and the profiler's hooks stay in the driver.
``loops.json`` has the times, and the cost of staging on this machine. Two loops are excluded from
any fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import pinstage as ps
from pinstage.inspect._bus import Cost
from pinstage.inspect._trace import trace_report

Batch = dict[str, list[torch.Tensor]]
BATCHES, WARM_UP, ROUNDS, TRACED = 8, 5, 11, 6
NEAR, NEAR_SECONDS = 0.2, 0.2e-3
"""A promise is kept if it is within either of these of the measured saving."""
SMALL_BATCH, MANY_LEAVES, LARGE_BATCH = (4, 8192), (512, 64), (8, 1 << 20)
"""Leaves, and float32 elements per leaf; all these batches take a slab."""
KEPT_CATEGORIES = {
    "gpu_memcpy",
    "gpu_memset",
    "kernel",
    "cuda_runtime",
    "cuda_driver",
    "cpu_op",
    "user_annotation",
}
NAMED_OPS = (
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::pin_memory",
    "aten::_pin_memory",
    "aten::cuda",
)
NAMED_OPS += ("aten::cpu", "aten::item", "aten::_local_scalar_dense")


@dataclass(frozen=True)
class Loop:
    """A training loop."""

    name: str
    make: Callable[[torch.Generator, float], Batch]
    page_locked: bool = False  # the batches, before the loop starts
    non_blocking: bool = False
    workers: int = 0
    waits: bool = True  # for the loss, in every step
    rows: int = 512  # of the model's input, with 2048 columns: 30 us per layer on an H200
    layers: int = 12  # of the model
    kept_out: bool = False


def leaves_of(count: int, elements: int) -> Callable[[torch.Generator, float], Batch]:
    """Return a function that makes batches of leaves of one size."""

    def make(generator: torch.Generator, scale: float) -> Batch:
        size = max(1, int(elements * scale))
        return {"leaves": [torch.randn(size, generator=generator) for _ in range(count)]}

    return make


def images(generator: torch.Generator, scale: float) -> Batch:
    """Make two leaves: 64 images and their labels."""
    side = max(8, int(224 * scale))
    return {
        "image": [torch.randn(64, 3, side, side, generator=generator)],
        "label": [torch.zeros(64).long()],
    }


def graphs(generator: torch.Generator, scale: float) -> Batch:
    """Make 257 ragged leaves: 64 graphs of four tensors each, and a mask."""
    batch: Batch = {"x": [], "edge_index": [], "edge_attr": [], "y": [], "mask": [torch.ones(64)]}
    for _ in range(64):
        nodes = 8 + int(torch.randint(52, (), generator=generator) * scale)
        batch["x"].append(torch.randn(nodes, 16, generator=generator))
        batch["edge_index"].append(torch.zeros(2, 3 * nodes, dtype=torch.int64))
        batch["edge_attr"].append(torch.randn(3 * nodes, 4, generator=generator))
        batch["y"].append(torch.randn(1, generator=generator))
    return batch


def detection(generator: torch.Generator, scale: float) -> Batch:
    """Make 192 ragged leaves: 48 samples of image, boxes, labels and masks."""
    batch: Batch = {"image": [], "boxes": [], "labels": [], "masks": []}
    for _ in range(48):
        height, width = (
            int(side) for side in torch.randint(200, 320, (2,), generator=generator) * scale
        )
        objects = int(torch.randint(1, 20, (), generator=generator))
        batch["image"].append(torch.zeros(3, height, width, dtype=torch.uint8))
        batch["boxes"].append(torch.randn(objects, 4, generator=generator))
        batch["labels"].append(torch.zeros(objects, dtype=torch.int64))
        batch["masks"].append(torch.zeros(objects, 28, 28, dtype=torch.uint8))
    return batch


SMALL = leaves_of(96, 2048)
LOOPS = (
    Loop("images", images),
    Loop("images-pinned-async", images, page_locked=True, non_blocking=True),
    Loop("small-leaves", SMALL),
    Loop(
        "small-leaves-pinned-async-ahead", SMALL, page_locked=True, non_blocking=True, waits=False
    ),
    Loop("graphs", graphs),
    Loop("detection", detection),
    Loop("detection-pinned-async", detection, page_locked=True, non_blocking=True),
    Loop("bound-by-its-model", SMALL, waits=False, rows=16384, layers=6),
    Loop(
        "workers-few-leaves",
        leaves_of(8, 65536),
        page_locked=True,
        non_blocking=True,
        workers=2,
        rows=8192,
        layers=8,
    ),
    Loop("workers-small-leaves", SMALL, workers=2),
    Loop("thousand-leaves-ahead", leaves_of(1000, 64), waits=False, kept_out=True),
    Loop("megabytes-async", leaves_of(16, 1 << 18), non_blocking=True, kept_out=True),
)


def main() -> None:
    """Record, or check what was recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path, metavar="FOLDER")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=40, help="steps per round and loop")
    parser.add_argument("--smoke", action="store_true", help="a small run on the CPU")
    options = parser.parse_args()
    if options.check is None:
        if options.out is None:
            parser.error("--out or --check")
        record_all(
            options.out,
            torch.device("cpu" if options.smoke else options.device),
            options.steps,
            options.smoke,
        )
    if options.smoke:
        print("smoke: the script works; a CPU's traces have no copies, and nothing is judged")  # noqa: T201
        return
    rows, missed = check(options.check or options.out)
    print("\n".join(rows))  # noqa: T201
    if missed:
        sys.exit(f"not kept: {', '.join(missed)}")


def check(folder: Path) -> tuple[list[str], list[str]]:
    """Return a table of promised and measured savings, in ms, and the loops with a broken promise.

    A promise is kept if the likely saving, from the trace and the step time without the profiler,
    is near the measured one. Where pinstage would be slower, the right promise is zero. A loop is
    "not decided" if its error is within the spread of its own rounds. The range that the trace
    alone promises has its own column.
    """
    about = json.loads((folder / "loops.json").read_text())
    cost = Cost(**about["cost"])
    rows = ["| loop | step | saved | promised with `--step-ms` | kept | from the trace alone | |"]
    rows += ["|---|---|---|---|---|---|---|"]
    missed = []
    for name, found in about["loops"].items():
        own, saved = found["own_seconds"], found["own_seconds"] - found["pinstage_seconds"]
        path, gained = folder / f"{name}.json.gz", max(saved, 0.0)
        promised, alone = (
            trace_report(path, cost=cost, step_seconds=step).packing for step in (own, None)
        )
        noise = math.hypot(found["own_spread"], found["pinstage_spread"]) / 2
        off, near = abs(promised.saved_seconds - gained), max(NEAR * abs(saved), NEAR_SECONDS)
        word = "yes" if off <= near else "not decided" if off <= near + noise else "**no**"
        missed += [name] * (word == "**no**")
        inside = "saved less" if gained < alone.least_saved_seconds else "inside"
        inside = "saved more" if gained > alone.most_saved_seconds else inside
        rows.append(
            f"| {name}{' (kept out)' if found['kept_out'] else ''} | {ms(own)} | {ms(saved)} ± "
            f"{ms(noise)} | {ms(promised.saved_seconds)} ({ms(promised.least_saved_seconds)} to "
            f"{ms(promised.most_saved_seconds)}) | {word} | {ms(alone.least_saved_seconds)} to "
            f"{ms(alone.most_saved_seconds)} | {inside} |"
        )
    return rows, missed


def ms(seconds: float) -> str:
    """Return seconds as text, in milliseconds."""
    return f"{seconds * 1e3:.2f}"


def record_all(out: Path, device: torch.device, steps: int, smoke: bool) -> None:
    """Time all loops; another process records their traces meanwhile."""
    out.mkdir(parents=True, exist_ok=True)
    steps, rounds, scale = (3, 1, 0.05) if smoke else (steps, ROUNDS, 1.0)
    model = model_of(device, smoke)
    times: dict[str, dict[str, Any]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as recorder, ps.Stager(device, max_bytes="1GiB") as stager:
        for loop in loops(smoke):
            batches = make_batches(loop, device, scale)
            took: dict[str, list[float]] = {"own": [], "pinstage": []}
            for number in range(rounds):
                if number == rounds // 2:
                    recorder.submit(
                        record, out / f"{loop.name}.json.gz", loop.name, str(device), scale, smoke
                    ).result()
                took["own"].append(
                    seconds_a_step(loop, batches, own_line(loop, device), model, steps)
                )
                took["pinstage"].append(
                    seconds_a_step(loop, batches, stager.to_device, model, steps)
                )
            times[loop.name] = {
                f"{way}_seconds": statistics.median(found) for way, found in took.items()
            }
            times[loop.name] |= {
                f"{way}_spread": max(found) - min(found) for way, found in took.items()
            }
            times[loop.name] |= {f"{way}_rounds": found for way, found in took.items()}
            batch = batches[0]
            times[loop.name] |= {
                "leaves": sum(map(len, batch.values())),
                "nbytes": sum(leaf.nbytes for leaves in batch.values() for leaf in leaves),
                "kept_out": loop.kept_out,
            }
            print(loop.name, {k: ms(v) for k, v in times[loop.name].items() if "seconds" in k})  # noqa: T201
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "steps": steps,
        "rounds": rounds,
        "cost": dataclasses.asdict(measure_cost(device)),
        "loops": times,
    }
    (out / "loops.json").write_text(json.dumps(about, indent=2) + "\n")


def measure_cost(device: torch.device) -> Cost:
    """Measure the cost of staging, with a step of a small model between batches; takes about a
    second.
    """
    with ps.Stager(device) as stager:
        small, many, large = (
            stage_seconds(stager, device, *shape)
            for shape in (SMALL_BATCH, MANY_LEAVES, LARGE_BATCH)
        )
    leaf = max(many - small, 1e-9) / (MANY_LEAVES[0] - SMALL_BATCH[0])
    fixed = max(small - SMALL_BATCH[0] * leaf, 1e-6)
    rate = LARGE_BATCH[0] * LARGE_BATCH[1] * 4 / max(large - fixed - LARGE_BATCH[0] * leaf, 1e-6)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return Cost(
        fixed, leaf, rate, f"{where}, by scripts/record_traces.py on {time.strftime('%Y-%m-%d')}"
    )


def stage_seconds(stager: ps.Stager, device: torch.device, leaves: int, elements: int) -> float:
    """Return the median time until a batch is on the device, over several ragged batches in
    turn.
    """
    batches = [
        {f"leaf{i}": torch.ones(elements + (i + shift) % 7) for i in range(leaves)}
        for shift in range(BATCHES)
    ]
    width = 1024 if device.type == "cuda" else 32
    weights = torch.eye(width, device=device)
    took: list[float] = []
    for batch in batches * 5:
        hidden = weights
        for _ in range(20):
            hidden = torch.relu(hidden @ weights)
        hidden.mean().item()
        began = time.perf_counter()
        transfer = stager.stage(batch)
        transfer.wait()
        transfer.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[BATCHES:])


def loops(smoke: bool) -> list[Loop]:
    """Return the loops, with a small model for a smoke run."""
    return [dataclasses.replace(loop, rows=64, layers=2) if smoke else loop for loop in LOOPS]


def model_of(device: torch.device, smoke: bool) -> torch.Tensor:
    """Return the weights that all layers share. A smoke run uses one thread, which is fast on a
    busy machine too.
    """
    if smoke:
        torch.set_num_threads(1)
    return torch.randn(64 if smoke else 2048, 64 if smoke else 2048, device=device) / 45


def make_batches(loop: Loop, device: torch.device, scale: float) -> list[Batch]:
    """Return a few batches, all different."""
    batches = [loop.make(torch.Generator().manual_seed(seed), scale) for seed in range(BATCHES)]
    if not loop.page_locked or loop.workers or device.type != "cuda":
        return batches
    return [
        {name: [leaf.pin_memory() for leaf in leaves] for name, leaves in batch.items()}
        for batch in batches
    ]


def own_line(loop: Loop, device: torch.device) -> Callable[[Batch], Batch]:
    """Return the loop's own line, which `Stager.to_device` replaces."""

    def move(batch: Batch) -> Batch:
        flag = loop.non_blocking
        return {
            name: [leaf.to(device, non_blocking=flag) for leaf in leaves]
            for name, leaves in batch.items()
        }

    return move


def stepping(
    loop: Loop,
    batches: list[Batch],
    move: Callable[[Batch], Batch],
    model: torch.Tensor,
    steps: int,
) -> Iterator[None]:
    """Train, and yield after each step."""
    source: Any = (batches[step % len(batches)] for step in range(steps))
    if loop.workers:
        dataset: Any = [batches[step % len(batches)] for step in range(steps)]
        pins = loop.page_locked and model.device.type == "cuda"
        source = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=loop.workers, pin_memory=pins
        )
    inputs = model.repeat(max(1, loop.rows // len(model)), 1)[: loop.rows]
    for batch in source:
        moved = move(batch)
        first = next(iter(moved.values()))[0]
        hidden = inputs + first.flatten()[:1].float()
        for _ in range(loop.layers):
            hidden = torch.relu(hidden @ model)
        loss = hidden.mean()
        if loop.waits:
            loss.item()
        yield


def seconds_a_step(
    loop: Loop,
    batches: list[Batch],
    move: Callable[[Batch], Batch],
    model: torch.Tensor,
    steps: int,
) -> float:
    """Return the mean time of some steps, after a warm-up; the device is idle at the start and the
    end.
    """
    running = stepping(loop, batches, move, model, WARM_UP + steps)
    for _ in range(WARM_UP):
        next(running)
    synchronise(model.device)
    began = time.perf_counter()
    for _ in range(steps):
        next(running)
    synchronise(model.device)
    took = (time.perf_counter() - began) / steps
    running.close()
    return took


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record(path: Path, name: str, device_name: str, scale: float, smoke: bool) -> None:
    """Write the trace of some steps of the unchanged loop, reduced to the events that `pinstage
    trace` reads.
    """
    device = torch.device(device_name)
    loop = next(loop for loop in loops(smoke) if loop.name == name)
    batches, model = make_batches(loop, device, scale), model_of(device, smoke)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    plan = schedule(wait=WARM_UP, warmup=3, active=TRACED, repeat=1)
    plain = path.with_suffix("")
    with profile(
        activities=activities,
        schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(str(plain)),
    ) as p:
        for _ in stepping(loop, batches, own_line(loop, device), model, WARM_UP + 3 + TRACED):
            p.step()
    slim(plain, path)
    plain.unlink()


def slim(source: Path, target: Path) -> None:
    """Rewrite a trace as small as possible; the figures of `pinstage trace` stay the same."""
    opener: Any = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt") as file:
        trace = json.load(file)
    events = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event["cat"] in KEPT_CATEGORIES
    ]
    first = min(float(event["ts"]) for event in events)
    threads = {
        thread: number
        for number, thread in enumerate({(event["pid"], event["tid"]): None for event in events})
    }
    kept = [slim_event(event, first, threads[event["pid"], event["tid"]]) for event in events]
    kept.sort(key=lambda event: event["ts"])
    properties = [
        {"id": found["id"], "name": found["name"]} for found in trace.get("deviceProperties") or ()
    ]
    text = json.dumps({"deviceProperties": properties, "traceEvents": kept}, separators=(",", ":"))
    target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def slim_event(event: dict[str, Any], first: float, thread: int) -> dict[str, Any]:
    """Return an event with only the fields that are read."""
    category, name = event["cat"], event["name"]
    if category in ("kernel", "gpu_memset"):
        name = "k"
    elif category == "cpu_op" and name not in NAMED_OPS:
        name = "o"
    found = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread}
    found |= {
        "ts": round(float(event["ts"]) - first, 3),
        "dur": round(float(event.get("dur", 0)), 3),
    }
    wanted = ("device", "bytes", "correlation") if category.startswith("gpu_memcpy") else ()
    wanted = ("device",) if category in ("kernel", "gpu_memset") else wanted
    copies = category.startswith("cuda") and "cpy" in name.lower()
    arguments = {
        key: event["args"][key]
        for key in (("correlation",) if copies else wanted)
        if key in event["args"]
    }
    return found | ({"args": arguments} if arguments else {})


if __name__ == "__main__":
    main()
