"""How fast bytes travel between host and device, measured: by size, direction and kind of host memory.

One point is the best of a few repetitions, each timed from the call to the end of the copy, as a loop that waits for
its batch meets it: the cost of the call is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import pinstage as ps

TO_DEVICE, TO_HOST = "host to device", "device to host"
PAGEABLE, PINNED, REGISTERED = "pageable", "pinned", "registered"

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes measured by `pinstage doctor`: from a small leaf to a large batch."""

_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_POINT_SECONDS = 0.03  # repetitions stop after this time: the best is found early, and all points together stay short


@dataclass(frozen=True)
class Point:
    """One measured copy.

    Attributes:
        direction: ``"host to device"`` or ``"device to host"``.
        kind: of the host memory: ``"pageable"``, ``"pinned"`` or ``"registered"``.
        nbytes: its size.
        seconds: from the call to its end; the best of a few.
    """

    direction: str
    kind: str
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth."""
        return self.nbytes / self.seconds


def measure(
    device: torch.device | str,
    *,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = (PAGEABLE, PINNED, REGISTERED),
    directions: Sequence[str] = (TO_DEVICE, TO_HOST),
    advance: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Measure copies between the host and a device. Blocks for up to a few seconds; synchronises the device.

    Args:
        device: a CUDA device. With ``"cpu"`` the same code copies from memory to memory, for tests.
        sizes: bytes of the copies.
        kinds: kinds of host memory.
        directions: which ways.
        advance: called after each point.

    Returns:
        A point for each combination.
    """
    device = torch.device(device)
    points = []
    largest = max(sizes)
    there = torch.zeros(largest, dtype=torch.uint8, device=device)
    for kind in kinds:
        with host_memory(kind, largest, device) as here:
            for direction in directions:
                for nbytes in sizes:
                    seconds = _best_copy(here[:nbytes], there[:nbytes], direction, device)
                    points.append(Point(direction, kind, nbytes, seconds))
                    advance()
            del here  # the pool takes the memory back when it closes, and not while it can be seen
    return points


@contextmanager
def host_memory(kind: str, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Lend host memory of a kind, uint8 ``[nbytes]``, written once."""
    if kind == PAGEABLE:
        yield torch.zeros(nbytes, dtype=torch.uint8)
        return
    memory = memory_of(kind, device)
    with ps.SlabPool(memory, max_bytes=2 * nbytes + MIB) as pool, pool.acquire(nbytes) as lease:
        yield lease.tensor().zero_()


def memory_of(kind: str, device: torch.device) -> ps.MemoryResource:
    """Return the memory resource that makes a kind of page-locked memory; plain memory for the CPU."""
    if device.type != "cuda":
        return ps.PageableMemory()
    return ps.RegisteredMemory(device=device) if kind == REGISTERED else ps.HostAllocMemory(device=device)


def pin_seconds(
    nbytes: int, device: torch.device, kinds: Iterable[str] = (PINNED, REGISTERED)
) -> dict[str, tuple[float, float]]:
    """Measure how long it takes to page-lock `nbytes` and to give them back, for each kind. Waits for the device.

    Returns:
        Seconds of the allocation and of the deallocation, by kind.
    """
    took = {}
    for kind in kinds:
        memory = memory_of(kind, device)
        began = time.perf_counter()
        block = memory.allocate(nbytes)
        held = time.perf_counter()
        memory.deallocate(block)
        took[kind] = held - began, time.perf_counter() - held
    return took


def _best_copy(here: torch.Tensor, there: torch.Tensor, direction: str, device: torch.device) -> float:
    source, target = (here, there) if direction == TO_DEVICE else (there, here)
    took: list[float] = []
    started = time.perf_counter()
    while len(took) < _LEAST_REPEATS or (len(took) < _MOST_REPEATS and time.perf_counter() - started < _POINT_SECONDS):
        synchronise(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronise(device)
        took.append(time.perf_counter() - began)
    return min(took)


def synchronise(device: torch.device) -> None:
    """Wait for a CUDA device; the CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
