"""What the kernel tells about the host, read from its files below a root that a test replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 1 << 62
"""Version 1 of control groups writes "no limit" as a number about this large."""


class Headroom(NamedTuple):
    """A limit of a control group, and what is left of it; bytes."""

    limit: int
    left: int


def text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the whole number that a file consists of; None if it is something else."""
    found = text(path)
    return int(found) if re.fullmatch(r"-?\d+", found) else None


def memory_bytes(root: Path, key: str) -> int | None:
    """Return a line of ``/proc/meminfo`` in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def locked_limit(root: Path) -> int | None:
    """Return the soft limit of locked memory in bytes; None if it is unlimited or not told."""
    match = re.search(r"^Max locked memory\s+(\d+)", text(root / "proc/self/limits"), re.MULTILINE)
    return int(match[1]) if match else None


def cgroup_memory(root: Path) -> Headroom | None:
    """Return the limit that leaves least, among the control groups above this process; None if none has one.

    Pages of files that the kernel would drop first count as left.
    """
    found = []
    for directory, version in _cgroups(root, "memory"):
        if version == 2:
            limits = [number(directory / name) for name in ("memory.max", "memory.high")]
            used, dropped = number(directory / "memory.current"), "inactive_file"
        else:
            limits = [number(directory / "memory.limit_in_bytes")]
            used, dropped = number(directory / "memory.usage_in_bytes"), "total_inactive_file"
        known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
        if known and used is not None:
            match = re.search(rf"^{dropped} (\d+)$", text(directory / "memory.stat"), re.MULTILINE)
            cached = int(match[1]) if match else 0
            found.append(Headroom(min(known), min(known) - max(used - cached, 0)))
    return min(found, key=lambda headroom: headroom.left, default=None)


def cgroup_cpus(root: Path) -> float | None:
    """Return how many cpus the control groups above this process let it use at once; None if they do not limit it."""
    found = []
    for directory, version in _cgroups(root, "cpu"):
        if version == 2:
            quota, _, period = text(directory / "cpu.max").partition(" ")
        else:
            quota, period = text(directory / "cpu.cfs_quota_us"), text(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def cpu_list(listed: str) -> frozenset[int]:
    """Read the kernel's lists of cpus: ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def chosen_word(setting: str) -> str:
    """Return the chosen one of a setting such as ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", setting)
    return match[1] if match else ""


def is_wsl(root: Path) -> bool:
    """Whether this is Linux under Windows."""
    return "microsoft" in text(root / "proc/sys/kernel/osrelease").lower()


def _cgroups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the directories of the groups above this process, its own first, and the version of each."""
    for line in text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mounts, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"], 1
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))  # in a container it may be the host's, of which only the top is seen
        for mount in mounts:
            for group in (own, *own.parents):
                if ".." not in group.parts and (root / mount / group).is_dir():
                    yield root / mount / group, version
