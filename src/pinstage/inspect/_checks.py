"""The doctor's checks: facts in, a line of the report out.

They are pure functions, so each branch is tested without the machine that it is about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import pinstage as ps

from .._host import Headroom, threads_within
from .._sizes import count, format_bytes
from .._torch import Problem
from ._bus import GIB, PAGEABLE, PINNED, REGISTERED, TO_DEVICE, Point
from ._cost import Cost
from ._gpus import Driver, Gpu
from ._report import duration, rate, share

Status = Literal["ok", "info", "warning", "problem"]

LITTLE_BYTES = 2 * GIB
"""Less memory than this is too little for a loader, its workers and a useful pool."""
SMALL_SHM_BYTES = GIB
"""torch's DataLoader passes each batch of each worker through ``/dev/shm``. Containers start with 64 MiB."""
FEW_CPUS = 4
"""With fewer, loader workers, packing threads and the training loop take turns."""
LEAST_OF_LINK = 0.6
"""Large page-locked copies reach about 85% of a link's rate on paper. Below this share something is in their way."""
LEAST_GAIN = 1.2
"""Page-locked copies should be faster than pageable ones by this factor at least."""


@dataclass(frozen=True)
class Check:
    """A line of the report."""

    name: str  # what was looked at
    status: Status  # info: neither good nor bad, or unknown; warning: works badly; problem: does not work
    found: str  # with numbers
    remedy: str = ""  # for a warning or a problem: what to do


# -- the host ----------------------------------------------------------------------------------------------------------


def python(version: str, *, free_threaded: bool, gil: bool) -> Check:
    if not free_threaded:
        return Check("Python", "ok", version)
    found = f"{version}, free-threaded, its lock {'on' if gil else 'off'}: pinstage is not tested there"
    remedy = "use the ordinary build for production; with the free-threaded one run the tests first"
    return Check("Python", "warning", found, remedy)


def cpus(usable: int, quota: float | None, installed: int) -> Check:
    real = usable if quota is None else min(usable, quota)
    limits = [f"{usable} by affinity"] if usable < installed else []
    if quota is not None:
        limits.append(f"{quota:g} by the control group's quota")
    found = f"{real:g} of {installed}" + (f" ({', '.join(limits)})" if limits else "")
    if quota is not None and quota < usable:
        found += f"; torch starts threads for {usable}, which then wait for each other"
        n = threads_within(usable, quota)
        remedy = f"OMP_NUM_THREADS={n} or torch.set_num_threads({n}); Stager(threads={n}); or more quota"
        return Check("CPUs", "warning", found, remedy)
    if real < FEW_CPUS:
        return Check("CPUs", "warning", found, f"give this process {FEW_CPUS} or more for loading and packing")
    return Check("CPUs", "ok", found)


def memory(total: int | None, available: int | None) -> Check:
    if total is None or available is None:
        return Check("memory", "info", "/proc/meminfo tells nothing")
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available < LITTLE_BYTES:
        return Check("memory", "warning", found, "end other programs, or give the pool a small max_bytes")
    return Check("memory", "ok", found)


def cgroup(headroom: Headroom | None) -> Check:
    name = "cgroup limit"
    if headroom is None:
        return Check(name, "ok", "no control group limits memory")
    found = f"{format_bytes(headroom.left)} of {format_bytes(headroom.limit)} left; page-locked memory counts"
    if headroom.left < LITTLE_BYTES:
        return Check(name, "warning", found, "raise the container's limit, or give the pool a small max_bytes")
    return Check(name, "ok", found)


def automatic_cap(max_bytes: int, reason: str) -> Check:
    return Check('max_bytes="auto"', "info", f"{format_bytes(max_bytes)}: {reason}")


def host_budgets(shares: Sequence[ps.HostShare]) -> Check:
    """Check what is taken of each `HostBudget`, and by whom."""
    name = "host budgets"
    if not shares:
        return Check(name, "ok", "no pool has one")
    caps = {share.budget: share.max_bytes for share in shares}
    taken = {budget: sum(share.nbytes for share in shares if share.budget == budget) for budget in caps}
    found = "; ".join(
        f"{budget or 'without a name'}: {format_bytes(taken[budget])} of {format_bytes(caps[budget])}"
        for budget in caps
    )
    if silent := [share.pid for share in shares if not share.answered]:
        return Check(name, "warning", found, f"end or continue {silent}, which do not answer and give nothing back")
    if over := [budget or "without a name" for budget in caps if taken[budget] > caps[budget]]:
        return Check(name, "warning", found, f"{over} is exceeded: its file was removed; end some of its processes")
    return Check(name, "info", found)


def locked_memory(soft_limit: int | None) -> Check:
    """Report ``ulimit -l``. It is often blamed, and does not bind CUDA's page-locking."""
    bound = "unlimited" if soft_limit is None else format_bytes(soft_limit) + "; CUDA's page-locking is not bound by it"
    return Check("locked-memory limit", "ok", bound)


def shared_memory(total: int | None) -> Check:
    name = "/dev/shm"
    if total is None:
        return Check(name, "warning", "not there", "mount it: torch's DataLoader workers need it")
    if total < SMALL_SHM_BYTES:
        found = f"{format_bytes(total)}: workers of torch's DataLoader may die of a bus error"
        remedy = "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory"
        return Check(name, "warning", found, remedy)
    return Check(name, "ok", format_bytes(total))


def huge_pages(enabled: str) -> Check:
    name = "huge pages"
    if not enabled:
        return Check(name, "info", "this kernel does not tell of transparent huge pages")
    if enabled != "never":
        return Check(name, "ok", f"transparent huge pages: {enabled}")
    found = "transparent huge pages: never; registering a large pool takes about three times as long"
    return Check(name, "warning", found, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root")


def wsl(present: bool) -> Check:
    if not present:
        return Check("WSL", "ok", "no")
    remedy = 'max_bytes="512MiB", and small batches; or Linux'
    return Check("WSL", "warning", "WSL2 lets a process page-lock about 1 GiB", remedy)


# -- the software ------------------------------------------------------------------------------------------------------


def cuda(built_for: str | None, available: bool, gpus: list[Gpu], driver: Driver) -> Check:
    if available:
        return Check("CUDA", "ok", ", ".join(f"{gpu.name} (cuda:{gpu.index})" for gpu in gpus) or "available")
    if driver.version is None:
        return Check("CUDA", "info", "no NVIDIA driver here: what follows is about the host, and nothing is measured")
    if built_for is None:
        found = f"driver {driver.version} is there, and this torch is built without CUDA"
        wanted = f"CUDA {driver.cuda or ''}".rstrip()
        return Check(
            "CUDA", "problem", found, f"install a torch built for {wanted}: https://pytorch.org/get-started/locally"
        )
    found = (
        f"driver {driver.version} (CUDA {driver.cuda or '?'}) is there, and torch for CUDA {built_for} cannot use it"
    )
    remedy = "nvidia-smi must list a GPU; then: is CUDA_VISIBLE_DEVICES empty, is the driver too old for this torch, "
    return Check("CUDA", "problem", found, remedy + "does the container have --gpus all?")


def versions(driver: Driver, built_for: str | None, bindings: str | None) -> Check:
    """Compare the driver with torch's CUDA and with cuda-python. The toolkit is named, though neither needs it."""
    name = "versions"
    found = (
        f"driver {driver.version or 'none'} (CUDA {driver.cuda or '?'}), torch CUDA {built_for or 'none'}, "
        f"cuda-python {bindings or 'none'}, toolkit {driver.toolkit or 'none'}"
    )
    if driver.version is None:
        return Check(name, "info", found)
    served = _major(driver.cuda)
    if bindings is None:
        remedy = f"pip install {_bindings_for(served or _major(built_for))}: memory cannot be page-locked"
        return Check(name, "problem", found, remedy)
    if served is not None and (_major(bindings) or 0) > served:
        found += ": cuda-python is newer than the driver serves"
        return Check(name, "problem", found, f"pip install {_bindings_for(served)}, or a newer driver")
    if served is not None and (_major(built_for) or 0) > served:
        found += ": torch is newer than the driver serves"
        return Check(name, "problem", found, f"a newer driver, or a torch for CUDA {driver.cuda}")
    return Check(name, "ok", found)


def page_locking(available: bool, why_not: str | None) -> Check:
    """Say whether pinstage can page-lock memory, where torch has a GPU available."""
    name = "page-locking"
    if why_not is None:
        return Check(name, "ok", "works")
    if not available:
        return Check(name, "info", "not without a GPU: staging uses pageable memory")
    found = f"{why_not}: staging uses pageable memory, which is slower"
    return Check(name, "problem", found, "see the line on versions; pip install cuda-python for this driver")


def extension(why_not: str | None) -> Check:
    """Say whether batches are described and packed in C; `why_not` is `pinstage._native`'s."""
    name = "extension"
    if why_not is None:
        return Check(name, "ok", "batches are described and packed in C")
    found, _, remedy = why_not.partition("; ")
    found = f"not in use, so batches are described and packed in Python, by one thread: {found}"
    if "PINSTAGE_NATIVE" in why_not and not remedy:  # as the user asked
        return Check(name, "info", found)
    return Check(name, "warning", found, remedy or "install a pinstage and a torch that go together")


def private_names(problems: list[Problem]) -> list[Check]:
    """Say which private names of torch and CPython do something else than pinstage expects."""
    if not problems:
        return [Check("private names", "ok", "those of torch and CPython do what is expected")]
    return [Check(problem.name, "warning", problem.reason, problem.remedy) for problem in problems]


def _major(version: str | None) -> int | None:
    match = re.match(r"\d+", version or "")
    return int(match[0]) if match else None


def _bindings_for(major: int | None) -> str:
    return '"cuda-python"' if major is None else f'"cuda-python>={major},<{major + 1}"'


# -- GPUs --------------------------------------------------------------------------------------------------------------


def link(gpu: Gpu, *, under_load: bool) -> Check:
    """Compare a GPU's PCIe link with what card and slot can do. An idle link may just be saving power."""
    name = f"PCIe cuda:{gpu.index}"
    now = gpu.link
    if now is None:
        return Check(name, "info", "neither nvidia-smi nor the kernel tells: often so in a virtual machine")
    found = f"generation {now.generation} x{now.width} {'under load' if under_load else 'now'}"
    if (now.generation, now.width) == (now.max_generation, now.max_width):
        return Check(name, "ok", f"{found}, as much as it can do: {rate(gpu.link_rate or 0)}")
    most = f"it could do generation {now.max_generation} x{now.max_width}"
    if not under_load:
        return Check(name, "info", f"{found}, idle links save power; {most}")
    remedy = "look at the slot, at lanes shared with other cards, at risers, and at the link speed in the BIOS"
    return Check(name, "warning", f"{found}; {most}", remedy)


def numa(gpu: Gpu, affinity: Set[int], nodes: int) -> Check:
    """Compare the NUMA node of a GPU with the CPUs of this process, on a machine of so many nodes."""
    name = f"NUMA cuda:{gpu.index}"
    if nodes <= 1:
        return Check(name, "ok", "the machine has one node")
    if gpu.numa_node is None or not gpu.local_cpus:
        return Check(name, "info", f"{nodes} nodes, and the kernel does not tell at which one the GPU is")
    local = len(affinity & gpu.local_cpus)
    found = f"at node {gpu.numa_node}; {local} of this process's {len(affinity)} CPUs are there"
    if local == len(affinity):
        return Check(name, "ok", found)
    remedy = f"numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node} for the process of this GPU"
    if local:
        return Check(name, "info", found, remedy)
    return Check(name, "warning", f"{found}: every copy crosses to another node", remedy)


def host_page_tables(gpu: Gpu) -> Check:
    """Check for a GPU that uses the host's page tables: there, page-locking means something else."""
    name = f"address space cuda:{gpu.index}"
    if gpu.host_page_tables is None:
        return Check(name, "info", f"nobody tells; {gpu.name} is not known to use the host's page tables")
    if not gpu.host_page_tables:
        return Check(name, "ok", "the GPU has page tables of its own")
    found = "the GPU uses the host's page tables (Grace): registering memory does not page-lock it, and pageable "
    remedy = "HostAllocMemory rather than RegisteredMemory; measure before you pin at all"
    return Check(name, "warning", found + "memory is copied fast", remedy)


# -- what was measured -------------------------------------------------------------------------------------------------


def bandwidth(points: Sequence[Point], link_rate: float | None, *, host_page_tables: bool) -> list[Check]:
    """Check the largest copies in each direction. With the host's page tables, pageable memory is as fast."""
    checks = []
    for direction in dict.fromkeys(point.direction for point in points):
        mine = [point for point in points if point.direction == direction]
        largest = max(point.nbytes for point in mine)
        rates = {point.kind: point.bytes_per_second for point in mine if point.nbytes == largest}
        found = ", ".join(f"{kind} {rate(speed)}" for kind, speed in rates.items()) + f", {format_bytes(largest)}"
        pinned = rates.get(PINNED, 0.0)
        status: Status = "ok"
        remedy = ""
        if not host_page_tables and link_rate is not None and pinned < LEAST_OF_LINK * link_rate:
            status = "warning"
            found += f": {share(pinned, link_rate)} of the link's {rate(link_rate)}"
            remedy = "is another process on this GPU or its switch? is the memory of another NUMA node? "
            remedy += "run it again when idle"
        elif not host_page_tables and pinned < LEAST_GAIN * rates.get(PAGEABLE, 0.0):
            status = "warning"
            found += ": page-locked memory is hardly faster than pageable"
            remedy = "run it again when the machine is idle; in a virtual machine ask its provider"
        checks.append(Check(direction, status, found, remedy))
    return checks


def small_copies(points: Sequence[Point]) -> list[Check]:
    """Say what the smallest page-locked copies reach, which is why batches are packed."""
    mine = sorted((p for p in points if (p.direction, p.kind) == (TO_DEVICE, PINNED)), key=lambda p: p.nbytes)
    if not mine:
        return []
    small, large = mine[0], mine[-1]
    found = f"{format_bytes(small.nbytes)} takes {duration(small.seconds)}: {rate(small.bytes_per_second)}, "
    found += f"{share(small.bytes_per_second, large.bytes_per_second)} of what the bus gives; pack them"
    return [Check("small copies", "info", found)]


def page_locking_time(nbytes: int, took: Mapping[str, tuple[float, float]]) -> Check:
    names = {PINNED: "cudaHostAlloc", REGISTERED: "registered huge pages"}
    parts = [f"{names[kind]} {duration(take)} (back: {duration(give)})" for kind, (take, give) in took.items()]
    return Check("page-locking time", "info", f"{format_bytes(nbytes)}: {', '.join(parts)}")


def staging_cost(cost: Cost) -> Check:
    """Say what staging takes here, which `pinstage trace` takes for traces of such a GPU."""
    found = f"in a training loop {duration(cost.fixed_seconds)} a batch, {duration(cost.leaf_seconds)} a leaf, "
    return Check("staging", "info", f"{found}{rate(cost.bytes_per_second)}")


def no_such_device(index: int, gpus: int) -> Check:
    remedy = (
        "name one that torch sees, or none" if gpus else "see the line on CUDA; without --device the host is checked"
    )
    return Check("device", "problem", f"no cuda:{index}: torch sees {count(gpus, 'GPU')}", remedy)


def not_measured(reason: str) -> Check:
    return Check("bandwidth", "info", f"not measured: {reason}")
