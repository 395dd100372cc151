"""The events of a trace that matter here, as columns of numbers.

Times are seconds since the first event that was kept.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .._errors import TraceError
from .._report import clean
from ._intervals import Intervals
from ._stream import Event, TraceFile

TO_DEVICE, TO_HOST = "HtoD", "DtoH"

COPY, PIN, SYNCHRONISE = "copy", "pin", "synchronise"
_CALLS = (
    (COPY, re.compile(r"(cuda|hip|cu)Memcpy(?!.*Peer)")),
    (PIN, re.compile(r"(cuda|hip|cu)(Mem)?(Host(Alloc|Malloc|Register|Unregister|Free)|(Malloc|Alloc|Free)Host)")),
    (SYNCHRONISE, re.compile(r"(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize")),
)  # fmt: skip
"""What host calls are for, by their names."""

_COPY_NAME = re.compile(r"Mem[cC]py (\w)\w*to(\w)\w*(?: \((\w+) -> (\w+)\))?")
_MOVING_OPS = {
    *("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory", "aten::_pin_memory", "aten::cuda", "aten::cpu"),
    *("aten::item", "aten::_local_scalar_dense"),
}
"""Operators that bring tensors to a device or to the host; one that holds no such copy is not counted."""
_OURS, _OUR_WAIT = "pinstage.", "pinstage.loader.wait"
_OUR_DOWNLOADS = frozenset(("pinstage.to_host", "pinstage.gather", "pinstage.wait"))
MOVING_OP, OUR_OP, TO_OP, INSIDE_TO_OP, _STEP_RANGE, _WAIT_RANGE, _NO_COPY = range(7)
"""What operators and ranges are. `aten::to` does nothing but call `aten::_to_copy`: see `_analysis`."""
_WAIT = "enumerate(DataLoader)"
_WORKERS = "_MultiProcessing"
_STEP = re.compile(r"ProfilerStep#\d+$")

_CATEGORIES = {
    "gpu_memcpy": "memcpy", "kernel": "kernel", "gpu_memset": "memset", "cuda_runtime": "call", "cuda_driver": "call",
    "hip_runtime": "call", "cpu_op": "op", "user_annotation": "op", "python_function": "python",
}  # fmt: skip
"""Kineto's names of categories."""


_LONGEST_US = 1e15
"""Of a trace, in microseconds: 30 years."""
_MOST, _MOST_DEVICES = 1 << 53, 1 << 16
"""Bytes and correlations are kept as floats, which hold larger numbers no longer exactly."""


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
    """What was read of one file. In the columns, a label and a thread is an index."""

    def __init__(self, path: str) -> None:
        self.path = path  # the file's name, for people
        self.header: dict[str, Any] = {}  # what stands beside the events
        self.events = 0  # how many the file has, kept or not
        self.labels: list[str] = []
        self.kernels = Columns("device")
        self.copies = Columns("device", "direction", "kind", "nbytes", "correlation")
        self.calls = Columns("thread", "name", "group", "correlation")  # on the host: to copy, pin or synchronise
        self.host = Columns("thread", "is_call")  # all that was recorded on the host: each cost the profiler time
        self.ops = Columns("thread", "kind")  # operators that may copy, and ranges of pinstage
        self.waits = Columns()  # of the loop for its loader
        self.has_workers = False  # whether some of these waits are for worker processes
        self.steps = Columns("thread", "number")
        self._label_of: dict[str, int] = {}
        self._thread_of: dict[Any, int] = {}
        self._zero: float | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether anything in it is of a GPU."""
        return bool(len(self.kernels) or len(self.copies) or len(self.calls))

    @property
    def device_name(self) -> str | None:
        """The name of the GPU, if the trace tells it."""
        found = self.header.get("deviceProperties")
        for properties in found if isinstance(found, list) else ():
            if isinstance(properties, dict) and isinstance(properties.get("name"), str):
                return clean(properties["name"]) or None
        return None

    @property
    def rank(self) -> int | None:
        """The rank of the process, if the trace tells it."""
        info = self.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if type(rank) is int and 0 <= rank < _MOST_DEVICES else None

    def texts(self, columns: Columns, name: str) -> npt.NDArray[np.object_]:
        """Return a column of labels as texts."""
        return np.array(self.labels, dtype=object)[columns[name]]

    def _label(self, text: str) -> int:
        index = self._label_of.setdefault(text, len(self.labels))
        if index == len(self.labels):
            self.labels.append(text)
        return index

    def take(self, events: Iterable[Event]) -> None:
        """Keep of the events what matters."""
        for event in events:
            self.events += 1
            if event.get("ph") != "X":
                continue
            category = event.get("cat")
            kind = _CATEGORIES.get(category) if isinstance(category, str) else None
            if kind is None:
                continue
            try:
                start, end = self._times(event)
                name, args = event["name"], event.get("args") or {}
                if not (isinstance(name, str) and isinstance(args, dict)):
                    raise TypeError("name or args")
                getattr(self, f"_take_{kind}")(event, clean(name), start, end)
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{self.path} is no trace of the PyTorch profiler: event {self.events:,} ({category}) has no "
                    f"usable {error!s:.100}"
                ) from error

    def _times(self, event: Event) -> tuple[float, float]:
        start, lasts = float(event["ts"]), float(event.get("dur", 0))
        if self._zero is None:
            self._zero = start
        start -= self._zero
        if not (abs(start) < _LONGEST_US and 0 <= lasts < _LONGEST_US):  # so that sums of them are finite, too
            raise ValueError(f"times: it begins after {start:g} us and lasts {lasts:g} us")
        return start * 1e-6, (start + lasts) * 1e-6

    def _take_kernel(self, event: Event, _name: str, start: float, end: float) -> None:
        self.kernels.add(start, end, _argument(event, "device", 0, _MOST_DEVICES))

    _take_memset = _take_kernel  # the device is at work

    def _take_python(self, event: Event, _name: str, start: float, end: float) -> None:
        self.host.add(start, end, self._thread(event), 0)

    def _take_memcpy(self, event: Event, name: str, start: float, end: float) -> None:
        direction, kind = map(self._label, _direction_and_kind(name))
        device, nbytes = _argument(event, "device", 0, _MOST_DEVICES), _argument(event, "bytes", 0)
        self.copies.add(start, end, device, direction, kind, nbytes, _argument(event, "correlation", -1))

    def _take_call(self, event: Event, name: str, start: float, end: float) -> None:
        thread = self._thread(event)
        self.host.add(start, end, thread, 1)
        group = _group_of_call(name)
        if group is not None:
            correlation = _argument(event, "correlation", -1)
            self.calls.add(start, end, thread, self._label(name), self._label(group), correlation)

    def _take_op(self, event: Event, name: str, start: float, end: float) -> None:
        thread = self._thread(event)
        self.host.add(start, end, thread, 0)
        kind = _kind_of_op(name)
        if kind == _WAIT_RANGE:
            self.waits.add(start, end)
            self.has_workers |= _WORKERS in name or name.startswith(_OURS)
        elif kind == _STEP_RANGE:
            self.steps.add(start, end, thread, _whole("step", name.rpartition("#")[2], 0))
        elif kind != _NO_COPY:
            self.ops.add(start, end, thread, kind)

    def _thread(self, event: Event) -> int:
        key = event.get("pid"), event.get("tid")
        return self._thread_of.setdefault(key, len(self._thread_of))


def _argument(event: Event, name: str, default: int, limit: int = _MOST) -> int:
    """Return a whole number from an event's arguments: `default`, or from 0 to `limit`."""
    return _whole(name, (event.get("args") or {}).get(name, default), default, limit)


def _whole(name: str, value: Any, default: int, limit: int = _MOST) -> int:
    number = int(value)
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
def _group_of_call(name: str) -> str | None:
    return next((group for group, pattern in _CALLS if pattern.match(name)), None)


@cache
def _kind_of_op(name: str) -> int:
    if _STEP.match(name):
        return _STEP_RANGE
    if name.startswith((_WAIT, _OUR_WAIT)):
        return _WAIT_RANGE
    if name in _MOVING_OPS:
        return {"aten::to": TO_OP, "aten::_to_copy": INSIDE_TO_OP}.get(name, MOVING_OP)
    return OUR_OP if name.startswith(_OURS) and name not in _OUR_DOWNLOADS else _NO_COPY


def read(file: TraceFile) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file cannot be read, is broken, or is no trace of the PyTorch profiler.
    """
    trace = Trace(clean(file.path.name))
    trace.take(file)
    trace.header = file.header
    if not trace.events:
        raise TraceError(f"{file.shown} holds no events; was the profiler's active step reached?")
    if not (len(trace.copies) or len(trace.kernels) or len(trace.host)):
        raise TraceError(
            f"{file.shown} holds {trace.events:,} events and none of a host or a GPU; record with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return trace
