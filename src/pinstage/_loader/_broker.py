"""The main process's side: a thread that answers the workers, and sends the batches."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any

from .._pool import Fence, Lease, descriptor_of
from .._reaper import running, warn
from .._sizes import format_bytes
from .._stage import HostSlabs
from ._loans import Loans
from ._messages import (
    BEGIN_AGAIN,
    BROKERS,
    STRUCTURES_KEPT,
    Ask,
    Freed,
    Granted,
    Refused,
    Unmapped,
    Waiting,
    send_descriptor,
    shut_down,
)
from ._sending import SendingQueue
from ._slabs import Slabs

_STARVED_MS = 1
"""Poll interval for the ends of copies while a worker waits for a slab. Otherwise the thread
doesn't poll.
"""

_IDLE_MS = 100
"""Poll interval in case an interrupt swallowed a wake-up. Only while a worker or a batch waits."""

_ENDED = object()

_tokens = itertools.count()


class SlabBroker:
    """Lends slabs of a pool to the workers of one iterator, and takes them back.

    It has a thread, which answers the workers' requests: the main thread may be waiting for the
    very worker that asks. The thread also sends the batches, since the main thread may be busy.
    Only this thread frees slabs. Other threads leave a note and wake it. Each slab is leased in a
    thread of its own, one at a time: page-locking 128 MiB takes 25 ms and more, and batches have to
    be sent meanwhile.

    The thread starts after the workers, so that these are forked from a process without it. If a
    loader needs answers before its iterator exists, the thread starts before the workers. It
    answers until `close`, and releases everything after `finish`.

    Args:
        slabs: the loader's slabs.
        channels: the main process's ends, one for each worker. The broker closes them.
    """

    def __init__(self, slabs: Slabs, channels: Sequence[Connection]) -> None:
        self.token = next(_tokens)
        self.structure_of = lru_cache(STRUCTURES_KEPT)(pickle.loads)
        """Unpickles a structure that a worker has sent."""
        host_slabs = HostSlabs(slabs.shared(), slabs.settings.owner, 0, shares=True)
        self.loans = Loans(host_slabs, len(channels))
        self.closing = False
        """Whether it answers no worker any more."""
        self._slabs = slabs
        self._channels = channels
        self._incoming: SendingQueue | None = None
        self._asked: deque[tuple[int, Ask]] = deque()  # with the workers
        self._leased: deque[tuple[int, Lease | None]] = deque()  # the thread that leases adds to it
        self._is_leasing = self._has_warned = False
        # Open as long as this object exists.
        self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._wake_write.fileno(), False)
        self._finished = self._leak = False
        # By the thread, or by a `finish` before it has begun; never released.
        self._claimed = threading.Lock()
        self._gone = threading.Lock()
        self._gone.acquire()
        BROKERS[self.token] = self

    # -- for any thread

    def start(self, incoming: SendingQueue | None = None) -> None:
        """Answer workers from now on, and send the batches in a queue. A second call may add the
        queue.
        """
        self._incoming = incoming
        if self._claimed.locked():
            self.wake()
        else:
            _thread.start_new_thread(self._serve, ())

    def give_back(self, number: int, event: Fence | None) -> None:
        """See `Loans.give_back`."""
        if self.loans.give_back(number, event):
            self.wake()

    def wake(self) -> None:
        """Wake the thread. Does not block."""
        with contextlib.suppress(OSError):  # the pipe is full: the thread wakes anyway
            os.write(self._wake_write.fileno(), b"w")

    def close(self) -> None:
        """Stop answering workers; those that wait for a slab fail. Releases nothing: workers may
        still write.
        """
        self.closing = True
        for channel in self._channels:
            shut_down(channel)
        self.wake()

    def finish(self, *, leak: bool) -> None:
        """Release everything, now that no worker is left. Blocks for at most five seconds.

        Args:
            leak: a worker could not be ended. The slabs that it may still write stay leased.
        """
        self._leak |= leak
        self._finished = True
        self.close()
        if self._claimed.acquire(blocking=False):
            self._end()
            return
        incoming = self._incoming
        if incoming is not None:
            incoming.close()
        # Longer only if unpickling a user's object does not end.
        if self._gone.acquire(timeout=5.0):
            self._gone.release()

    # -- the thread

    def _serve(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        running[self] = None
        try:
            with self._slabs.target.in_background():
                self._answer_workers()
        except BaseException as error:  # noqa: BLE001 - raised by the loop
            self.close()
            if self._incoming is None:
                self._warn(0, repr(error))
            else:
                self._incoming.fail(error)
        finally:
            while not self._finished or (self._is_leasing and not self._leased):
                self._read_wake_ups()  # workers may still write, and a slab may be made
            self._end()
            del running[self]

    def _answer_workers(self) -> None:
        readers: dict[int, Callable[[], object]] = {self._wake_read.fileno(): self._read_wake_ups}
        for worker, channel in enumerate(self._channels):
            readers[channel.fileno()] = partial(self._receive, worker)
        poll = select.poll()
        for file in readers:
            poll.register(file, select.POLLIN)
        incoming: SendingQueue | None = None
        waits = False
        while not self.closing:
            if incoming is None and (incoming := self._incoming) is not None:
                readers[incoming.fileno()] = incoming.receive
                poll.register(incoming.fileno(), select.POLLIN)
            for file, _ in poll.poll(self._poll_ms(waits)):
                if readers[file]() is _ENDED:
                    poll.unregister(file)
            if incoming is not None:
                waits = incoming.send_ready()
            self._grant_slabs()
            for loan in self.loans.freed():
                self._send(loan.worker, Freed(loan.number))

    def _poll_ms(self, waits: bool) -> int | None:
        """Return how long the thread sleeps unless a message wakes it; None for no limit.

        Args:
            waits: whether a batch waits for its turn.
        """
        starved = self.loans.starved
        if starved and self.loans.copying:
            return _STARVED_MS
        return _IDLE_MS if starved or waits else None

    def _read_wake_ups(self) -> None:
        """Block until the thread was woken."""
        os.read(self._wake_read.fileno(), 4096)

    def _receive(self, worker: int) -> object:
        """Read a worker's message; return `_ENDED` if there will be no other."""
        try:
            message = self._channels[worker].recv()
        except (EOFError, OSError):  # the worker ended, or was killed; torch notices by itself
            self.loans.leave(worker)
            return _ENDED
        match message:
            case Ask(int(), int(wanted), [*given_up]):
                self.loans.take_back(worker, given_up)
                self.loans.begin_request(worker, wanted)
                self._asked.append((worker, message))
            case Waiting(int(nbytes), int(received)):
                self.loans.begin_wait(worker, nbytes, received)
            case Unmapped(number, why):
                self._warn(self.loans.of(worker, number).lease.nbytes, why)
                self.loans.take_back(worker, [number])
            case _:
                raise RuntimeError(
                    f"worker {worker} sent an unknown message: {message!r:.100}; {BEGIN_AGAIN}"
                )
        return None

    def _grant_slabs(self) -> None:
        """Send workers the slab that was leased, and let a thread lease the next one."""
        while self._leased:
            self._is_leasing = False
            self._grant(*self._leased.popleft())
        while self._asked and not self._is_leasing:
            worker, ask = self._asked.popleft()
            try:
                _thread.start_new_thread(self._lease, (worker, ask))
                self._is_leasing = True
            except RuntimeError as error:
                # No thread could be started: the worker does without a slab.
                self._warn(ask.wanted, repr(error))
                self._grant(worker, None)

    def _grant(self, worker: int, lease: Lease | None) -> None:
        """Send a worker the slab that was leased for it, or a refusal."""
        self.loans.end_request(worker)
        if lease is None:
            self._send(worker, Refused())
            return
        loan = self.loans.lend(worker, lease)
        self._send(worker, Granted(loan.number, lease.nbytes), descriptor_of(lease))

    def _warn(self, nbytes: int, why: str) -> None:
        # Python 3.12's error at the end.
        if not self._has_warned and "interpreter shutdown" not in why:
            self._has_warned = True
            what = f"a DataLoader goes on without a slab of {format_bytes(nbytes)}, which is slow"
            warn(f"{what}: {why}; see `pinstage doctor`")

    def _send(self, worker: int, message: Any, fd: int | None = None) -> None:
        self.loans.end_wait(worker)
        channel = self._channels[worker]
        # Messages have a few bytes, and a worker never has more unread ones than slabs, so sending
        # doesn't block.
        with contextlib.suppress(OSError):  # the worker ended
            # `send` would make a pickler of multiprocessing's, which takes longer.
            channel.send_bytes(pickle.dumps(message))
            # Right behind the message: the worker reads no further before it has the descriptor.
            if fd is not None:
                send_descriptor(channel, fd)

    # -- a thread for each slab

    def _lease(self, worker: int, ask: Ask) -> None:
        """Lease a slab of the size that a worker wants, or else of the least size."""
        lease = None
        try:
            with self._slabs.target.in_background():
                for nbytes in sorted({ask.wanted, ask.nbytes}, reverse=True):
                    if lease is None and not self.closing:
                        lease = self._lease_of(worker, nbytes)
        finally:
            self._leased.append((worker, lease))
            self.wake()

    def _lease_of(self, worker: int, nbytes: int) -> Lease | None:
        try:
            return self.loans.lease(worker, nbytes)
        except Exception as error:  # noqa: BLE001 - the system refused: the worker does without
            self._warn(nbytes, repr(error))
            return None

    # -- the end

    def _end(self) -> None:
        BROKERS.pop(self.token, None)
        self._incoming = None
        for channel in self._channels:
            channel.close()
        for _, lease in self._leased:
            if lease is not None:
                lease.release()
        leaked = self.loans.release_all(leak=self._leak)
        if leaked:
            LEAKED.append((self._slabs, leaked))
        self._gone.release()


LEAKED: list[Any] = []
"""Slabs of workers that could not be ended, and may still write. They stay leased until the process
ends.
"""


@atexit.register
def _end_threads() -> None:
    """End all threads before the interpreter ends: a later return from CUDA would abort the
    process.
    """
    for broker in list(BROKERS.values()):
        broker.finish(leak=True)  # the workers are still there


os.register_at_fork(after_in_child=BROKERS.clear)  # they are the parent's
