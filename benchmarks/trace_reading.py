"""Time and memory that `pinstage trace` needs to read a large trace, which is generated and removed
afterwards.

    python benchmarks/trace_reading.py --megabytes 500

The events are written as the profiler writes them: each step has 300 copies with their calls and
operators, and 900 kernels with theirs.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison import Args, Outcome, Program, Size, Variant, ok
from pinstage.inspect._trace import trace_report

Event = dict[str, Any]

COPIES, KERNELS, STEP_US = 300, 900, 20_000
KERNEL = (
    "void "
    "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)"
)


def measure(variant: Variant, args: Args, case: Size) -> Outcome:  # noqa: ARG001
    """Write the trace, and return the seconds until it was read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        events = write(path, case.nbytes)
        began = time.perf_counter()
        variant.setup(path)
        read = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ok([read], f"{events:,} events, peak memory {peak / 1e9:.2f} GB")


def write(path: Path, nbytes: int) -> int:
    """Write events until the file has this size; return their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": [\n'
        )
        step = 0
        while file.tell() < nbytes:
            for event in events_of_step(step):
                file.write((",\n" if count else "") + json.dumps(event, indent=2))
                count += 1
            step += 1
        file.write("]}\n")
    return count


def events_of_step(step: int) -> Iterator[Event]:
    """Yield the events of one step."""
    start = 4302434813144.0 + step * STEP_US
    yield _on_host("user_annotation", f"ProfilerStep#{step}", start, STEP_US, {})
    shapes = {
        "Input type": ["float", "Scalar"],
        "Input Strides": [[128, 1], []],
        "Input Dims": [[64, 128], [], []],
    }
    for index in range(COPIES):
        at, ids = start + index * 20, {"correlation": step * 10_000 + index}
        yield _on_host("cpu_op", "aten::to", at, 18.5, shapes)
        yield _on_host("cuda_runtime", "cudaMemcpyAsync", at + 5, 6.1, ids)
        yield _on_device(
            "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 9, 1.3, ids | {"bytes": 32768}
        )
    for index in range(KERNELS):
        at, ids = start + COPIES * 20 + index * 15, {"correlation": step * 10_000 + COPIES + index}
        yield _on_host("cpu_op", "aten::addmm", at, 11.5, shapes)
        yield _on_host("cuda_runtime", "cudaLaunchKernel", at + 5, 3.1, ids)
        flow = {"pid": 0, "tid": 7, "ts": at + 9, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "f", "id": index, "bp": "e", **flow}
        yield _on_device(
            "kernel", KERNEL, at + 9, 12.3, ids | {"grid": [8, 4, 2], "block": [32, 1, 1]}
        )


def _on_host(category: str, name: str, start: float, lasts: float, more: Event) -> Event:
    said = {"External id": 1, "Record function id": 0, "Ev Idx": 1}
    return _event(category, name, start, lasts, said | more) | {"pid": 1, "tid": 1}


def _on_device(category: str, name: str, start: float, lasts: float, more: Event) -> Event:
    said = {"External id": 1, "device": 0, "context": 1, "stream": 7, "blocks per SM": 0.48}
    return _event(category, name, start, lasts, said | more) | {"pid": 0, "tid": 7}


def _event(category: str, name: str, start: float, lasts: float, args: Event) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": lasts, "args": args}


PROGRAM = Program.of(
    globals(),
    title="s until the trace is read",
    ways=(Variant("pinstage trace", trace_report, "`pinstage trace`", ours=True),),
    cases=lambda args: [Size(f"{args.megabytes} MB", args.megabytes * 1_000_000)],
    options={"megabytes": (500, "the size of the trace")},
    small={"megabytes": 1},
    unit="s",
)
PROGRAM.run(__name__)
