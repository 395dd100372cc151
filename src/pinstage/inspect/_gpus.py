"""What is known of each GPU and of the driver: from torch, nvidia-smi and the kernel's files."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _host

_LINK_FIELDS = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max", "pcie.link.width.max")
_GENERATION_OF_SPEED = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_SMI_SECONDS = 20

Smi = Callable[[Sequence[str]], str]
"""Runs nvidia-smi with arguments and returns what it prints; empty if there is none or it fails."""


@dataclass(frozen=True)
class Link:
    """A PCIe link: as it is now, and what card and slot can do."""

    generation: int  # 1 to 6
    width: int  # lanes
    max_generation: int
    max_width: int


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use. What nobody tells is None."""

    index: int  # torch's
    name: str
    pci: str | None = None  # its address, as the kernel writes it
    link: Link | None = None
    host_page_tables: bool | None = None  # whether it uses the host's page tables (Grace)
    numa_node: int | None = None
    local_cpus: frozenset[int] = frozenset()  # those at the same NUMA node

    @property
    def link_rate(self) -> float | None:
        """Bytes per second of the link as it is now, before the cost of packets."""
        if self.link is None:
            return None
        return _LANE_BYTES_PER_SECOND.get(self.link.generation, 0.0) * self.link.width or None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, and the CUDA toolkit if one is installed. torch and cuda-python bring what they need of it."""

    version: str | None  # such as 580.159; None if there is no driver
    cuda: str | None  # the newest CUDA that the driver serves, such as 13.0
    toolkit: str | None = None  # such as 12.8.1


def nvidia_smi(arguments: Sequence[str]) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SMI_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_driver(root: Path, smi: Smi) -> Driver:
    """Find the driver, whether torch can use it or not, and the toolkit."""
    module = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _host.text(root / "proc/driver/nvidia/version"))
    printed = smi([])
    version = re.search(r"Driver Version: ([\d.]+)", printed) or module
    cuda = re.search(r"CUDA Version: (\d+\.\d+)", printed)
    return Driver(version[1] if version else None, cuda[1] if cuda else None, _toolkit(root / "usr/local/cuda"))


def _toolkit(folder: Path) -> str | None:
    told = re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([\d.]+)"', _host.text(folder / "version.json"))
    if told:
        return told[1]
    # A slim installation has no such file, but the compiler's headers: 1000 * major + 10 * minor.
    defined = re.search(r"#define CUDA_VERSION (\d+)", _host.text(folder / "include/cuda.h"))
    return f"{int(defined[1]) // 1000}.{int(defined[1]) % 1000 // 10}" if defined else None


def find_gpus(root: Path, smi: Smi) -> list[Gpu]:
    """Find the GPUs that torch can use. An idle link shows less than it can do: keep it busy (`busy_bus`)."""
    if not torch.cuda.is_available():
        return []
    told = query(smi, ("uuid", "pci.bus_id", *_LINK_FIELDS))
    modes = query(smi, ("uuid", "addressing_mode"))  # asked apart: older drivers refuse the whole question
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        mode = _row_of(modes, uuid).get("addressing_mode", "")
        found.append(describe(index, properties.name, _row_of(told, uuid), mode, root))
    return found


def describe(index: int, name: str, told: Mapping[str, str], addressing_mode: str, root: Path) -> Gpu:
    """Put together what is known of one GPU; `told` is what nvidia-smi tells of it, by field, and may be empty.

    The addressing mode is ``ATS`` where the GPU uses the host's page tables.
    """
    pci = pci_address(told.get("pci.bus_id", ""))
    device = pci or "none"
    if re.search(r"\bG[HB]\d+", name):  # Grace Hopper, Grace Blackwell
        host_page_tables: bool | None = True
    else:
        host_page_tables = addressing_mode == "ATS" if addressing_mode in ("ATS", "HMM", "None") else None
    link = link_of(told, _host.pci_device(device, root))
    return Gpu(index, name, pci, link, host_page_tables, _host.pci_node(device, root), _host.pci_cpus(device, root))


def query(smi: Smi, fields: Sequence[str]) -> list[dict[str, str]]:
    """Ask nvidia-smi about all GPUs: a row for each, by field; none if it does not know one of the fields."""
    printed = smi([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def pci_address(bus_id: str) -> str | None:
    """Write nvidia-smi's address as the kernel does: ``00000000:3B:00.0`` is ``0000:3b:00.0``."""
    match = re.fullmatch(r"(?:0000)?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)", bus_id)
    return match[1].lower() if match else None


def link_of(told: Mapping[str, str], device: Path) -> Link | None:
    """Return the link as nvidia-smi tells it, else as the kernel does."""
    values = [told.get(field, "") for field in _LINK_FIELDS]
    if all(value.isdecimal() for value in values):
        return Link(*map(int, values))
    read: list[Any] = []
    for when in ("current", "max"):
        speed = _host.text(device / f"{when}_link_speed").partition(" ")[0]
        read += [_GENERATION_OF_SPEED.get(speed), _host.number(device / f"{when}_link_width")]
    return Link(*read) if all(read) else None


@contextmanager
def busy_bus(device: torch.device) -> Iterator[None]:
    """Keep copies travelling while the body runs."""
    stop = threading.Event()

    def copy() -> None:
        there = torch.empty(1 << 26, dtype=torch.uint8, device=device)
        here = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
        while not stop.is_set():
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize(device)

    thread = threading.Thread(target=copy, name="pinstage-doctor")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _row_of(rows: Sequence[dict[str, str]], uuid: str) -> dict[str, str]:
    for row in rows:
        if uuid and row["uuid"].removeprefix("GPU-") == uuid:
            return row
    # An older torch does not tell the id. A single row is then the GPU's, unless some GPUs are hidden from torch.
    return rows[0] if len(rows) == 1 and not os.environ.get("CUDA_VISIBLE_DEVICES") else {}
