"""File descriptors, sent through the channel between the main process and a worker.

To open ``/proc/<pid>/fd`` of the other process would do the same, but some sandboxes refuse that.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

_MARK = b"f"
"""A descriptor cannot travel without at least one byte."""


def send_descriptor(channel: Connection, fd: int) -> None:
    """Send a duplicate of a descriptor. The next read at the other end must be `receive_descriptor`.

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
    if not fds:  # the kernel leaves out a descriptor that would be one too many
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0]


@contextmanager
def _socket_of(channel: Connection) -> Iterator[socket.socket]:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=channel.fileno())
    try:
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` made it
        yield end
    finally:
        end.detach()
