"""Checks of what was measured: how fast bytes travel, and how long it takes to page-lock them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..._sizes import format_bytes
from .. import _format as fmt
from .._bandwidth import PAGEABLE, PINNED, REGISTERED, TO_DEVICE, Point
from .._report import Table
from ._check import Check

LEAST_OF_LINK = 0.6
"""Of what a link gives on paper, large page-locked copies reach some 85%; below this something is in their way."""
LEAST_GAIN = 1.2
"""Page-locked copies that are not faster than pageable ones by this are worth a look."""
_BAR = 12


def bandwidth(points: Sequence[Point], link_rate: float | None, *, host_page_tables: bool) -> list[Check]:
    """Look at the largest copies, for each direction.

    Args:
        points: what was measured.
        link_rate: bytes per second of the link on paper; None: not known.
        host_page_tables: whether the GPU uses the host's: then pageable memory is as fast, and no PCIe link counts.
    """
    checks = []
    for direction in dict.fromkeys(point.direction for point in points):
        largest = max(point.nbytes for point in points if point.direction == direction)
        rates = {
            point.kind: point.bytes_per_second
            for point in points
            if (point.direction, point.nbytes) == (direction, largest)
        }
        found = ", ".join(f"{kind} {fmt.rate(rate)}" for kind, rate in rates.items()) + f", {format_bytes(largest)}"
        checks.append(_judge(direction, found, rates, None if host_page_tables else link_rate, host_page_tables))
    return checks


def _judge(
    direction: str, found: str, rates: Mapping[str, float], link_rate: float | None, host_page_tables: bool
) -> Check:
    pinned = rates.get(PINNED, 0.0)
    if link_rate is not None and pinned < LEAST_OF_LINK * link_rate:
        return Check(
            direction,
            "warning",
            f"{found}: {fmt.share(pinned, link_rate)} of the link's {fmt.rate(link_rate)}",
            "is another process on this GPU or its switch? is the memory of another NUMA node? run it again when idle",
        )
    if not host_page_tables and pinned < LEAST_GAIN * rates.get(PAGEABLE, 0.0):
        return Check(
            direction,
            "warning",
            f"{found}: page-locked memory is hardly faster than pageable",
            "run it again when the machine is idle; in a virtual machine ask its provider",
        )
    return Check(direction, "ok", found)


def small_copies(points: Sequence[Point]) -> Check | None:
    """Say what the smallest copies reach, which is why batches are packed."""
    ours = [point for point in points if point.direction == TO_DEVICE and point.kind == PINNED]
    if not ours:
        return None
    small, large = min(ours, key=lambda point: point.nbytes), max(ours, key=lambda point: point.nbytes)
    return Check(
        "small copies",
        "info",
        f"{format_bytes(small.nbytes)} takes {fmt.duration(small.seconds)}: {fmt.rate(small.bytes_per_second)}, "
        f"{fmt.share(small.bytes_per_second, large.bytes_per_second)} of what the bus gives; pack them",
    )


def pinning(nbytes: int, took: Mapping[str, tuple[float, float]]) -> Check:
    """Say how long it takes to page-lock memory, and to give it back."""
    names = {PINNED: "cudaHostAlloc", REGISTERED: "registered huge pages"}
    parts = [
        f"{names.get(kind, kind)} {fmt.duration(take)} (back: {fmt.duration(give)})"
        for kind, (take, give) in took.items()
    ]
    return Check("page-locking time", "info", f"{format_bytes(nbytes)}: {', '.join(parts)}")


def not_measured(reason: str) -> Check:
    """Say that nothing was measured, and why."""
    return Check("bandwidth", "info", f"not measured: {reason}")


def bars(points: Sequence[Point]) -> Table:
    """Draw the bandwidth as bars of text: a row for each direction and size, a bar for each kind."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    by_key = {(point.direction, point.nbytes, point.kind): point.bytes_per_second for point in points}
    fastest = max(by_key.values())
    rows = []
    for direction, nbytes in dict.fromkeys((point.direction, point.nbytes) for point in points):
        row = [direction, format_bytes(nbytes)]
        for kind in kinds:
            rate = by_key.get((direction, nbytes, kind), 0.0)
            row += [f"{rate / 1e9:.1f}", "#" * round(_BAR * rate / fastest)]
        rows.append(row)
    columns = ["", ">size", *(cell for kind in kinds for cell in (f">{kind}", ""))]
    return Table(columns, rows, "bandwidth, GB/s, the call included")
