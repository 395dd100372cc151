"""The host's ledger: what each pool with a `HostBudget` may hold, in a file that all processes of a user share.

A row is a pool, and says how many bytes it may hold; it is written before they are taken, and after they are freed.
Beside the file stands a named pipe for each row. The pool has it open for reading, and the kernel closes that when the
process ends, however it ends. So *a pool is alive while its pipe has a reader*: no process number is asked for, which
another process may have, and which means nothing in another container. A byte in the pipe wakes the pool.

Each transaction begins with the rows of the dead: they are removed. The journal of sqlite is rolled back by whoever
comes next, if a process was killed in the middle.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _host
from .._torch import ownership
from ..errors import HostBudgetError

if TYPE_CHECKING:
    import sqlite3

VARIABLE = "PINSTAGE_LEDGER_DIR"
"""Names another folder, such as one that several containers share."""

_BUSY_SECONDS = 10.0
"""A transaction takes a millisecond. Whoever has the file for longer was stopped in the middle of one."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pools (
    key TEXT PRIMARY KEY, budget TEXT NOT NULL, cap INTEGER NOT NULL, pid INTEGER NOT NULL, program TEXT NOT NULL,
    bytes INTEGER NOT NULL, wanted INTEGER NOT NULL DEFAULT 0, since REAL NOT NULL DEFAULT 0,
    told TEXT NOT NULL DEFAULT '{}'
)
"""

_at_rest = threading.RLock()
"""Held during each transaction of this process, and while it forks: a child that gets half of one could never begin
another, and one that inherits a pipe unseen would seem to be its reader."""

_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Row:
    """A pool, as the ledger has it."""

    key: str
    """Names its pipe, too."""
    budget: str
    """The budget's name; empty for the user's own."""
    cap: int
    """What all pools of this budget may hold together, in bytes."""
    pid: int
    program: str
    bytes: int
    """What it may hold."""
    wanted: int
    """What it waits for, in bytes; 0 if for nothing."""
    since: float
    """When it began to wait, by the monotonic clock, which all processes of a host have in common."""
    told: str
    """What it last said of itself: JSON."""


class Bell(io.FileIO):
    """The reading end of a pool's pipe: while it is open, the pool is alive. Not inherited by children."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        # For writing as well, or it would be at its end whenever nobody writes.
        super().__init__(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW), "r+")
        _bells.add(self)

    __del__ = io.FileIO.close  # that of a file complains


def ring(path: Path, message: bytes) -> bool | None:
    """Put a byte into a pool's pipe. Never waits.

    Returns:
        Whether the pool is alive: not if its pipe has no reader, or is gone. None if the pipe cannot be opened, for
        example because this process has too many open files: that says nothing of the pool.
    """
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return False if error.errno in (errno.ENXIO, errno.ENOENT) else None
    try:
        os.write(pipe, message)
    except BlockingIOError:  # full: it has enough to wake up for
        return True
    except BrokenPipeError:  # it ended just now
        return False
    finally:
        os.close(pipe)
    return True


class Entries:
    """A transaction. What is not committed at its end was never done."""

    def __init__(self, db: sqlite3.Connection, folder: Path) -> None:
        self.folder = folder
        self._db = db

    def pipe(self, key: str) -> Path:
        return self.folder / f"{key}.pipe"

    def rows(self) -> list[Row]:
        """Return the rows of all living pools, and remove those of the dead.

        Raises:
            HostBudgetError: the row of a living pool is damaged.
        """
        found = self._db.execute("SELECT key, budget, cap, pid, program, bytes, wanted, since, told FROM pools")
        living = []
        for row in itertools.starmap(Row, found.fetchall()):
            if ring(self.pipe(row.key), b"") is False:
                self.remove(row.key)
                continue
            if [type(getattr(row, name)).__name__ for name in Row.__slots__] != list(Row.__annotations__.values()):
                raise damaged(row, "a field has the wrong type")
            living.append(row)
        return living

    def add(self, budget: str, cap: int, pid: int, program: str, nbytes: int) -> tuple[str, Bell]:
        """Add a pool; return its key and its pipe."""
        self._tidy()
        key = secrets.token_hex(8)
        self._db.execute(
            "INSERT INTO pools (key, budget, cap, pid, program, bytes) VALUES (?, ?, ?, ?, ?, ?)",
            (key, budget, cap, pid, program, nbytes),
        )
        return key, Bell(self.pipe(key))

    def write(self, key: str, nbytes: int, wanted: int, since: float) -> None:
        self._db.execute(
            "UPDATE pools SET bytes = ?, wanted = ?, since = ? WHERE key = ?", (nbytes, wanted, since, key)
        )

    def tell(self, key: str, told: str) -> None:
        self._db.execute("UPDATE pools SET told = ? WHERE key = ?", (told, key))

    def remove(self, key: str) -> None:
        self._db.execute("DELETE FROM pools WHERE key = ?", (key,))
        self.pipe(key).unlink(missing_ok=True)

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def _tidy(self) -> None:
        """Remove the pipes of pools that were killed while they were added; wake those whose file was removed."""
        known = {key for (key,) in self._db.execute("SELECT key FROM pools")}
        for path in self.folder.glob("*.pipe"):
            if path.stem not in known and ring(path, b".") is False:
                path.unlink(missing_ok=True)


@cache
def _ownership() -> Callable[[], bool]:
    return ownership(_at_rest)


def is_in_transaction() -> bool:
    """Say whether this thread is in a transaction. What a finaliser asks for then cannot wait for the end of that."""
    return _ownership()()


@contextlib.contextmanager
def transaction() -> Iterator[Entries]:
    """Have the ledger to oneself. Blocks while another process has it.

    Raises:
        HostBudgetError: its folder or file is not the user's alone, or cannot be written; or a finaliser asks in the
            middle of another transaction of this thread.
    """
    import sqlite3

    if is_in_transaction():
        raise HostBudgetError(
            "the host's ledger is in use by this very thread: a finaliser, such as the end of a generator, asked for "
            "it again; a finaliser may release() leases and close() pools, nothing else"
        )
    with _at_rest:
        file = _file()
        folder = file.parent
        _check_folder(folder)
        _make(file)
        # Opened each time: a connection that is open in a fork is of no use in the child, nor in the parent.
        db = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = OFF")
            db.execute("BEGIN IMMEDIATE")
            db.execute(_SCHEMA)
            yield Entries(db, folder)
        except (sqlite3.Error, OSError) as error:
            raise HostBudgetError(
                f"the host's ledger cannot be used: {file}: {error}; if no program uses it, remove that file, or name "
                f"another folder in {VARIABLE}"
            ) from error
        finally:
            db.close()  # rolls back what was not committed


def exists() -> bool:
    """Say whether there is a ledger.

    Raises:
        HostBudgetError: its folder cannot be read.
    """
    file = _file()
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unsafe(file, error.strerror or str(error)) from error
    return True


def _file() -> Path:
    """Return the path of the ledger.

    Not in ``XDG_RUNTIME_DIR``: that is not set in every way to start a program, so that two of them would have two
    ledgers; and it is removed when the user logs out, while programs go on.
    """
    folder = Path(os.environ.get(VARIABLE) or f"/tmp/pinstage-{os.geteuid()}")
    if not folder.is_absolute():
        raise HostBudgetError(
            f"{VARIABLE} is a relative path: {str(folder)!r}: each working directory would have a ledger of its own; "
            "name the folder by an absolute path"
        )
    # After a crash of the machine all are dead, and the file may be broken, since it is never synced.
    boot = _host.text(Path("/proc/sys/kernel/random/boot_id")) or "host"
    return folder / f"ledger-1-{boot}.sqlite"


def _check_folder(folder: Path) -> None:
    """See that the folder is there, and is nobody's but the user's."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise HostBudgetError(
            f"no folder for the host's ledger: {folder}: {error.strerror}; name another one in {VARIABLE}"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(folder, "it is no folder, or a link to one")
    _check_owner(folder, found)


def _make(file: Path) -> None:
    """See that the ledger is there, and is the user's: by others it can be neither made nor changed in that folder.

    Looked at by its name. To open and close it would drop the locks that sqlite has on it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        found = file.lstat()
    except OSError as error:
        raise _unsafe(file, error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise _unsafe(file, "it is a link, or no file")
    _check_owner(file, found)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise _unsafe(path, f"it is of user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o077:
        raise _unsafe(path, f"its mode {stat.S_IMODE(found.st_mode):o} lets others in")


def damaged(row: Row, why: object) -> HostBudgetError:
    return HostBudgetError(
        f"the host's ledger is damaged: {_file()}: row {row.key!r} of process {row.pid} ({row.program}): {why}; if no "
        f"program uses it, remove that file, or name another folder in {VARIABLE}"
    )


def _unsafe(path: Path, why: str) -> HostBudgetError:
    return HostBudgetError(
        f"the host's ledger cannot be trusted: {path}: {why}; remove it, or name a folder of your own in {VARIABLE}"
    )


def _forget() -> None:
    """In a forked child: its pools refuse to work, and must not seem to be alive."""
    for bell in list(_bells):
        bell.close()
    _bells.clear()
    _at_rest.release()


os.register_at_fork(before=_at_rest.acquire, after_in_parent=_at_rest.release, after_in_child=_forget)
