"""What stands in the place of the queues of torch's iterator, in the main process."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from .._staging import Transfer
from .._torch import close_writing_end, is_resumption, queue_file
from ._arrivals import Arrival, Failed
from ._sending import Sender


class SendingQueue:
    """What torch's iterator reads in place of its queue: batches come out of it on their way to the device.

    The server's thread reads the queue behind, sends what arrives, and makes the views, while the loop is busy with an
    earlier batch. Batches are sent in their order, no further ahead of the one that the loop wants than `depth`; those
    that come too early stay in their slabs. So does, in its order, the news that a worker has no more: it must not come
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
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: dict[Any, Any] = {}
        # The loop's thread writes `_last`, then looks at `_waits_for`; the other one writes `_waits_for`, then looks at
        # `_last`: so one of them notices that a batch may be sent.
        self._waits_for: int | None = None
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

    def close(self) -> None:
        """Put an end to a message that a killed worker began; the others have ended."""
        close_writing_end(self._source)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"torch {torch.__version__} asks its loader's queue for {name}, which pinstage.DataLoader does not know; "
            "use Stager.prefetch over torch's own loader, or another torch"
        )

    def _wanted(self) -> int:
        """Return what torch wants next: a number, or without order how many there were before."""
        batches = self._batches() if self._in_order else None
        return self._taken if batches is None else int(batches._rcvd_idx)

    def _allow(self, last: int) -> None:
        self._last = max(self._last, last)
        waits_for = self._waits_for
        if waits_for is not None and waits_for <= self._last:  # perhaps once more: an interrupt may have swallowed it
            self._wake()

    # -- the server's thread

    def fileno(self) -> int:
        """Return the file that can be read when there is a message."""
        return queue_file(self._source)

    def receive(self) -> None:
        """Read a message."""
        try:
            number, payload = self._source.get()
        except BaseException as error:  # noqa: BLE001 - it cannot be unpickled: raised by `get`
            self._ready.put(error)
            return
        if self._resuming:
            self._forget()
            self._resuming -= is_resumption(number)
            if not isinstance(_batch_in(payload), Arrival):
                self._ready.put((number, payload))
        else:
            self._held[number] = payload

    def send(self) -> bool:
        """Send the batches whose turn it is; pass on what else is between them. Says whether any has to wait."""
        if self._resuming:
            self._forget()
        while self._held:
            number = min(self._held) if self._in_order else next(iter(self._held))
            self._waits_for = number if self._in_order else self._sent
            if self._waits_for > self._last:
                return True
            self._ready.put((number, self._on_its_way(self._held.pop(number))))
        self._waits_for = None
        return False

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
        self._held.clear()  # torch drops them all: their slabs are free at once
        self._sent = 0


class IndexQueue:
    """A queue to a worker whose `put` raises an error of its message's.

    Else a message that cannot be pickled, the indexes of a sampler say, would be a text on the screen, of the queue's
    own thread, and the loop would wait for its batch forever. Other attributes are the queue's.

    Args:
        behind: of torch's iterator.
    """

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def put(self, message: Any) -> None:
        """Take a message. Does not block.

        Raises:
            Exception: it cannot be pickled.
        """
        if not _is_plain(message):
            ForkingPickler.dumps(message)
        self._behind.put(message)

    def __getattr__(self, name: str) -> Any:
        if name == "_behind":  # not made yet: no recursion
            raise AttributeError(name)
        return getattr(self._behind, name)


def _is_plain(message: Any) -> bool:
    """Say whether a message is no more than numbers, as nearly all are."""
    if type(message) is not tuple:
        return message is None
    return all(type(part) is int or (type(part) is list and {int}.issuperset(map(type, part))) for part in message)


def _batch_in(payload: Any) -> Any:
    return payload[0] if isinstance(payload, tuple) else payload  # a tuple of torchdata's: (batch, worker, state)
