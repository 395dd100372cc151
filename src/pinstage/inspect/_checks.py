"""The doctor's checks: each takes facts and returns a line of the report.

They are pure functions, so each branch can be tested without the machine that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple

from .._host import threads_within
from .._pool import PoolUsage, held_bytes
from .._sizes import count, format_bytes
from ._bus import GIB, PAGEABLE, PINNED, Point, by_direction
from ._gpus import Driver, Gpu
from ._report import rate, share
from ._top import by_budget

Status = Literal["ok", "info", "warning", "problem"]

LITTLE_BYTES = 512 << 20
"""A smaller automatic cap is too little for a useful pool."""
SMALL_SHM_BYTES = GIB
"""torch's DataLoader passes each batch of each worker through ``/dev/shm``. Containers start with
64 MiB.
"""
FEW_CPUS = 4
"""With fewer CPUs, loader workers, packing threads and the training loop take turns."""
LEAST_OF_LINK = 0.6
"""Large page-locked copies reach about 85% of a link's nominal rate. Below this share, something
slows them down.
"""
LEAST_GAIN = 1.2
"""Page-locked copies should be faster than pageable ones by this factor at least."""


class Check(NamedTuple):
    """A line of the report."""

    name: str
    # Info: neither good nor bad, or unknown; warning: works badly; problem: does not work.
    status: Status
    found: str  # with numbers
    remedy: str = ""  # for a warning or a problem: what to do


# -- the host --------------------------------------------------------------------------------------


def cpus(usable: int, quota: float | None, installed: int) -> Check:
    name, limits, real = "CPUs", [], float(usable)
    if usable < installed:
        limits.append(f"{usable} by affinity")
    if quota is not None:
        limits.append(f"{quota:g} by the control group's quota")
        real = min(usable, quota)
    found = f"{real:g} of {installed}" + (f" ({', '.join(limits)})" if limits else "")
    if real < usable:
        found += f"; torch starts threads for {usable}, which then wait for each other"
        n = threads_within(usable, quota)
        remedy = f"OMP_NUM_THREADS={n} or torch.set_num_threads({n}); Stager(pack_threads={n})"
        return Check(name, "warning", found, f"{remedy}; or more quota")
    if real < FEW_CPUS:
        remedy = f"give this process {FEW_CPUS} or more for loading and packing"
        return Check(name, "warning", found, remedy)
    return Check(name, "ok", found)


def memory(max_bytes: int, reason: str) -> Check:
    """Check the cap that a pool would choose; `reason` names the limit that decides it."""
    name, found = 'max_bytes="auto"', f"{format_bytes(max_bytes)}: {reason}"
    if max_bytes >= LITTLE_BYTES:
        return Check(name, "ok", found)
    remedy = "end other programs, or raise the container's limit, which includes page-locked memory"
    return Check(name, "warning", found, remedy)


def host_budgets(pools: Sequence[PoolUsage]) -> Check:
    """Check how much of each `HostBudget` is taken, and by which processes."""
    name, shares, exceeded = "host budgets", [], []
    for budget, members in by_budget(pools):
        held, cap = held_bytes(members), members[0].max_bytes
        shares.append(f"{budget}: {format_bytes(held)} of {format_bytes(cap)}")
        if held > cap:
            exceeded.append(budget)
    found = "; ".join(shares) or "no pool has one"
    if exceeded:
        remedy = f"{exceeded} is exceeded: its file was removed; end some of its processes"
        return Check(name, "warning", found, remedy)
    return Check(name, "info" if pools else "ok", found)


def shared_memory(total: int | None) -> Check:
    name = "/dev/shm"
    if total is None:
        return Check(name, "warning", "not there", "mount it: torch's DataLoader workers need it")
    if total >= SMALL_SHM_BYTES:
        return Check(name, "ok", format_bytes(total))
    found = f"{format_bytes(total)}: workers of torch's DataLoader may end with a bus error"
    remedy = (
        "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory"
    )
    return Check(name, "warning", found, remedy)


def huge_pages(enabled: str, shared: str) -> Check:
    name, found = "huge pages", f"transparent huge pages: {enabled}; "
    if not enabled:
        return Check(name, "info", "this kernel does not report transparent huge pages")
    if enabled != "never":
        return Check(name, "ok", f"{found}of shared memory (shmem_enabled): {shared}")
    found += "registering a large pool takes about three times as long"
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root"
    return Check(name, "warning", found, remedy)


def wsl(present: bool) -> Check:
    if not present:
        return Check("WSL", "ok", "no")
    remedy = 'max_bytes="512MiB", and small batches; or Linux'
    return Check("WSL", "warning", "WSL2 lets a process page-lock about 1 GiB", remedy)


# -- the software ----------------------------------------------------------------------------------


def cuda(built_for: str | None, available: bool, gpus: list[Gpu], driver: Driver) -> Check:
    name = "CUDA"
    if available:
        names = ", ".join(f"{gpu.name} (cuda:{gpu.index})" for gpu in gpus)
        return Check(name, "ok", names or "available")
    if driver.version is None:
        found = "no NVIDIA driver here: what follows is about the host, and nothing is measured"
        return Check(name, "info", found)
    found = f"driver {driver.version} (CUDA {driver.cuda or '?'}) is there, but "
    if built_for is None:
        remedy = "install a torch for that CUDA: https://pytorch.org/get-started/locally"
        return Check(name, "problem", f"{found}this torch is built without CUDA", remedy)
    remedy = (
        "nvidia-smi must list a GPU; then: is CUDA_VISIBLE_DEVICES empty, is the driver too old "
        "for this torch, does the container have --gpus all?"
    )
    return Check(name, "problem", f"{found}torch for CUDA {built_for} can't use it", remedy)


def versions(python: str, driver: Driver, built_for: str | None, bindings: str | None) -> Check:
    """Compare the driver with torch's CUDA and with cuda-python.

    The cases are in the order in which they matter; the first that holds is reported.
    """
    name, served = "versions", _major(driver.cuda)
    found = f"Python {python}, driver {driver.version or 'none'} (CUDA {driver.cuda or '?'}), "
    found += f"torch CUDA {built_for or 'none'}, cuda-python {bindings or 'none'}"
    if driver.version is None:
        return Check(name, "info", found)
    if bindings is None:
        package = _bindings_for(served or _major(built_for))
        remedy = f"pip install {package}: memory cannot be page-locked"
        return Check(name, "problem", found, remedy)
    if served and _major(bindings) > served:
        found += ": cuda-python is newer than the driver serves"
        remedy = f"pip install {_bindings_for(served)}, or a newer driver"
        return Check(name, "problem", found, remedy)
    if served and _major(built_for) > served:
        found += ": torch is newer than the driver serves"
        remedy = f"a newer driver, or a torch for CUDA {driver.cuda}"
        return Check(name, "problem", found, remedy)
    return Check(name, "ok", found)


def page_locking(available: bool, why_not: str | None, kind: str, reason: str) -> Check:
    """Check whether pinstage can page-lock memory; `kind` and `reason` are the result of an attempt
    with one page.
    """
    name = "page-locking"
    if kind == "registered":
        return Check(name, "ok", "works: a page was registered")
    if why_not is None:
        found = f"a page could not be registered: {reason}. A HostRegion is {kind} here, and a "
        remedy = "pass ps.memory.HostAllocMemory() as a pool's memory, and don't share regions"
        status: Status = "warning" if kind == "allocated" else "problem"
        return Check(name, status, f"{found}shared one is pageable", remedy)
    if not available:
        return Check(name, "info", "not without a GPU: staging uses pageable memory")
    found = f"{why_not}: staging uses pageable memory, which is slower"
    remedy = "see the line on versions; pip install cuda-python for this driver"
    return Check(name, "problem", found, remedy)


def _major(version: str | None) -> int:
    return int(version.partition(".")[0]) if version else 0


def _bindings_for(major: int) -> str:
    oldest = "12.9" if major == 12 else major  # pyproject.toml has the same
    return f'"cuda-python>={oldest},<{major + 1}"' if major else '"cuda-python"'


def loader_slabs(available: bool, is_pinned: bool) -> Check:
    """Report how the batches of a loader's workers are sent; `is_pinned` is the result of an
    attempt with one page.
    """
    name = "loader's slabs"
    if is_pinned:
        return Check(name, "ok", "workers write into page-locked memory")
    if not available:
        return Check(name, "info", "workers write into shared memory that isn't page-locked")
    found = "workers write into shared memory that can't be page-locked: batches are sent from it"
    remedy = "expect about a quarter of the speed; the line on page-locking has the reason"
    return Check(name, "warning", found, remedy)


# -- GPUs ------------------------------------------------------------------------------------------


def link(gpu: Gpu) -> Check:
    """Compare the width of a GPU's PCIe link with the most that card and slot support. Bandwidth
    shows its speed.
    """
    name, now = f"PCIe cuda:{gpu.index}", gpu.link
    if now is None:
        return Check(name, "info", "unknown to nvidia-smi, as is common in virtual machines")
    found = f"generation {now.generation} x{now.width}: {rate(gpu.link_rate or 0)}"
    if now.width < now.max_width:
        remedy = "look at the slot, at lanes shared with other cards, and at risers"
        return Check(name, "warning", f"{found}; x{now.max_width} is possible", remedy)
    return Check(name, "ok", found)


def numa(gpu: Gpu, affinity: Set[int], nodes: int, *, has_policy: bool = False) -> Check:
    """Compare the NUMA node of a GPU with the CPUs of this process, which may have a memory
    policy.
    """
    name, local = f"NUMA cuda:{gpu.index}", len(affinity & gpu.local_cpus)
    if nodes <= 1:
        return Check(name, "ok", "the machine has one node")
    if gpu.numa_node is None or not gpu.local_cpus:
        return Check(name, "info", f"{nodes} nodes, but the kernel doesn't report the GPU's node")
    found = f"at node {gpu.numa_node}; {local} of this process's {len(affinity)} CPUs are there"
    if has_policy:
        found += "; its memory policy (numactl) decides where page-locked memory is"
    if local == len(affinity):
        return Check(name, "ok", found)
    remedy = f"numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node} for the process of "
    remedy += "this GPU"
    if local:
        return Check(name, "info", found, remedy)
    return Check(name, "warning", f"{found}: every copy crosses to another node", remedy)


def host_page_tables(gpu: Gpu) -> Check:
    """Check whether a GPU uses the host's page tables, because page-locking works differently
    there.
    """
    name = f"address space cuda:{gpu.index}"
    if not gpu.host_page_tables:
        return Check(name, "ok", "the GPU has page tables of its own")
    found = (
        "the GPU uses the host's page tables (Grace): registering memory does not page-lock it, "
        "and pageable memory is copied fast"
    )
    remedy = "HostAllocMemory rather than RegisteredMemory; measure before you pin at all"
    return Check(name, "warning", found, remedy)


# -- measurements ----------------------------------------------------------------------------------


def bandwidth(points: Sequence[Point], gpu: Gpu) -> list[Check]:
    """Check the largest copies in each direction. With the host's page tables, pageable memory is
    as fast.
    """
    return [
        _largest_copies(direction, by_kind, gpu)
        for direction, by_kind in by_direction(points).items()
    ]


def _largest_copies(direction: str, by_kind: Mapping[str, Sequence[Point]], gpu: Gpu) -> Check:
    largest = [points[-1] for points in by_kind.values()]
    rates = {point.kind: point.bytes_per_second for point in largest}
    speeds = ", ".join(f"{kind} {rate(speed)}" for kind, speed in rates.items())
    found = f"{speeds}, {format_bytes(largest[0].nbytes)}"
    pinned = math.inf if gpu.host_page_tables else rates.get(PINNED, math.inf)
    if gpu.link_rate is not None and pinned < LEAST_OF_LINK * gpu.link_rate:
        found += f": {share(pinned, gpu.link_rate)} of the link's {rate(gpu.link_rate)}"
        remedy = (
            "is another process on this GPU or its switch, or the memory of another NUMA node? "
            "Else look at the slot and at the link speed in the BIOS"
        )
        return Check(direction, "warning", found, remedy)
    if pinned < LEAST_GAIN * rates.get(PAGEABLE, 0.0):
        found += ": page-locked memory is hardly faster than pageable"
        remedy = "run it again when the machine is idle; in a virtual machine ask its provider"
        return Check(direction, "warning", found, remedy)
    return Check(direction, "ok", found)


def no_such_device(index: int, gpus: int) -> Check:
    remedy = "see the line on CUDA; without --device the host is checked"
    if gpus:
        remedy = "name a GPU that torch sees, or none"
    return Check("device", "problem", f"no cuda:{index}: torch sees {count(gpus, 'GPU')}", remedy)
