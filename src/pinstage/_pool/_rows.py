"""The files in which processes write what they hold of a `HostBudget`.

Each pool, region and shared slab has a *row*: a small file in a folder of the user's. Its
descriptor has a lock. So a row counts as long as any process has the descriptor, and a row without
a lock belongs to processes that have ended. Processes read and write rows under the folder's lock.

A forked child inherits all descriptors. It closes those of memory that it doesn't inherit. Shared
memory stays mapped in the child, and so its rows stay open there, and count until the child has
ended, too.

Rows fail closed: a row that can't be written keeps its last numbers, and a damaged row, which its
checksum shows, is an error, never a 0.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from .._reaper import reaper
from ..errors import HostBudgetError, PinstageError
from ._adaptor import RefusedForNow

T = TypeVar("T")

VARIABLE = "PINSTAGE_BUDGET_DIR"
"""The environment variable that names another folder, such as a volume that several containers
share.
"""

_BUSY_SECONDS = 10.0
"""Time-out for the folder's lock, which is usually held for less than a millisecond: then its
holder is stopped.
"""

_LEAST_SECONDS = 0.1
"""Even a call that shouldn't wait gives another process this long to finish with the folder: the
CPUs may be busy.
"""

_SUFFIX = ".pinstage"

_SPARE_BYTES = 128
"""Room in a row for larger numbers, and for an inode."""

turn = threading.RLock()
"""Held with the folder's lock, and during a fork, so that no child inherits the folder's lock."""


NOW = 0.0
"""A deadline that has passed: `in_folder` waits only for `_LEAST_SECONDS`."""


class FolderBusy(RefusedForNow):
    """Another process has the folder's lock, and so it isn't known whether there is room."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The part of a `HostBudget` that one pool or region holds."""

    budget: str
    """The budget's name."""
    max_bytes: int
    """The cap on all pools of this budget together."""
    pid: int
    """The id of the process that made it, as seen in the process's own container."""
    program: str
    """The process's program, and its rank if it has one."""
    pool: str
    """Distinguishes the pool from others of the same process."""
    held_bytes: int
    """Bytes that the pool holds, idle slabs included, or is about to allocate; also bytes of shared
    memory that it has freed, and that a forked child or a handle keeps."""
    shared: dict[str, int] = field(default_factory=dict)
    """The part of `held_bytes` that other processes may hold, too: bytes by the memory's inode,
    counted once.
    """


def held_bytes(pools: list[PoolUsage]) -> int:
    """Return the bytes that pools hold together. Memory that several of them share counts once."""
    private, shared = 0, dict[str, int]()
    for pool in pools:
        private += pool.held_bytes - sum(pool.shared.values())
        shared |= pool.shared
    return private + sum(shared.values())


class Row:
    """A file with the bytes that are held. Call all methods in threads that no interrupt reaches.

    Args:
        usage: the row's first content.
        is_inherited: whether forked children inherit the memory.
    """

    def __init__(self, usage: PoolUsage, *, is_inherited: bool) -> None:
        self.name = f"{_prefix_of(usage.budget)}{secrets.token_hex(8)}{_SUFFIX}"
        self.usage = usage
        """The file's content, once there is a file."""
        self.is_inherited = is_inherited
        self.descriptors = list[int]()
        """The file's; empty if there is none."""
        self._life = np.empty(0)  # not the row: see `Reaper.watch`
        _rows.add(self)
        reaper.watch(self._life, partial(close_files, self.descriptors))

    def write(self, folder: int, held: int, inode: str = "") -> None:
        """Write the number of bytes that are held. Make the file if it is missing or was removed.

        Args:
            folder: the descriptor of the folder, whose lock this thread has.
            held: bytes.
            inode: of memory that other processes may hold, too.

        Raises:
            OSError: it can't be written. A row that was there keeps its numbers, a new one is
                removed.
        """
        usage = replace(self.usage, held_bytes=held, shared={inode: held} if inode else {})
        text = json.dumps(asdict(usage)).encode()
        record = b"%010d" % zlib.crc32(text) + text
        if not self.descriptors or not os.fstat(self.descriptors[-1]).st_nlink:
            self.close()
            self.descriptors.append(
                os.open(self.name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            )
        file = self.descriptors[-1]
        before = os.pread(file, os.fstat(file).st_size, 0)
        # All writes have the same size, so that later ones need no space.
        nbytes = len(before) or len(record) + _SPARE_BYTES
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pwrite(file, record.ljust(nbytes), 0) < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                if before:
                    os.pwrite(file, before, 0)
                else:  # the next call makes another one
                    os.unlink(self.name, dir_fd=folder)
            raise
        self.usage = usage

    def close(self) -> None:
        """Close the file. The row still counts if another process has its descriptor."""
        close_files(self.descriptors)


_rows = weakref.WeakSet[Row]()


def close_files(descriptors: list[int]) -> bool:
    """Close files, the last one first; return True, as a task does. Call it in a thread that no
    interrupt reaches.
    """
    with turn:  # else a child that is forked in between would keep a descriptor
        while descriptors:
            with contextlib.suppress(OSError):  # it is closed nevertheless
                os.close(descriptors.pop())
    return True


def _prefix_of(budget: str) -> str:
    """Return how the file names of a budget's rows begin, so that no other row is read."""
    return hashlib.sha256(ascii(budget).encode()).hexdigest()[:16] + "-"


def new_usage(budget: str, max_bytes: int) -> PoolUsage:
    """Return the content of the rows of a new pool, which holds nothing yet."""
    return PoolUsage(budget, max_bytes, os.getpid(), _program(), secrets.token_hex(8), 0)


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = (path.parent if path.name == "__main__.py" else path).name or "python"
    rank = os.environ.get("RANK")
    return name if rank is None else f"{name} rank {rank}"


# -- the folder ------------------------------------------------------------------------------------


def folder_path() -> Path:
    """Return the folder's path.

    The folder isn't in ``XDG_RUNTIME_DIR``: some launchers leave that unset, so two programs could
    use two folders. It is also removed when the user logs out, while programs still run.
    """
    path = Path(os.environ.get(VARIABLE) or f"/tmp/pinstage-{os.geteuid()}")
    if not path.is_absolute():
        raise HostBudgetError(
            f"{VARIABLE} is a relative path: {str(path)!r}: each working directory would have "
            "budgets of its own; name the folder by an absolute path"
        )
    return path


def in_folder(path: Path, work: Callable[[int], T], deadline: float = math.inf) -> T:
    """Make sure that the folder exists and is the user's alone, and hold its lock while `work` uses
    its descriptor.

    Blocks. Call it in a thread that no interrupt reaches.

    Args:
        path: the folder's.
        work: what to do.
        deadline: the time until which to wait for another process, by `time.monotonic`.

    Raises:
        FolderBusy: another process has had the folder's lock until the deadline.
        HostBudgetError: it has had it for ten seconds, or the folder can't be used.
    """
    busy_until = time.monotonic() + _BUSY_SECONDS
    deadline = max(deadline, time.monotonic() + _LEAST_SECONDS)
    left = _LEAST_SECONDS  # at first, however late this thread is
    try:
        while left > 0:
            if turn.acquire(timeout=left):
                try:
                    folder = _open(path)
                    try:
                        if _lock(folder):
                            return work(folder)
                    finally:  # before a child may be forked: it would keep the lock
                        os.close(folder)
                finally:
                    turn.release()
            time.sleep(0.0005)
            left = min(busy_until, deadline) - time.monotonic()
        if deadline < busy_until:
            raise FolderBusy
        raise TimeoutError(
            f"another process has held its lock for {_BUSY_SECONDS} s: is it stopped?"
        )
    except PinstageError:  # some are an `OSError`, too
        raise
    except OSError as error:
        raise HostBudgetError(
            f"host budgets cannot be used: {path}: {error}; remove that folder while no program "
            f"uses it, or name another one in {VARIABLE}"
        ) from error


def _open(path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status, user = os.fstat(folder), os.geteuid()
    if status.st_uid != user or status.st_mode & 0o077:
        os.close(folder)
        raise PermissionError(
            f"it belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}, not to "
            f"user {user}, mode 700"
        )
    return folder


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process has it
        return False
    return True


# -- reading ---------------------------------------------------------------------------------------


def read_rows(folder: int, budget: str | None = None, but: Container[str] = ()) -> list[PoolUsage]:
    """Return what living processes hold, a record for each pool. Removes the rows of processes that
    have ended.

    Args:
        folder: the descriptor of the folder, whose lock this thread has.
        budget: the name of the only budget to return; None for all.
        but: names of rows to leave out.

    Raises:
        HostBudgetError: a row is damaged, unless it belongs to another budget.
    """
    pools = dict[str, PoolUsage]()
    prefix = "" if budget is None else _prefix_of(budget)
    for name in os.listdir(folder):
        if not name.endswith(_SUFFIX) or name in but:
            continue
        row = _read_living(folder, name, prefix)
        if row is None:
            continue
        if (other := pools.get(row.pool)) is not None:
            row = replace(
                row,
                held_bytes=row.held_bytes + other.held_bytes,
                shared=row.shared | other.shared,
            )
        pools[row.pool] = row
    return list(pools.values())


def _read_living(folder: int, name: str, prefix: str) -> PoolUsage | None:
    """Read a row if its name has the prefix. Return None, and remove it, if no process has it."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
        return None
    except BlockingIOError:
        return _read(file) if name.startswith(prefix) else None
    finally:
        os.close(file)


def _read(file: int) -> PoolUsage | None:
    """Read a row; return None if it is empty: its process could not write it.

    Unknown fields, as of other versions, are ignored.
    """
    record = os.pread(file, os.fstat(file).st_size, 0)
    if not record:
        return None
    try:
        text = record[10:].rstrip()
        if int(record[:10]) != zlib.crc32(text):
            raise ValueError("its checksum is wrong")
        fields = json.loads(text)
        return PoolUsage(**{name: fields[name] for name in PoolUsage.__annotations__})
    except (LookupError, ValueError) as error:
        path = Path(f"/proc/self/fd/{file}").readlink()
        raise HostBudgetError(
            f"a host budget's file is damaged: {path}: {error}; end the process that has it open"
            f"{_holder(file)}, or name another folder in {VARIABLE}"
        ) from error


def _holder(file: int) -> str:
    """Return a text that names the process that has a row's lock; empty if unknown."""
    with contextlib.suppress(OSError):
        if owner := re.search(
            rf"FLOCK .* (\d+) [\da-f]+:[\da-f]+:{os.fstat(file).st_ino} ",
            Path("/proc/locks").read_text(),
        ):
            return f" ({owner[1]})"
    return ""


# -- fork ------------------------------------------------------------------------------------------


def _forget() -> None:
    """Close the files in a forked child, except those of memory that it inherits: they would keep
    bytes counted.
    """
    for row in list(_rows):
        if not row.is_inherited:
            row.close()
    turn.release()


os.register_at_fork(before=turn.acquire, after_in_parent=turn.release, after_in_child=_forget)
