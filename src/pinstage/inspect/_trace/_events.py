"""The events of a trace that matter here, as columns of numbers.

Times are seconds since the first event that was kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .._errors import TraceError
from .._report import clean
from ._intervals import Intervals
from ._stream import Event, TraceFile

TO_DEVICE, TO_HOST = "HtoD", "DtoH"

COPY, PIN, SYNCHRONISE = range(3)
_CALLS = (
    re.compile(r"(cuda|hip|cu)Memcpy(?!.*Peer)"),
    re.compile(r"(cuda|hip|cu)(Mem)?(Host(Alloc|Malloc|Register|Unregister|Free)|(Malloc|Alloc|Free)Host)"),
    re.compile(r"(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize"),
)
"""Names of the host calls that copy, pin and synchronise."""

_COPY_NAME = re.compile(r"Mem[cC]py (\w)\w*to(\w)\w*(?: \((\w+) -> (\w+)\))?")
_MOVING_OPS = re.compile(r"aten::(copy_|_?pin_memory|cuda|cpu|item|_local_scalar_dense)$")
"""Operators that copy between host and device, beside ``aten::to``; one without such a copy in it isn't counted."""
_OURS = "pinstage."
_OUR_DOWNLOADS = frozenset(("pinstage.to_host", "pinstage.gather", "pinstage.wait"))
MOVING_OP, OUR_OP, TO_OP, INSIDE_TO_OP, _STEP_RANGE, _WAIT_RANGE, _NO_COPY = range(7)
"""Kinds of operators and ranges. `aten::to` does nothing but call `aten::_to_copy`: see `_analysis`."""
_WAITS = ("enumerate(DataLoader)", "pinstage.loader.wait")
_WORKERS = "_MultiProcessing"
_STEP = re.compile(r"ProfilerStep#\d+$")

_CATEGORIES = {
    "gpu_memcpy": "memcpy", "kernel": "kernel", "gpu_memset": "kernel", "cuda_runtime": "call", "cuda_driver": "call",
    "hip_runtime": "call", "cpu_op": "op", "user_annotation": "op", "python_function": "python",
}  # fmt: skip
"""Kineto's names of categories. While memory is set, the device is at work as with a kernel."""

_LONGEST_US = 1e15
"""Of a trace, in microseconds: 30 years."""
_MOST, _MOST_DEVICES = 1 << 53, 1 << 16
"""Bytes and correlations are kept as floats, which are exact up to here."""


class Columns:
    """Events of one sort, a row of numbers each: start, end, and an integer for each further name."""

    def __init__(self, *names: str) -> None:
        self._names = ("start", "end", *names)
        self._rows = array("d")

    def add(self, start: float, end: float, *values: int) -> None:
        """Append an event."""
        self._rows.extend((start, end, *values))

    def __len__(self) -> int:
        return len(self._rows) // len(self._names)

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        return self._table()[:, self._names.index(name)].astype(np.int64)

    def spans(self) -> Intervals:
        """Return start and end of each event, ``[n, 2]``, in the order of the file."""
        return self._table()[:, :2]

    def _table(self) -> npt.NDArray[np.float64]:
        return np.array(self._rows, dtype=np.float64).reshape(-1, len(self._names))


class Trace:
    """The events of one file. In the columns, a thread is an index."""

    def __init__(self, path: str) -> None:
        self.path = path  # the file's name, for people
        self.device_name: str | None = None
        self.has_gpu = False  # whether anything in it is of a GPU
        self.events = 0  # how many the file has, kept or not
        self.kernels = Columns("device")
        self.copies = Columns("device", "nbytes", "correlation")
        self.ways: list[tuple[str, str]] = []  # direction and kind of host memory of each copy
        self.calls = Columns("thread", "group", "correlation")  # on the host: to copy, pin or synchronise
        self.host = Columns("thread", "weight")  # all that was recorded on the host: each cost the profiler time
        self.ops = Columns("thread", "kind")  # operators that may copy, and ranges of pinstage
        self.waits = Columns()  # of the loop for its loader
        self.has_workers = False  # whether some of these waits are for worker processes
        self.steps = Columns("thread", "number")
        self._threads: dict[Any, int] = {}
        self._zero: float | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Keep the events that matter."""
        for event in events:
            self.events += 1
            category = event.get("cat")
            sort = _CATEGORIES.get(category) if isinstance(category, str) else None
            if event.get("ph") != "X" or sort is None:
                continue
            try:
                self._keep(event, sort)
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{self.path} isn't a trace of the PyTorch profiler: event {self.events:,} ({category}) has no "
                    f"usable {error!s:.100}"
                ) from error

    def _keep(self, event: Event, sort: str) -> None:
        start, end = self._times(event)
        name, arguments = event["name"], event.get("args") or {}
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise TypeError("name or args")
        name = clean(name)
        if sort == "kernel":
            self.kernels.add(start, end, _whole(arguments, "device", 0, _MOST_DEVICES))
            return
        if sort == "memcpy":
            device, nbytes = _whole(arguments, "device", 0, _MOST_DEVICES), _whole(arguments, "bytes", 0)
            self.copies.add(start, end, device, nbytes, _whole(arguments, "correlation", -1))
            self.ways.append(_direction_and_kind(name))
            return
        thread = self._threads.setdefault((event.get("pid"), event.get("tid")), len(self._threads))
        self.host.add(start, end, thread, 2 if sort == "call" else 1)  # see `_analysis.EVENT_UNITS`
        if sort == "call" and (group := group_of_call(name)) is not None:
            self.calls.add(start, end, thread, group, _whole(arguments, "correlation", -1))
        elif sort == "op" and (kind := _kind_of_op(name)) != _NO_COPY:
            if kind == _WAIT_RANGE:
                self.waits.add(start, end)
                self.has_workers |= _WORKERS in name or name.startswith(_OURS)
            elif kind == _STEP_RANGE:
                self.steps.add(start, end, thread, _whole({"step": name.rpartition("#")[2]}, "step", 0))
            else:
                self.ops.add(start, end, thread, kind)

    def _times(self, event: Event) -> tuple[float, float]:
        start, lasts = float(event["ts"]), float(event.get("dur", 0))
        if self._zero is None:
            self._zero = start
        start -= self._zero
        if not (abs(start) < _LONGEST_US and 0 <= lasts < _LONGEST_US):  # so that sums of them are finite, too
            raise ValueError(f"times: it begins after {start:g} us and lasts {lasts:g} us")
        return start * 1e-6, (start + lasts) * 1e-6


def _whole(values: Mapping[str, Any], name: str, default: int, limit: int = _MOST) -> int:
    """Return a whole number of an event: `default`, or from 0 to `limit`."""
    number = int(values.get(name, default))
    if number != default and not 0 <= number < limit:
        raise ValueError(f"{name}: {number}")
    return number


# A trace has millions of events and few names: each name is read once.


@cache
def _direction_and_kind(name: str) -> tuple[str, str]:
    match = _COPY_NAME.match(name)
    if match is None:
        return "other", "unknown"
    direction = f"{match[1].upper()}to{match[2].upper()}"
    host = match[3] if direction == TO_DEVICE else match[4]
    return direction, (host or "unknown").lower()


@cache
def group_of_call(name: str) -> int | None:
    """Return what a host call is for, by its name."""
    return next((group for group, pattern in enumerate(_CALLS) if pattern.match(name)), None)


@cache
def _kind_of_op(name: str) -> int:
    if _STEP.match(name):
        return _STEP_RANGE
    if name.startswith(_WAITS):
        return _WAIT_RANGE
    if _MOVING_OPS.match(name):
        return MOVING_OP
    ours = OUR_OP if name.startswith(_OURS) and name not in _OUR_DOWNLOADS else _NO_COPY
    return {"aten::to": TO_OP, "aten::_to_copy": INSIDE_TO_OP}.get(name, ours)


def read(file: TraceFile) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file cannot be read, is broken, or isn't a trace of the PyTorch profiler.
    """
    trace = Trace(clean(file.path.name))
    trace.take(file)
    trace.has_gpu = any(map(len, (trace.copies, trace.kernels, trace.calls)))
    if not (trace.has_gpu or len(trace.host)):
        raise TraceError(
            f"{file.shown} holds {trace.events:,} events and none of a host or a GPU; record with activities="
            "[ProfilerActivity.CPU, ProfilerActivity.CUDA], until the end of an active step"
        )
    with suppress(AttributeError, LookupError, TypeError):  # where it isn't written, or is something else
        trace.device_name = clean(file.header["deviceProperties"][0]["name"]) or None
    return trace
