"""What a trace says about copies between host and device, in numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._bus import KIB, MIB
from ._events import COPY, INSIDE_TO_OP, OUR_OP, PIN, SYNCHRONISE, TO_DEVICE, TO_HOST, TO_OP, Trace
from ._intervals import ALWAYS, EMPTY, Intervals, containing, intersection, subtract, total, union, within

BUCKETS = (
    ("< 4 KiB", 0, 4 * KIB),
    ("4 to 64 KiB", 4 * KIB, 64 * KIB),
    ("64 KiB to 1 MiB", 64 * KIB, MIB),
    ("1 to 16 MiB", MIB, 16 * MIB),
    (">= 16 MiB", 16 * MIB, 1 << 62),
)
_SHORTEST = 1e-9  # of a trace of one moment, so that shares of it can be taken
_GAP = 5e-6
"""From one kernel of a full queue to the next, and from one `.to()` of a loop to the next: 1 to 4 us in the traces of
tests/traces/loops."""
OP_UNITS, CALL_UNITS = 2.3, 4.6
_UNIT_SECONDS = 0.4e-6
"""What the profiler adds to each operator and to each call of CUDA depends on the machine: 0.7 and 1.4 us on one H200's
host, 1.7 and 3.4 on another's. The trace has a measure of it, the time from the beginning of `aten::to` to that of
`aten::_to_copy`, of which little else is part: 0.31 and 0.74 us there. The second figure is for traces without it."""
SMALL_BYTES = 64 * KIB
"""Below it, the call costs more than the bus."""


@dataclass(frozen=True, kw_only=True)
class _SomeCopies:
    """Copies that have something in common."""

    direction: str  # HtoD, DtoH, DtoD...
    copies: int
    nbytes: int
    seconds: float  # their durations on the device, added up

    @property
    def bytes_per_second(self) -> float:
        """What the copies achieved while they ran."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self) | {"bytes_per_second": self.bytes_per_second}


@dataclass(frozen=True, kw_only=True)
class CopyGroup(_SomeCopies):
    """All copies of one direction, from or to one kind of host memory."""

    kind: str  # pageable, pinned...
    median_bytes: float
    hidden_seconds: float  # time in which one of them and a kernel ran on its device
    exposed_seconds: float  # time in which one of them ran and no kernel did


@dataclass(frozen=True, kw_only=True)
class SizeBucket(_SomeCopies):
    """Copies of one direction and about one size."""

    label: str
    is_small: bool  # the call costs more than the bus


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
    """One training step, or the whole trace where no steps are annotated."""

    number: int  # as the profiler counts; -1 for the whole trace
    start: float  # seconds since the trace began
    seconds: float  # its duration on the host
    copies: int  # to the device, that were asked for in it
    nbytes: int  # of these copies
    copy_seconds: float  # time in which a copy to the device, or from it, ran
    kernel_seconds: float  # time in which a kernel ran, or the next of a run was about to
    staging_seconds: float  # time in which the host was staging, or a copy to the device ran
    stall_seconds: float  # of that, without a kernel: the GPU waits for staging
    synchronise_seconds: float  # time in which the host waited for the device, outside staging
    wait_seconds: float  # time in which the loop waited for its loader
    host_staging_seconds: float  # time in which the loop's thread was staging
    download_seconds: float  # time in which the loop's thread was in operators and calls that copy to the host
    exposed_download_seconds: float  # of that, without a kernel
    idle_wait_seconds: float  # of wait_seconds, until a batch was there to be unpickled
    downloads: int = 0  # copies to the host that were asked for in it
    download_bytes: int = 0
    # What the profiler adds to the times above: to the step, and to the parts of it that are named
    profiler_seconds: float = 0.0
    profiler_staging_seconds: float = 0.0
    profiler_stall_seconds: float = 0.0
    profiler_idle_seconds: float = 0.0  # while no kernel ran, and no copy that the host did not stage beside
    profiler_download_seconds: float = 0.0  # in exposed_download_seconds


@dataclass(frozen=True)
class Spans:
    """When things happened, for the timeline: intervals in seconds, ``[n, 2]`` each."""

    kernels: Intervals
    copies: dict[str, Intervals]
    host: Intervals
    waits: Intervals
    stalls: Intervals


@dataclass(frozen=True)
class Analysis:
    """What one trace says."""

    path: str  # the file's name
    rank: int | None
    device_name: str | None
    device: int  # the figures of steps are about the GPU with the most work
    seconds: float  # from the first to the last moment that is looked at
    groups: tuple[CopyGroup, ...]
    buckets: tuple[SizeBucket, ...]
    calls: tuple[HostCall, ...]  # those that took most first
    steps: tuple[Step, ...]
    annotated: bool  # whether steps are annotated; if not, one step is the whole trace
    has_gpu: bool  # whether there is anything of a GPU in the trace
    has_workers: bool  # whether the loop's loader has worker processes
    uses_pinstage: bool  # whether pinstage staged something on the loop's thread
    op_seconds: float  # that the profiler added to each operator or range that it recorded
    call_seconds: float  # that it added to each call of CUDA
    fastest_pinned: float  # bytes per second of the fastest page-locked copy to the device of 1 MiB or more; 0: none
    spans: Spans

    def middle(self, name: str) -> float:
        """Return the median over the steps of one of their figures."""
        return float(np.median([getattr(step, name) for step in self.steps]))

    def sum_of(self, name: str, direction: str = TO_DEVICE) -> float:
        """Return the sum over the groups of a direction of one of their figures."""
        return float(sum(getattr(group, name) for group in self.groups if group.direction == direction))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the timeline as plain data. Seconds and bytes."""
        plain = ("path", "rank", "device_name", "device", "seconds", "fastest_pinned")
        return {name: getattr(self, name) for name in plain} | {
            "copies": [group.to_dict() for group in self.groups],
            "sizes": [bucket.to_dict() for bucket in self.buckets],
            "calls": [dataclasses.asdict(call) for call in self.calls],
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "steps_annotated": self.annotated,
        }


def analyse(trace: Trace) -> Analysis:
    """Compute the figures of a trace."""
    copies = _Copies(trace)
    kernels = {
        int(device): union(trace.kernels.spans()[trace.kernels["device"] == device])
        for device in np.unique(trace.kernels["device"])
    }
    device = _main_device(kernels, copies)
    busy = union(kernels.get(device, EMPTY), gap=_GAP)
    thread = _main_thread(trace)
    uploads, downloads = (_host_copying(trace, copies, thread, way) for way in (TO_DEVICE, TO_HOST))
    ours = trace.ops.spans()[(trace.ops["thread"] == thread) & (trace.ops["kind"] == OUR_OP)]
    host = union(uploads, ours, gap=_GAP)
    if not trace.has_gpu:  # then the operators that would copy are all that can be told
        host = union(trace.ops.spans()[trace.ops["thread"] == thread])
    downloads = subtract(downloads, host)
    on_it = copies.device == device
    to_device = union(copies.spans[on_it & (copies.direction == TO_DEVICE)])
    both_ways = union(copies.spans[on_it & np.isin(copies.direction, (TO_DEVICE, TO_HOST))])
    staging = union(host, to_device)
    stalls = subtract(staging, busy)
    waits = union(trace.waits.spans())
    synchronising = subtract(_synchronising(trace, thread), staging)
    exposed = subtract(downloads, busy)
    columns = (both_ways, busy, staging, stalls, synchronising, waits, host)
    steps = _steps(trace, copies, (*columns, downloads, exposed, _idle_waits(trace, thread)))
    unit = _profiler_unit(trace, thread)
    op_seconds, call_seconds = OP_UNITS * unit, CALL_UNITS * unit
    # What the profiler does while a kernel runs, or a copy that the host does not stage beside, holds nothing up.
    under_way = subtract(both_ways, host)
    parts = (host, subtract(stalls, under_way), exposed, subtract(ALWAYS, union(busy, under_way)))
    steps = _with_profiler(steps, trace, thread, (op_seconds, call_seconds), parts)
    return Analysis(
        path=trace.path,
        rank=trace.rank,
        device_name=trace.device_name,
        device=device,
        seconds=max(step.start + step.seconds for step in steps) - steps[0].start,
        groups=_groups(copies, kernels),
        buckets=_buckets(copies),
        calls=_host_calls(trace),
        steps=steps,
        annotated=bool(len(trace.steps)),
        has_gpu=trace.has_gpu,
        has_workers=trace.has_workers,
        uses_pinstage=bool(len(ours)),
        op_seconds=op_seconds,
        call_seconds=call_seconds,
        fastest_pinned=_fastest_pinned(copies),
        spans=Spans(busy, _timeline_copies(copies, device), host, waits, stalls),
    )


class _Copies:
    """The copies of a trace, an array for each figure."""

    def __init__(self, trace: Trace) -> None:
        self.spans = trace.copies.spans()
        self.seconds = self.spans[:, 1] - self.spans[:, 0]
        self.device = trace.copies["device"]
        self.nbytes = trace.copies["nbytes"]
        self.correlation = trace.copies["correlation"]
        self.direction = trace.texts(trace.copies, "direction")
        self.kind = trace.texts(trace.copies, "kind")

    def sums(self, chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return number, bytes and seconds of the chosen copies."""
        return {
            "copies": int(chosen.sum()),
            "nbytes": int(self.nbytes[chosen].sum()),
            "seconds": float(self.seconds[chosen].sum()),
        }

    def by_kind(self) -> list[tuple[str, str, npt.NDArray[np.bool_]]]:
        """Return each direction and kind that there is, and which copies are of it; to the device first."""
        pairs = sorted(set(zip(self.direction, self.kind, strict=True)))
        pairs.sort(key=lambda pair: (pair[0] not in (TO_DEVICE, TO_HOST), pair[0] != TO_DEVICE))
        return [(way, kind, (self.direction == way) & (self.kind == kind)) for way, kind in pairs]


def _main_device(kernels: dict[int, Intervals], copies: _Copies) -> int:
    """Return the device with the most work: kernels count, and where there are none, copies."""
    if kernels:
        return max(kernels, key=lambda device: total(kernels[device]))
    return int(np.bincount(copies.device).argmax()) if len(copies.device) else 0


def _main_thread(trace: Trace) -> int:
    """Return the thread of the training loop: of the steps, else the one that calls CUDA most, else the busiest."""
    threads = next((found["thread"] for found in (trace.steps, trace.calls, trace.host) if len(found)), ())
    return int(np.bincount(threads).argmax()) if len(threads) else 0


def _synchronising(trace: Trace, thread: int) -> Intervals:
    """Return when the loop's thread waited for the device."""
    chosen = (trace.texts(trace.calls, "group") == SYNCHRONISE) & (trace.calls["thread"] == thread)
    return union(trace.calls.spans()[chosen])


def _idle_waits(trace: Trace, thread: int) -> Intervals:
    """Return when the loop waited for a batch that was not there: what it does with one shows as operators."""
    waits, starts = trace.waits.spans(), np.sort(trace.host.spans()[trace.host["thread"] == thread, 0])
    after = np.append(starts, np.inf)[np.searchsorted(starts, waits[:, 0], side="right")]
    return union(np.column_stack([waits[:, 0], np.minimum(waits[:, 1], after)]))


def _host_copying(trace: Trace, copies: _Copies, thread: int, way: str) -> Intervals:
    """Return when the loop's thread was copying in one direction: calls that do, and operators around them.

    A copy's call is short beside the operators that lead to it (`aten::to` takes some 10 us for the smallest tensor),
    so the outermost such operator around a call is counted whole. Pinning counts as copying to the device. What other
    threads do, the loader's pinning for instance, holds nobody up by itself.
    """
    group = trace.texts(trace.calls, "group")
    mine = copies.correlation[(copies.direction == way) & (copies.correlation >= 0)]
    relevant = (group == COPY) & np.isin(trace.calls["correlation"], mine)
    if way == TO_DEVICE:
        relevant |= group == PIN
    relevant &= trace.calls["thread"] == thread
    calls = trace.calls.spans()[relevant]
    around = union(trace.ops.spans()[(trace.ops["thread"] == thread) & (trace.ops["kind"] != OUR_OP)])
    holding = np.unique(containing(around, calls[:, 0]))
    return union(calls, around[holding[holding >= 0]])


def _steps(trace: Trace, copies: _Copies, columns: Sequence[Intervals]) -> tuple[Step, ...]:
    """Return the steps in the order of time; `columns` are the times that `Step` adds up, in its order."""
    if len(trace.steps):
        bounds, numbers = trace.steps.spans(), trace.steps["number"]
        order = np.argsort(bounds[:, 0], kind="stable")
        bounds, numbers = bounds[order], numbers[order]
    else:
        parts = (trace.kernels, trace.copies, trace.calls) if trace.has_gpu else (trace.host,)
        everything = np.concatenate([part.spans() for part in parts])
        first, last = everything[:, 0].min(), everything[:, 1].max()
        bounds, numbers = np.array([[first, max(last, first + _SHORTEST)]]), np.array([-1])
    launched = _launch_times(trace, copies)
    figures = np.column_stack([within(spans, bounds[:, 0], bounds[:, 1]) for spans in columns])
    steps = []
    for number, (start, end), row in zip(numbers, bounds, figures, strict=True):
        here = (launched >= start) & (launched < end)
        up, down = (copies.sums(here & (copies.direction == way)) for way in (TO_DEVICE, TO_HOST))
        counted = {"downloads": down["copies"], "download_bytes": down["nbytes"]}
        steps.append(
            Step(int(number), float(start), float(end - start), up["copies"], up["nbytes"], *row.tolist(), **counted)
        )
    return tuple(steps)


def _profiler_unit(trace: Trace, thread: int) -> float:
    """Return how long it takes from the beginning of an operator to that of the one that it calls at once."""
    kinds, starts = trace.ops["kind"], trace.ops.spans()[:, 0]
    mine = trace.ops["thread"] == thread
    outer, inner = np.sort(starts[mine & (kinds == TO_OP)]), starts[mine & (kinds == INSIDE_TO_OP)]
    before = np.searchsorted(outer, inner, side="right") - 1
    if not (before >= 0).any():
        return _UNIT_SECONDS
    return float(np.median((inner - outer[before])[before >= 0]))


def _with_profiler(
    steps: Sequence[Step],
    trace: Trace,
    thread: int,
    cost: tuple[float, float],
    parts: Sequence[Intervals],
) -> tuple[Step, ...]:
    """Add what the profiler took, for an operator and for a call: in each step, and in parts of it."""
    mine = trace.host["thread"] == thread
    starts = trace.host.spans()[mine, 0]
    added = np.array(cost)[trace.host["is_call"][mine]]
    inside = [np.ones(len(starts)), *(containing(part, starts) >= 0 for part in parts)]
    names = ("seconds", "staging_seconds", "stall_seconds", "download_seconds", "idle_seconds")
    order = np.argsort(starts, kind="stable")
    # What comes before a step's end less what comes before its start.
    sums = [np.concatenate([[0.0], np.cumsum((added * chosen)[order])]) for chosen in inside]
    edges = np.searchsorted(starts[order], [(step.start, step.start + step.seconds) for step in steps])
    found = []
    for step, (first, end) in zip(steps, edges, strict=True):
        figures: dict[str, Any] = {
            f"profiler_{name}": float(t[end] - t[first]) for name, t in zip(names, sums, strict=True)
        }
        found.append(dataclasses.replace(step, **figures))
    return tuple(found)


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
    for direction, kind, mine in copies.by_kind():
        hidden = exposed = 0.0
        for device in np.unique(copies.device[mine]):
            spans = union(copies.spans[mine & (copies.device == device)])
            with_kernel = total(intersection(spans, kernels.get(int(device), EMPTY)))
            hidden += with_kernel
            exposed += total(spans) - with_kernel
        found.append(
            CopyGroup(
                direction=direction,
                kind=kind,
                median_bytes=float(np.median(copies.nbytes[mine])),
                hidden_seconds=hidden,
                exposed_seconds=exposed,
                **copies.sums(mine),
            )
        )
    return tuple(found)


def _buckets(copies: _Copies) -> tuple[SizeBucket, ...]:
    found = []
    for direction in (TO_DEVICE, TO_HOST):
        for label, least, limit in BUCKETS:
            mine = (copies.direction == direction) & (copies.nbytes >= least) & (copies.nbytes < limit)
            if mine.any():
                is_small = limit <= SMALL_BYTES
                found.append(SizeBucket(direction=direction, label=label, is_small=is_small, **copies.sums(mine)))
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
    for direction, kind, mine in copies.by_kind():
        here = mine & (copies.device == device)
        if direction in (TO_DEVICE, TO_HOST) and here.any():
            rows[f"{direction} {kind}"] = union(copies.spans[here])
    return rows
