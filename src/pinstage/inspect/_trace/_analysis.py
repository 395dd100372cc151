"""What a trace says about copies between host and device, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._events import COPY, PIN, TO_DEVICE, TO_HOST, Columns, Trace
from ._intervals import EMPTY, Intervals, containing, intersection, subtract, total, union, within

KIB, MIB = 1 << 10, 1 << 20
BUCKETS = (
    ("< 4 KiB", 0, 4 * KIB),
    ("4 to 64 KiB", 4 * KIB, 64 * KIB),
    ("64 KiB to 1 MiB", 64 * KIB, MIB),
    ("1 to 16 MiB", MIB, 16 * MIB),
    (">= 16 MiB", 16 * MIB, 1 << 62),
)
_SHORTEST = 1e-9  # of a trace of one moment, so that shares of it can be taken
SMALL_BYTES = 64 * KIB
"""Below it, the call costs more than the bus."""


@dataclass(frozen=True)
class CopyGroup:
    """All copies of one direction and kind.

    Attributes:
        direction: ``HtoD``, ``DtoH``, ``DtoD``...
        kind: of the host memory: ``pageable``, ``pinned``...
        copies: how many.
        nbytes: of them together.
        median_bytes: half of them are smaller.
        largest_bytes: the largest.
        seconds: their durations on the device, added up.
        hidden_seconds: time in which one of them and a kernel ran on its device.
        exposed_seconds: time in which one of them ran and no kernel did.
    """

    direction: str
    kind: str
    copies: int
    nbytes: int
    median_bytes: float
    largest_bytes: int
    seconds: float
    hidden_seconds: float
    exposed_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """What the copies achieved while they ran."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class SizeBucket:
    """Copies of one direction and about one size."""

    direction: str
    label: str
    copies: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """What the copies achieved while they ran."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class HostCall:
    """One function of CUDA that the host called to copy, to pin, or to synchronise."""

    group: str
    name: str
    calls: int
    seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Step:
    """One training step, or the whole trace where no steps are annotated.

    Attributes:
        number: as the profiler counts; -1 for the whole trace.
        start: seconds since the trace began.
        seconds: its duration on the host.
        copies: host-to-device copies that were asked for in it.
        nbytes: of them together.
        copy_seconds: time in which one of them, or of those to the host, ran.
        exposed_seconds: of that, without a kernel.
        kernel_seconds: time in which a kernel ran.
        staging_seconds: time in which the host was staging, or a copy to the device ran.
        stall_seconds: of that, without a kernel: the GPU waits for staging.
        synchronise_seconds: time in which the host waited for the device, outside staging.
        wait_seconds: time in which the loop waited for its loader.
    """

    number: int
    start: float
    seconds: float
    copies: int
    nbytes: int
    copy_seconds: float
    exposed_seconds: float
    kernel_seconds: float
    staging_seconds: float
    stall_seconds: float
    synchronise_seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Spans:
    """Where things happened, for the timeline: intervals in seconds, ``[n, 2]`` each."""

    kernels: Intervals
    copies: dict[str, Intervals]
    host: Intervals
    waits: Intervals
    stalls: Intervals


@dataclass(frozen=True)
class Analysis:
    """What one trace says.

    Attributes:
        path: the file's name.
        rank: of the process, or None.
        device_name: of the GPU, or None.
        device: the index of the GPU that the figures of steps are about: the one with the most work.
        seconds: from the first to the last moment that is looked at.
        groups: copies by direction and kind.
        buckets: copies by direction and size.
        calls: host calls, those that took most first.
        steps: training steps; one that is the whole trace, if none are annotated.
        annotated: whether steps are annotated.
        fastest_pinned: bytes per second of the fastest page-locked copy to the device of 1 MiB or more; 0 if none.
        spans: for the timeline.
    """

    path: str
    rank: int | None
    device_name: str | None
    device: int
    seconds: float
    groups: tuple[CopyGroup, ...]
    buckets: tuple[SizeBucket, ...]
    calls: tuple[HostCall, ...]
    steps: tuple[Step, ...]
    annotated: bool
    fastest_pinned: float
    spans: Spans

    def middle(self, name: str) -> float:
        """Return the median over the steps of one of their figures."""
        return float(np.median([getattr(step, name) for step in self.steps]))

    def sum_of(self, name: str, direction: str = TO_DEVICE) -> float:
        """Return the sum over the groups of a direction of one of their figures."""
        return float(sum(getattr(group, name) for group in self.groups if group.direction == direction))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the timeline as plain data. Seconds and bytes."""
        rated = (self.groups, self.buckets)
        groups, buckets = (
            [dataclasses.asdict(item) | {"bytes_per_second": item.bytes_per_second} for item in items]
            for items in rated
        )
        return {
            "path": self.path,
            "rank": self.rank,
            "device_name": self.device_name,
            "device": self.device,
            "seconds": self.seconds,
            "copies": groups,
            "sizes": buckets,
            "calls": [dataclasses.asdict(call) for call in self.calls],
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "steps_annotated": self.annotated,
            "fastest_pinned": self.fastest_pinned,
        }


def analyse(trace: Trace) -> Analysis:
    """Compute the figures of a trace."""
    copies = _Copies(trace)
    kernels = {int(device): _spans_of(trace.kernels, "device", device) for device in np.unique(trace.kernels["device"])}
    device = _main_device(kernels, copies)
    busy = kernels.get(device, EMPTY)
    host = _host_staging(trace, copies)
    to_device = copies.spans_where((copies.direction == TO_DEVICE) & (copies.device == device))
    both_ways = copies.spans_where(np.isin(copies.direction, (TO_DEVICE, TO_HOST)) & (copies.device == device))
    staging = union(host, to_device)
    stalls = subtract(staging, busy)
    waits = union(trace.waits.spans())
    sync = subtract(_calls_of(trace, "synchronise", _main_thread(trace)), staging)
    bounds, numbers = _step_bounds(trace)
    start, end = bounds[:, 0], bounds[:, 1]
    launched = _launch_times(trace, copies)
    uploads = copies.direction == TO_DEVICE
    exposed = subtract(both_ways, busy)
    columns = [within(spans, start, end) for spans in (both_ways, exposed, busy, staging, stalls, sync, waits)]
    steps = []
    for index, number in enumerate(numbers):
        mine = uploads & (launched >= start[index]) & (launched < end[index])
        steps.append(
            Step(
                int(number),
                float(start[index]),
                float(end[index] - start[index]),
                int(mine.sum()),
                int(copies.nbytes[mine].sum()),
                *(float(column[index]) for column in columns),
            )
        )
    return Analysis(
        path=trace.path,
        rank=trace.rank,
        device_name=trace.device_name,
        device=device,
        seconds=float(end.max() - start.min()),
        groups=_groups(copies, kernels),
        buckets=_buckets(copies),
        calls=_host_calls(trace),
        steps=tuple(steps),
        annotated=bool(len(trace.steps)),
        fastest_pinned=_fastest_pinned(copies),
        spans=Spans(busy, _timeline_copies(copies, device), host, waits, stalls),
    )


class _Copies:
    """The columns of copies as arrays."""

    def __init__(self, trace: Trace) -> None:
        labels = np.array([*trace.labels, ""], dtype=object)
        self.spans = trace.copies.spans()
        self.device = trace.copies["device"]
        self.direction = labels[trace.copies["direction"]]
        self.kind = labels[trace.copies["kind"]]
        self.nbytes = trace.copies["nbytes"]
        self.correlation = trace.copies["correlation"]
        self.seconds = self.spans[:, 1] - self.spans[:, 0]

    def spans_where(self, chosen: npt.NDArray[np.bool_]) -> Intervals:
        """Return the times of the chosen copies, merged."""
        return union(self.spans[np.asarray(chosen, dtype=bool)])


def _spans_of(columns: Columns, name: str, value: int) -> Intervals:
    return union(columns.spans()[columns[name] == value])


def _main_device(kernels: dict[int, Intervals], copies: _Copies) -> int:
    """Return the device with the most work: kernels count, and where there are none, copies."""
    if kernels:
        return max(kernels, key=lambda device: total(kernels[device]))
    return int(np.bincount(copies.device).argmax()) if len(copies.device) else 0


def _main_thread(trace: Trace) -> int:
    """Return the thread of the training loop: of the steps, else the one that calls CUDA most."""
    threads = trace.steps["thread"] if len(trace.steps) else trace.calls["thread"]
    return int(np.bincount(threads).argmax()) if len(threads) else 0


def _calls_of(trace: Trace, group: str, thread: int) -> Intervals:
    labels = np.array([*trace.labels, ""], dtype=object)
    chosen = (labels[trace.calls["group"]] == group) & (trace.calls["thread"] == thread)
    return union(trace.calls.spans()[chosen.astype(bool)])


def _host_staging(trace: Trace, copies: _Copies) -> Intervals:
    """Return when the loop's thread was staging: calls that copy to the device or pin, and operators around them.

    A copy's call is short beside the operators that lead to it (`aten::to` takes some 10 us for the smallest tensor),
    so the outermost such operator around a call is counted whole. Ranges of pinstage count as they are. What other
    threads do, the loader's pinning for instance, holds nobody up by itself.
    """
    thread = _main_thread(trace)
    labels = np.array([*trace.labels, ""], dtype=object)
    group = labels[trace.calls["group"]]
    uploads = copies.correlation[(copies.direction == TO_DEVICE) & (copies.correlation >= 0)]
    relevant = (group == COPY) & np.isin(trace.calls["correlation"], uploads) | (group == PIN)
    relevant &= trace.calls["thread"] == thread
    calls = trace.calls.spans()[relevant.astype(bool)]
    here = trace.ops["thread"] == thread
    ours = here & (trace.ops["ours"] == 1)
    spans = trace.ops.spans()
    around = union(spans[here & ~ours])
    holding = np.unique(containing(around, calls[:, 0]))
    return union(calls, around[holding[holding >= 0]], spans[ours])


def _step_bounds(trace: Trace) -> tuple[Intervals, npt.NDArray[np.int64]]:
    if len(trace.steps):
        spans, numbers = trace.steps.spans(), trace.steps["number"]
        order = np.argsort(spans[:, 0], kind="stable")
        return spans[order], numbers[order]
    everything = np.concatenate([part.spans() for part in (trace.kernels, trace.copies, trace.calls)])
    first, last = everything[:, 0].min(), everything[:, 1].max()
    return np.array([[first, max(last, first + _SHORTEST)]]), np.array([-1])


def _launch_times(trace: Trace, copies: _Copies) -> npt.NDArray[np.float64]:
    """Return when each copy was asked for; when it ran, if its call was not recorded."""
    launched = copies.spans[:, 0].copy()
    calls, starts = trace.calls["correlation"], trace.calls.spans()[:, 0]
    if not len(calls):
        return launched
    order = np.argsort(calls, kind="stable")
    index = np.minimum(np.searchsorted(calls[order], copies.correlation), len(calls) - 1)
    known = (calls[order][index] == copies.correlation) & (copies.correlation >= 0)
    launched[known] = starts[order][index][known]
    return launched


def _groups(copies: _Copies, kernels: dict[int, Intervals]) -> tuple[CopyGroup, ...]:
    found = []
    for direction, kind in sorted(set(zip(copies.direction, copies.kind, strict=True))):
        mine = ((copies.direction == direction) & (copies.kind == kind)).astype(bool)
        hidden = exposed = 0.0
        for device in np.unique(copies.device[mine]):
            spans = copies.spans_where(mine & (copies.device == device))
            with_kernel = total(intersection(spans, kernels.get(int(device), EMPTY)))
            hidden += with_kernel
            exposed += total(spans) - with_kernel
        nbytes = copies.nbytes[mine]
        found.append(
            CopyGroup(
                direction,
                kind,
                int(mine.sum()),
                int(nbytes.sum()),
                float(np.median(nbytes)),
                int(nbytes.max()),
                float(copies.seconds[mine].sum()),
                hidden,
                exposed,
            )
        )
    first = [TO_DEVICE, TO_HOST]
    return tuple(sorted(found, key=lambda group: (group.direction not in first, group.direction != TO_DEVICE)))


def _buckets(copies: _Copies) -> tuple[SizeBucket, ...]:
    found = []
    for direction in (TO_DEVICE, TO_HOST):
        for label, least, limit in BUCKETS:
            mine = ((copies.direction == direction) & (copies.nbytes >= least) & (copies.nbytes < limit)).astype(bool)
            if mine.any():
                nbytes, seconds = int(copies.nbytes[mine].sum()), float(copies.seconds[mine].sum())
                found.append(SizeBucket(direction, label, int(mine.sum()), nbytes, seconds))
    return tuple(found)


def _fastest_pinned(copies: _Copies) -> float:
    large = (copies.direction == TO_DEVICE) & (copies.kind == "pinned") & (copies.nbytes >= MIB) & (copies.seconds > 0)
    return float((copies.nbytes[large] / copies.seconds[large]).max()) if large.any() else 0.0


def _host_calls(trace: Trace) -> tuple[HostCall, ...]:
    spans, names, groups = trace.calls.spans(), trace.calls["name"], trace.calls["group"]
    lasted = spans[:, 1] - spans[:, 0]
    found = []
    for name in np.unique(names):
        mine = names == name
        group = trace.labels[int(groups[mine][0])]
        label, seconds = trace.labels[int(name)], lasted[mine]
        found.append(HostCall(group, label, int(mine.sum()), float(seconds.sum()), float(seconds.max())))
    return tuple(sorted(found, key=lambda call: -call.seconds))


def _timeline_copies(copies: _Copies, device: int) -> dict[str, Intervals]:
    rows = {}
    for direction, kind in sorted(set(zip(copies.direction, copies.kind, strict=True)), reverse=True):
        mine = (copies.direction == direction) & (copies.kind == kind) & (copies.device == device)
        if direction in (TO_DEVICE, TO_HOST) and mine.any():
            rows[f"{direction} {kind}"] = copies.spans_where(mine)
    return rows
