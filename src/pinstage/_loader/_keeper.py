"""The main process's side: which slots there are, whose they are, and when each is free again."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

from .._errors import AcquireTimeoutError, BudgetExceededError, PoolClosedError
from .._layout import Layout
from .._pool import Event, Lease, SlabPool, size_class
from .._sizes import format_bytes
from .._staging import Target
from ._arrivals import KEEPERS
from ._descriptors import send_descriptor

_POLL_MS = 1
"""How often copies are looked at while a worker waits for a slot. Nobody looks while none waits."""

_tokens = itertools.count()


class Incoming(Protocol):
    """What the keeper's thread reads besides."""

    def fileno(self) -> int:
        """Return the file that can be read when there is something."""
        ...

    def receive(self) -> None:
        """Take what is there."""
        ...

    def send(self) -> None:
        """Send on what may be sent by now. Called whenever the thread was woken."""
        ...

    def fail(self, error: BaseException) -> None:
        """Take note that the thread ends, by an error."""
        ...

    def close(self) -> None:
        """Let nothing wait for what will not come."""
        ...


class Slot:
    """A slab that one worker may write."""

    __slots__ = ("_start", "free_message", "lease", "number", "tensor", "worker")

    def __init__(self, number: int, worker: int, lease: Lease) -> None:
        self.number = number
        self.worker = worker
        self.lease = lease
        self.tensor: torch.Tensor | None = lease.tensor()
        self._start: torch.Tensor | None = None
        self.free_message = _encoded("free", number)
        """The message that the worker gets after each copy."""

    def start(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes. Most batches of a loader are of one size: the view is made once."""
        start = self._start
        if start is None or start.numel() != nbytes:
            assert self.tensor is not None
            start = self._start = self.tensor[:nbytes]
        return start

    def forget(self) -> None:
        """Let go of the views, without which the slab would not be free."""
        self.tensor = self._start = None


class SlotKeeper:
    """Leases slots to the workers of one iterator, and takes them back.

    A thread answers the workers' requests, since the main one may be waiting for just the worker that asks, and sends
    their batches, since the main one may be busy. It is the only one that leases and releases. It starts after the
    workers, so that they are forked from a process without it, except where a loader needs answers before its iterator
    is there.

    Args:
        pool: over shared memory.
        channels: this side's ends, one for each worker; the keeper closes them.
        target: where slots are copied to.
        owner: keeps the pool open.
    """

    def __init__(self, pool: SlabPool, channels: Sequence[Connection], target: Target, owner: object) -> None:
        self.token = next(_tokens)
        self.pid = os.getpid()
        self.structures: dict[tuple[int, int | None], Layout | bytes] = {}
        """What structure numbers mean, for each worker; pickled as long as it could not be unpickled."""
        self._owner = owner
        self._target = target
        self._pool = pool
        self._channels = dict(enumerate(channels))
        self._open = {channel.fileno(): worker for worker, channel in self._channels.items()}
        self._numbers = itertools.count()
        self._slots: dict[int, Slot] = {}
        self._copying: deque[tuple[int, Event | None]] = deque()
        self._dropped: deque[int] = deque()  # written by finalisers, without the lock
        self._starved: dict[int, int] = {}  # worker to bytes
        self._lock = threading.RLock()  # a finaliser may run inside
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = self._told = self._finished = self._ended = False
        self._leak = self._has_warned = False
        self._thread: threading.Thread | None = None
        self._incoming: Incoming | None = None
        self._kept: Sequence[Any] = ()
        KEEPERS[self.token] = self

    # -- for the iterator

    def start(self) -> None:
        """Start to answer workers; a second call does nothing."""
        if self._thread is not None:
            return
        # A daemon, as the workers are: it must not keep the program from ending.
        self._thread = threading.Thread(target=self._serve, name="pinstage-loader", daemon=True)
        self._thread.start()

    def serve(self, incoming: Incoming) -> None:
        """Send what comes from now on."""
        self._incoming = incoming
        self.wake()

    def keep(self, objects: Sequence[Any]) -> None:
        """Keep objects alive while workers are answered.

        The queues to them, that is. When the iterator is collected with a cycle of garbage, such as that of an error
        that was kept, they would be closed before it could tell the workers to end, and each would take 5 seconds.
        """
        self._kept = objects

    def arrived(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return the bytes that arrived in a slot."""
        return self._slots[slot].start(nbytes)

    def sent(self, slot: int, event: Event | None) -> None:
        """Give a slot back to its worker when the copy from it is done; at once if it is, for None."""
        with self._lock:
            self._copying.append((slot, event))
            if event is None:
                self._sweep()
            watch = bool(self._starved and self._copying)
        if watch:
            self.wake()

    def dropped(self, slot: int) -> None:
        """Take note that a batch was dropped unused. Finalisers call it: nobody holds its lock for long.

        Does nothing in a forked child and at the end of the program, where a thread that is gone may hold it for ever.
        """
        if os.getpid() != self.pid or sys.is_finalizing():
            return
        self._dropped.append(slot)
        self.wake()

    def wake(self) -> None:
        """Let the thread look at what there is to do."""
        # Not ended: else the number may be another file's by now. Full: then it wakes anyway.
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                os.write(self._wake_write, b"w")

    def waiting(self) -> str:
        """Say which workers wait for slabs, and who holds these; empty if none waits."""
        with self._lock:
            copying = {number for number, _ in self._copying}
            workers = []
            for worker, nbytes in self._starved.items():
                own = [number for number, slot in self._slots.items() if slot.worker == worker]
                busy = len(copying.intersection(own))
                workers.append(
                    f"worker {worker} waits for a slab of {format_bytes(nbytes)}: of its {len(own)}, {busy} are being "
                    f"copied to the device and {len(own) - busy} hold batches that the loop has not taken"
                )
        if not workers:
            return ""
        stats = self._pool.stats()
        held, cap = format_bytes(stats.leased_bytes), format_bytes(stats.max_bytes)
        return f"{'; '.join(workers)}; all workers hold {held} of {cap}; raise max_bytes"

    def close(self) -> None:
        """Tell workers that wait for slots to stop. Nothing is released yet: they may still write."""
        self._closing = True
        self.wake()

    def finish(self, *, leak: bool) -> None:
        """Release everything, now that no worker is left.

        Args:
            leak: a worker could not be ended: what it may write must not be handed out again.
        """
        self._leak = leak
        self._finished = True
        thread, incoming = self._thread, self._incoming
        if thread is None:
            self._end()
        else:
            if incoming is not None:
                incoming.close()
            self.wake()
            if thread is not threading.current_thread():
                thread.join(5.0)  # for ever only if a finaliser runs inside the pool, in this very thread

    # -- the thread

    def _serve(self) -> None:
        try:
            with self._target.in_background():
                self._answer_workers()
        except BaseException as error:
            self._leak = True  # workers may still write
            self._tell_workers()
            if self._incoming is None:
                raise
            self._incoming.fail(error)
        finally:
            self._end()

    def _answer_workers(self) -> None:
        poll = select.poll()
        incoming: Incoming | None = None
        source = -1
        for file in (*self._open, self._wake_read):
            poll.register(file, select.POLLIN)
        while not self._finished:
            if incoming is None and (incoming := self._incoming) is not None:
                source = incoming.fileno()
                poll.register(source, select.POLLIN)
            for file, _ in poll.poll(_POLL_MS if self._starved and self._copying else None):
                if incoming is not None and file == source:
                    incoming.receive()
                elif file == self._wake_read:
                    os.read(file, 4096)
                elif not self._receive(self._open[file]):
                    poll.unregister(file)
            if self._closing and not self._told:
                self._told = True
                if incoming is not None:
                    poll.unregister(source)
                self._tell_workers()
            if incoming is not None and not self._closing:
                incoming.send()
            if self._copying or self._dropped:
                with self._lock:
                    self._sweep()

    def _tell_workers(self) -> None:
        """Tell those that wait for slots to stop. Closing their channels would not: later workers have them too."""
        for worker in self._open.values():
            self._send(self._channels[worker], _encoded("closed"))

    def _receive(self, worker: int) -> bool:
        """Answer a worker. Says whether more may come."""
        channel = self._channels[worker]
        try:
            kind, *details = channel.recv()
        except (EOFError, OSError):  # the worker ended, or was killed; torch notices by itself
            del self._open[channel.fileno()]
            with self._lock:
                self._starved.pop(worker, None)
            return False
        if kind == "ask":
            self._answer(channel, worker, *details)
        elif kind == "starved":
            with self._lock:
                self._sweep()
                if any(slot.worker == worker for slot in self._slots.values()):
                    self._starved[worker] = details[0]
        else:
            number, why = details
            self._warn(self._slots[number].lease.nbytes, why)
            self._drop([number])
        return True

    def _answer(self, channel: Connection, worker: int, nbytes: int, wanted: int, dropped: list[int]) -> None:
        self._drop(dropped)
        for size in dict.fromkeys((wanted, nbytes)):
            lease = None if self._closing else self._lease(worker, size)
            if lease is not None:
                slot = Slot(next(self._numbers), worker, lease)
                with self._lock:
                    self._slots[slot.number] = slot
                self._send(channel, _encoded("granted", slot.number, lease.nbytes), lease.fd)
                return
        self._send(channel, _encoded("refused"))

    def _lease(self, worker: int, nbytes: int) -> Lease | None:
        """Lease a slab for a worker, but none that a worker without any will need."""
        rounded = size_class(nbytes, self._pool.memory.granularity)
        size = rounded if rounded <= self._pool.max_bytes else nbytes
        with self._lock:
            supplied = {slot.worker for slot in self._slots.values()}
        if worker in supplied:
            stats = self._pool.stats()
            room = stats.max_bytes - stats.leased_bytes - stats.in_flight_bytes - size
            if room < size * len(set(self._open.values()) - supplied):
                return None
        try:
            return self._pool.acquire(size, timeout=0)
        except (BudgetExceededError, AcquireTimeoutError, PoolClosedError):
            return None  # the worker makes do without
        except Exception as error:  # noqa: BLE001 - of the system: as above, but nobody would know why it is slow
            self._warn(size, repr(error))
            return None

    def _warn(self, nbytes: int, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(RuntimeWarning):  # made an error: not here, the workers wait
                warnings.warn(
                    f"a DataLoader goes on without a slab of {format_bytes(nbytes)}, which is slow: {why}; see "
                    "`pinstage doctor`",
                    RuntimeWarning,
                    stacklevel=1,
                )

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._lock:
                slot = self._slots.pop(number)
            slot.forget()
            slot.lease.release()

    def _sweep(self) -> None:
        """Under the lock."""
        while self._dropped:
            self._free(self._dropped.popleft())
        while self._copying and ((event := self._copying[0][1]) is None or event.query()):
            self._free(self._copying.popleft()[0])

    def _free(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is not None:
            self._starved.pop(slot.worker, None)
            self._send(self._channels[slot.worker], slot.free_message)

    def _send(self, channel: Connection, message: bytes, fd: int | None = None) -> None:
        # A few bytes, and never more of them unread than a worker has slots: the socket takes them without waiting.
        with self._lock:
            if self._ended:
                return
            try:
                channel.send_bytes(message)
                if fd is not None:  # right behind it: the worker reads no further before it has that
                    send_descriptor(channel, fd)
            except OSError:
                return  # the worker ended

    def _end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._kept = ()
            self._incoming = None
            events = dict(self._copying)
            slots, self._slots = self._slots, {}
            self._copying.clear()
            self._starved.clear()
            for channel in self._channels.values():
                channel.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        if self._leak:
            LEAKED.append((self._owner, slots))
            return
        for slot in slots.values():
            slot.forget()
            slot.lease.release(after=events.get(slot.number))


def _encoded(*message: Any) -> bytes:
    """Encode a message as `Connection.send` does."""
    return bytes(ForkingPickler.dumps(message))


LEAKED: list[Any] = []
"""Slots that a worker may still write which could not be ended. They stay leased until the process ends."""


@atexit.register
def _end_threads() -> None:
    """End all threads before the interpreter: one that comes back from CUDA or torch later would abort the process."""
    for keeper in list(KEEPERS.values()):
        if keeper.pid == os.getpid():
            keeper.finish(leak=True)  # the workers are still there
