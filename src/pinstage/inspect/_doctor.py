"""What on this machine makes copies to the GPU slow, and what to do about it.

`diagnose` gathers the facts (`_host`, `_gpus`), measures copies (`_bus`) and lets `_checks` judge them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import sysconfig
from collections.abc import Sequence, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pinstage as ps

from .. import _host, _native, _torch
from .._memory import why_unusable
from .._sizes import count, format_bytes
from . import _checks, _top
from ._bus import GIB, PAGEABLE, Point, measure, page_locking_seconds
from ._checks import Check, Status
from ._cost import Cost, measure_cost
from ._gpus import Gpu, Smi, busy_bus, find_driver, find_gpus, nvidia_smi
from ._report import Line, Section, TextTable

PINNED_BYTES = GIB
"""Bytes that are page-locked to see how long that takes."""
_NEEDED_BYTES = 3 * PINNED_BYTES
"""With less memory left nothing is measured."""
_BAR = 12


@dataclass(frozen=True)
class Measured:
    gpu: Gpu
    points: tuple[Point, ...]
    page_locking: dict[str, tuple[float, float]]  # by kind: seconds for PINNED_BYTES, and to give them back
    cost: Cost | None = None  # of staging


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's report."""

    checks: tuple[Check, ...]
    measured: Measured | None = None
    shares: tuple[ps.HostShare, ...] = ()  # of budgets

    @property
    def has_problem(self) -> bool:
        """Whether anything is a problem; warnings are none."""
        return any(check.status == "problem" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        points, page_locking = (self.measured.points, self.measured.page_locking) if self.measured else ((), {})
        return {
            "problem": self.has_problem,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "bandwidth": [dataclasses.asdict(point) | {"bytes_per_second": point.bytes_per_second} for point in points],
            "page_locking": {
                kind: {"nbytes": PINNED_BYTES, "seconds": take, "seconds_back": give}
                for kind, (take, give) in page_locking.items()
            },
            **_top.to_dict(self.shares),
            "cost": dataclasses.asdict(self.measured.cost) if self.measured and self.measured.cost else None,
        }

    def sections(self) -> list[Section]:
        urgent = [check for check in self.checks if check.status in ("problem", "warning")]
        rows = [
            (check.status.upper() if check in urgent else check.status, check.name, check.found)
            for check in self.checks
        ]
        sections: list[Section] = [
            TextTable(["", "what", "found"], rows, styles=[check.status for check in self.checks])
        ]
        if self.shares:
            sections += _top.sections(self.shares)
        if self.measured is not None and self.measured.points:
            sections.append(bars(self.measured.points))
        sections += [Line(f"{check.name}: {check.remedy}", check.status) for check in urgent if check.remedy]
        problems = sum(check.status == "problem" for check in urgent)
        worst: Status = "problem" if problems else "warning" if urgent else "ok"
        summary = f"{count(problems, 'problem')} and {count(len(urgent) - problems, 'warning')}"
        return [*sections, Line(f"{summary} in {count(len(self.checks), 'check')}", worst)]


def diagnose(
    *,
    device: int | None = None,
    measuring: bool = True,
    root: Path = Path("/"),
    smi: Smi = nvidia_smi,
) -> Diagnosis:
    """Look at this machine, and say what can be said without a GPU. Blocks for some seconds where one is measured.

    `device` is the index of the GPU to measure, or None for torch's current one; it should be idle. `root` is where
    ``proc`` and ``sys`` are.
    """
    available = torch.cuda.is_available()
    driver = find_driver(root, smi)
    with contextlib.ExitStack() as busy_buses:
        for index in range(torch.cuda.device_count() if available and measuring else 0):
            busy_buses.enter_context(busy_bus(torch.device("cuda", index)))
        gpus = find_gpus(root, smi)
    affinity, nodes = _host.affinity(), len(_host.numa_nodes(root))
    checks = [
        _checks.cuda(torch.version.cuda, available, gpus, driver),
        _checks.versions(driver, torch.version.cuda, _bindings_version()),
        _checks.page_locking(available, why_unusable()),
    ]
    for gpu in gpus:
        checks += [
            _checks.link(gpu, under_load=measuring),
            _checks.numa(gpu, affinity, nodes),
            _checks.host_page_tables(gpu),
        ]
    checks += [_checks.extension(_native.why_not), *_checks.private_names(_torch.problems())]
    checks += host_checks(root, affinity)
    shares, found = _budgets()
    checks.append(found)
    if device is not None and device >= len(gpus):
        checks.append(_checks.no_such_device(device, len(gpus)))
        measuring = False
    reason = _why_not_measured(gpus, measuring, root)
    if reason is not None:
        return Diagnosis((*checks, _checks.not_measured(reason)), shares=shares)
    measured = _measure(gpus, device)
    return Diagnosis((*checks, *_transfer_checks(measured)), measured, shares)


def host_checks(root: Path, affinity: Set[int]) -> list[Check]:
    """Check everything that is no GPU."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    cap = ps.SlabPool(ps.PageableMemory()).stats()
    return [
        _checks.python(platform.python_version(), free_threaded=free_threaded, gil=_torch.has_interpreter_lock()),
        _checks.cpus(len(affinity), _host.cpu_quota(root), _host.installed_cpus()),
        _checks.memory(_host.meminfo("MemTotal", root), _host.meminfo("MemAvailable", root)),
        _checks.cgroup(min(_host.cgroup_memory(root), key=lambda group: group.left, default=None)),
        _checks.automatic_cap(cap.max_bytes, cap.max_bytes_reason),
        _checks.locked_memory(_host.locked_limit(root)),
        _checks.shared_memory(_host.shm_bytes(root)),
        _checks.huge_pages(_host.huge_pages(root)),
        _checks.wsl(_host.is_wsl(root)),
    ]


def _budgets() -> tuple[tuple[ps.HostShare, ...], Check]:
    try:
        shares = tuple(ps.HostBudget.shares())
    except ps.errors.HostBudgetError as error:
        return (), Check("host budgets", "warning", str(error), "make the ledger usable, or use no HostBudget")
    return shares, _checks.host_budgets(shares)


def _bindings_version() -> str | None:
    for name in ("cuda-bindings", "cuda-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _why_not_measured(gpus: Sequence[Gpu], measuring: bool, root: Path) -> str | None:
    if not gpus:
        return "no GPU"
    if not measuring:
        return "as asked"
    left = [_host.meminfo("MemAvailable", root), *(group.left for group in _host.cgroup_memory(root))]
    least = min((nbytes for nbytes in left if nbytes is not None), default=_NEEDED_BYTES)
    if least < _NEEDED_BYTES:
        return f"{format_bytes(least)} of memory left, and it takes {format_bytes(_NEEDED_BYTES)}"
    return None


def _measure(gpus: Sequence[Gpu], device: int | None) -> Measured:
    index = torch.cuda.current_device() if device is None else device
    on = torch.device("cuda", index)
    if why_unusable() is not None:
        return Measured(gpus[index], tuple(measure(on, kinds=(PAGEABLE,))), {})
    points = measure(on)
    locking = page_locking_seconds(PINNED_BYTES, on)
    return Measured(gpus[index], tuple(points), locking, measure_cost(on))


def _transfer_checks(measured: Measured) -> list[Check]:
    if not measured.page_locking:
        return [_checks.not_measured("page-locked memory: see the line on page-locking")]
    gpu, points = measured.gpu, measured.points
    return [
        *_checks.bandwidth(points, gpu.link_rate, host_page_tables=bool(gpu.host_page_tables)),
        *_checks.small_copies(points),
        _checks.page_locking_time(PINNED_BYTES, measured.page_locking),
        *([] if measured.cost is None else [_checks.staging_cost(measured.cost)]),
    ]


def bars(points: Sequence[Point]) -> TextTable:
    """Draw the bandwidth as bars of text: a row for each direction and size, a bar for each kind."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    rates = {(point.direction, point.nbytes, point.kind): point.bytes_per_second for point in points}
    fastest = max(rates.values())
    rows = []
    for direction, nbytes in dict.fromkeys((point.direction, point.nbytes) for point in points):
        row = [direction, format_bytes(nbytes)]
        for kind in kinds:
            rate = rates.get((direction, nbytes, kind), 0.0)
            row += [f"{rate / 1e9:.1f}", "#" * round(_BAR * rate / fastest)]
        rows.append(row)
    columns = ["", ">size", *(cell for kind in kinds for cell in (f">{kind}", ""))]
    return TextTable(columns, rows, "bandwidth, GB/s, the call included")
