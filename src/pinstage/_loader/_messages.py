"""The messages of workers, and the channels in the other direction."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NoReturn

from .._batch import Structure, Table, check_content
from .._pool import Fence
from ..errors import LayoutError

BEGIN_AGAIN = "begin another pass, with new workers"
"""The remedy for messages that can't be right."""

STRUCTURES_KEPT = 64
"""The number of structures that a worker keeps pickled, and that the main process keeps
unpickled."""

BROKERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The `SlabBroker` of each iterator of this process, by its token, until the broker has ended."""


# -- from a worker to the broker -------------------------------------------------------------------


@dataclass(slots=True)
class Ask:
    """The worker wants another slab. `Granted` or `Refused` answers."""

    nbytes: int
    """The least size."""
    wanted: int
    """The size that it would rather have."""
    given_up: list[int]
    """The slabs that it gives up, by their numbers."""


@dataclass(slots=True)
class Waiting:
    """The worker waits until one of its slabs is free."""

    nbytes: int
    """The bytes that it needs."""
    received: int
    """The number of messages that it has received."""


@dataclass(slots=True)
class Unmapped:
    """The worker can't map a slab that was granted, and gives it up."""

    number: int
    why: str


# -- from the broker to a worker -------------------------------------------------------------------


@dataclass(slots=True)
class Granted:
    """The worker has another slab. Its descriptor follows."""

    number: int
    nbytes: int


@dataclass(slots=True)
class Refused:
    """The worker gets no other slab."""


@dataclass(slots=True)
class Freed:
    """The worker may write a slab again."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Freed, (self.number,)  # one per batch: half the time of a dataclass's own pickle


# -- batches, through the queue of torch's loader --------------------------------------------------


@dataclass(eq=False, slots=True)
class BatchMessage:
    """A batch as the worker puts it into the queue. Unpickling makes it a `PackedBatch`, by
    `receive`.

    Unpickling happens wherever torch reads the queue. So when torch drops a batch there, as it does
    when persistent workers are reset, the batch's slab becomes free.
    """

    token: int
    """The broker's token."""
    worker: int
    """The id of the worker."""
    slab: int | None
    """The number of the slab with the bytes. None if they are in `raw`, or if there are none."""
    structure: bytes
    """The batch's structure, pickled."""
    table: bytes
    """The data of its offset table."""
    pickled: bytes | None
    """The leaves that are not packed, as a list, pickled. None if there are none."""
    raw: bytearray | None
    """The bytes of a batch for which there was no slab."""
    waited: float
    """Seconds that the worker waited for a slab."""

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, _fields_of(self)


_fields_of = attrgetter(*BatchMessage.__slots__)


@dataclass(eq=False, slots=True)
class PackedBatch:
    """A batch that a worker has packed, in the main process. If it is dropped unsent, its slab is
    free again.
    """

    broker: Any
    structure: Structure
    table: Table
    number: int | None
    """The slab's number, until it is given back. None if the bytes are in `raw`, or if there are no
    bytes.
    """
    raw: bytearray | None
    others: list[Any]
    """The leaves that are not packed."""
    waited: float
    """Seconds that the worker waited for a slab."""

    def give_back(self, event: Fence | None) -> None:
        """Give a slab back to its worker when `event` is done (None: no copy reads it)."""
        number, self.number = self.number, None
        if number is not None:
            self.broker.give_back(number, event)

    def __del__(self) -> None:
        self.give_back(None)


class Failed:
    """Stands for a batch that could not be unpickled or sent. An error in the queue itself would
    end torch's loop.
    """

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def reraise(self) -> NoReturn:
        """Raise the error. May be called once."""
        raise self._errors.pop()  # a variable, and the traceback, would keep one another


def receive(*contents: Any) -> PackedBatch | Failed | None:
    """Make a packed batch from the fields of a `BatchMessage`; return None if the broker has ended.

    Raises:
        OSError: unpickling failed. torch explains the error.
        BaseException: unpickling raised this, and it isn't an `Exception`.
    """
    message = BatchMessage(*contents)
    broker = BROKERS.get(message.token)
    if broker is None:
        return None
    worker, slab, raw = message.worker, message.slab, message.raw
    try:
        structure = broker.structure_of(message.structure)
        table = Table.of_bytes(message.table)
        check_content(structure, table)
        others = pickle.loads(message.pickled) if message.pickled is not None else []
        room = len(raw or b"") if slab is None else broker.loans.of(worker, slab).lease.nbytes
        unpacked = table.others + table.moved
        if table.nbytes > room or len(others) != unpacked:
            raise LayoutError(
                f"worker {worker} sent a batch that its offset table doesn't describe: "
                f"{table.nbytes} bytes in {room}, and {len(others)} of {unpacked} leaves that are "
                f"not packed; {BEGIN_AGAIN}"
            )
    except BaseException as error:
        if slab is not None:
            broker.give_back(slab, None)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            return Failed(error)
        raise
    return PackedBatch(broker, structure, table, slab, raw, others, message.waited)


# -- channels --------------------------------------------------------------------------------------

_MARK = b"f"
"""A descriptor can't be sent without at least one byte."""


def send_descriptor(channel: Connection, fd: int) -> None:
    """Send a duplicate of a descriptor. The next read at the other end must be
    `receive_descriptor`.

    Opening ``/proc/<pid>/fd`` of the other process would do the same, but some sandboxes refuse
    that.

    Raises:
        OSError: the other end is closed.
    """
    with _socket_of(channel) as sender:
        socket.send_fds(sender, [_MARK], [fd])


def receive_descriptor(channel: Connection) -> int:
    """Return the next descriptor. Blocks until it is there. The caller closes it.

    Raises:
        EOFError: the other end is closed.
        OSError: this process may not open any more files.
    """
    with _socket_of(channel) as receiver:
        mark, fds, _, _ = socket.recv_fds(receiver, len(_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not mark:
        raise EOFError("the channel was closed")
    if not fds:  # the kernel drops a descriptor above the process's limit
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0]


def shut_down(channel: Connection) -> None:
    """End a channel at both ends. Closing it isn't enough: workers that were forked later have this
    end, too.
    """
    with suppress(OSError), _socket_of(channel) as end:  # it is closed already
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def _socket_of(channel: Connection) -> Iterator[socket.socket]:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=channel.fileno())
    try:
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        yield end
    finally:
        end.detach()
