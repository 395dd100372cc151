"""Facts about this host: CPUs, memory, control groups, NUMA nodes, limits.

Only this module reads these facts from the kernel's files, so the pool, the threads and the doctor
all use the same figures. Each caller decides how to use them.

Files are read below ``root``, which tests replace with a tree of their own. Facts that the kernel
doesn't report are None or empty, not errors. Each answer is a snapshot: a virtual machine whose
memory grows on demand reports its current size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED_BYTES = 1 << 62
"""Version 1 of control groups writes "no limit" as a number larger than this."""


class Headroom(NamedTuple):
    """A control group's memory, in bytes."""

    limit: int
    """Bytes that its processes may use."""
    left: int
    """Bytes of the limit that they don't use yet; negative if they use more, which ``memory.high``
    allows.
    """


# -- CPUs ------------------------------------------------------------------------------------------


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many threads can run at once in this process, by its CPU affinity and its quota
    (`threads_within`).
    """
    return threads_within(len(affinity()), cpu_quota(root))


def threads_within(cpus: int, quota: float | None) -> int:
    """Return how many threads can run at once on a number of CPUs under a quota, as `cpu_quota`
    returns it; at least 1.

    A quota of 2.5 gives 2. With a third thread the group would use up its quota before the period
    ends, and then the kernel stops all of its threads until the next one, tens of milliseconds
    later.
    """
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def affinity() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs the control groups above this process let it use at once; None if they
    do not limit it.
    """
    quotas = []
    for group, version in _groups("cpu", root):
        if version == 2:
            quota, _, period = text(group / "cpu.max").partition(" ")
        else:
            quota, period = text(group / "cpu.cfs_quota_us"), text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 mean no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# -- memory ----------------------------------------------------------------------------------------


def meminfo(key: str, root: Path = Path("/")) -> int | None:
    """Return a line of ``/proc/meminfo``, such as ``MemTotal`` or ``MemAvailable``, in bytes."""
    kib = _first(rf"^{key}:\s+(\d+)", root / "proc/meminfo")
    return int(kib) * 1024 if kib else None


def cgroup_memory(root: Path = Path("/")) -> list[Headroom]:
    """Return the memory of each limited control group above this process, its own first.

    Version 2: the smaller of ``memory.max`` and ``memory.high``; version 1:
    ``memory.limit_in_bytes``. Inactive file pages, which the kernel drops first, count as left, as
    in Kubernetes.
    """
    headrooms = []
    for group, version in _groups("memory", root):
        if version == 2:
            limits = [number(group / "memory.max"), number(group / "memory.high")]
            used, dropped = number(group / "memory.current"), "inactive_file"
        else:
            limits = [number(group / "memory.limit_in_bytes")]
            used, dropped = number(group / "memory.usage_in_bytes"), "total_inactive_file"
        known = [limit for limit in limits if limit is not None and 0 <= limit < _UNLIMITED_BYTES]
        if known and used is not None:
            cached = int(_first(rf"^{dropped} (\d+)$", group / "memory.stat") or 0)
            headrooms.append(Headroom(min(known), min(known) - max(used - cached, 0)))
    return headrooms


def locked_limit(root: Path = Path("/")) -> int | None:
    """Return the soft limit of locked memory, ``RLIMIT_MEMLOCK``, in bytes; None if it is unlimited
    or unknown.
    """
    limit = _first(r"^Max locked memory\s+(\d+)", root / "proc/self/limits")
    return int(limit) if limit else None


def shm_bytes(root: Path = Path("/")) -> int | None:
    """Return the size of ``/dev/shm``; None if it doesn't exist."""
    try:
        filesystem = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return filesystem.f_frsize * filesystem.f_blocks


def huge_pages(root: Path = Path("/"), setting: str = "enabled") -> str:
    """Return the selected value of a setting of transparent huge pages; empty if unknown.

    ``enabled`` is ``always``, ``madvise`` or ``never``; ``shmem_enabled``, for shared memory, has
    other values, too.
    """
    return _first(r"\[(\w+)\]", root / "sys/kernel/mm/transparent_hugepage" / setting)


# -- nodes and devices -----------------------------------------------------------------------------


def numa_nodes(root: Path = Path("/")) -> frozenset[int]:
    """Return the NUMA nodes; empty if the kernel reports none."""
    return _numbers(root / "sys/devices/system/node/online")


def node_cpus(node: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the CPUs of a NUMA node, whether this process may use them or not."""
    return _numbers(root / f"sys/devices/system/node/node{node}/cpulist")


def pci_device(address: str, root: Path = Path("/")) -> Path:
    """Return the sysfs folder of the PCI device at an address, such as ``"0000:1b:00.0"``."""
    return root / "sys/bus/pci/devices" / address.lower()


def pci_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device; None if the firmware doesn't report it."""
    node = number(pci_device(address, root) / "numa_node")
    return None if node is None or node < 0 else node


def pci_cpus(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Return the CPUs that are nearest to a PCI device; empty if unknown."""
    return _numbers(pci_device(address, root) / "local_cpulist")


# -- the system, and its files ---------------------------------------------------------------------


def is_wsl(root: Path = Path("/")) -> bool:
    """Return whether this is Linux under Windows (WSL), by the name of its kernel."""
    return "microsoft" in text(root / "proc/sys/kernel/osrelease").lower()


def process_exists(pid: int) -> bool:
    """Return whether a process exists. A process that has ended exists until its parent has waited
    for it.
    """
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # PermissionError: it is another user's
    return True


def text(path: Path) -> str:
    """Return a file's text without the space around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the whole number that a file consists of; None if it is something else."""
    content = text(path)
    return int(content) if re.fullmatch(r"-?\d+", content) else None


def _first(pattern: str, path: Path) -> str:
    """Return the group of a pattern's first match in a file; empty if there is none."""
    match = re.search(pattern, text(path), re.MULTILINE)
    return match[1] if match else ""


def _numbers(path: Path) -> frozenset[int]:
    """Read a list such as ``0-3,8,10-11``."""
    numbers: set[int] = set()
    for part in filter(None, text(path).split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups above this process, its own first, and the version of
    each.
    """
    # A sandbox may have the groups without saying which one the process is in. Then it is in the
    # top one.
    for line in text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mounts, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"], 1
        else:
            continue
        # Inside a container the path may be the host's, which is not visible here: then only the
        # mount's own folder is found, and that is the container's group.
        own = PurePosixPath(path.lstrip("/"))
        for mount in dict.fromkeys(mounts):  # both are the same if a controller is mounted alone
            for group in (own, *own.parents):
                if ".." not in group.parts and (root / mount / group).is_dir():
                    yield root / mount / group, version
