"""The queue that torch's iterator reads in place of its own: packed batches are sent."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch

from .._compat.loader import close_writing_end, has_lost_a_worker, is_resumption, queue_file
from .._pool import Fence, is_page_locked
from .._stage import HandOver, HostBytes, Packed, Transfer, kept, send_packed
from ._messages import Failed, PackedBatch
from ._slabs import Slabs

LOOK_SECONDS = 0.2
"""Interval at which a loop that waits for a batch looks for a worker that has ended. torch's
interval is 5 s.
"""


def send(slabs: Slabs, batch: PackedBatch) -> Transfer:
    """Start the copy of a packed batch, behind which its slab returns to the worker. Does not
    block; any thread.
    """
    host = None
    if batch.number is not None:
        lease = batch.broker.loans.of(None, batch.number).lease
        host = HostBytes(lease.data_ptr(), is_page_locked(lease))
    elif batch.raw is not None:
        host = HostBytes(torch.frombuffer(batch.raw, dtype=torch.uint8).data_ptr(), False)

    def release(event: Fence | None) -> None:
        batch.give_back(event)
        kept.until(event, [batch.raw])  # some devices read ordinary memory later

    packed = Packed(batch.structure, batch.table, batch.others)
    transfer = send_packed(slabs.target, packed, host, slabs.settings.own_storage, release)
    slabs.counters.count(transfer, fallback=batch.raw is not None, slab_wait_seconds=batch.waited)
    return transfer


class SendingQueue:
    """The queue that torch's iterator reads: packed batches go in, batches on their way to the
    device come out.

    The broker's thread reads the worker queue, sends the batches, and makes their views. Meanwhile
    the loop is busy with an earlier batch. Batches are sent in order, at most `depth` ahead of the
    loop. Batches that arrive too early stay in their slabs.

    The message that a worker has no more batches keeps its place: it must not overtake the worker's
    last batch.

    Args:
        source: the worker queue.
        batches: torch's iterator. Kept by a weak reference, since the thread must not keep it
            alive.
        send: starts the copy of a packed batch.
        depth: the number of batches sent ahead.
        wake: wakes the thread, which then calls `send_ready`.
    """

    def __init__(
        self,
        source: Any,
        batches: Any,
        send: Callable[[PackedBatch], Transfer],
        depth: int,
        wake: Callable[[], None],
    ) -> None:
        self._source = source
        self._batches = weakref.ref(batches)
        self._in_order: bool = batches._in_order
        self._send = send
        self._depth = depth
        self._wake = wake
        self._ready = HandOver()
        self._held: dict[Any, Any] = {}
        # The loop's thread writes `_last`, then looks at `_waits_for`. The broker's thread writes
        # `_waits_for`, then looks at `_last`. So one of them notices that a batch may be sent.
        self._waits_for: int | None = None
        self._sent = self._resuming = 0
        self._closed = threading.Lock()  # taken by the first `close`, never released
        self.begin()

    # -- the loop's thread

    def advance(self) -> None:
        """Note that the loop has taken a batch, so that the thread may send the next one."""
        self._allow(self._wanted() - 1 + self._depth)

    def get(self, timeout: float) -> Any:
        """Return the next message. Blocks for at most `timeout` seconds.

        Raises:
            queue.Empty: there was no message in that time, or a worker has ended: torch's iterator
                then looks which.
            BaseException: a message could not be unpickled, or the thread failed.
        """
        self._allow(self._wanted())
        deadline = time.monotonic() + timeout
        item = None
        while item is None:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                item = self._ready.get(min(left, LOOK_SECONDS))
            except Empty:
                batches = self._batches()
                if left <= LOOK_SECONDS or batches is None or has_lost_a_worker(batches):
                    raise
        self._taken += isinstance(_batch_in(item[1]), Transfer)
        return item

    def drop_until_resumed(self, workers: int) -> None:
        """Send nothing until this number of workers have reported that they begin again."""
        self.begin()
        self._resuming = workers
        self._wake()

    def begin(self) -> None:
        """Note that the loop has no batch yet."""
        self._taken = 0
        self._last = self._depth - 1

    def close(self) -> None:
        """Close the writing end, or the thread would wait for the rest of a message that a killed
        worker didn't finish.

        The end of a pass and the end of the program may both call this, in two threads. Closing the
        file twice would fail, or would close a file that another thread has just opened.
        """
        if self._closed.acquire(blocking=False):
            close_writing_end(self._source)

    def _wanted(self) -> int:
        """Return the number of the batch that torch wants next; without order, the number of
        batches taken.
        """
        batches = self._batches() if self._in_order else None
        return self._taken if batches is None else int(batches._rcvd_idx)

    def _allow(self, last: int) -> None:
        self._last = max(self._last, last)
        waits_for = self._waits_for
        # Again, if need be: an interrupt may have swallowed it.
        if waits_for is not None and waits_for <= self._last:
            self._wake()

    # -- the broker's thread

    def fileno(self) -> int:
        """Return the file descriptor that is readable when there is a message."""
        return queue_file(self._source)

    def receive(self) -> None:
        """Read one message."""
        try:
            number, payload = self._source.get()
        except BaseException as error:  # noqa: BLE001 - it cannot be unpickled: raised by `get`
            self._ready.put(error)
            return
        if self._resuming:
            self._forget()
            self._resuming -= is_resumption(number)
            if not isinstance(_batch_in(payload), PackedBatch):
                self._ready.put((number, payload))
        else:
            self._held[number] = payload

    def send_ready(self) -> bool:
        """Send the batches whose turn it is, and pass on the messages between them. Return whether
        a batch waits.
        """
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
        """Note that the thread has ended by an error, which `get` raises from now on."""
        self._ready.end(error)

    def _on_its_way(self, payload: Any) -> Any:
        batch = _batch_in(payload)
        if not isinstance(batch, PackedBatch):
            return payload
        try:
            sent: Transfer | Failed = self._send(batch)
            self._sent += 1
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            sent = Failed(error)
        return (sent, *payload[1:]) if isinstance(payload, tuple) else sent

    def _forget(self) -> None:
        self._held.clear()  # torch drops these batches, so their slabs are free at once
        self._sent = 0


def _batch_in(payload: Any) -> Any:
    # Torchdata's tuple: (batch, worker, state).
    return payload[0] if isinstance(payload, tuple) else payload
