"""Finds out why copies to the GPU are slow on this machine, and names the remedies.

`diagnose` gathers the facts (`_host`, `_gpus`), measures copies (`_bus`) and lets `_checks` judge
them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pinstage as ps

from .. import _host
from .._compat.calls import why_checkpoints_are_unknown
from .._compat.loader import why_loader_is_unknown
from .._compat.storages import why_changes_are_not_seen
from .._compat.views import why_tensors_are_slow
from .._memory import memory_policy, why_unusable
from .._pool import usage_of_host
from .._sizes import count, format_bytes
from . import _checks
from ._bus import MIB, PAGEABLE, PINNED, REGISTERED, Point, by_direction, measure
from ._checks import Check, Status
from ._gpus import Gpu, Smi, find_driver, find_gpus, nvidia_smi
from ._report import Line, Section, TextTable

_NEEDED_BYTES = 1024 * MIB
"""With less memory left, nothing is measured."""
_URGENT: tuple[Status, ...] = ("problem", "warning")


class Diagnosis(NamedTuple):
    """The doctor's report."""

    checks: tuple[Check, ...]
    gpu: Gpu | None = None  # the GPU that was measured
    points: tuple[Point, ...] = ()

    @property
    def has_problem(self) -> bool:
        """Whether a check found a problem. Warnings don't count."""
        return any(check.status == "problem" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.has_problem,
            "checks": [check._asdict() for check in self.checks],
            "bandwidth": [
                point._asdict() | {"bytes_per_second": point.bytes_per_second}
                for point in self.points
            ],
        }

    def sections(self) -> list[Section]:
        statuses = [check.status for check in self.checks]
        sections: list[Section] = [_table(self.checks)]
        if self.points:
            sections.append(bandwidth(self.points))
        urgent = [check for check in self.checks if check.status in _URGENT]
        sections += [Line(f"{check.name}: {check.remedy}", check.status) for check in urgent]
        numbers = " and ".join(count(statuses.count(status), status) for status in _URGENT)
        worst = next((status for status in _URGENT if status in statuses), "ok")
        return [*sections, Line(f"{numbers} in {count(len(statuses), 'check')}", worst)]


def _table(checks: Sequence[Check]) -> TextTable:
    rows = [
        (check.status.upper() if check.status in _URGENT else check.status, check.name, check.found)
        for check in checks
    ]
    return TextTable(["", "what", "found"], rows, "", [check.status for check in checks])


def diagnose(
    *,
    device: int | None = None,
    measuring: bool = True,
    root: Path = Path("/"),
    smi: Smi = nvidia_smi,
) -> Diagnosis:
    """Check this machine, with or without a GPU. Blocks for some seconds if a GPU is measured.

    `device` is the index of the GPU to measure, or None for torch's current one; it should be idle.
    `root` is the folder with ``proc`` and ``sys``.
    """
    available, why_not = torch.cuda.is_available(), why_unusable()
    driver, gpus = find_driver(root, smi), find_gpus(root, smi)
    affinity, nodes = _host.affinity(), len(_host.numa_nodes(root))
    built_for, python = torch.version.cuda, platform.python_version()
    is_missing = device is not None and device >= len(gpus)
    tried = None if is_missing else device
    checks = [
        _checks.cuda(built_for, available, gpus, driver),
        _checks.versions(python, driver, built_for, _bindings_version()),
        _checks.page_locking(available, why_not, *try_page(tried)),
        _checks.loader_slabs(available, try_slab(tried)),
    ]
    for gpu in gpus:
        checks.append(_checks.link(gpu))
        checks.append(_checks.numa(gpu, affinity, nodes, has_policy=bool(memory_policy())))
        checks.append(_checks.host_page_tables(gpu))
    checks += private_names()
    checks += host_checks(root, affinity)
    checks.append(budget_check())
    if device is not None and is_missing:
        checks.append(_checks.no_such_device(device, len(gpus)))
    reason = _why_not_measured(gpus, measuring and not is_missing, root)
    if reason is not None:
        return Diagnosis((*checks, Check("bandwidth", "info", f"not measured: {reason}")))
    index = torch.cuda.current_device() if device is None else device
    kinds = (PAGEABLE, PINNED, REGISTERED) if why_not is None else (PAGEABLE,)
    points = tuple(measure(f"cuda:{index}", kinds=kinds))
    return Diagnosis((*checks, *_checks.bandwidth(points, gpus[index])), gpus[index], points)


def host_checks(root: Path, affinity: Set[int]) -> list[Check]:
    """Check everything but the GPUs and the software."""
    cap = ps.SlabPool(memory=ps.memory.PageableMemory()).stats()
    shared = _host.huge_pages(root, "shmem_enabled") or "unknown"
    return [
        _checks.cpus(len(affinity), _host.cpu_quota(root), os.cpu_count() or 1),
        _checks.memory(cap.max_bytes, cap.max_bytes_reason),
        _checks.shared_memory(_host.shm_bytes(root)),
        _checks.huge_pages(_host.huge_pages(root), shared),
        _checks.wsl(_host.is_wsl(root)),
    ]


def budget_check() -> Check:
    """Check the budgets of this host, whose files may be damaged."""
    try:
        return _checks.host_budgets(usage_of_host())
    except ps.errors.HostBudgetError as error:
        remedy = "follow the message, or use no HostBudget"
        return Check("host budgets", "warning", str(error), remedy)


def private_names() -> list[Check]:
    """Report the private names of torch and CPython that don't behave as pinstage expects."""
    probes = (
        (
            "tensors",
            why_tensors_are_slow(),
            "tensors are described and made in Python, one by one",
        ),
        (
            "save_on_cpu",
            why_changes_are_not_seen(),
            "pinstage.offload.save_on_cpu is refused: use torch's",
        ),
        ("load_weights", why_checkpoints_are_unknown(), "modules are refused: use load_state_dict"),
        (
            "DataLoader",
            why_loader_is_unknown(),
            "batches of workers are staged in the main process, which is slower",
        ),
    )
    checks = [Check(name, "warning", why, effect) for name, why, effect in probes if why]
    return checks or [Check("private names", "ok", "those of torch and CPython behave as expected")]


def try_page(device: int | None) -> tuple[str, str]:
    """Return the kind of memory that a region of one page gets, and why it isn't registered."""
    # Without the warning: the report has the reason.
    with warnings.catch_warnings(action="ignore"), ps.HostRegion(1, device=device) as region:
        return region.kind, region.reason


def try_slab(device: int | None) -> bool:
    """Return whether a slab that workers write into is page-locked."""
    with warnings.catch_warnings(action="ignore"):
        memory = ps.memory.SharedMemory(device)
        block = memory.allocate(1)
        memory.deallocate(block)
        return bool(block.is_pinned)


def _bindings_version() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("cuda-bindings")  # cuda-python is a metapackage of it
    return None


def _why_not_measured(gpus: Sequence[Gpu], measuring: bool, root: Path) -> str | None:
    if not gpus:
        return "no GPU"
    if not measuring:
        return "as requested"
    left = [_host.meminfo("MemAvailable", root)]
    left += [group.left for group in _host.cgroup_memory(root)]
    least = min(nbytes for nbytes in (*left, _NEEDED_BYTES) if nbytes is not None)
    if least >= _NEEDED_BYTES:
        return None
    return (
        f"{format_bytes(least)} of memory left, but measuring takes {format_bytes(_NEEDED_BYTES)}"
    )


def bandwidth(points: Sequence[Point]) -> TextTable:
    """Return a row for each direction and size, with the rate of each kind of memory."""
    rows, kinds = [], list[str]()
    for direction, by_kind in by_direction(points).items():
        kinds = list(by_kind)
        for copies in zip(*by_kind.values(), strict=True):
            rates = [f"{_rate(copy):.1f}" for copy in copies]
            rows.append([direction, format_bytes(copies[0].nbytes), *rates])
    columns = ["", ">size", *(f">{kind}" for kind in kinds)]
    return TextTable(columns, rows, "bandwidth, GB/s, the call included")


def _rate(point: Point) -> float:
    return point.bytes_per_second / 1e9


# -- the picture -----------------------------------------------------------------------------------

# Two kinds often have the same speed, as they should: a thick line stays visible behind a thin one.
_STYLES = {
    PAGEABLE: ("#e07b39", "s", 1.5),
    PINNED: ("#3b7dd8", "o", 5.0),
    REGISTERED: ("#2f9e6e", "^", 1.5),
}


def save_plot(
    points: Sequence[Point], path: Path | str, *, title: str, link_rate: float | None = None
) -> None:
    """Write a PNG: a panel for each direction, a line for each kind of memory and for the link's
    nominal rate.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Without pyplot, which looks for a display and keeps state.
    from matplotlib.figure import Figure

    directions = by_direction(points)
    sizes = sorted({point.nbytes for point in points})
    figure = Figure(figsize=(5.4 * len(directions), 4.2), layout="constrained")
    axes = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axis, (direction, by_kind) in zip(axes, directions.items(), strict=True):
        for kind, copies in by_kind.items():
            color, marker, width = _STYLES[kind]
            axis.plot(
                [copy.nbytes for copy in copies], [_rate(copy) for copy in copies], label=kind,
                color=color, marker=marker, lw=width, ms=5.5 + width,
            )  # fmt: skip
        if link_rate is not None:
            axis.axhline(link_rate / 1e9, color="gray", linestyle=":", label="the link on paper")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [format_bytes(nbytes) for nbytes in sizes], rotation=45, ha="right")
        axis.minorticks_off()
        axis.set(title=direction, xlabel="bytes in one copy")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="GB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=130)
