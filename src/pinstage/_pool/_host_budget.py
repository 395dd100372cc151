"""One cap for the pools of several processes: it wraps a memory resource, as RMM's adaptors do.

Each pool has a file in a folder of the user's. The file is locked as long as the pool's process
lives; a file without a lock belongs to a process that has ended. Allocating and freeing read and
write these files under the folder's lock, and for a request that waits, a thread of the pool reads
them again and again. A lease of an idle slab does neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from .._compat.calls import ownership
from .._memory import Block, MemoryResource, PageableMemory
from .._reaper import reaper
from .._sizes import Size, format_bytes, parse_bytes
from ..errors import AcquireTimeoutError, BudgetExceededError, HostBudgetError

T = TypeVar("T")

VARIABLE = "PINSTAGE_BUDGET_DIR"
"""The environment variable that names another folder, such as a volume that several containers
share.
"""

_LOOK_SECONDS = 0.05
"""Interval at which a request that waits for other processes checks for room."""

_BUSY_SECONDS = 10.0
"""Time-out for the folder's lock, which is usually held for less than a millisecond: then its
holder is stopped.
"""

_SUFFIX = ".pinstage"

_turn = threading.RLock()
"""Held with the folder's lock, and during a fork, so that no child inherits the folder's lock."""

_limited: weakref.WeakSet[LimitedMemory] = weakref.WeakSet()


@dataclass(unsafe_hash=True, init=False, repr=False)
class HostBudget:
    """One cap on the bytes of all pools on a host that use it, in any number of processes.

    Pass it as the ``budget`` of a pool, a stager or a loader. A pool takes bytes from it to grow,
    and returns them when it frees slabs. When the budget is used up, a request waits as it does at
    a pool's own cap, until another pool frees slabs, for example by `SlabPool.trim`. The bytes of a
    process are free again when it has ended, even if it was killed.

    Processes of one user share a budget if they see the same local folder: ``/tmp/pinstage-<user
    id>``, or the folder that ``PINSTAGE_BUDGET_DIR`` names. Containers that share that folder share
    the budget.

    Args:
        max_bytes: the cap, as an int or text such as ``"64GiB"``. It must be the same in all
            processes.
        name: the budget's name, for example that of the job. Pools share a budget if its name is
            the same.

    Raises:
        TypeError: `max_bytes` is neither an integer nor text.
        ValueError: `max_bytes` is not a positive size, or `name` is empty or not text.
    """

    max_bytes: int
    name: str

    def __init__(self, max_bytes: Size, *, name: str) -> None:
        self.max_bytes = parse_bytes(max_bytes)
        self.name = name
        if self.max_bytes <= 0:
            raise ValueError(
                f"a budget must be positive: {max_bytes!r}; pass a size such as '64GiB'"
            )
        if not name or not isinstance(name, str):
            raise ValueError(f"a budget's name must be text: {name!r}; pass one such as 'job7'")

    def usage(self) -> list[PoolUsage]:
        """Return what each pool of this budget holds, in all processes.

        Reads the pools' files.

        Raises:
            HostBudgetError: the folder cannot be used, or a file in it is damaged.
        """
        return [pool for pool in usage_of_host() if pool.budget == self.name]

    def __repr__(self) -> str:
        return f"HostBudget({format_bytes(self.max_bytes)!r}, name={self.name!r})"


def check_budget(budget: object) -> None:
    """Check that a budget is a `HostBudget`.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(budget, HostBudget):
        raise TypeError(
            f"budget must be a HostBudget: {budget!r}; pass HostBudget('64GiB', name='job7')"
        )


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The part of a `HostBudget` that one pool or region holds."""

    budget: str
    """The budget's name."""
    max_bytes: int
    """The cap on all pools of this budget together."""
    pid: int
    """The process id, as seen in the process's own container."""
    program: str
    """The process's program, and its rank if it has one."""
    pool: str
    """Distinguishes the pool from others of the same process."""
    held_bytes: int
    """Bytes that the pool holds, idle slabs included, or is about to allocate."""
    shared: dict[str, int] = field(default_factory=dict)
    """The part of `held_bytes` that other processes may hold, too: bytes by the memory's inode,
    counted once.
    """


def usage_of_host() -> list[PoolUsage]:
    """Return what each pool of this user holds of its budget, ordered by budget and process.

    Raises:
        HostBudgetError: as `HostBudget.usage`.
    """
    if not os.path.lexists(_path()):
        return []
    return sorted(
        _in_folder(_path(), _living), key=lambda usage: (usage.budget, usage.pid, usage.pool)
    )


def held_bytes(pools: list[PoolUsage]) -> int:
    """Return the bytes that pools hold together. Memory that several of them share counts once."""
    regions = {inode: nbytes for pool in pools for inode, nbytes in pool.shared.items()}
    return sum(pool.held_bytes - sum(pool.shared.values()) for pool in pools) + sum(
        regions.values()
    )


class HostIsFull(Exception):  # noqa: N818 - a signal, which makes the request wait
    """The budget has no room now."""


class LimitedMemory:
    """A memory resource that allocates within a `HostBudget`, for one pool. `inode` identifies
    shared memory.

    All methods that read or write files wait for the folder's lock.

    Raises:
        ValueError: another pool has a budget of this name with another cap.
        HostBudgetError: the folder cannot be used.
    """

    _file, _is_ending = -1, False

    def __init__(
        self, memory: MemoryResource, budget: HostBudget, inode: int | None = None
    ) -> None:
        self.granularity = memory.granularity
        self.others: list[PoolUsage] = []
        """Other pools of this budget, as of the last check."""
        self.allowed = budget.max_bytes
        """Bytes that the pool may hold, as far as it knows: the whole budget, or less after a
        refusal.
        """
        self.is_entered = ownership(_turn)
        """Returns whether the calling thread is reading or writing the files."""
        self._memory, self._budget, self._path, self._key = (
            memory,
            budget,
            _path(),
            secrets.token_hex(8),
        )
        self._inode = "" if inode is None else str(inode)
        self._held, self._checked_at = 0, 0.0
        _limited.add(self)
        _in_folder(self._path, self._begin)

    def __del__(self) -> None:
        self._close()

    def holders(self) -> str:
        """Return a text for errors that names the holders of the rest of the budget; empty if there
        are none.
        """
        largest = sorted(
            (pool for pool in self.others if pool.held_bytes), key=lambda pool: -pool.held_bytes
        )[:4]
        names = [
            f"{format_bytes(pool.held_bytes)} in process {pool.pid} ({pool.program})"
            for pool in largest
        ]
        total = format_bytes(held_bytes(self.others))
        return (
            f", of which other pools of this host had {total}: {', '.join(names)}" if names else ""
        )

    def is_due(self) -> bool:
        """Return whether to `look`: the budget had no room, 50 ms ago or earlier."""
        return (
            self.allowed < self._budget.max_bytes
            and time.monotonic() - self._checked_at >= _LOOK_SECONDS
        )

    def look(self) -> None:
        """Check for room again, if that is due."""
        if self.is_due():
            # Which would end a request that waits: growing raises it.
            with contextlib.suppress(HostBudgetError):
                _in_folder(self._path, lambda folder: self._note(self._room(folder)))
            self._checked_at = time.monotonic()

    def check_room(self, nbytes: int, *, take: bool = False) -> None:
        """Make sure that this many bytes can be allocated now.

        Raises:
            HostIsFull: there is no room.
        """
        _in_folder(self._path, partial(self._check, nbytes, take))

    def allocate(self, nbytes: int) -> Block:
        """Allocate, as `MemoryResource.allocate`.

        Raises:
            HostIsFull: there is no room.
        """
        self.check_room(nbytes, take=True)
        try:
            block = self._memory.allocate(nbytes)
        except BaseException:
            self.give(nbytes)
            raise
        if block.nbytes != nbytes:
            self.give(nbytes - block.nbytes)
        return block

    def deallocate(self, block: Block) -> None:
        try:
            self._memory.deallocate(block)
        finally:  # the pool forgets a slab that it could not free
            self.give(block.nbytes)

    def give(self, nbytes: int) -> None:
        """Count bytes as free again; a negative number takes bytes."""
        with _turn:
            self._held -= nbytes
        if not self.reap():  # freeing must not fail because of the folder
            reaper.tasks.put(self)

    def reap(self) -> bool:
        """Write the file, or close it if the pool is closed and holds nothing; return whether that
        was possible.
        """
        with _turn:
            if self._is_ending and not self._held:
                self._close()
                return True
            try:
                _in_folder(self._path, lambda folder: self._write(folder, self._held))
            except HostBudgetError:
                return False
            return True

    def end(self) -> None:
        """Close the file, now or as soon as no memory is held."""
        with _turn:
            self._is_ending = True
            if not self._held:
                self._close()

    def _begin(self, folder: int) -> None:
        self._room(folder)
        budget = self._budget
        for other in [other for other in self.others if other.max_bytes != budget.max_bytes]:
            raise ValueError(
                f"two caps for one budget: {budget!r} is {budget.max_bytes} bytes here, and "
                f"{other.max_bytes} bytes in process {other.pid} ({other.program}); give it the "
                "same cap everywhere, or another name"
            )
        self._write(folder, 0)

    def _check(self, nbytes: int, take: bool, folder: int) -> None:
        room = self._room(folder)
        if nbytes > room:
            self._note(room)
            raise HostIsFull
        self.allowed = self._budget.max_bytes
        if take:
            self._write(folder, self._held + nbytes)

    def _room(self, folder: int) -> int:
        """Read the other pools' files; return the bytes by which the pool may grow."""
        self.others = [
            pool for pool in _living(folder, self._key) if pool.budget == self._budget.name
        ]
        if any(self._inode in other.shared for other in self.others):
            return self._budget.max_bytes  # that memory is counted already
        return self._budget.max_bytes - self._held - held_bytes(self.others)

    def _note(self, room: int) -> None:
        self.allowed, self._checked_at = self._held + max(0, room), time.monotonic()

    def _write(self, folder: int, held: int) -> None:
        """Write the pool's file, with the bytes that it holds. Make the file if it is missing or
        was removed.
        """
        if self._file < 0 or not os.fstat(self._file).st_nlink:
            self._close()
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._key + _SUFFIX, flags, 0o600, dir_fd=folder)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shared = {self._inode: held} if self._inode and held else {}
        usage = PoolUsage(
            self._budget.name,
            self._budget.max_bytes,
            os.getpid(),
            _program(),
            self._key,
            held,
            shared,
        )
        text = json.dumps(asdict(usage)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))
        self._held = held

    def _close(self) -> None:
        # First, so that no other thread closes the same descriptor again.
        file, self._file = (
            self._file,
            -1,
        )
        if file >= 0:
            os.close(file)


class Claim:
    """Bytes of a budget that are taken at once and held until `release`, for a region.

    Args:
        budget: the budget that they count against.
        nbytes: the number of bytes.
        inode: of memory that other processes may hold, too, and that counts once; None for other
            memory.

    Raises:
        BudgetExceededError: the budget is smaller than `nbytes`.
        AcquireTimeoutError: the rest of the budget is in use.
    """

    def __init__(self, budget: HostBudget, nbytes: int, inode: int | None) -> None:
        check_budget(budget)
        self._nbytes, self._memory = nbytes, LimitedMemory(PageableMemory(), budget, inode)
        try:
            self._memory.check_room(nbytes, take=True)
        except HostIsFull:
            text = (
                f"{format_bytes(nbytes)} requested from {budget!r}{self._memory.holders()}; ask "
                "for less, or raise "
            )
            error = AcquireTimeoutError if nbytes <= budget.max_bytes else BudgetExceededError
            raise error(
                text + "the budget", requested_bytes=nbytes, max_bytes=budget.max_bytes
            ) from None
        finally:
            self._memory.end()

    def release(self) -> None:
        """Give the bytes back."""
        self._memory.give(self._nbytes)


def _path() -> Path:
    """Return the folder's path.

    The folder isn't in ``XDG_RUNTIME_DIR``: some launchers leave that unset, so two programs could
    use two folders. It is also removed when the user logs out, while programs still run.
    """
    path = Path(os.environ.get(VARIABLE) or f"/tmp/pinstage-{os.geteuid()}")
    if not path.is_absolute():
        why = (
            "each working directory would have budgets of its own; name the folder by an absolute "
            "path"
        )
        raise HostBudgetError(f"{VARIABLE} is a relative path: {str(path)!r}: {why}")
    return path


def _in_folder(path: Path, work: Callable[[int], T]) -> T:
    """Make sure that the folder exists and is the user's alone, and hold its lock while `work` uses
    its descriptor.

    Blocks. Not a context manager: an interrupt at its end would leave the folder locked.
    """
    with _turn:
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found, user = os.fstat(folder), os.geteuid()
                if found.st_uid != user or found.st_mode & 0o077:
                    mode = f"mode {stat.S_IMODE(found.st_mode):o}, not to user {user}, mode 700"
                    raise PermissionError(f"it belongs to user {found.st_uid}, {mode}")
                _lock(folder)
                return work(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise HostBudgetError(
                f"host budgets cannot be used: {path}: {error}; remove that folder while no "
                f"program uses it, or name another one in {VARIABLE}"
            ) from error


def _lock(folder: int) -> None:
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                why = f"another process has held its lock for {_BUSY_SECONDS} s: is it stopped?"
                raise TimeoutError(why) from None
        time.sleep(0.0005)


def _living(folder: int, but: str = "") -> list[PoolUsage]:
    """Return the records of living processes' pools, except `but`; remove the files of processes
    that have ended.
    """
    found = []
    for name in [
        name for name in os.listdir(folder) if name.endswith(_SUFFIX) and name != but + _SUFFIX
    ]:
        file = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
        except BlockingIOError:
            found.append(_read(file, name))
        finally:
            os.close(file)
    return found


def _read(file: int, name: str) -> PoolUsage:
    """Read a pool's file. Unknown fields, as of other versions, are ignored."""
    try:
        record = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        usage = PoolUsage(**{key: record[key] for key in PoolUsage.__slots__ if key in record})
        if min(usage.max_bytes, usage.held_bytes, *usage.shared.values()) < 0:
            raise ValueError("a negative number of bytes")
    except (AttributeError, TypeError, ValueError) as error:
        remedy = f"end the process that has it open, or name another folder in {VARIABLE}"
        raise HostBudgetError(
            f"a host budget's file is damaged: {_path() / name}: {error}; {remedy}"
        ) from error
    return usage


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = (path.parent if path.name == "__main__.py" else path).name or "python"
    rank = os.environ.get("RANK")
    return name if rank is None else f"{name} rank {rank}"


def _forget() -> None:
    """Close the files in a forked child: an open file would keep the parent's bytes counted."""
    for memory in list(_limited):
        memory._close()
    _limited.clear()
    _turn.release()


os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_forget)
