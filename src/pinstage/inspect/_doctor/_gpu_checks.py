"""Checks of the GPUs, the driver and what talks to it. Pure: facts in, checks out."""

from __future__ import annotations

import re
from collections.abc import Set

from .. import _format as fmt
from ._check import Check
from ._gpus import Driver, Gpu

_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def cuda(built_for: str | None, available: bool, gpus: list[Gpu], driver: Driver) -> Check:
    """Look at whether torch can use a GPU.

    Args:
        built_for: the CUDA that torch was built for; None: for none.
        available: what torch says.
        gpus: that it sees.
        driver: that is installed.
    """
    if available:
        names = ", ".join(f"{gpu.name} (cuda:{gpu.index})" for gpu in gpus)
        return Check("CUDA", "ok", names or "available")
    if driver.version is None:
        return Check("CUDA", "info", "no NVIDIA driver here: what follows is about the host, and nothing is measured")
    if built_for is None:
        return Check(
            "CUDA",
            "problem",
            f"driver {driver.version} is there, and this torch is built without CUDA",
            f"install a torch built for CUDA {driver.cuda or ''}".rstrip()
            + ": https://pytorch.org/get-started/locally",
        )
    return Check(
        "CUDA",
        "problem",
        f"driver {driver.version} (CUDA {driver.cuda or '?'}) is there, and torch for CUDA {built_for} cannot use it",
        "nvidia-smi must list a GPU; then: is CUDA_VISIBLE_DEVICES empty, is the driver too old for this torch, does "
        "the container have --gpus all?",
    )


def versions(driver: Driver, built_for: str | None, bindings: str | None) -> Check:
    """Compare driver, torch and cuda-python; the toolkit is named, and needed by neither.

    Args:
        driver: that is installed.
        built_for: the CUDA that torch was built for.
        bindings: the version of cuda-python.
    """
    name = "versions"
    found = f"driver {driver.version or 'none'} (CUDA {driver.cuda or '?'}), torch CUDA {built_for or 'none'}, "
    found += f"cuda-python {bindings or 'none'}, toolkit {driver.toolkit or 'none'}"
    if driver.version is None:
        return Check(name, "info", found)
    served = _major(driver.cuda)
    wanted = served or _major(built_for)
    if bindings is None:
        return Check(name, "problem", found, f'pip install "cuda-python{_pin(wanted)}": memory cannot be page-locked')
    if served is not None and (_major(bindings) or 0) > served:
        return Check(
            name,
            "problem",
            f"{found}: cuda-python is newer than the driver serves",
            f'pip install "cuda-python{_pin(served)}", or a newer driver',
        )
    if served is not None and (_major(built_for) or 0) > served:
        return Check(
            name,
            "problem",
            f"{found}: torch is newer than the driver serves",
            f"a newer driver, or a torch for CUDA {driver.cuda}",
        )
    return Check(name, "ok", found)


def page_locking(available: bool, reason: str | None) -> Check:
    """Say whether pinstage can page-lock memory.

    Args:
        available: whether torch can use a GPU.
        reason: why it cannot; None if it can.
    """
    if reason is None:
        return Check("page-locking", "ok", "works")
    if not available:
        return Check("page-locking", "info", "not without a GPU: staging uses pageable memory")
    return Check("page-locking", "problem", reason, "see the line on versions; pip install cuda-python for this driver")


def link(gpu: Gpu, *, under_load: bool) -> Check:
    """Compare a GPU's PCIe link with what card and slot can do; an idle one may just be saving power."""
    name = f"PCIe cuda:{gpu.index}"
    now = gpu.link
    if now is None:
        return Check(name, "info", "neither nvidia-smi nor the kernel tells: often so in a virtual machine")
    found = f"generation {now.generation} x{now.width} {'under load' if under_load else 'now'}"
    if (now.generation, now.width) == (now.max_generation, now.max_width):
        return Check(name, "ok", f"{found}, as much as it can do: {fmt.rate(link_rate(gpu) or 0)}")
    if not under_load:
        most = f"generation {now.max_generation} x{now.max_width}"
        return Check(name, "info", f"{found}, idle links save power; it could do {most}")
    return Check(
        name,
        "warning",
        f"{found}; it could do generation {now.max_generation} x{now.max_width}",
        "look at the slot, at lanes shared with other cards, at risers, and at the link speed in the BIOS",
    )


def link_rate(gpu: Gpu) -> float | None:
    """Return the bytes per second of a GPU's link as it is now, before the cost of packets."""
    if gpu.link is None:
        return None
    return _LANE_BYTES_PER_SECOND.get(gpu.link.generation, 0.0) * gpu.link.width or None


def numa(gpu: Gpu, affinity: Set[int], nodes: int) -> Check:
    """Compare the NUMA node of a GPU with the cpus of this process.

    Args:
        gpu: the GPU.
        affinity: cpus that this process may run on.
        nodes: NUMA nodes of the machine.
    """
    name = f"NUMA cuda:{gpu.index}"
    if nodes <= 1:
        return Check(name, "ok", "the machine has one node")
    if gpu.numa_node is None or not gpu.local_cpus:
        return Check(name, "info", f"{nodes} nodes, and the kernel does not tell at which one the GPU is")
    local = len(affinity & gpu.local_cpus)
    found = f"at node {gpu.numa_node}; {local} of this process's {len(affinity)} cpus are there"
    if local == len(affinity):
        return Check(name, "ok", found)
    remedy = f"numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node} for the process of this GPU"
    if local == 0:
        return Check(name, "warning", f"{found}: every copy crosses to another node", remedy)
    return Check(name, "info", found, remedy)


def host_page_tables(gpu: Gpu) -> Check:
    """Look for systems on which page-locking means something else."""
    name = f"address space cuda:{gpu.index}"
    if gpu.host_page_tables:
        return Check(
            name,
            "warning",
            "the GPU uses the host's page tables (Grace): registering memory does not page-lock it, and pageable "
            "memory is copied fast",
            "HostAllocMemory rather than RegisteredMemory; measure before you pin at all",
        )
    if gpu.host_page_tables is None:
        return Check(name, "info", f"nobody tells; {gpu.name} is not known to use the host's page tables")
    return Check(name, "ok", "the GPU has page tables of its own")


def _major(version: str | None) -> int | None:
    match = re.match(r"\d+", version or "")
    return int(match[0]) if match else None


def _pin(major: int | None) -> str:
    return "" if major is None else f">={major},<{major + 1}"
