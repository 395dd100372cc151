"""The GPUs and the driver, as torch, nvidia-smi and the kernel's files describe them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _host

_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

Smi = Callable[[Sequence[str]], str]
"""Runs nvidia-smi with arguments and returns its output; empty if there is none or it fails."""


class Link(NamedTuple):
    """A PCIe link. An idle link runs at a lower generation to save power, but keeps its width."""

    generation: int  # the highest that card and slot support, 1 to 6
    width: int  # lanes in use
    max_width: int  # the most lanes that card and slot support


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use. None means unknown."""

    index: int  # torch's
    name: str
    link: Link | None = None
    numa_node: int | None = None
    local_cpus: frozenset[int] = frozenset()  # those at the same NUMA node

    @property
    def link_rate(self) -> float | None:
        """Bytes per second of the link, without the overhead of packets."""
        if self.link is None or self.link.generation not in _LANE_BYTES_PER_SECOND:
            return None
        return _LANE_BYTES_PER_SECOND[self.link.generation] * self.link.width

    @property
    def host_page_tables(self) -> bool:
        """Whether the GPU uses the host's page tables, as Grace Hopper and Grace Blackwell do."""
        return bool(re.search(r"\bG[HB]\d+", self.name))


class Driver(NamedTuple):
    """NVIDIA's driver."""

    version: str | None  # such as 580.159; None if there is no driver
    cuda: str | None  # the newest CUDA that the driver supports, such as 13.0


def nvidia_smi(arguments: Sequence[str]) -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_driver(root: Path, smi: Smi) -> Driver:
    """Find the driver, whether torch can use it or not."""
    printed = smi([])
    kernels = _host.text(root / "proc/driver/nvidia/version")
    version = re.search(r"Driver Version: ([\d.]+)", printed) or re.search(
        r"Kernel Module.*?\s(\d+\.[\d.]+)", kernels
    )
    cuda = re.search(r"CUDA Version: (\d+\.\d+)", printed)
    return Driver(version and version[1], cuda and cuda[1])


def find_gpus(root: Path, smi: Smi) -> list[Gpu]:
    """Find the GPUs that torch can use."""
    if not torch.cuda.is_available():
        return []
    links, gpus = find_links(smi), []
    for index in range(torch.cuda.device_count()):
        gpu: Any = torch.cuda.get_device_properties(index)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node, cpus = _host.pci_node(address, root), _host.pci_cpus(address, root)
        gpus.append(Gpu(index, gpu.name, links.get(str(gpu.uuid)), node, cpus))
    return gpus


def find_links(smi: Smi) -> dict[str, Link]:
    """Ask nvidia-smi for the PCIe links, by the UUIDs of their GPUs; unknown ones are left out."""
    fields = "uuid,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    printed = smi([f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    rows = re.findall(r"^GPU-(\S+), (\d+), (\d+), (\d+)\s*$", printed, re.MULTILINE)
    return {uuid: Link(*map(int, numbers)) for uuid, *numbers in rows}
