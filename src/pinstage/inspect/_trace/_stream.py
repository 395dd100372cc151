"""Read a large JSON document event by event.

A trace of half a gigabyte holds millions of events, of which a few kinds matter. Python's own decoder reads each event
as it comes, out of a window on the file, so memory stays at the window's size whatever the file's. (Measured on a
generated trace of 500 MB: docs/trace.md. Faster readers exist; none was needed.)
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .._errors import TraceError
from .._report import clean

_WINDOW = 4 << 20
"""Characters read at a time."""
_LONGEST_VALUE = 64 << 20
"""Characters that one event may have. What still cannot be decoded then is broken, and is not read to its end."""
_SKIPPED = re.compile(r"[\s,]*")
_EXPECTED = "export one with profiler.export_chrome_trace() or torch.profiler.tensorboard_trace_handler()"
_decode = json.JSONDecoder(strict=False).raw_decode  # not strict: names of kernels come with control characters

Event = dict[str, Any]


class TraceFile:
    """A trace on disk, ``.json`` or ``.json.gz``. Iterating it yields its events, and fills `header` on the way.

    Attributes:
        path: the file.
        shown: its path, to be printed.
        header: what stands beside the events: ``deviceProperties``, ``distributedInfo`` and the like.
    """

    def __init__(self, path: Path, *, advance: Callable[[int], None] | None = None) -> None:
        """Take a file to be read; `advance` is called with the bytes of it that were read since the last call."""
        self.path = path
        self.shown = clean(str(path))
        self.header: dict[str, Any] = {}
        self._advance = advance or (lambda _: None)

    def __iter__(self) -> Iterator[Event]:
        yielded = 0
        try:
            with self.path.open("rb") as raw:
                for event in self._events(_Window(raw, self._advance)):
                    yielded += 1
                    yield event
        # BadGzipFile is an OSError, too: it comes before those.
        # A number of too many digits is a ValueError, nesting that is too deep a RecursionError.
        except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            if not yielded:
                raise self._no_trace(f"{reason}, before any event") from None
            raise TraceError(
                f"{self.shown} is broken or cut off after {yielded:,} events: {reason}; was the program stopped while "
                "it wrote the trace? Record it again"
            ) from None
        except OSError as error:
            raise TraceError(f"cannot read {self.shown}: {error.strerror or error}") from error

    def _events(self, window: _Window) -> Iterator[Event]:
        first = window.peek()
        if first == "[":  # the older of the two formats: events alone
            yield from window.array()
            return
        if first != "{":
            raise self._no_trace("it is not JSON" if first else "it is empty")
        window.skip()
        seen = False
        while window.peek() != "}":
            key = window.value()
            if window.peek() != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", "", 0)
            window.skip()
            if key == "traceEvents" and window.peek() == "[":
                seen = True
                yield from window.array()
            else:
                window.peek()
                self.header[str(key)] = window.value()
        if not seen:
            keys = clean(", ".join(list(self.header)[:5])) or "nothing"
            raise self._no_trace(f"it is JSON without traceEvents (it has {keys})")

    def _no_trace(self, reason: str) -> TraceError:
        return TraceError(f"{self.shown} is no trace: {reason}; {_EXPECTED}")


class _Window:
    """A part of the file's text, and how far it was decoded."""

    def __init__(self, raw: IO[bytes], advance: Callable[[int], None]) -> None:
        self._raw = raw
        self._advance = advance
        self._told = 0
        packed = raw.read(2) == b"\x1f\x8b"  # whatever the name says
        raw.seek(0)
        self._bytes: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0

    def peek(self) -> str:
        """Return the next character that is no blank or comma; nothing at the end of the file."""
        while True:
            self._at = _SKIPPED.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Go past the character that was peeked at."""
        self._at += 1

    def value(self) -> Any:
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

    def array(self) -> Iterator[Event]:
        """Yield the objects of the array that begins here."""
        self.skip()
        while (next_ := self.peek()) != "]":
            if not next_:
                raise json.JSONDecodeError("it ends in the middle of its events", "", 0)
            value = self.value()
            if isinstance(value, dict):
                yield value
        self.skip()

    def _read(self) -> bool:
        data = self._bytes.read(_WINDOW)
        position = self._raw.tell()
        self._advance(position - self._told)
        self._told = position
        self._text = self._text[self._at :] + self._characters.decode(data)
        self._at = 0
        return bool(data)
