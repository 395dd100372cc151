"""The results of a benchmark: rows of one schema, with the machine, versions and commit of the
measurement.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
STATUSES = ("ok", "incorrect", "error", "not installed", "needs CUDA")
PACKAGES = (
    "torch", "numpy", "cuda-bindings", "pinstage", "tensordict", "spdl-io", "spdl-core",
    "accvlab.multi_tensor_copier", "lightning", "accelerate", "torch-geometric", "safetensors",
    "diffusers", "fastsafetensors", "runai-model-streamer", "torchtune", "torchao",
)  # fmt: skip


@dataclass
class Row:
    """One variant on one case. Times are in `unit`; None where nothing was measured."""

    benchmark: str
    case: str
    variant: str
    status: str
    detail: str = ""
    ours: bool = False
    nbytes: int = 0
    leaves: int | None = None
    unit: str = "ms"
    repeats: int = 0
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    main_median: float | None = None
    """The time until the call returned, which the main thread loses."""
    main_p10: float | None = None
    main_p90: float | None = None
    busy_median: float | None = None
    """The same while the GPU has 100 ms of kernels to run first."""
    gb_per_s: float | None = None
    """nbytes over the median."""
    vs_best_rival: float | None = None
    """The best rival's median over this one; above 1, this variant is faster than every rival."""

    def fill(
        self, samples: Sequence[float], main: Sequence[float] = (), busy: Sequence[float] = ()
    ) -> None:
        """Set the figures from the samples, which are in seconds, or fractions if the unit is
        "%".
        """
        scale = {"s": 1.0, "ms": 1e3, "us": 1e6, "%": 100.0}[self.unit]
        self.repeats = len(samples)
        self.p10, self.median, self.p90 = (quantile(samples, q) * scale for q in (0.1, 0.5, 0.9))
        self.minimum, self.maximum = min(samples) * scale, max(samples) * scale
        if main:
            self.main_p10, self.main_median, self.main_p90 = (
                quantile(main, q) * scale for q in (0.1, 0.5, 0.9)
            )
        if busy:
            self.busy_median = quantile(busy, 0.5) * scale
        if self.nbytes and self.median:
            self.gb_per_s = self.nbytes / (self.median / scale) / 1e9


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the q-quantile of the samples, linear between neighbours."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def best_rival(rows: Sequence[Row], case: str) -> Row | None:
    """Return the fastest measured row of a case that isn't ours."""
    rivals = [row for row in rows if row.case == case and row.status == "ok" and not row.ours]
    return min(rivals, key=lambda row: row.median or 0.0, default=None)


def compare(rows: Sequence[Row]) -> None:
    """Set `vs_best_rival` of each measured row."""
    for row in rows:
        best = best_rival(rows, row.case)
        if best and best.median and row.median:
            row.vs_best_rival = best.median / row.median


def environment() -> dict[str, Any]:
    """Return machine, versions, commit and date, without creating a CUDA context in this
    process.
    """
    return {
        "schema": SCHEMA,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
    }


def machine() -> dict[str, Any]:
    """Return the facts that affect the figures: GPU, driver, CUDA, CPU and cores, memory, kernel,
    glibc's settings.
    """
    gpu, driver = _first_line(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    ).partition(", ")[::2]
    cpuinfo, meminfo = _lines("/proc/cpuinfo"), _lines("/proc/meminfo")
    return {
        "gpu": gpu or None,
        "driver": driver or None,
        "cuda": torch.version.cuda,
        "cpu": next(
            (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")),
            platform.machine(),
        ),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory": next(
            (line.partition(":")[2].strip() for line in meminfo if line.startswith("MemTotal")),
            None,
        ),
        "huge_pages": next(iter(_lines("/sys/kernel/mm/transparent_hugepage/enabled")), None),
        "kernel": platform.release(),
    }


def version(package: str) -> str:
    """Return a package's version, "not installed", or "source tree" if it can be imported but isn't
    installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(getattr(import_module(package.replace("-", "_")), "__version__", "source tree"))
    except ImportError:
        return "not installed"


def commit() -> str:
    """Return the measured commit, from git or, for a tree without its repository, from
    PINSTAGE_COMMIT.
    """
    if os.environ.get("PINSTAGE_COMMIT"):
        return os.environ["PINSTAGE_COMMIT"]
    here = str(Path(__file__).parent)
    if not _first_line("git", "-C", here, "ls-files", Path(__file__).name):
        return "unknown"  # installed: a repository around it is unrelated
    head = _first_line("git", "-C", here, "rev-parse", "HEAD")
    changed = _first_line("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return (head + ("-dirty" if changed else "")) if head else "unknown"


def source(result: dict[str, Any]) -> str:
    """Return the source of the figures: machine, versions, commit and date."""
    machine, versions = result["machine"], result["versions"]
    commit = re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", result["commit"])
    device = f"{machine['cpu']}, no GPU"
    if machine["gpu"]:
        device = f"{machine['gpu']}, driver {machine['driver']}"
    return (
        f"{device}, {machine['cores']} cores, torch {versions['torch']}, Python "
        f"{versions['python']}; commit {commit}, {result['date'][:10]}"
    )


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return the rows of a result file; fields that it lacks have their defaults."""
    known = {field.name for field in fields(Row)}
    return [
        Row(**{key: value for key, value in row.items() if key in known}) for row in result["rows"]
    ]


def result_of(
    benchmark: str, settings: dict[str, Any], rows: Sequence[Row], incomplete: str | None = None
) -> dict[str, Any]:
    """Return the content of a result file; `incomplete` says how much was measured, if that isn't
    all.
    """
    said = {} if incomplete is None else {"incomplete": incomplete}
    rounded = [_rounded(row) for row in rows]
    return {"benchmark": benchmark, **said, **environment(), "settings": settings, "rows": rounded}


def save(path: Path, result: dict[str, Any]) -> None:
    """Write one result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def _rounded(row: Row) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in asdict(row).items()
    }


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
