"""The events of a trace: the file is read by events; the relevant ones become rows.

A trace of half a gigabyte holds millions of events, but only a few kinds matter. Python's own
decoder reads one event at a time from a window on the file, so the memory for reading depends on
the window, not on the file. (Measured on a generated trace of 500 MB: docs/trace.md. Faster readers
exist, but none was needed.)

Times are seconds since the first event that was kept.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import TraceError
from .._report import clean

_WINDOW = 4 << 20
"""Characters read at a time."""
_LONGEST_VALUE = 64 << 20
"""Longest event, in characters. A longer one counts as broken, instead of reading the rest of the
file for its end.
"""
_SKIPPED = re.compile(r"[\s,:]*")
_EXPECTED = (
    "export one with profiler.export_chrome_trace() or torch.profiler.tensorboard_trace_handler()"
)
# Not strict, because names of kernels have control characters.
_decode = json.JSONDecoder(strict=False).raw_decode

Event = dict[str, Any]


class TraceFile:
    """A trace on disk, ``.json`` or ``.json.gz``. Iterating it yields its events, and fills
    `header` on the way.

    Attributes:
        path: the file.
        shown: its path, safe to print.
        header: values other than the events, such as ``deviceProperties``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = clean(str(path))
        self.header: dict[str, Any] = {}
        self._file: Any = None
        self._text, self._at = "", 0  # a window on the file, and how far it was decoded

    def __iter__(self) -> Iterator[Event]:
        yielded = 0
        try:
            with self.path.open("rb") as raw:
                packed = raw.peek(2)[:2] == b"\x1f\x8b"  # whatever the name says
                stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
                self._file = io.TextIOWrapper(stream, "utf-8", "replace", newline="")
                for event in self._events():
                    yielded += 1
                    yield event
        except TraceError:  # a ValueError, too
            raise
        # BadGzipFile is an OSError, so it has to be caught first. A number with too many digits
        # raises ValueError, and too deep a nesting RecursionError.
        except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            if not yielded:
                raise self._not_a_trace(f"{reason}, before any event") from None
            raise TraceError(
                f"{self.shown} is broken or cut off after {yielded:,} events: {reason}; was the "
                "program stopped while it wrote the trace? Record it again"
            ) from None
        except OSError as error:
            raise TraceError(f"cannot read {self.shown}: {error.strerror or error}") from error

    def _events(self) -> Iterator[Event]:
        first = self._peek()
        if not first or first not in "{[":
            raise self._not_a_trace("invalid JSON" if first else "empty file")
        self._at += 1
        if first == "[":  # the older of the two formats: a list of events
            yield from self._listed()
            return
        has_events = False
        while self._peek() != "}":
            key = self._value()
            if self._peek() == "[" and key == "traceEvents":
                has_events, self._at = True, self._at + 1
                yield from self._listed()
            else:
                self.header[str(key)] = self._value()
        if not has_events:
            keys = clean(", ".join(list(self.header)[:5])) or "none"
            raise self._not_a_trace(f"JSON without traceEvents (its keys: {keys})")

    def _listed(self) -> Iterator[Event]:
        """Yield the events up to the end of a list, behind which the window begins then."""
        while self._peek() != "]":
            if isinstance(event := self._value(), dict):
                yield event
        self._at += 1

    def _not_a_trace(self, reason: str) -> TraceError:
        return TraceError(f"{self.shown} isn't a profiler trace: {reason}; {_EXPECTED}")

    def _peek(self) -> str:
        """Return the next character that isn't white space or a separator; nothing at the end of
        the file.
        """
        while True:
            # It matches nothing, too.
            self._at = _SKIPPED.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _value(self) -> Any:
        """Decode the value at the character that was peeked at."""
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError:
                if len(self._text) - self._at > _LONGEST_VALUE or not self._read():
                    raise
                continue
            # A number may continue behind the end of the window.
            if end < len(self._text) or not self._read():
                self._at = end
                return value

    def _read(self) -> bool:
        more = self._file.read(_WINDOW)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


# -- the events that matter ------------------------------------------------------------------------

TO_DEVICE, TO_HOST = "HtoD", "DtoH"

(
    KERNEL,
    COPY,
    CALL_COPY,
    CALL_PIN,
    CALL_SYNCHRONISE,
    CALL,
    TO_OP,
    INSIDE_TO_OP,
    MOVING_OP,
    OUR_OP,
    STEP,
    WAIT,
    OTHER,
) = range(13)
"""Kinds of events. Those from `CALL_COPY` on are on the host; up to `CALL` they are calls of CUDA.
`aten::to` does nothing but call `aten::_to_copy`: see `_analysis`. Setting memory keeps the device
busy, so it counts as a kernel."""
CALLS, HOST = range(CALL_COPY, CALL), range(CALL_COPY, OTHER + 1)
CORRELATED, GPU_AND_CALLS = range(COPY, CALL), range(KERNEL, CALL)

_CATEGORIES = {
    "gpu_memcpy": COPY, "kernel": KERNEL, "gpu_memset": KERNEL, "cuda_runtime": CALL,
    "cuda_driver": CALL, "hip_runtime": CALL, "cpu_op": MOVING_OP, "user_annotation": MOVING_OP,
    "python_function": OTHER,
}  # fmt: skip
"""Kineto's categories, and the kind of their events unless `_NAMES` has another one for the event's
name.
"""
_NAMES = {
    CALL: (
        (CALL_COPY, r"(cuda|hip|cu)Memcpy(?!.*Peer)"),
        (
            CALL_PIN,
            r"(cuda|hip|cu)(Mem)?(Host(M?[aA]lloc|(Unr|R)egister|Free)|(Malloc|Alloc|Free)Host)",
        ),
        (CALL_SYNCHRONISE, r"(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize"),
    ),
    MOVING_OP: (
        (TO_OP, r"aten::to$"),
        (INSIDE_TO_OP, r"aten::_to_copy$"),
        (MOVING_OP, r"aten::(copy_|_?pin_memory|cuda|cpu|item|_local_scalar_dense)$"),
        (STEP, r"ProfilerStep#\d+$"),
        (WAIT, r"enumerate\(DataLoader\)|pinstage\.loader\.wait"),
        (OUR_OP, r"pinstage\.(?!(fetch|gather|wait)$)"),
    ),
}
"""Kinds by name. An operator that may copy between host and device counts only if it has such a
copy in it.
"""
_WORKERS = re.compile(r"pinstage|.*_MultiProcessing")
_COPY_NAME = re.compile(r"Mem[cC]py (\w)\w*to(\w)\w*(?: \((\w+) -> (\w+)\))?")

_LONGEST_US = 1e15
"""The longest trace, in microseconds: 30 years."""
_MOST, _MOST_DEVICES = 1 << 53, 1 << 16
"""Bytes and correlations are kept as floats, which are exact up to here."""


class Events:
    """Some events of a trace, one per row."""

    def __init__(self, rows: npt.NDArray[np.float64]) -> None:
        self.rows = rows
        self.spans = rows[:, :2]  # start and end
        # `track` is the index of a device or thread, `number` the number of a step, or a
        # correlation.
        self.kind, self.track, self.number, self.nbytes = rows[:, 2:].astype(np.int64).T

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, *kinds: int, track: int | None = None) -> Events:
        """Return the events of some kinds, of all tracks or of one."""
        chosen = np.isin(self.kind, kinds)
        return Events(self.rows[chosen if track is None else chosen & (self.track == track)])


class Trace:
    """The events of one file.

    Raises:
        TraceError: the file cannot be read, is broken, isn't a trace of the PyTorch profiler, or
            has no GPU events.
    """

    def __init__(self, file: TraceFile) -> None:
        self.path = clean(file.path.name)
        self.ways: list[tuple[str, str]] = []  # direction and kind of host memory of each copy
        self.has_workers = False  # whether the loop waited for worker processes of its loader
        self._rows = array("d")
        self._threads: dict[Any, int] = {}
        self._zero: float | None = None
        for number, event in enumerate(file, 1):
            category = str(event.get("cat"))
            if event.get("ph") != "X" or category not in _CATEGORIES:
                continue
            try:
                self._keep(event, _CATEGORIES[category])
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                raise TraceError(
                    f"{self.path} isn't a trace of the PyTorch profiler: event {number:,} "
                    f"({category}) has no usable {error!s:.100}"
                ) from error
        # In the order of the file.
        self.events = Events(np.array(self._rows, dtype=np.float64).reshape(-1, 6))
        if not len(self.events.of(*GPU_AND_CALLS)):
            raise TraceError(
                f"{file.shown} holds no event of a GPU; record the loop on a GPU with activities="
                "[ProfilerActivity.CPU, ProfilerActivity.CUDA], until the end of an active step"
            )
        self.device_name: str | None = None
        with suppress(AttributeError, LookupError, TypeError):  # it is missing, or has another form
            self.device_name = clean(file.header["deviceProperties"][0]["name"]) or None

    def _keep(self, event: Event, kind: int) -> None:
        start, lasts = self._start(event), _figure(event, "dur", 0, _LONGEST_US)
        name, arguments = event["name"], event.get("args") or {}
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise TypeError("name or args")
        kind, number, nbytes = kind_of(kind, name), -1.0, 0.0
        if kind == COPY:
            nbytes = _figure(arguments, "bytes", 0)
            self.ways.append(_direction_and_kind(clean(name)))
        if kind == STEP:
            number = _figure({"step": name.rpartition("#")[2]}, "step", 0)
        elif kind in CORRELATED:
            number = _figure(arguments, "correlation", -1)
        elif kind == WAIT and _WORKERS.match(name):
            self.has_workers = True
        if kind in (KERNEL, COPY):
            track = _figure(arguments, "device", 0, _MOST_DEVICES)
        else:
            track = self._thread(event)
        self._rows.extend((start * 1e-6, (start + lasts) * 1e-6, kind, track, number, nbytes))

    def _start(self, event: Event) -> float:
        """Return when an event began, in microseconds since the first one."""
        began = float(event["ts"])
        if self._zero is None:
            self._zero = began
        start = began - self._zero
        if not abs(start) < _LONGEST_US:  # so that sums of times are finite, too
            raise ValueError(f"ts: it begins after {start:g} us")
        return start

    def _thread(self, event: Event) -> int:
        thread = event.get("pid"), event.get("tid")
        return self._threads.setdefault(thread, len(self._threads))


def _figure(values: Mapping[str, Any], name: str, default: float, limit: float = _MOST) -> float:
    """Return a number of an event: `default`, or a number from 0 to `limit`."""
    number = float(values.get(name, default))
    if number != default and not 0 <= number < limit:
        raise ValueError(f"{name}: {number}")
    return number


# A trace has millions of events but few names: each name is matched once.


@cache
def kind_of(kind: int, name: str) -> int:
    """Return the kind of an event by its name."""
    for named_kind, pattern in _NAMES.get(kind, ()):
        if re.match(pattern, name):
            return named_kind
    return OTHER if kind == MOVING_OP else kind


@cache
def _direction_and_kind(name: str) -> tuple[str, str]:
    match = _COPY_NAME.match(name)
    if match is None:
        return "other", "unknown"
    direction = f"{match[1].upper()}to{match[2].upper()}"
    host = match[3] if direction == TO_DEVICE else match[4]
    return direction, (host or "unknown").lower()
