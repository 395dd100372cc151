"""Read a large JSON document event by event.

A trace of half a gigabyte holds millions of events, of which a few kinds matter. Python's own decoder reads each event
as it comes, out of a window on the file, so memory stays at the window's size whatever the file's. (Measured on a
generated trace of 500 MB: docs/trace.md. Faster readers exist; none was needed.)
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import TraceError
from .._report import clean

_WINDOW = 4 << 20
"""Characters read at a time."""
_LONGEST_VALUE = 64 << 20
"""Longest event, in characters. An event that can't be decoded by then is broken: don't read the rest for its end."""
_SKIPPED = re.compile(r"[\s,:]*")
_EXPECTED = "export one with profiler.export_chrome_trace() or torch.profiler.tensorboard_trace_handler()"
_decode = json.JSONDecoder(strict=False).raw_decode  # not strict: names of kernels come with control characters

Event = dict[str, Any]


class TraceFile:
    """A trace on disk, ``.json`` or ``.json.gz``. Iterating it yields its events, and fills `header` on the way.

    Attributes:
        path: the file.
        shown: its path, to be printed.
        header: the values beside the events: ``deviceProperties`` and the like.
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
                packed = raw.read(2) == b"\x1f\x8b"  # whatever the name says
                raw.seek(0)
                stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
                self._file = io.TextIOWrapper(stream, "utf-8", "replace", newline="")
                for event in self._events():
                    yielded += 1
                    yield event
        # BadGzipFile is an OSError, too: it comes before those.
        # A number of too many digits is a ValueError, nesting that is too deep a RecursionError.
        except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            if not yielded:
                raise self._not_a_trace(f"{reason}, before any event") from None
            raise TraceError(
                f"{self.shown} is broken or cut off after {yielded:,} events: {reason}; was the program stopped while "
                "it wrote the trace? Record it again"
            ) from None
        except OSError as error:
            raise TraceError(f"cannot read {self.shown}: {error.strerror or error}") from error

    def _events(self) -> Iterator[Event]:
        first = self._peek()
        if not first or first not in "{[":
            raise self._not_a_trace("invalid JSON" if first else "empty file")
        self._at += 1
        inside = seen = first == "["  # the older of the two formats: events alone
        while (character := self._peek()) != ("]" if first == "[" else "}"):
            if inside and character == "]":
                inside, self._at = False, self._at + 1
            elif inside:
                if isinstance(event := self._value(), dict):
                    yield event
            elif (key := self._value()) == "traceEvents" and self._peek() == "[":
                inside, seen, self._at = True, True, self._at + 1
            else:
                self._peek()
                self.header[str(key)] = self._value()
        if not seen:
            keys = clean(", ".join(list(self.header)[:5])) or "nothing"
            raise self._not_a_trace(f"JSON without traceEvents (it has {keys})")

    def _not_a_trace(self, reason: str) -> TraceError:
        return TraceError(f"{self.shown} isn't a profiler trace: {reason}; {_EXPECTED}")

    def _peek(self) -> str:
        """Return the next character that isn't white space or a separator; nothing at the end of the file."""
        while True:
            self._at = _SKIPPED.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
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
            # A number may go on behind the window's end; what ends by a bracket does not.
            if end < len(self._text) or isinstance(value, dict | list | str) or not self._read():
                self._at = end
                return value

    def _read(self) -> bool:
        more = self._file.read(_WINDOW)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)
