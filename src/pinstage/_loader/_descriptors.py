"""File descriptors through the channel between a worker and the main process.

Opening the other process's ``/proc/<pid>/fd`` would do the same, but some sandboxes refuse that.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

_MARK = b"f"
"""A descriptor has to travel beside a byte at least."""


def send_descriptor(channel: Connection, fd: int) -> None:
    """Send a duplicate of a descriptor to whoever reads the other end, which must be `receive_descriptor`.

    Raises:
        OSError: the other end is closed.
    """
    with _socket_of(channel) as sender:
        socket.send_fds(sender, [_MARK], [fd])


def receive_descriptor(channel: Connection) -> int:
    """Return the descriptor that was sent; the caller closes it. Blocks until it is there.

    Raises:
        EOFError: the other end is closed.
        OSError: this process may not open any more files.
    """
    with _socket_of(channel) as receiver:
        mark, fds, _, _ = socket.recv_fds(receiver, len(_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not mark:
        raise EOFError("the channel was closed")
    if not fds:  # the kernel leaves out what would be too many
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
