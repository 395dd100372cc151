"""The time of copies between host and device, and of staging: measured, or given.

`measure` times copies, by size, direction and kind of host memory. A point is the best of a few
repetitions, each timed from the call to the end of the copy. So it includes the cost of the call,
as in a loop that waits for its batch. A `Bus` estimates the time of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import pinstage as ps

from .._native import core

TO_DEVICE, TO_HOST = "host to device", "device to host"
PAGEABLE, PINNED, REGISTERED = "pageable", "pinned", "registered"

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes that `pinstage doctor` measures: from a small leaf to a large batch."""

_LEAST_REPEATS, _MOST_REPEATS = 3, 20
# Repetitions stop after this time: the best comes early, and the whole measurement stays short.
_POINT_SECONDS = 0.03
_CALL_US = 7.5  # microseconds of a copy call, unless given: 7 to 8 were measured on an H200's host


class Point(NamedTuple):
    """One measured copy."""

    direction: str  # TO_DEVICE or TO_HOST
    kind: str  # of the host memory: PAGEABLE, PINNED or REGISTERED
    nbytes: int
    seconds: float  # from the call to the end of the copy; the best of a few

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds


def measure(
    device: torch.device | str,
    *,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = (PAGEABLE, PINNED, REGISTERED),
) -> list[Point]:
    """Measure copies between the host and a device. Blocks for up to a few seconds; synchronises
    the device.

    With ``"cpu"`` the same code copies from memory to memory, for tests.

    Returns:
        A point for each combination of kind, direction and size.
    """
    device = torch.device(device)
    points = []
    there = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    for kind in kinds:
        with _host_memory(kind, max(sizes), device) as here:
            for direction, nbytes in product((TO_DEVICE, TO_HOST), sizes):
                source, target = here[:nbytes], there[:nbytes]
                if direction == TO_HOST:
                    source, target = target, source
                seconds = _best_copy(source, target, device)
                points.append(Point(direction, kind, nbytes, seconds))
            del here, source, target  # the pool takes no memory back that still has views
    return points


def by_direction(points: Iterable[Point]) -> dict[str, dict[str, list[Point]]]:
    """Return the points of each direction and kind of memory, in the order of `measure`: the
    largest copy is the last.
    """
    groups: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        groups.setdefault(point.direction, {}).setdefault(point.kind, []).append(point)
    return groups


@contextmanager
def _host_memory(kind: str, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Lend host memory of one kind, uint8 ``[nbytes]``, written once."""
    if kind == PAGEABLE:
        yield torch.zeros(nbytes, dtype=torch.uint8)
        return
    pinned: Any = ps.memory.RegisteredMemory if kind == REGISTERED else ps.memory.HostAllocMemory
    memory = pinned(device=device) if device.type == "cuda" else ps.memory.PageableMemory()
    with ps.SlabPool(2 * nbytes + MIB, memory=memory) as pool, pool.acquire(nbytes) as lease:
        yield lease.tensor().zero_()


def _best_copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    # Does nothing for the CPU.
    synchronise = partial(torch.get_device_module(device).synchronize, device)
    repeats: list[float] = []
    deadline = time.perf_counter() + _POINT_SECONDS
    while len(repeats) < _MOST_REPEATS:
        if len(repeats) >= _LEAST_REPEATS and time.perf_counter() > deadline:
            break
        synchronise()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronise()
        repeats.append(time.perf_counter() - began)
    return min(repeats)


@dataclass(frozen=True)
class Bus:
    """The speed of host-to-device copies.

    Attributes:
        pageable: GB/s of large copies from pageable memory.
        pinned: GB/s of large copies from page-locked memory.
        call: microseconds that any copy takes, however small.
        source: where the figures come from, in words.

    Raises:
        ValueError: a bandwidth is not above zero, or `call` is negative.
    """

    pageable: float
    pinned: float
    call: float = _CALL_US
    source: str = "as given"

    def __post_init__(self) -> None:
        if not (self.pageable > 0 and self.pinned > 0 and self.call >= 0):
            raise ValueError(
                f"the bandwidth of a bus must be above zero: {self}; give GB/s, and microseconds "
                "per call"
            )

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.pageable:g} GB/s pageable, {self.pinned:g} GB/s pinned, "
            f"{self.call:g} us per call"
        )

    def seconds(self, nbytes: int, *, pinned: bool) -> float:
        """Return the seconds of one copy of `nbytes`, including the call; 0 for 0 bytes."""
        if not nbytes:
            return 0.0
        speed = self.pinned if pinned else self.pageable
        return self.call * 1e-6 + nbytes / speed * 1e-9


REFERENCE_BUS = Bus(
    10, 55, source="as on an H200 (pinstage doctor measures yours, --bus and bus= take it)"
)


@dataclass(frozen=True)
class Cost:
    """The cost of staging a batch."""

    fixed_seconds: float  # for any batch, whatever its content
    leaf_seconds: float  # for each leaf
    bytes_per_second: float  # packing and copying overlap
    source: str

    def seconds(self, leaves: int, nbytes: int, bus: float) -> float:
        """Return the seconds that staging a batch takes, over a bus with a speed in bytes per
        second.
        """
        speed = min(self.bytes_per_second, bus)
        return self.fixed_seconds + leaves * self.leaf_seconds + nbytes / speed


REFERENCE = Cost(250e-6, 0.7e-6, 42e9, source="an H200 with 16 cores")
"""The cost in a training loop, which `pinstage trace` assumes. The time per leaf is from one H200's
host; 0.95 us were found on the host of tests/traces/loops. The fixed time is fitted to an earlier
recording of the loops of tests/traces/loops that aren't held out: 0.2 ms fit best, and a higher
value keeps the predicted saving low."""

_FEW = Cost(15e-6, 4e-6, 10e9, REFERENCE.source)
_SMALL = Cost(40e-6, 0.52e-6, 50e9, REFERENCE.source)
_CHUNKS = Cost(95e-6, 0.58e-6, 47e9, REFERENCE.source)
"""The cost of each way to the device (see `pinstage._stage._sender`), one batch after the other.
Fitted to benchmarks/results/staging.json: at most 22% off."""


def staging_seconds(leaves: int, nbytes: int, bus: Bus) -> float:
    """Return the seconds that `Stager.to_device` takes for a batch, until its last copy is done."""
    small = _FEW if leaves <= core.MOST_FEW else _SMALL
    way = _CHUNKS if nbytes >= MIB else small
    return way.seconds(leaves, nbytes, bus.pinned * 1e9)
