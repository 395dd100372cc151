"""The main process's side: which worker has which slab, and when each slab is free again."""

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
from collections.abc import Collection, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .._pool import Fence, Lease, descriptor_of, size_class
from .._reaper import running, warn
from .._sizes import format_bytes
from ..errors import AcquireTimeoutError, BudgetExceededError, LayoutError, PoolClosedError
from ._messages import BEGIN_AGAIN, BROKERS, STRUCTURES_KEPT, send_descriptor, shut_down
from ._sending import SendingQueue
from ._slabs import Slabs

_STARVED_MS = 1
"""Poll interval for the ends of copies while a worker waits for a slab. Otherwise the thread
doesn't poll.
"""

_IDLE_MS = 100
"""Poll interval in case an interrupt swallowed a wake-up. Only while a worker or a batch waits."""

_tokens = itertools.count()


class Loan(NamedTuple):
    """A slab that one worker may write.

    First the worker has the slab. Then the batch that arrived in it has the slab, until the batch
    is sent or dropped. Then the copy has it. When the copy is done, the worker gets a message, and
    has the slab again.
    """

    number: int
    worker: int
    lease: Lease


class SlabBroker:
    """Lends slabs of a pool to the workers of one iterator, and takes them back.

    It has a thread, which answers the workers' requests: the main thread may be waiting for the
    very worker that asks. The thread also sends the batches, since the main thread may be busy.
    Only this thread frees slabs. Other threads leave a note and wake it. Each request for a slab is
    served and answered in a thread of its own: page-locking 128 MiB takes 25 ms and more, and
    batches have to be sent meanwhile.

    The thread starts after the workers, so that these are forked from a process without it. If a
    loader needs answers before its iterator exists, the thread starts before the workers. It
    answers until `close`, and releases everything after `finish`.

    Args:
        slabs: the loader's slabs. Kept until the end, since they keep the pool open.
        channels: the main process's ends, one for each worker. The broker closes them.
        owner: the name under which slabs are leased.
    """

    def __init__(self, slabs: Slabs, channels: Sequence[Connection], owner: str) -> None:
        self.token = next(_tokens)
        self.structure_of = lru_cache(STRUCTURES_KEPT)(pickle.loads)
        """Unpickles a structure that a worker has sent."""
        self._slabs: Slabs | None = slabs
        self._target = slabs.target
        self._pool = slabs.shared()
        self._owner = owner
        self._channels = channels
        self._open = {channel.fileno(): worker for worker, channel in enumerate(channels)}
        self._numbers = itertools.count()
        self._loans: dict[int, Loan] = {}  # requests add to it
        self._copying: deque[tuple[int, Fence | None]] = deque()  # any thread appends to it
        self._starved: dict[int, int] = {}  # bytes that each worker waits for
        self._asking: dict[int, int] = {}  # bytes that each worker has asked for
        self._messages = [0] * len(channels)  # how many each worker was sent
        # So that workers get slabs one after the other, and none after the end.
        self._lending = threading.Lock()
        self._writing = threading.Lock()  # so that a descriptor is right behind its message
        # Open as long as this object exists.
        self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._wake_write.fileno(), False)
        self.closing = False
        """Whether it answers no worker any more."""
        self._finished = self._leak = self._has_warned = False
        # By the thread, or by a `finish` before it has begun; never released.
        self._claimed = threading.Lock()
        self._gone = threading.Lock()
        self._gone.acquire()
        self._incoming: SendingQueue | None = None
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

    def loan_of(self, worker: int | None, number: Any) -> Loan:
        """Return the loan of a slab, by the number that a worker sent.

        Args:
            worker: the worker that has to have the slab; None for any.
            number: the slab's number.

        Raises:
            LayoutError: the slab isn't lent, or is lent to another worker.
        """
        loan = self._loans.get(number)
        if loan is None or worker not in (None, loan.worker):
            whose = "any worker" if worker is None else f"worker {worker}"
            raise LayoutError(
                f"a worker's message names a slab that isn't lent to {whose}: {number!r}; "
                f"{BEGIN_AGAIN}"
            )
        return loan

    def give_back(self, number: int, event: Fence | None) -> None:
        """Give a slab back to its worker when `event` is done (None: no copy reads it). Finalisers
        may call this.
        """
        if number in self._loans:  # if not, everything has ended
            self._copying.append((number, event))
            if event is None or self._starved:
                self.wake()

    def wake(self) -> None:
        """Wake the thread. Does not block."""
        with contextlib.suppress(OSError):  # the pipe is full: the thread wakes anyway
            os.write(self._wake_write.fileno(), b"w")

    def waiting(self, workers: Collection[int]) -> str:
        """Return a text that says what each of these workers, whose batches are late, waits for."""
        return "; ".join(self._waiting(worker) for worker in workers)

    def _waiting(self, worker: int) -> str:
        nbytes = self._starved.get(worker)
        if nbytes is None:
            asked = self._asking.get(worker)
            if asked is not None:
                return f"worker {worker} waits until a slab of {format_bytes(asked)} is made"
            return (
                f"worker {worker} has not sent its batch, and waits for no slab: its dataset or "
                "its collate function takes longer; raise timeout, or look there"
            )
        copying = {number for number, _ in list(self._copying)}
        own = [number for number, loan in self._loans.copy().items() if loan.worker == worker]
        busy = len(copying.intersection(own))
        stats = self._pool.stats()
        held, cap = format_bytes(stats.leased_bytes), format_bytes(stats.max_bytes)
        return (
            f"worker {worker} waits for a slab of {format_bytes(nbytes)}: of its {len(own)}, "
            f"{busy} are being copied to the device and {len(own) - busy} hold batches that "
            f"the loop has not taken; all workers hold {held} of {cap}; raise max_bytes"
        )

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
            with self._target.in_background():
                self._answer_workers()
        except BaseException as error:  # noqa: BLE001 - raised by the loop
            self.close()
            if self._incoming is None:
                self._warn(0, repr(error))
            else:
                self._incoming.fail(error)
        finally:
            while not self._finished:  # workers may still write
                os.read(self._wake_read.fileno(), 4096)
            self._end()
            del running[self]

    def _answer_workers(self) -> None:
        poll = select.poll()
        incoming: SendingQueue | None = None
        source = -1
        waits = False
        wake = self._wake_read.fileno()
        for file in (*self._open, wake):
            poll.register(file, select.POLLIN)
        while not self.closing:
            if incoming is None and (incoming := self._incoming) is not None:
                source = incoming.fileno()
                poll.register(source, select.POLLIN)
            for file, _ in poll.poll(self._poll_ms(waits)):
                if incoming is not None and file == source:
                    incoming.receive()
                elif file == wake:
                    os.read(file, 4096)
                elif not self._receive(self._open[file]):
                    poll.unregister(file)
            if incoming is not None:
                waits = incoming.send_ready()
            self._sweep()

    def _poll_ms(self, waits: bool) -> int | None:
        """Return how long the thread sleeps unless a message wakes it; None for no limit.

        Args:
            waits: whether a batch waits for its turn.
        """
        if self._starved and self._copying:
            return _STARVED_MS
        return _IDLE_MS if self._starved or waits else None

    def _receive(self, worker: int) -> bool:
        """Read a worker's request, and serve it. Return whether the worker may send another one."""
        channel = self._channels[worker]
        try:
            message = channel.recv()
        except (EOFError, OSError):  # the worker ended, or was killed; torch notices by itself
            del self._open[channel.fileno()]
            self._starved.pop(worker, None)
            self._asking.pop(worker, None)
            return False
        match message:
            case ("ask", int(nbytes), int(wanted), [*given_up]):
                self._take_back(worker, given_up)
                self._asking[worker] = wanted
                try:
                    _thread.start_new_thread(self._lend, (worker, nbytes, wanted))
                except RuntimeError as error:
                    # No thread could be started: the worker does without a slab.
                    self._warn(wanted, repr(error))
                    self._grant(worker, None)
            case ("starved", int(nbytes), int(received)):
                with self._writing:
                    # If not, a message is on its way to the worker, which then looks again.
                    if received == self._messages[worker] and worker in self._supplied():
                        self._starved[worker] = nbytes
            case ("unmapped", number, why):
                self._warn(self.loan_of(worker, number).lease.nbytes, why)
                self._take_back(worker, [number])
            case _:
                raise RuntimeError(
                    f"worker {worker} sent an unknown message: {message!r:.100}; {BEGIN_AGAIN}"
                )
        return True

    def _grant(self, worker: int, loan: Loan | None) -> None:
        """Send a worker the slab that was leased for it, or a refusal."""
        self._asking.pop(worker, None)
        if loan is None:
            self._send(worker, ("refused",))
        else:
            self._send(
                worker, ("granted", loan.number, loan.lease.nbytes), descriptor_of(loan.lease)
            )

    def _warn(self, nbytes: int, why: str) -> None:
        # Python 3.12's error at the end.
        if not self._has_warned and "interpreter shutdown" not in why:
            self._has_warned = True
            what = f"a DataLoader goes on without a slab of {format_bytes(nbytes)}, which is slow"
            warn(f"{what}: {why}; see `pinstage doctor`")

    def _take_back(self, worker: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.loan_of(worker, number).lease.release()
            del self._loans[number]

    def _sweep(self) -> None:
        """Send the workers the numbers of slabs that are free again."""
        while self._copying and ((event := self._copying[0][1]) is None or event.query()):
            number, _ = self._copying.popleft()
            loan = self._loans.get(number)
            if loan is not None:
                self._send(loan.worker, ("free", number))

    def _send(self, worker: int, message: tuple[Any, ...], fd: int | None = None) -> None:
        channel = self._channels[worker]
        # Messages have a few bytes, and a worker never has more unread ones than slabs, so sending
        # doesn't block.
        with contextlib.suppress(OSError), self._writing:  # the worker ended
            self._messages[worker] += 1
            self._starved.pop(worker, None)
            channel.send(message)
            # Right behind the message: the worker reads no further before it has the descriptor.
            if fd is not None:
                send_descriptor(channel, fd)

    # -- a thread for each request

    def _lend(self, worker: int, least: int, wanted: int) -> None:
        """Lend a worker a slab of `wanted` bytes, or else of `least`; send it a refusal if there is
        no room.
        """
        loan = None
        with self._lending:
            if self.closing:
                return
            try:
                with self._target.in_background():
                    lease = self._lease(worker, wanted)
                    if lease is None and least < wanted:
                        lease = self._lease(worker, least)
                if lease is not None:
                    loan = Loan(next(self._numbers), worker, lease)
                    self._loans[loan.number] = loan
            finally:
                self._grant(worker, loan)

    def _lease(self, worker: int, nbytes: int) -> Lease | None:
        """Lease a slab for a worker; return None if there is no room, or if a worker without slabs
        will need it.
        """
        rounded = size_class(nbytes, self._pool.memory.granularity)
        size = rounded if rounded <= self._pool.max_bytes else nbytes
        supplied = self._supplied()
        if worker in supplied:
            room = self._pool.stats().owners[self._owner].available_bytes - size
            if room < size * len(set(self._open.values()) - supplied):
                return None
        try:
            return self._pool.acquire(size, timeout=0, owner=self._owner)
        except (BudgetExceededError, AcquireTimeoutError, PoolClosedError):
            return None  # the worker does without a slab
        except Exception as error:  # noqa: BLE001 - the system refused: the same, and a warning gives the reason
            self._warn(size, repr(error))
            return None

    def _supplied(self) -> set[int]:
        """Return the workers that have slabs."""
        return {loan.worker for loan in list(self._loans.values())}

    # -- the end

    def _end(self) -> None:
        BROKERS.pop(self.token, None)
        self._incoming = None
        with self._lending:  # until a slab that is being leased is among the loans
            loans, self._loans = self._loans, {}
        events = dict(self._copying)
        self._copying.clear()
        self._starved.clear()
        for channel in self._channels:
            channel.close()
        if self._leak:
            LEAKED.append((self._slabs, loans))
        else:
            for loan in loans.values():
                loan.lease.release(after=events.get(loan.number))
        self._slabs = None
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
