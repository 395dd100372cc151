"""Figures about copies between host and device, from a trace.

Times are added up by interval arithmetic on arrays. A set of intervals is a float64 array of shape
``[n, 2]``, start and end in seconds, sorted and disjoint. `union` makes a set; the other functions
of intervals take sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._bus import KIB, MIB
from . import _events
from ._events import (
    CALL,
    CALLS,
    COPY,
    HOST,
    KERNEL,
    OUR_OP,
    STEP,
    TO_DEVICE,
    TO_HOST,
    Events,
    Trace,
)

Times = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.float64]

EMPTY: Intervals = np.empty((0, 2))
ALWAYS: Intervals = np.array([[-np.inf, np.inf]])

_SHORTEST = 1e-9  # seconds of a trace of one moment, so that shares of it can be computed
_GAP = 5e-6
"""Gaps up to this are ignored, from one kernel of a full queue to the next, and from one `.to()` of
a loop to the next: 1 to 4 us in the traces of tests/traces/loops."""
EVENT_UNITS = 2.3
"""The first constant of the model. The profiler adds time to each operator, and twice as much to
each call of CUDA. The time depends on the machine: 0.7 us on one H200's host, 1.7 us on another's.
A trace contains a measure of it: the time from the start of `aten::to` to the start of
`aten::_to_copy`, with little other work in between: 0.31 and 0.74 us on these hosts. The constant
is the ratio of both times."""
UNIT_SECONDS = 0.4e-6
"""The time from `aten::to` to `aten::_to_copy`, for traces without these operators."""
SMALL_BYTES = 64 * KIB
"""Below this size, the call costs more than the bus."""


class Analysis:
    """Figures from a trace."""

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        copies = _Copies(events, trace.ways)
        devices = np.unique(events.of(KERNEL).place)
        kernels = {int(device): union(events.of(KERNEL, place=device).spans) for device in devices}
        # The figures of steps are about the GPU with the most kernel time; without kernels, with
        # the most copies.
        by_copies = int(np.bincount(copies.place).argmax()) if len(copies) else 0
        self.device = max(kernels, key=lambda device: total(kernels[device]), default=by_copies)
        # The training loop's thread has the steps, else the most calls of CUDA, else the most host
        # events.
        threads = next(
            filter(len, (events.of(*kinds).place for kinds in ((STEP,), CALLS, HOST))), ()
        )
        loop = events.of(*HOST, place=int(np.bincount(threads).argmax()) if len(threads) else 0)
        self.path, self.device_name = trace.path, trace.device_name
        self.has_workers = trace.has_workers
        self.annotated = bool(len(events.of(STEP)))  # if not, one step is the whole trace
        self.uses_pinstage = bool(len(loop.of(OUR_OP)))
        self.groups = _groups(copies, kernels)
        # The profiler's cost for each operator or range. A call of CUDA costs twice as much.
        self.event_seconds = EVENT_UNITS * _profiler_unit(loop)
        busy = union(kernels.get(self.device, EMPTY), gap=_GAP)
        # Of each step.
        self.figures = _figures(events, loop, copies, self.device, busy, self.event_seconds)
        self.seconds = float(
            (self.figures["start"] + self.figures["seconds"]).max() - self.figures["start"][0]
        )
        uploads = copies.direction == TO_DEVICE
        self.small_copies = int((uploads & (copies.nbytes < SMALL_BYTES)).sum())
        # Bytes per second of the fastest page-locked copy to the device of 1 MiB or more; 0: none.
        large = (
            uploads & (copies.memory == "pinned") & (copies.nbytes >= MIB) & (copies.seconds > 0)
        )
        self.fastest_pinned = float((copies.nbytes[large] / copies.seconds[large]).max(initial=0))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The figures of each step, in chronological order."""
        columns = [values.tolist() for values in self.figures.values()]
        return [dict(zip(self.figures, row, strict=True)) for row in zip(*columns, strict=True)]

    def middle(self, name: str) -> float:
        """Return the median of a figure over the steps."""
        return float(np.median(self.figures[name]))

    def sum_of(self, name: str, direction: str = TO_DEVICE) -> float:
        """Return the sum of a figure over the groups of a direction."""
        return float(sum(group[name] for group in self.groups if group["direction"] == direction))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, in seconds and bytes."""
        plain = (
            "path",
            "device_name",
            "device",
            "seconds",
            "small_copies",
            "annotated",
            "event_seconds",
            "steps",
        )
        return {name: getattr(self, name) for name in plain} | {"copies": self.groups}


class _Copies(Events):
    """The copies of a trace."""

    def __init__(self, events: Events, ways: Sequence[tuple[str, str]]) -> None:
        super().__init__(events.of(COPY).rows)
        self.seconds = self.spans[:, 1] - self.spans[:, 0]
        # Of the host: pageable, pinned.
        self.direction, self.memory = np.array(ways, dtype=object).reshape(-1, 2).T


def _figures(
    events: Events, loop: Events, copies: _Copies, device: int, busy: Intervals, unit: float
) -> dict[str, npt.NDArray[Any]]:
    """Return a column of figures for all steps, by name; `loop` has the events on the loop's
    thread.
    """
    bounds, numbers = _bounds(events)
    uploads, downloads = (_host_copying(loop, copies, way) for way in (TO_DEVICE, TO_HOST))
    host = union(uploads, loop.of(OUR_OP).spans, gap=_GAP)
    downloads = subtract(downloads, host)
    on_it = copies.place == device
    both_ways = union(copies.spans[on_it & np.isin(copies.direction, (TO_DEVICE, TO_HOST))])
    staging = union(host, copies.spans[on_it & (copies.direction == TO_DEVICE)])
    stalls = subtract(staging, busy)
    waits, starts = events.of(_events.WAIT).spans, np.sort(loop.spans[:, 0])
    # A loop that gets a batch runs operators on it.
    got_it = np.append(starts, np.inf)[np.searchsorted(starts, waits[:, 0], side="right")]
    idle = np.column_stack([waits[:, 0], np.minimum(waits[:, 1], got_it)])
    times = {
        "copy_seconds": both_ways,  # a copy to the device, or from it, ran
        "kernel_seconds": busy,  # a kernel ran, or the next one of a full queue was about to
        "staging_seconds": staging,  # the host was staging, or a copy to the device ran
        "stall_seconds": stalls,  # of that, without a kernel: the GPU waits for staging
        # The host waited for the device, outside staging.
        "synchronise_seconds": subtract(union(loop.of(_events.CALL_SYNCHRONISE).spans), staging),
        "wait_seconds": union(waits),  # the loop waited for its loader
        # Of that, until the first operator, such as in unpickling the batch.
        "idle_wait_seconds": union(idle),
        "host_staging_seconds": host,  # the loop's thread was staging
        # The loop's thread was in operators and calls that copy to the host.
        "download_seconds": downloads,
        "exposed_download_seconds": subtract(downloads, busy),  # of that, without a kernel
    }
    figures = {"number": numbers, "start": bounds[:, 0], "seconds": bounds[:, 1] - bounds[:, 0]}
    figures |= {name: within(spans, bounds[:, 0], bounds[:, 1]) for name, spans in times.items()}
    launched = _launch_times(events, copies)
    for way, number, size in (
        (TO_DEVICE, "copies", "nbytes"),
        (TO_HOST, "downloads", "download_bytes"),
    ):
        here = copies.direction == way
        figures[number] = _sums(launched[here], np.ones(here.sum()), bounds).astype(np.int64)
        figures[size] = _sums(launched[here], copies.nbytes[here], bounds).astype(np.int64)
    # The profiler's part of the times above. It delays nothing while a kernel runs, or while a copy
    # runs and the host isn't staging.
    under_way = subtract(both_ways, host)
    parts = {
        "profiler_seconds": ALWAYS,
        "profiler_staging_seconds": host,
        "profiler_stall_seconds": subtract(stalls, under_way),
        "profiler_idle_seconds": subtract(ALWAYS, union(busy, under_way)),
    }
    starts, added = loop.spans[:, 0], unit * (1 + (loop.kind <= CALL))
    for name, part in parts.items():
        figures[name] = _sums(starts, added * (containing(part, starts) >= 0), bounds)
    return figures


def _bounds(events: Events) -> tuple[Intervals, npt.NDArray[np.int64]]:
    """Return start and end of each step, in chronological order, and the profiler's step
    numbers.
    """
    steps = events.of(STEP)
    if len(steps):
        order = np.argsort(steps.spans[:, 0], kind="stable")
        return steps.spans[order], steps.number[order]
    everything = events.of(KERNEL, COPY, *CALLS).spans
    first, last = everything[:, 0].min(), everything[:, 1].max()
    return np.array([[first, max(last, first + _SHORTEST)]]), np.array([-1])


def _sums(times: Times, weights: npt.NDArray[Any], bounds: Intervals) -> Times:
    """Return the sum of the weights of events whose time is between the bounds of each step."""
    order = np.argsort(times, kind="stable")
    running = np.concatenate([[0.0], np.cumsum(weights[order])])
    first, end = np.searchsorted(times[order], bounds.T)
    found: Times = running[end] - running[first]
    return found


def _host_copying(loop: Events, copies: _Copies, way: str) -> Intervals:
    """Return when the loop's thread was copying in one direction: the calls, and the operators
    around them.

    A copy's call is short compared with the operators around it (`aten::to` takes some 10 us for
    the smallest tensor), so the outermost such operator counts completely. Pinning counts as
    copying to the device. Work of other threads, such as the loader's pinning, delays nothing by
    itself.
    """
    calls = loop.of(_events.CALL_COPY)
    mine = copies.number[(copies.direction == way) & (copies.number >= 0)]
    spans = calls.spans[np.isin(calls.number, mine)]
    if way == TO_DEVICE:
        spans = np.concatenate([spans, loop.of(_events.CALL_PIN).spans])
    around = union(loop.of(_events.TO_OP, _events.INSIDE_TO_OP, _events.MOVING_OP).spans)
    holding = np.unique(containing(around, spans[:, 0]))
    return union(spans, around[holding[holding >= 0]])


def _profiler_unit(loop: Events) -> float:
    """Return the median time from the start of `aten::to` to the start of the `aten::_to_copy` that
    it calls.
    """
    outer, inner = (
        np.sort(loop.of(_events.TO_OP).spans[:, 0]),
        loop.of(_events.INSIDE_TO_OP).spans[:, 0],
    )
    before = np.searchsorted(outer, inner, side="right") - 1
    if not (before >= 0).any():
        return UNIT_SECONDS
    return float(np.median((inner - outer[before])[before >= 0]))


def _launch_times(events: Events, copies: _Copies) -> Times:
    """Return when each copy was requested, or when it ran, if its call was not recorded."""
    calls = events.of(*CALLS)
    asked = dict(zip(calls.number.tolist(), calls.spans[:, 0].tolist(), strict=True))
    asked.pop(-1, None)  # calls without a correlation
    ran = zip(copies.number.tolist(), copies.spans[:, 0].tolist(), strict=True)
    return np.array([asked.get(number, start) for number, start in ran])


def _groups(copies: _Copies, kernels: dict[int, Intervals]) -> list[dict[str, Any]]:
    """Return the figures of each direction and kind of host memory, copies to the device first.

    ``seconds`` is the sum of the durations on the device. ``hidden_seconds`` is the time in which a
    copy and a kernel ran on its device, ``exposed_seconds`` the time in which a copy ran without a
    kernel.
    """
    pairs = set(zip(copies.direction, copies.memory, strict=True))
    found = []
    for way, kind in sorted(
        pairs, key=lambda pair: (pair[0] not in (TO_DEVICE, TO_HOST), pair[0] != TO_DEVICE, pair)
    ):
        mine = (copies.direction == way) & (copies.memory == kind)
        group: dict[str, Any] = {"direction": way, "kind": kind, "copies": int(mine.sum())}
        group |= {
            "nbytes": int(copies.nbytes[mine].sum()),
            "seconds": float(copies.seconds[mine].sum()),
        }
        group["bytes_per_second"] = group["nbytes"] / (group["seconds"] or np.inf)
        group["hidden_seconds"] = group["exposed_seconds"] = 0.0
        for device in np.unique(copies.place[mine]):
            spans = union(copies.spans[mine & (copies.place == device)])
            exposed = total(subtract(spans, kernels.get(int(device), EMPTY)))
            group["hidden_seconds"] += total(spans) - exposed
            group["exposed_seconds"] += exposed
        found.append(group)
    return found


# -- intervals -------------------------------------------------------------------------------------


def union(*parts: npt.ArrayLike, gap: float = 0.0) -> Intervals:
    """Merge arrays of intervals, ``[n, 2]``, into a set. Joins intervals at most `gap` apart, and
    drops empty ones.
    """
    spans = np.concatenate(
        [np.asarray(part, dtype=np.float64).reshape(-1, 2) for part in parts] or [EMPTY]
    )
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate([[True], spans[1:, 0] > reach[:-1] + gap])
    ends = np.concatenate([begins[1:], [True]])
    return np.column_stack([spans[begins, 0], reach[ends]])


def total(spans: Intervals) -> float:
    """Return the length of a set."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return the difference of two sets."""
    if not len(one) or not len(other):
        return one
    edges = np.concatenate([one.ravel(), other.ravel()])
    steps = np.concatenate([np.tile([1, -1], len(one)), np.tile([-2, 2], len(other))])
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(steps[order])
    # Depth 1: in one only; -1: in both; -2: in the other only.
    kept = np.flatnonzero(depth[:-1] == 1)
    return union(np.column_stack([edges[kept], edges[kept + 1]]))


def within(spans: Intervals, start: npt.ArrayLike, end: npt.ArrayLike) -> Times:
    """Return the length of the part of a set between each `start` and `end`."""
    start, end = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    if not len(spans):
        return np.zeros(start.shape)
    lengths = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    before = np.column_stack(
        [lengths[:-1], lengths[1:]]
    ).ravel()  # length up to each edge, linear in between
    found: Times = np.interp(end, spans.ravel(), before) - np.interp(start, spans.ravel(), before)
    return found


def containing(spans: Intervals, times: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Return the index of the interval that contains each time, including its ends; -1 if none
    does.
    """
    times = np.asarray(times, dtype=np.float64)
    if not len(spans):
        return np.full(times.shape, -1, dtype=np.intp)
    index: npt.NDArray[Any] = np.searchsorted(spans[:, 0], times, side="right") - 1
    return np.where((index >= 0) & (times <= spans[np.maximum(index, 0), 1]), index, -1)
