"""How fast bytes travel between host and device: measured on this machine, or as given.

`measure` times copies, by size, direction and kind of host memory. A point is the best of a few repetitions, each timed
from the call to the end of the copy, so it includes the cost of the call, as a loop does that waits for its batch. A
`Bus` prices a copy from such points.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

import pinstage as ps

from ._errors import InspectError

TO_DEVICE, TO_HOST = "host to device", "device to host"
PAGEABLE, PINNED, REGISTERED = "pageable", "pinned", "registered"

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes that `pinstage doctor` measures: from a small leaf to a large batch."""

_BUS_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_POINT_SECONDS = 0.03  # repetitions stop after this time: the best comes early, and all points together stay short
_CALL_US = 7.5  # of one copy call where a figure is not given: 7 to 8 were measured beside an H200


@dataclass(frozen=True)
class Point:
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
    directions: Sequence[str] = (TO_DEVICE, TO_HOST),
) -> list[Point]:
    """Measure copies between the host and a device. Blocks for up to a few seconds; synchronises the device.

    With ``"cpu"`` the same code copies from memory to memory, for tests.

    Returns:
        A point for each combination of kind, direction and size.
    """
    device = torch.device(device)
    points = []
    there = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    for kind in kinds:
        with _host_memory(kind, max(sizes), device) as here:
            for direction in directions:
                for nbytes in sizes:
                    source, target = (here, there) if direction == TO_DEVICE else (there, here)
                    seconds = _best_copy(source[:nbytes], target[:nbytes], device)
                    points.append(Point(direction, kind, nbytes, seconds))
            del here, source, target  # the pool does not take memory back that can still be seen
    return points


@contextmanager
def _host_memory(kind: str, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Lend host memory of a kind, uint8 ``[nbytes]``, written once."""
    if kind == PAGEABLE:
        yield torch.zeros(nbytes, dtype=torch.uint8)
        return
    with ps.SlabPool(_resource(kind, device), max_bytes=2 * nbytes + MIB) as pool, pool.acquire(nbytes) as lease:
        yield lease.tensor().zero_()


def _resource(kind: str, device: torch.device) -> ps.MemoryResource:
    if device.type != "cuda":
        return ps.PageableMemory()
    return ps.RegisteredMemory(device=device) if kind == REGISTERED else ps.HostAllocMemory(device=device)


def page_locking_seconds(nbytes: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """Measure how long it takes to page-lock `nbytes`, and to give them back, by kind. Waits for the device."""
    took = {}
    for kind in (PINNED, REGISTERED):
        memory = _resource(kind, device)
        began = time.perf_counter()
        block = memory.allocate(nbytes)
        held = time.perf_counter()
        memory.deallocate(block)
        took[kind] = held - began, time.perf_counter() - held
    return took


def _best_copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    took: list[float] = []
    started = time.perf_counter()
    while len(took) < _LEAST_REPEATS or (len(took) < _MOST_REPEATS and time.perf_counter() - started < _POINT_SECONDS):
        synchronise()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronise()
        took.append(time.perf_counter() - began)
    return min(took)


_measured: dict[str, Bus] = {}


@dataclass(frozen=True)
class Bus:
    """Seconds of one host-to-device copy, by size, from pageable and from page-locked memory.

    Attributes:
        pageable: pairs of bytes and seconds, bytes ascending, at least two. Time is linear between them.
        pinned: the same from page-locked memory.
        source: where the figures come from, in words.
    """

    pageable: tuple[tuple[int, float], ...]
    pinned: tuple[tuple[int, float], ...]
    source: str = "as given"

    @classmethod
    def of_figures(cls, *, pageable: float, pinned: float, call: float = _CALL_US) -> Bus:
        """Make a bus from three figures.

        Args:
            pageable: GB/s of large copies from pageable memory.
            pinned: GB/s of large copies from page-locked memory.
            call: microseconds that any copy takes, however small.

        Raises:
            ValueError: a bandwidth is not above zero, or `call` is negative.
        """
        if min(pageable, pinned) <= 0 or call < 0:
            raise ValueError(
                f"no such bus: pageable {pageable} GB/s, pinned {pinned} GB/s, call {call} us; give GB/s above zero"
            )
        start = call * 1e-6
        return cls(
            ((0, start), (GIB, start + GIB / (pageable * 1e9))),
            ((0, start), (GIB, start + GIB / (pinned * 1e9))),
            f"as given: {pageable:g} GB/s pageable, {pinned:g} GB/s pinned, {call:g} us a call",
        )

    @classmethod
    def parse(cls, text: str) -> Bus:
        """Read ``"pageable=8,pinned=55"``, with ``call=7.5`` if one likes: GB/s, and microseconds a call.

        Raises:
            InspectError: it does not read like that.
        """
        try:
            pairs = [part.partition("=")[::2] for part in text.split(",")]
            figures = {name.strip(): float(value) for name, value in pairs}
            if len(figures) != len(pairs):
                raise ValueError(text)
            return cls.of_figures(**figures)
        except (TypeError, ValueError):
            raise InspectError(
                f"not a bus: {text!r}; write GB/s and microseconds, as in pageable=8,pinned=55,call=7.5"
            ) from None

    @classmethod
    def measured(cls, device: torch.device | str | int | None = None) -> Bus | None:
        """Measure this machine's bus, once a process and device; about half a second. Synchronises the device.

        Args:
            device: a CUDA device; None: the current one.

        Returns:
            The bus, or None without a CUDA device.

        Raises:
            RuntimeError: there is a CUDA device, and memory cannot be page-locked; `pinstage doctor` says why.
        """
        if not torch.cuda.is_available():
            return None
        asked = torch.device("cuda" if device is None else device)
        index = torch.cuda.current_device() if str(asked) == "cuda" else asked.index
        name = f"cuda:{index}"
        if name not in _measured:
            points = measure(name, sizes=_BUS_SIZES, kinds=(PAGEABLE, PINNED), directions=(TO_DEVICE,))
            pageable, pinned = (
                tuple((point.nbytes, point.seconds) for point in points if point.kind == kind)
                for kind in (PAGEABLE, PINNED)
            )
            source = f"measured on {torch.cuda.get_device_name(index)} ({name})"
            _measured[name] = cls(pageable, pinned, source)
        return _measured[name]

    def seconds(self, nbytes: int, *, pinned: bool) -> float:
        """Return what one copy of `nbytes` costs, its call included; nothing for no bytes."""
        if nbytes == 0:
            return 0.0
        sizes, seconds = zip(*(self.pinned if pinned else self.pageable), strict=True)
        if nbytes <= sizes[-1]:
            return float(np.interp(nbytes, sizes, seconds))
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return float(seconds[-1] + max(slope, 0.0) * (nbytes - sizes[-1]))

    @property
    def pinned_bytes_per_second(self) -> float:
        """Bandwidth of the largest page-locked copy known."""
        nbytes, seconds = self.pinned[-1]
        return nbytes / seconds
