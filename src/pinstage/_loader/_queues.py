"""What stands in the place of the queues of torch's iterator, in the main process. Uses what `multiprocessing` hides.

``tests/test_loader_torch.py`` fails, with the name, when any of it changes.
"""

from __future__ import annotations

import contextlib
import io
import queue
import select
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data._utils.worker import _ResumeIteration as Resumed

from .._staging import Transfer
from ._arrivals import Arrival, Failed
from ._sending import Sender

_AT_ONCE = select.PIPE_BUF - 4
"""Bytes that a pipe takes as a whole, or not at all; without the length that `multiprocessing` puts before them."""


Outbox = deque[tuple["IndexQueue", Any, bytes]]
"""Messages to workers, each with how it is encoded."""


class SendingQueue:
    """What torch's iterator reads in place of its queue: batches come out of it on their way to the device.

    The keeper's thread reads the queue behind, sends what arrives, and makes the views, while the loop is busy with an
    earlier batch. Batches are sent in their order, no further ahead of the one that the loop wants than `depth`; those
    that come too early stay in their slots. So does, in its order, the news that a worker has no more: it must not come
    before that worker's last batch.

    Args:
        source: the queue behind.
        batches: torch's iterator. The reference is weak: the thread must not keep it alive.
        sender: sends.
        depth: batches sent ahead.
        wake: wakes the thread, which calls `send` then.
    """

    def __init__(self, source: Any, batches: Any, sender: Sender, depth: int, wake: Callable[[], None]) -> None:
        self._source = source
        self._batches = weakref.ref(batches)
        self._in_order: bool = batches._in_order
        self._sender = sender
        self._depth = depth
        self._wake = wake
        self.outbox: Outbox = deque()
        """Messages to workers, which the keeper's thread sends, too."""
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The loop's thread writes `_last`, then looks at `_held`; the other one writes `_held`, then looks at `_last`:
        # so one of them notices that a batch may be sent.
        self._held: dict[Any, Any] = {}
        self._sent = self._resuming = 0
        self._end: BaseException | None = None
        self.begin()

    # -- the loop's thread

    def advance(self) -> None:
        """Take note that the loop has a batch: while it is busy with that, the thread has its turn."""
        self._allow(self._wanted() - 1 + self._depth)

    def get(self, timeout: float) -> Any:
        """Return the next message.

        Raises:
            queue.Empty: none came in `timeout` seconds.
            BaseException: a message could not be unpickled, or the thread failed.
        """
        self._allow(self._wanted())
        item = self._ready.get(timeout=timeout)
        if isinstance(item, BaseException):
            if item is self._end:
                self._ready.put(item)  # nothing else will ever come
            raise item
        self._taken += isinstance(_batch_in(item[1]), Transfer)
        return item

    def drop_until_resumed(self, workers: int) -> None:
        """Send no batch before so many workers have said that they begin again."""
        self.begin()
        self._resuming = workers
        self._wake()

    def begin(self) -> None:
        """Take note that the loop has no batch yet."""
        self._taken = 0
        self._last = self._depth - 1
        if self.outbox:
            self._wake()

    def close(self) -> None:
        """Put an end to a message that a killed worker began; the others have ended."""
        self._source._writer.close()

    def _wanted(self) -> int:
        """Return what torch wants next: a number, or without order how many there were before."""
        batches = self._batches() if self._in_order else None
        return self._taken if batches is None else int(batches._rcvd_idx)

    def _allow(self, last: int) -> None:
        before, self._last = self._last, max(self._last, last)
        if self.outbox or (
            any(number in self._held for number in range(before + 1, last + 1)) if self._in_order else self._held
        ):
            self._wake()

    # -- the keeper's thread

    def fileno(self) -> int:
        """Return the file that can be read when there is a message."""
        return int(self._source._reader.fileno())

    def receive(self) -> None:
        """Read a message."""
        try:
            number, payload = self._source.get()
        except BaseException as error:  # noqa: BLE001 - it cannot be unpickled: raised by `get`
            self._ready.put(error)
            return
        if self._resuming:
            self._forget()
            self._resuming -= isinstance(number, Resumed)
            if not isinstance(_batch_in(payload), Arrival):
                self._ready.put((number, payload))
        else:
            self._held[number] = payload

    def send(self) -> None:
        """Send what there is for workers, then the batches whose turn it is; pass on what else is between them."""
        while self.outbox:
            index_queue, message, encoded = self.outbox.popleft()
            index_queue.send(message, encoded)
        if self._resuming:
            self._forget()
        while self._held:
            number = min(self._held) if self._in_order else next(iter(self._held))
            if (number if self._in_order else self._sent) > self._last:
                return
            self._ready.put((number, self._on_its_way(self._held.pop(number))))

    def fail(self, error: BaseException) -> None:
        """Take note that the thread ends, by an error."""
        self._end = error
        self._ready.put(error)

    def _on_its_way(self, payload: Any) -> Any:
        arrival = _batch_in(payload)
        if not isinstance(arrival, Arrival):
            return payload
        sent: Transfer | Failed
        try:
            sent = self._sender.send(arrival)
            self._sent += 1
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            sent = Failed(error)
        return (sent, *payload[1:]) if isinstance(payload, tuple) else sent

    def _forget(self) -> None:
        self._held.clear()  # torch drops them all: their slots are free at once
        self._sent = 0


class IndexQueue:
    """A queue to a worker of torch's iterator whose messages the keeper's thread writes.

    `multiprocessing.Queue` has a thread of its own for that: waking it, and the interpreter lock that it takes, were a
    tenth or more of the main thread's time for a batch of ten leaves; waking the worker is as much. Messages keep their
    order, but for the one that ends a worker. Other attributes are the queue's.

    Args:
        behind: a `multiprocessing.Queue`.
        outbox: where messages wait for that thread, which somebody else wakes.
    """

    def __init__(self, behind: Any, outbox: Outbox) -> None:
        self._behind = behind
        self._outbox = outbox
        self._poll = select.poll()
        self._poll.register(behind._writer, select.POLLOUT)
        self._encoded = io.BytesIO()
        self._pickler = ForkingPickler(self._encoded)  # made once: it copies a table of what it knows to pickle

    def put(self, message: Any) -> None:
        """Take a message. Does not block.

        Raises:
            Exception: it cannot be pickled.
            ValueError: the queue is closed.
        """
        if self._behind._closed:
            self._behind.put(message)  # says so
        encoded = self._encode(message)
        if message is None:  # the worker ends, and reads nothing else
            self.send(message, encoded)
        else:
            self._outbox.append((self, message, encoded))

    def send(self, message: Any, encoded: bytes) -> None:
        """Send a message: at once if it is small, and does not have to wait."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile: the worker ended
            if not self._write(encoded):
                self._behind.put(message)

    def close(self) -> None:
        """Close the queue, and drop what waits."""
        self._outbox.clear()  # or it and those that wait in it would keep one another
        self._behind.close()

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


def _batch_in(payload: Any) -> Any:
    return payload[0] if isinstance(payload, tuple) else payload  # a tuple of torchdata's: (batch, worker, state)
