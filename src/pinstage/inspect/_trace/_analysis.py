"""Figures about copies between host and device, from a trace.

The moments at which events begin and end divide the trace into cells. A set of times, such as those
at which a kernel runs, is an array of bools, one for each cell. So sets are combined by ``&``,
``|`` and ``~``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._bus import KIB, MIB
from ._events import (
    CALL,
    CALL_COPY,
    CALL_PIN,
    CALL_SYNCHRONISE,
    CALLS,
    COPY,
    GPU_AND_CALLS,
    HOST,
    INSIDE_TO_OP,
    KERNEL,
    MOVING_OP,
    OUR_OP,
    STEP,
    TO_DEVICE,
    TO_HOST,
    TO_OP,
    WAIT,
    Events,
    Trace,
)

Times = npt.NDArray[np.float64]
Cells = npt.NDArray[np.bool_]

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


class Timeline:
    """Time, divided into cells at the moments of all events.

    Args:
        moments: seconds, in any order and shape; the starts and ends of all intervals that are used
            later.

    Attributes:
        edges: where each cell begins. The last one has no length and is in no set of `cover`.
        lengths: seconds of each cell.
    """

    def __init__(self, moments: npt.ArrayLike) -> None:
        self.edges = np.unique(moments)
        self.lengths = np.diff(self.edges, append=self.edges[-1])

    def index(self, moments: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return the cells that begin at some moments."""
        return np.searchsorted(self.edges, moments)

    def cover(self, intervals: Times) -> Cells:
        """Return the set of the cells in any of the intervals, ``[n, 2]``."""
        return self._between(*self.index(intervals.T))

    def _between(self, first: npt.NDArray[np.intp], end: npt.NDArray[np.intp]) -> Cells:
        starts, ends = (np.bincount(cells, minlength=len(self.edges)) for cells in (first, end))
        return np.cumsum(starts - ends) > 0

    def bridge(self, cells: Cells) -> Cells:
        """Return a set with its gaps of up to `_GAP` filled."""
        turns = np.flatnonzero(np.diff(cells, prepend=False))
        first, end = turns[1:-1:2], turns[2::2]
        is_short = self.edges[end] - self.edges[first] <= _GAP
        return cells | self._between(first[is_short], end[is_short])

    def runs_at(self, cells: Cells, moments: Times) -> Cells:
        """Return the runs of a set, without gaps, that contain any of the moments."""
        runs = np.cumsum(np.diff(cells, prepend=False))  # the same number in all cells of a run
        return cells & np.isin(runs, runs[self.index(moments)])

    def seconds(self, cells: Cells) -> float:
        """Return the length of a set."""
        return float(self.lengths[cells].sum())

    def amounts(self, moments: Times, weights: npt.NDArray[Any]) -> Times:
        """Return the sum of the weights of the moments in each cell."""
        return np.bincount(self.index(moments), weights, len(self.edges)).astype(np.float64)

    def within(self, amounts: Times, bounds: Times) -> Times:
        """Return the sum of the amounts of the cells within each of the bounds, ``[n, 2]``."""
        running = np.concatenate([[0.0], np.cumsum(amounts)])
        first, end = self.index(bounds.T)
        return running[end] - running[first]  # type: ignore[no-any-return]


class Analysis:
    """Figures from a trace."""

    def __init__(self, trace: Trace) -> None:
        events = self._events = trace.events
        copies = self._copies = _Copies(events, trace.ways)
        bounds, numbers = _steps(events)
        timeline = self._timeline = Timeline(np.concatenate([events.spans, bounds]))
        kernels = {
            int(device): timeline.cover(events.of(KERNEL, track=device).spans)
            for device in np.unique(np.append(events.of(KERNEL, COPY).track, 0))
        }
        # The figures of steps are about the GPU with the most kernel time; without kernels, with
        # the most copies.
        self.device = max(
            kernels,
            key=lambda device: (timeline.seconds(kernels[device]), (copies.track == device).sum()),
        )
        loop = self._loop = _loop_of(events)
        self.path, self.device_name = trace.path, trace.device_name
        self.has_workers = trace.has_workers
        self.annotated = bool(len(events.of(STEP)))  # if not, one step is the whole trace
        self.uses_pinstage = bool(len(loop.of(OUR_OP)))
        self.groups = _groups(timeline, copies, kernels)
        # The profiler's cost for each operator or range. A call of CUDA costs twice as much.
        self.event_seconds = EVENT_UNITS * _profiler_unit(loop)
        # Of each step.
        self.figures = {
            "number": numbers,
            "start": bounds[:, 0],
            "seconds": bounds[:, 1] - bounds[:, 0],
            **self._figures(timeline.bridge(kernels[self.device]), bounds),
        }
        self.seconds = float(bounds[:, 1].max() - bounds[0, 0])
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

    def sum_of(self, name: str, direction: str = TO_DEVICE, kind: str | None = None) -> float:
        """Return the sum of a figure over the copies in a direction, of all host memory or one
        kind.
        """
        groups = [group for group in self.groups if group["direction"] == direction]
        return float(sum(group[name] for group in groups if kind in (None, group["kind"])))

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

    def _figures(self, busy: Cells, bounds: Times) -> dict[str, npt.NDArray[Any]]:
        """Return a column for each figure, with a row for each step."""
        timeline, events, loop, copies = self._timeline, self._events, self._loop, self._copies
        cover = timeline.cover
        to_device, to_host = copies.direction == TO_DEVICE, copies.direction == TO_HOST
        is_here = copies.track == self.device
        uploads, downloads = (cover(copies.spans[is_here & way]) for way in (to_device, to_host))
        host = timeline.bridge(self._host_copying(TO_DEVICE) | cover(loop.of(OUR_OP).spans))
        staging = host | uploads
        stalls = staging & ~busy
        fetching = self._host_copying(TO_HOST) & ~host
        waits, starts = events.of(WAIT).spans, np.sort(loop.spans[:, 0])
        # A loop that gets a batch runs operators on it.
        got_it = np.append(starts, np.inf)[np.searchsorted(starts, waits[:, 0], side="right")]
        idle = np.column_stack([waits[:, 0], np.minimum(waits[:, 1], got_it)])
        times = {
            "copy_seconds": uploads | downloads,
            "kernel_seconds": busy,  # a kernel ran, or the next one of a full queue was about to
            "staging_seconds": staging,  # the host was staging, or a copy to the device ran
            "stall_seconds": stalls,  # of that, without a kernel: the GPU waits for staging
            # The host waited for the device, outside staging.
            "synchronise_seconds": cover(loop.of(CALL_SYNCHRONISE).spans) & ~staging,
            "wait_seconds": cover(waits),  # the loop waited for its loader
            # Of that, until the first operator, such as in unpickling the batch.
            "idle_wait_seconds": cover(idle),
            "host_staging_seconds": host,  # the loop's thread was staging
            # The loop's thread was in operators and calls that copy to the host.
            "download_seconds": fetching,
            "exposed_download_seconds": fetching & ~busy,  # of that, without a kernel
        }
        # The profiler's part of the times above. It delays nothing while a kernel runs, or while a
        # copy runs and the host isn't staging.
        under_way = (uploads | downloads) & ~host
        profiled = {
            "profiler_seconds": np.ones_like(host),
            "profiler_staging_seconds": host,
            "profiler_stall_seconds": stalls & ~under_way,
            "profiler_idle_seconds": ~(busy | under_way),
        }
        added = timeline.amounts(loop.spans[:, 0], self.event_seconds * (1 + (loop.kind <= CALL)))
        # One by one, because each array of amounts is large.
        figures = {name: timeline.within(timeline.lengths * times[name], bounds) for name in times}
        launched = _launch_times(events, copies)
        launches = {
            "copies": to_device,
            "nbytes": to_device * copies.nbytes,
            "downloads": to_host,
            "download_bytes": to_host * copies.nbytes,
        }
        for name, weights in launches.items():
            sums = timeline.within(timeline.amounts(launched, weights), bounds)
            figures[name] = sums.astype(np.int64)
        return figures | {
            name: timeline.within(added * profiled[name], bounds) for name in profiled
        }

    def _host_copying(self, way: str) -> Cells:
        """Return when the loop's thread was copying in one direction: the calls, and the operators
        around them.

        A copy's call is short compared with the operators around it (`aten::to` takes some 10 us
        for the smallest tensor), so the outermost such operator counts completely. Pinning counts
        as copying to the device. Work of other threads, such as the loader's pinning, delays
        nothing by itself.
        """
        loop, copies, timeline = self._loop, self._copies, self._timeline
        calls = loop.of(CALL_COPY)
        mine = copies.number[(copies.direction == way) & (copies.number >= 0)]
        spans = calls.spans[np.isin(calls.number, mine)]
        if way == TO_DEVICE:
            spans = np.concatenate([spans, loop.of(CALL_PIN).spans])
        operators = loop.of(TO_OP, INSIDE_TO_OP, MOVING_OP).spans
        return timeline.cover(spans) | timeline.runs_at(timeline.cover(operators), spans[:, 0])


class _Copies(Events):
    """The copies of a trace."""

    def __init__(self, events: Events, ways: Sequence[tuple[str, str]]) -> None:
        super().__init__(events.of(COPY).rows)
        self.seconds = self.spans[:, 1] - self.spans[:, 0]
        # Of the host: pageable, pinned.
        self.direction, self.memory = np.array(ways, dtype=object).reshape(-1, 2).T


def _steps(events: Events) -> tuple[Times, npt.NDArray[np.int64]]:
    """Return start and end of each step, in chronological order, and the profiler's step
    numbers.
    """
    steps = events.of(STEP)
    if len(steps):
        order = np.argsort(steps.spans[:, 0], kind="stable")
        return steps.spans[order], steps.number[order]
    everything = events.of(*GPU_AND_CALLS).spans
    first, last = everything[:, 0].min(), everything[:, 1].max()
    return np.array([[first, max(last, first + _SHORTEST)]]), np.array([-1])


def _loop_of(events: Events) -> Events:
    """Return the host events of the training loop's thread, which has the steps, else the most
    calls of CUDA, else the most host events.
    """
    for kinds in (STEP,), CALLS, HOST:
        threads = events.of(*kinds).track
        if len(threads):
            return events.of(*HOST, track=int(np.bincount(threads).argmax()))
    return events.of(*HOST)


def _profiler_unit(loop: Events) -> float:
    """Return the median time from the start of `aten::to` to the start of the `aten::_to_copy` that
    it calls.
    """
    outer = np.sort(loop.of(TO_OP).spans[:, 0])
    inner = loop.of(INSIDE_TO_OP).spans[:, 0]
    before = np.searchsorted(outer, inner, side="right") - 1
    if not (before >= 0).any():
        return UNIT_SECONDS
    return float(np.median((inner - outer[before])[before >= 0]))


def _launch_times(events: Events, copies: _Copies) -> Times:
    """Return when each copy was requested, or when it ran, if its call was not recorded."""
    calls = events.of(*CALLS)
    requested = dict(zip(calls.number.tolist(), calls.spans[:, 0].tolist(), strict=True))
    requested.pop(-1, None)  # calls without a correlation
    ran = zip(copies.number.tolist(), copies.spans[:, 0].tolist(), strict=True)
    return np.array([requested.get(number, start) for number, start in ran])


def _groups(timeline: Timeline, copies: _Copies, kernels: dict[int, Cells]) -> list[dict[str, Any]]:
    """Return the figures of each direction and kind of host memory, copies to the device first.

    ``seconds`` is the sum of the durations on the device. ``hidden_seconds`` is the time in which a
    copy and a kernel ran on its device, ``exposed_seconds`` the time in which a copy ran without a
    kernel.
    """
    order = {TO_DEVICE: 0, TO_HOST: 1}
    pairs = set(zip(copies.direction, copies.memory, strict=True))
    groups = []
    for way, kind in sorted(pairs, key=lambda pair: (order.get(pair[0], len(order)), pair)):
        mine = (copies.direction == way) & (copies.memory == kind)
        nbytes, seconds = int(copies.nbytes[mine].sum()), float(copies.seconds[mine].sum())
        hidden = exposed = 0.0
        for device in np.unique(copies.track[mine]):
            copying = timeline.cover(copies.spans[mine & (copies.track == device)])
            hidden += timeline.seconds(copying & kernels[device])
            exposed += timeline.seconds(copying & ~kernels[device])
        groups.append(
            {
                "direction": way,
                "kind": kind,
                "copies": int(mine.sum()),
                "nbytes": nbytes,
                "seconds": seconds,
                "bytes_per_second": nbytes / (seconds or np.inf),
                "hidden_seconds": hidden,
                "exposed_seconds": exposed,
            }
        )
    return groups
