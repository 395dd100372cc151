"""`diagnose`: gather the facts, measure what can be measured, and check."""

from __future__ import annotations

import contextlib
import platform
import sysconfig
import warnings
from collections.abc import Callable, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pinstage as ps

from ... import _host, _native, _torch
from ..._sizes import format_bytes
from .. import _format as fmt
from .._bandwidth import PAGEABLE, PINNED, REGISTERED, SIZES, TO_DEVICE, TO_HOST, Point, measure, pin_seconds
from .._errors import InspectError
from .._report import Block, Line, Table
from . import _gpu_checks, _host_checks, _software_checks, _transfer_checks
from ._check import Check, Status
from ._gpus import Gpu, Smi, busy_bus, find_driver, find_gpus, nvidia_smi

_PIN_BYTES = 1 << 30
_SPARE = 3
"""Measuring takes this many times the pinned GiB; with less left it is not tried."""
POINTS = len(SIZES) * 6
"""Points that are measured on one GPU: three kinds of memory, two directions."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one GPU.

    Attributes:
        gpu: the GPU.
        points: copies by size, direction and kind of memory.
        pin: seconds to page-lock `pin_bytes` and to give them back, by kind.
        pin_bytes: how many.
    """

    gpu: Gpu
    points: tuple[Point, ...]
    pin: dict[str, tuple[float, float]]
    pin_bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's report.

    Attributes:
        checks: a line each.
        measured: what was measured; None where nothing was.
    """

    checks: tuple[Check, ...]
    measured: Measured | None = None

    @property
    def has_problem(self) -> bool:
        """Whether anything is a problem; warnings are none."""
        return any(check.status == "problem" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        measured = self.measured
        points = [] if measured is None else measured.points
        return {
            "problem": self.has_problem,
            "checks": [check.to_dict() for check in self.checks],
            "bandwidth": [
                {
                    "direction": point.direction,
                    "kind": point.kind,
                    "nbytes": point.nbytes,
                    "seconds": point.seconds,
                    "bytes_per_second": point.bytes_per_second,
                }
                for point in points
            ],
            "page_locking": {}
            if measured is None
            else {
                kind: {"nbytes": measured.pin_bytes, "seconds": take, "seconds_back": give}
                for kind, (take, give) in measured.pin.items()
            },
        }

    def blocks(self) -> list[Block]:
        """Return what is printed."""
        rows = [
            (check.status.upper() if check.status in ("problem", "warning") else check.status, check.name, check.found)
            for check in self.checks
        ]
        blocks: list[Block] = [Table(["", "what", "found"], rows, styles=[check.status for check in self.checks])]
        if self.measured is not None and self.measured.points:
            blocks.append(_transfer_checks.bars(self.measured.points))
        blocks += [
            Line(f"{check.name}: {check.remedy}", check.status)
            for check in self.checks
            if check.remedy and check.status in ("problem", "warning")
        ]
        return [*blocks, Line(self._summary(), self._worst())]

    def _worst(self) -> Status:
        order: tuple[Status, ...] = ("problem", "warning", "ok")
        return next((status for status in order if any(check.status == status for check in self.checks)), "ok")

    def _summary(self) -> str:
        counted = [
            fmt.count(sum(check.status == status for check in self.checks), status) for status in ("problem", "warning")
        ]
        return " and ".join(counted) + f" in {fmt.count(len(self.checks), 'check')}"


def diagnose(
    *,
    device: int | None = None,
    measuring: bool = True,
    root: Path = Path("/"),
    smi: Smi = nvidia_smi,
    advance: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Look at this machine. Blocks for some seconds where there is a GPU to measure, which should be idle.

    Args:
        device: the index of the GPU to measure; None: torch's current one.
        measuring: whether to measure at all.
        root: where ``proc`` and ``sys`` are.
        smi: runs nvidia-smi.
        advance: called after each measured point, `POINTS` times.

    Returns:
        The report. It says what it can without a GPU.
    """
    available = torch.cuda.is_available()
    driver = find_driver(root, smi)
    reason = why_not_page_locked()
    gpus = _find(root, smi, busy=available and measuring)
    affinity, nodes = _host.affinity(), len(_host.numa_nodes(root))
    checks = [
        _gpu_checks.cuda(torch.version.cuda, available, gpus, driver),
        _gpu_checks.versions(driver, torch.version.cuda, bindings_version()),
        _gpu_checks.page_locking(available, reason),
    ]
    for gpu in gpus:
        checks += [
            _gpu_checks.link(gpu, under_load=measuring),
            _gpu_checks.numa(gpu, affinity, nodes),
            _gpu_checks.host_page_tables(gpu),
        ]
    checks += [_software_checks.extension(_native.why_not), *_software_checks.private_names(_torch.problems())]
    checks += host_checks(root, affinity)
    measured, more = _measure(gpus, device, reason, measuring, root, advance)
    return Diagnosis((*checks, *more), measured)


def host_checks(root: Path, affinity: Set[int]) -> list[Check]:
    """Check everything that is no GPU."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    gil = _torch.has_interpreter_lock()
    cap = ps.SlabPool(ps.PageableMemory()).stats()
    return [
        _host_checks.python(platform.python_version(), free_threaded=free_threaded, gil=gil),
        _host_checks.cpus(len(affinity), _host.cpu_quota(root), _host.installed_cpus()),
        _host_checks.memory(_host.meminfo("MemTotal", root), _host.meminfo("MemAvailable", root)),
        _host_checks.cgroup(min(_host.cgroup_memory(root), key=lambda group: group.left, default=None)),
        _host_checks.automatic_cap(cap.max_bytes, cap.max_bytes_reason),
        _host_checks.locked_memory(_host.locked_limit(root)),
        _host_checks.shared_memory(_host.shm_bytes(root)),
        _host_checks.huge_pages(_host.huge_pages(root)),
        _host_checks.wsl(_host.is_wsl(root)),
    ]


def bindings_version() -> str | None:
    """Return the version of cuda-python that is installed; None if there is none."""
    for name in ("cuda-bindings", "cuda-python"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def why_not_page_locked() -> str | None:
    """Return why pinstage cannot page-lock memory here; None if it can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ps.default_memory().is_pinned:
            return None
    return str(caught[0].message) if caught else "no CUDA device"


def _find(root: Path, smi: Smi, *, busy: bool) -> list[Gpu]:
    if not busy:
        return find_gpus(root, smi)
    with contextlib.ExitStack() as busy_buses:
        for index in range(torch.cuda.device_count()):
            busy_buses.enter_context(busy_bus(torch.device("cuda", index)))
        return find_gpus(root, smi)


def _measure(
    gpus: list[Gpu], device: int | None, reason: str | None, measuring: bool, root: Path, advance: Callable[[], None]
) -> tuple[Measured | None, list[Check]]:
    if not gpus:
        return None, [_transfer_checks.not_measured("no GPU")]
    if not measuring:
        return None, [_transfer_checks.not_measured("as asked")]
    left = [_host.meminfo("MemAvailable", root), *(group.left for group in _host.cgroup_memory(root))]
    least = min((nbytes for nbytes in left if nbytes is not None), default=_SPARE * _PIN_BYTES)
    if least < _SPARE * _PIN_BYTES:
        need = format_bytes(_SPARE * _PIN_BYTES)
        return None, [_transfer_checks.not_measured(f"{format_bytes(least)} of memory left, and it takes {need}")]
    index = torch.cuda.current_device() if device is None else device
    if index >= len(gpus):
        raise InspectError(f"no cuda:{index}: torch sees {fmt.count(len(gpus), 'GPU')}")
    gpu = gpus[index]
    on = torch.device("cuda", gpu.index)
    kinds = (PAGEABLE, PINNED, REGISTERED) if reason is None else (PAGEABLE,)
    points = measure(on, kinds=kinds, directions=(TO_DEVICE, TO_HOST), advance=advance)
    took = pin_seconds(_PIN_BYTES, on) if reason is None else {}
    checks: list[Check] = []
    if reason is None:
        checks += _transfer_checks.bandwidth(
            points, _gpu_checks.link_rate(gpu), host_page_tables=bool(gpu.host_page_tables)
        )
        small = _transfer_checks.small_copies(points)
        checks += [small] if small else []
        checks.append(_transfer_checks.pinning(_PIN_BYTES, took))
    else:
        checks.append(_transfer_checks.not_measured("page-locked memory: see the line on page-locking"))
    return Measured(gpu, tuple(points), took, _PIN_BYTES), checks
