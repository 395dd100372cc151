"""What a copy to the device costs: measured on this machine, or as given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ._bandwidth import KIB, MIB, PAGEABLE, PINNED, TO_DEVICE, Point, measure
from ._errors import InspectError

_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
_GIB = 1 << 30
_CALL_US = 7.5
"""Microseconds of one copy call where a figure is not given: 7 to 8 were measured beside an H200."""
_FIGURES = ("pageable", "pinned", "call")

_measured: dict[str, Bus] = {}


@dataclass(frozen=True)
class Bus:
    """Seconds of one host-to-device copy, by size, from pageable and from page-locked memory.

    Attributes:
        pageable: pairs of bytes and seconds, bytes ascending, at least two; between them time is linear.
        pinned: the same from page-locked memory.
        source: where the figures are from, for people.
    """

    pageable: tuple[tuple[int, float], ...]
    pinned: tuple[tuple[int, float], ...]
    source: str = "as given"

    @classmethod
    def of_figures(cls, *, pageable: float, pinned: float, call: float = _CALL_US) -> Bus:
        """Make a bus of three figures.

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
            ((0, start), (_GIB, start + _GIB / (pageable * 1e9))),
            ((0, start), (_GIB, start + _GIB / (pinned * 1e9))),
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
            if len(figures) != len(pairs) or not set(figures) <= set(_FIGURES):
                raise ValueError(text)
            return cls.of_figures(**figures)
        except (TypeError, ValueError):
            raise InspectError(
                f"not a bus: {text!r}; write GB/s and microseconds, as in pageable=8,pinned=55,call=7.5"
            ) from None

    @classmethod
    def measured(cls, device: torch.device | str | None = None) -> Bus | None:
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
        named = torch.device("cuda" if device is None else device)
        index = torch.cuda.current_device() if str(named) == "cuda" else named.index
        name = f"cuda:{index}"
        if name not in _measured:
            points = measure(name, sizes=_SIZES, kinds=(PAGEABLE, PINNED), directions=(TO_DEVICE,))
            _measured[name] = cls.of_points(points, f"measured on {torch.cuda.get_device_name(index)} ({name})")
        return _measured[name]

    @classmethod
    def of_points(cls, points: Iterable[Point], source: str) -> Bus:
        """Make a bus of measured host-to-device copies."""
        by_kind: dict[str, list[tuple[int, float]]] = {PAGEABLE: [], PINNED: []}
        for point in points:
            if point.direction == TO_DEVICE and point.kind in by_kind:
                by_kind[point.kind].append((point.nbytes, point.seconds))
        return cls(tuple(sorted(by_kind[PAGEABLE])), tuple(sorted(by_kind[PINNED])), source)

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
