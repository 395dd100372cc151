"""Checks of everything that is no GPU. Pure: figures in, a check out."""

from __future__ import annotations

from ..._host import Headroom, threads_within
from ..._sizes import format_bytes
from ._check import Check

GIB, MIB = 1 << 30, 1 << 20

LITTLE_BYTES = 2 * GIB
"""Less memory than this is too little for a loader, its workers and a useful pool."""
SMALL_SHM_BYTES = GIB
"""torch's DataLoader passes each batch of each worker through ``/dev/shm``; containers start with 64 MiB."""
FEW_CPUS = 4
"""With fewer, loader workers, packing threads and the loop take turns."""


def python(version: str, *, free_threaded: bool, gil: bool) -> Check:
    """Look at the interpreter."""
    if not free_threaded:
        return Check("Python", "ok", version)
    return Check(
        "Python",
        "warning",
        f"{version}, free-threaded, its lock {'on' if gil else 'off'}: pinstage is not tested there",
        "use the ordinary build for production; with the free-threaded one run the tests first",
    )


def memory(total: int | None, available: int | None) -> Check:
    """Look at the memory of the machine."""
    if total is None or available is None:
        return Check("memory", "info", "/proc/meminfo tells nothing")
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available < LITTLE_BYTES:
        return Check("memory", "warning", found, "end other programs, or give the pool a small max_bytes")
    return Check("memory", "ok", found)


def cgroup(headroom: Headroom | None) -> Check:
    """Look at the container's limit."""
    if headroom is None:
        return Check("cgroup limit", "ok", "no control group limits memory")
    found = f"{format_bytes(headroom.left)} of {format_bytes(headroom.limit)} left; page-locked memory counts"
    if headroom.left < LITTLE_BYTES:
        return Check(
            "cgroup limit", "warning", found, "raise the container's memory limit, or give the pool a small max_bytes"
        )
    return Check("cgroup limit", "ok", found)


def automatic_cap(max_bytes: int, reason: str) -> Check:
    """Say what ``max_bytes="auto"`` would be."""
    return Check('max_bytes="auto"', "info", f"{format_bytes(max_bytes)}: {reason}")


def locked_memory(soft_limit: int | None) -> Check:
    """Look at ``ulimit -l``, which many blame, and which does not bind."""
    if soft_limit is None:
        return Check("locked-memory limit", "ok", "unlimited")
    return Check("locked-memory limit", "ok", f"{format_bytes(soft_limit)}; CUDA's page-locking is not bound by it")


def shared_memory(total: int | None) -> Check:
    """Look at the size of ``/dev/shm``."""
    if total is None:
        return Check("/dev/shm", "warning", "not there", "mount it: torch's DataLoader workers need it")
    if total < SMALL_SHM_BYTES:
        return Check(
            "/dev/shm",
            "warning",
            f"{format_bytes(total)}: workers of torch's DataLoader may die of a bus error",
            "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory",
        )
    return Check("/dev/shm", "ok", format_bytes(total))


def huge_pages(enabled: str) -> Check:
    """Look at transparent huge pages."""
    if enabled in ("always", "madvise"):
        return Check("huge pages", "ok", f"transparent huge pages: {enabled}")
    if enabled == "never":
        return Check(
            "huge pages",
            "warning",
            "transparent huge pages: never; registering a large pool takes about three times as long",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return Check("huge pages", "info", "this kernel does not tell of transparent huge pages")


def cpus(usable: int, quota: float | None, installed: int) -> Check:
    """Look at how many cpus this process may really use.

    Args:
        usable: that it may run on.
        quota: how many at once; None: all of them.
        installed: that the machine has.
    """
    real = usable if quota is None else min(usable, quota)
    limits = [f"{usable} by affinity"] if usable < installed else []
    if quota is not None:
        limits.append(f"{quota:g} by the control group's quota")
    found = f"{real:g} of {installed}" + (f" ({', '.join(limits)})" if limits else "")
    if quota is not None and quota < usable:
        threads = threads_within(usable, quota)
        return Check(
            "cpus",
            "warning",
            f"{found}; torch starts threads for {usable}, which then wait for each other",
            f"OMP_NUM_THREADS={threads} or torch.set_num_threads({threads}); Stager(threads={threads}); or more quota",
        )
    if real < FEW_CPUS:
        return Check("cpus", "warning", found, f"give this process {FEW_CPUS} or more for loading and packing")
    return Check("cpus", "ok", found)


def wsl(present: bool) -> Check:
    """Look for Linux under Windows."""
    if not present:
        return Check("WSL", "ok", "no")
    return Check(
        "WSL", "warning", "WSL2 lets a process page-lock about 1 GiB", 'max_bytes="512MiB", and small batches; or Linux'
    )
