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

from ... import _host

_FIELDS = (
    "uuid", "pci.bus_id", "driver_version", "pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max",
    "pcie.link.width.max",
)  # fmt: skip
_GENERATION_OF_SPEED = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s
_SMI_SECONDS = 20

Smi = Callable[[Sequence[str]], str]
"""Runs nvidia-smi with arguments and returns what it prints; empty if there is none or it fails."""


@dataclass(frozen=True)
class Link:
    """A PCIe link.

    Attributes:
        generation: 1 to 6, now.
        width: lanes, now.
        max_generation: that card and slot can do.
        max_width: that card and slot can do.
    """

    generation: int
    width: int
    max_generation: int
    max_width: int


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use.

    Attributes:
        index: torch's.
        name: of the product.
        pci: its address, as the kernel writes it; None if it is not known.
        link: its PCIe link; None if nobody tells.
        host_page_tables: whether it uses the host's page tables (Grace); None if nobody tells.
        numa_node: that it is at; None if nobody tells.
        local_cpus: that are at the same node.
    """

    index: int
    name: str
    pci: str | None = None
    link: Link | None = None
    host_page_tables: bool | None = None
    numa_node: int | None = None
    local_cpus: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: such as ``580.159``; None if there is no driver.
        cuda: the newest CUDA it serves, such as ``13.0``; None if it is not told.
        toolkit: the CUDA toolkit that is installed, such as ``12.8.1``; None if there is none, which is usual: torch
            and cuda-python bring what they need.
    """

    version: str | None
    cuda: str | None
    toolkit: str | None = None


def nvidia_smi(arguments: Sequence[str]) -> str:
    """Run nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def find_driver(root: Path, smi: Smi = nvidia_smi) -> Driver:
    """Find the driver, whether torch can use it or not, and the toolkit."""
    module = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _host.text(root / "proc/driver/nvidia/version"))
    printed = smi([])
    version = re.search(r"Driver Version: ([\d.]+)", printed) or module
    cuda = re.search(r"CUDA Version: (\d+\.\d+)", printed)
    return Driver(version[1] if version else None, cuda[1] if cuda else None, _toolkit(root / "usr/local/cuda"))


def _toolkit(folder: Path) -> str | None:
    """Read a toolkit's version from the file for it; slim installations have the compiler's headers only."""
    told = re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([\d.]+)"', _host.text(folder / "version.json"))
    if told:
        return told[1]
    defined = re.search(r"#define CUDA_VERSION (\d+)", _host.text(folder / "include/cuda.h"))
    number = int(defined[1]) if defined else 0  # 1000 * major + 10 * minor
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def find_gpus(root: Path, smi: Smi = nvidia_smi) -> list[Gpu]:
    """Find the GPUs that torch can use. A link saves power when nothing travels: keep it busy (`busy_bus`)."""
    if not torch.cuda.is_available():
        return []
    told = query(smi, _FIELDS)
    modes = query(smi, ("uuid", "addressing_mode"))
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        found.append(
            describe(index, properties.name, _of(told, uuid), _of(modes, uuid).get("addressing_mode", ""), root)
        )
    return found


def describe(index: int, name: str, told: Mapping[str, str], addressing_mode: str, root: Path) -> Gpu:
    """Put together what is known of one GPU.

    Args:
        index: torch's.
        name: of the product.
        told: by nvidia-smi, by the names of its fields; may be empty.
        addressing_mode: ``ATS`` where the GPU uses the host's page tables, ``HMM``, ``None``, or nothing.
        root: where ``sys`` is.
    """
    pci = pci_address(told.get("pci.bus_id", ""))
    device = pci or "none"
    names_of_grace = re.search(r"\bG[HB]\d+", name)
    uses_host = addressing_mode == "ATS" if addressing_mode in ("ATS", "HMM", "None") else None
    return Gpu(
        index,
        name,
        pci,
        link_of(told, _host.pci_device(device, root)),
        True if names_of_grace else uses_host,
        _host.pci_node(device, root),
        _host.pci_cpus(device, root),
    )


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
    values = [told.get(field, "") for field in _FIELDS[3:]]
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


def _of(rows: Sequence[dict[str, str]], uuid: str) -> dict[str, str]:
    """Return the row of a GPU; of the only one, if torch does not know its own name."""
    for row in rows:
        if uuid and row["uuid"].removeprefix("GPU-") == uuid:
            return row
    return rows[0] if len(rows) == 1 and not os.environ.get("CUDA_VISIBLE_DEVICES") else {}
