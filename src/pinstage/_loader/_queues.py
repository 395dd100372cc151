"""What stands in the place of the queues of torch's iterator, in the main process. Uses what `multiprocessing` hides.

``tests/test_loader_torch.py`` fails, with the name, when any of it changes.
"""

from __future__ import annotations

import io
import math
import queue
import select
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch._utils import ExceptionWrapper

from ._arrivals import Arrival, Unreadable

_LONGEST_POLL = 2**31 - 1
"""Milliseconds; a C int."""

_AT_ONCE = select.PIPE_BUF - 4
"""Bytes that a pipe takes as a whole, or not at all; without the length that `multiprocessing` puts before them."""


class PeekedQueue:
    """The queue of torch's iterator, in which one may look for a batch without waiting for it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: deque[Any] = deque()
        self.drops = False
        """Whether the batches of a pass that was left are read, which torch drops. Each gives its slot back at once:
        torch holds it until it has the next one, for which the worker may need just that slot."""
        self._poll = select.poll()
        self._poll.register(source._reader, select.POLLIN)

    def get(self, timeout: float) -> Any:
        """Return the next message; as the source's own method, which makes a poll object for each.

        Raises:
            queue.Empty: none came in `timeout` seconds.
        """
        if not self._items and not self._poll.poll(min(math.ceil(timeout * 1e3), _LONGEST_POLL)):
            raise queue.Empty
        item = self._items.popleft() if self._items else self._source.get()
        if isinstance(item, Exception):
            raise item
        if self.drops and isinstance(batch := _batch_in(item[1]), Arrival):
            batch.drop()
        return item

    def holds_batch(self, number: int | None) -> bool:
        """Return whether a batch, or any for None, has arrived."""
        if self._has(number):
            return True
        try:
            while self._poll.poll(0):  # one that finds nothing costs a tenth of a `get` that does
                self._items.append(self._source.get())  # not `block=False`: that would poll again, in a slow way
        except Exception as error:  # noqa: BLE001 - a message that cannot be unpickled: raised when its turn comes
            self._items.append(error)
        return self._has(number)

    def _has(self, number: int | None) -> bool:
        return bool(self._items) and any(
            not isinstance(item, Exception) and number in (None, item[0]) and is_batch(item[1]) for item in self._items
        )


class IndexQueue:
    """A queue to a worker of torch's iterator that small messages are written to at once.

    `multiprocessing.Queue` leaves that to a thread: waking it, and the interpreter lock that it takes, were a tenth or
    more of the main thread's time for a batch of ten leaves. Messages keep their order: one is written here only while
    the thread has nothing to write, and waits. Other attributes are the queue's.

    Args:
        behind: a `multiprocessing.Queue`.
    """

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self._poll = select.poll()
        self._poll.register(behind._writer, select.POLLOUT)
        self._encoded = io.BytesIO()
        self._pickler = ForkingPickler(self._encoded)  # made once: it copies a table of what it knows to pickle

    def put(self, message: Any) -> None:
        """Send a message. Does not block."""
        if not self._write(self._encode(message)):
            self._behind.put(message)

    def _encode(self, message: Any) -> bytes:
        self._encoded.seek(0)
        self._encoded.truncate()
        try:
            self._pickler.dump(message)
        finally:
            self._pickler.clear_memo()
        return self._encoded.getvalue()

    def _write(self, encoded: bytes) -> bool:
        behind = self._behind
        if len(encoded) > _AT_ONCE or behind._closed:
            return False
        with behind._notempty:  # the thread's condition: who waits for it has written all that it took
            if behind._buffer or not behind._notempty._waiters or not self._poll.poll(0):
                return False
            if not behind._sem.acquire(False):
                return False
            behind._writer.send_bytes(encoded)
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "_behind":  # not made yet: no recursion
            raise AttributeError(name)
        return getattr(self._behind, name)


def is_batch(payload: Any) -> bool:
    """Tell a batch, or an error in its place, from the news that a worker has no more."""
    return isinstance(_batch_in(payload), Arrival | Unreadable | ExceptionWrapper)


def _batch_in(payload: Any) -> Any:
    return payload[0] if isinstance(payload, tuple) else payload  # a tuple of torchdata's: (batch, worker, state)
