"""One cap for the pools of several processes: it wraps a memory resource, as RMM's adaptors do.

Allocating and freeing read and write the files of `_rows`. A request that waits for other processes
tries to allocate again and again. A lease of an idle slab reads none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from .._compat.calls import ownership
from .._memory import PAGE_BYTES, Block, MemoryResource, auto_max_bytes
from .._reaper import reaper, uninterrupted
from .._sizes import Size, count, format_bytes, parse_bytes, size_to_paste
from ..errors import AcquireTimeoutError, BudgetExceededError, HostBudgetError
from ._adaptor import RefusedForNow, ResourceAdaptor
from ._rows import (
    NOW,
    FolderBusy,
    PoolUsage,
    Row,
    folder_path,
    held_bytes,
    in_folder,
    new_usage,
    read_rows,
    turn,
)

_LOOK_SECONDS = 0.05
"""Interval at which a request that waits for other processes tries again."""


@dataclass(unsafe_hash=True, init=False, repr=False)
class HostBudget:
    """One cap on the bytes of all pools on a host that use it, in any number of processes.

    Pass it as the ``budget`` of a pool, a stager or a loader. A pool takes bytes from it to grow,
    and returns them when it frees slabs. When the budget is used up, a request waits as it does at
    a pool's own cap, until another pool frees slabs, for example by `SlabPool.trim`. The bytes of a
    process are free again when it has ended, even if it was killed. Shared memory counts once,
    until all processes that have it, forked children included, have freed it or ended.

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
        ValueError: `max_bytes` is not a size, or too small (text for less than a page), or `name`
            is empty or not text.
    """

    max_bytes: int
    name: str

    def __init__(self, max_bytes: Size, *, name: str) -> None:
        self.max_bytes = given_bytes(max_bytes)
        self.name = name
        if not name or not isinstance(name, str):
            raise ValueError(f"a budget's name must be text: {name!r}; pass one such as 'job7'")

    def usage(self) -> list[PoolUsage]:
        """Return what each pool of this budget holds, in all processes.

        Reads the pools' files. Blocks while another process uses them, for at most ten seconds.

        Raises:
            HostBudgetError: the folder cannot be used, or a file of this budget is damaged.
        """
        return usage_of_host(self.name)

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


def usage_of_host(budget: str | None = None) -> list[PoolUsage]:
    """Return what each pool of this user holds of its budget, ordered by budget and process.

    Args:
        budget: the name of the only budget to return; None for all.

    Raises:
        HostBudgetError: as `HostBudget.usage`.
    """
    path = folder_path()
    if not os.path.lexists(path):
        return []
    pools = uninterrupted(partial(in_folder, path, partial(read_rows, budget=budget)))
    return sorted(pools, key=attrgetter("budget", "pid", "pool"))


class LimitedMemory(ResourceAdaptor):
    """A memory resource that allocates within a `HostBudget`, for one pool.

    Slabs of private memory have a row together. Each shared slab has a row of its own, because
    forked children inherit such slabs, and keep them when this process frees them.

    Raises:
        ValueError: another pool has a budget of this name with another cap.
        HostBudgetError: the folder cannot be used.
    """

    is_entered = staticmethod(ownership(turn))
    """Returns whether the calling thread is reading or writing the files."""

    _held = 0
    """Bytes that this row should have. It has more if it could not be written."""
    _known_until = 0.0
    _room_for = 0
    """Bytes that the pool may hold, by the last refusal."""
    _is_ending = _is_busy = _is_late = False

    def __init__(self, resource: MemoryResource, budget: HostBudget) -> None:
        super().__init__(resource)
        self.others = list[PoolUsage]()
        """Other pools of this budget, as of the last check."""
        self._budget, self._path = budget, folder_path()
        self._row = Row(new_usage(budget.name, budget.max_bytes), is_inherited=False)
        self._shared = dict[int, Row]()
        """The rows of shared slabs, by the `id` of the block."""
        uninterrupted(partial(in_folder, self._path, self._begin))

    def holders(self) -> str:
        busy = f", while another process had the lock of {self._path}" if self._is_busy else ""
        return _text_of(self.others, self._row.usage.pool) + busy

    @property
    def allowed(self) -> int:
        """Bytes that the pool may hold, as far as it knows: the whole budget, or less for a moment
        after a refusal.
        """
        is_known = time.monotonic() < self._known_until
        return self._room_for if is_known else self._budget.max_bytes

    def allocate(self, nbytes: int, count: int, deadline: float) -> list[Block]:
        """Allocate, as `ResourceAdaptor.allocate`; by `NOW` for a request that has been refused
        before.

        Raises:
            HostBudgetError: the folder cannot be used; but `RefusedForNow` by `NOW`.
        """
        shared = count if self.resource.is_shared else 0
        rows = [Row(self._row.usage, is_inherited=True) for _ in range(shared)]
        self._take(nbytes * count, rows, deadline)
        try:
            blocks = super().allocate(nbytes, count, deadline)
        except BaseException:
            self._give(nbytes * count, rows)
            raise
        self._shared |= zip(map(id, blocks), rows, strict=False)
        self._give(sum(nbytes - block.nbytes for block in blocks))
        return blocks

    def deallocate(self, block: Block) -> None:
        try:
            self.resource.deallocate(block)
        finally:  # the pool forgets a slab that it could not free
            row = self._shared.pop(id(block), None)
            self._give(block.nbytes, filter(None, [row]))

    def cap(self, nbytes: int) -> str:
        return f'budget=HostBudget("{size_to_paste(nbytes + held_bytes(self.others))}", ...)'

    def reap(self) -> bool:
        """Write the row, or close it if the pool is closed and holds nothing; return whether that
        was possible.
        """
        self._is_late = False  # first: bytes that are freed from now on may be missing in the row
        with turn:
            if self._is_ending and not self._held_bytes():
                self._row.close()
                return True
        try:
            in_folder(self._path, lambda folder: self._row.write(folder, self._held), NOW)
        except (HostBudgetError, MemoryError, RefusedForNow):
            self._is_late = True
        return not self._is_late

    def end(self) -> None:
        """Close the row, now or as soon as no memory is held."""
        self._is_ending = True
        if self.is_entered():  # in a finaliser in the middle of a call of this thread
            reaper.tasks.put(self)
        else:
            uninterrupted(self._update)

    def _begin(self, folder: int) -> None:
        self._room(folder)
        self._row.write(folder, 0)

    def _take(self, nbytes: int, rows: list[Row], deadline: float) -> None:
        """Count bytes as held, if there is room: each of the rows has an equal part; without rows,
        they are private.
        """

        def take(folder: int) -> None:
            room = self._room(folder)
            if nbytes > room:
                self._note(room)
                raise RefusedForNow
            if not rows:
                self._row.write(folder, self._held + nbytes)
                self._held += nbytes
            for row in rows:
                row.write(folder, nbytes // len(rows))

        try:
            in_folder(self._path, take, deadline)
        except FolderBusy:
            self._note(0)
            self._is_busy = True
            raise
        except RefusedForNow:
            raise
        except BaseException as error:
            for row in rows:
                row.close()
            self._update()  # the file may hold anything now
            if isinstance(error, HostBudgetError) and deadline == NOW:
                self._note(0)
                raise RefusedForNow from None  # it goes on waiting: the trouble may pass
            raise

    def _give(self, nbytes: int, rows: Iterable[Row] = ()) -> None:
        """Count bytes as free again, first those of some rows; a negative number takes private
        bytes.
        """
        for row in rows:
            nbytes -= row.usage.held_bytes
            row.close()
        with turn:
            self._held -= nbytes
        if nbytes or self._is_ending:
            self._update()

    def _update(self) -> None:
        """Write or close the row. Whatever prevents that, the reaper tries again until it
        succeeds.
        """
        if not self._is_late and not self.reap():
            reaper.tasks.put(self)

    def _held_bytes(self) -> int:
        return self._held + sum(row.usage.held_bytes for row in list(self._shared.values()))

    def _room(self, folder: int) -> int:
        """Read the other pools' rows; return the bytes by which the pool may grow."""
        own = {self._row.name, *(row.name for row in list(self._shared.values()))}
        self.others, self._is_busy = _read_others(folder, self._budget, own), False
        return self._budget.max_bytes - self._held_bytes() - held_bytes(self.others)

    def _note(self, room: int) -> None:
        self._room_for = self._held_bytes() + max(0, room)
        self._known_until = time.monotonic() + _LOOK_SECONDS


def cap_of(max_bytes: Size, budget: HostBudget | None, granularity: int) -> tuple[int, str]:
    """Return the cap of a pool in bytes, and where it comes from.

    Args:
        max_bytes: see `SlabPool`.
        budget: see `SlabPool`.
        granularity: that of the pool's memory.

    Raises:
        TypeError: `max_bytes` is neither an integer nor text, or `budget` is not a `HostBudget`.
        ValueError: `max_bytes` is not a size, or the cap is too small.
    """
    if budget is not None:
        check_budget(budget)
    if max_bytes is None:
        raise TypeError(
            "max_bytes cannot be None: a pool always has a cap; pass 'auto', or a size such as "
            "'2GiB'"
        )
    if not (isinstance(max_bytes, str) and max_bytes.strip().lower() == "auto"):
        cap, reason = given_bytes(max_bytes), f"given: {max_bytes}"
        if budget is not None:
            cap, reason = min(cap, budget.max_bytes), f"{reason}, within {budget!r}"
    elif budget is not None:
        cap, reason = budget.max_bytes, f"given: {budget!r}"
    else:
        cap, reason = auto_max_bytes()
    return given_bytes(cap, granularity), reason


def given_bytes(max_bytes: Size, least: int = 1) -> int:
    """Read a cap that is given as a size.

    Args:
        max_bytes: the cap. Text must be at least a page: ``"2"`` hardly means two bytes.
        least: the fewest bytes that let something through.

    Raises:
        TypeError: neither an integer nor text.
        ValueError: not a size, or too small.
    """
    cap = parse_bytes(max_bytes)
    if isinstance(max_bytes, str):
        least = max(least, PAGE_BYTES)
    if cap < least:
        raise ValueError(
            f"max_bytes is too small: {max_bytes!r} is {count(cap, 'byte')}. Pass at least "
            f"{least:,}, or a size with a unit, such as '512MiB'"
        )
    return cap


class Claim:
    """Bytes of a budget that a region holds, from `take` until `release`, or until this object is
    gone.

    Args:
        budget: the budget that they count against.
        nbytes: the number of bytes.
        is_shared: whether other processes may hold the memory, too. Then it counts once, and until
            all have freed it.
    """

    def __init__(self, budget: HostBudget, nbytes: int, *, is_shared: bool) -> None:
        check_budget(budget)
        self._budget, self._nbytes, self._path = budget, nbytes, folder_path()
        self._row = Row(new_usage(budget.name, budget.max_bytes), is_inherited=is_shared)
        self.descriptors = self._row.descriptors
        """Those of the row: the memory counts as long as any process has one of them."""

    def take(self, inode: str) -> None:
        """Take the bytes. Blocks. Call it in a thread that no interrupt reaches, as the other
        methods.

        Args:
            inode: of shared memory that another process made, which counts already; else empty.

        Raises:
            BudgetExceededError: the budget is smaller than the region.
            AcquireTimeoutError: the rest of the budget is in use.
            ValueError, HostBudgetError: as `LimitedMemory`.
        """

        def take(folder: int) -> None:
            budget, nbytes = self._budget, self._nbytes
            others = _read_others(folder, budget)
            is_counted = any(inode in other.shared for other in others)
            if not is_counted and nbytes > budget.max_bytes - held_bytes(others):
                error = AcquireTimeoutError if nbytes <= budget.max_bytes else BudgetExceededError
                raise error(
                    f"{format_bytes(nbytes)} requested from {budget!r}{_text_of(others)}; ask for "
                    "less, or raise the budget",
                    requested_bytes=nbytes,
                    max_bytes=budget.max_bytes,
                )
            self._row.write(folder, nbytes, inode)

        in_folder(self._path, take)

    def share(self, inode: str) -> None:
        """Note the inode of the memory, so that processes that map it, too, don't count it again.
        Blocks.
        """
        in_folder(self._path, lambda folder: self._row.write(folder, self._nbytes, inode))

    def release(self) -> None:
        """Give the bytes back, unless other processes hold the memory. Doesn't block."""
        self._row.close()


def _read_others(folder: int, budget: HostBudget, own: Container[str] = ()) -> list[PoolUsage]:
    """Return what other pools of a budget hold; see `read_rows`.

    Raises:
        ValueError: one of them has a budget of this name with another cap.
    """
    others = read_rows(folder, budget.name, own)
    for other in others:
        if other.max_bytes != budget.max_bytes:
            raise ValueError(
                f"two caps for one budget: {budget!r} is {budget.max_bytes} bytes here, and "
                f"{other.max_bytes} bytes in process {other.pid} ({other.program}); give it the "
                "same cap everywhere, or another name"
            )
    return others


def _text_of(others: list[PoolUsage], own: str = "") -> str:
    """Return a text for errors that names the largest holders; empty if there are none.

    Args:
        others: the pools.
        own: the name of the pool that has the error. Its other bytes are those that forked children
            keep.
    """
    largest = sorted(others, key=lambda pool: -pool.held_bytes)[:4]
    if not held_bytes(others):
        return ""
    names = []
    for pool in filter(attrgetter("held_bytes"), largest):
        process = f"process {pool.pid} ({pool.program})"
        where = "children forked from this process" if pool.pool == own else process
        names.append(f"{format_bytes(pool.held_bytes)} in {where}")
    return (
        f", of which other pools of this host had {format_bytes(held_bytes(others))}: "
        f"{', '.join(names)}"
    )
