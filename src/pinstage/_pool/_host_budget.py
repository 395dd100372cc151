"""One cap for a host: how the pools of several processes share it, and lend one another what is idle.

A pool that grows asks the ledger of the host (`_host_ledger`), in the thread that does slow work anyway. If the budget
is taken, the request waits in the pool's line like any other, and the pool's row says how much it wants. Then the
pool's own thread, which sleeps otherwise, asks the others one after the other, the largest first: each frees what is
idle, as much as is wanted, and answers. So nobody frees more than it takes.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import math
import os
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

from .._sizes import format_bytes, parse_bytes
from ._host_ledger import Bell, Entries, Row, damaged, exists, ring, transaction
from ._stats import OwnerStats
from ._waiting import Line

_NEWS, _LEND, _TELL = b"!", b"?", b"."
"""What a pool is woken with: something was given back; give back what is idle, and answer; say how you are."""

_LOOK_SECONDS = 0.25
"""How often a pool that waits looks whether another one died, which nobody tells. One that does not wait sleeps."""

_TURN_SECONDS = 1.0
"""How long the pool that has waited longest keeps what comes free for itself: long enough for another one to end the
step that it is in, so that small requests cannot starve a large one. After that, whatever fits may pass: two that wait
for one another, the one with what the other needs, are in each other's way no longer than this."""

LEND_SECONDS = 1.0
"""How long a reservation waits for others to give back what is idle. A process that is not stopped needs milliseconds,
and the time that its device takes."""

_TOUCH_SECONDS = 3600.0
"""How often a pool that sleeps looks after its row and pipe: what tidies /tmp goes by age, of ten days and more."""

_ANSWER_SECONDS = 0.1
"""How long `HostBudget.shares` waits for pools to say how they are. It takes them a millisecond."""

_TELL_SECONDS = 0.9
"""How often a pool that did not grow or shrink says how it is, whoever asks: once for each picture of ``pinstage top``.
"""


class HostBudget:
    """One cap on the bytes of all pools of a host that use it, in any number of processes.

    Pass it as the ``max_bytes`` of a pool, a stager or a loader. A pool takes from it when it grows, and gives back
    what it frees. When the budget is used up, a request waits as it does at a pool's own cap, and meanwhile pools of
    other processes free idle slabs. What a process held is free again when the process has ended, even if it was
    killed.

    Processes of one user share a budget if they see the same local folder: ``/tmp/pinstage-<user id>``, or the one that
    ``PINSTAGE_LEDGER_DIR`` names. Containers that share that folder share the budget.

    Args:
        max_bytes: the cap, as an int or text such as ``"64GiB"``. The same in all processes.
        name: which budget; None for the user's default one.

    Raises:
        TypeError: `max_bytes` is neither an integer nor text, or `name` is not text.
        ValueError: `max_bytes` is not a positive size, or `name` is empty.
    """

    def __init__(self, max_bytes: SupportsIndex | str, *, name: str | None = None) -> None:
        self.max_bytes = parse_bytes(max_bytes)
        self.name = name
        if self.max_bytes <= 0:
            raise ValueError(f"a budget must be positive: {max_bytes!r}; pass a size such as '64GiB'")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a budget's name is text, not {type(name).__name__}; None means the user's own")
        if name == "":
            raise ValueError("a budget's name is empty: ''; leave it out for the user's own")

    @staticmethod
    def shares() -> list[HostShare]:
        """Return what each pool on this host has of its budget, and what it uses that for.

        Each pool is asked how it is, so this takes 0.1 seconds. Costs a pool less than a millisecond.

        Raises:
            HostBudgetError: the host's ledger cannot be used, or is damaged.
        """
        if not exists():
            return []
        with transaction() as entries:
            pipes = [entries.pipe(row.key) for row in entries.rows()]
        asked = time.monotonic()
        for pipe in pipes:
            ring(pipe, _TELL)
        if pipes:
            time.sleep(_ANSWER_SECONDS)
        with transaction() as entries:
            rows = entries.rows()
            entries.commit()
        found = []
        for row in sorted(rows, key=lambda row: (row.budget, row.pid, row.key)):
            try:
                told = json.loads(row.told)
                answered = float(told.get("at", 0)) >= asked - _TELL_SECONDS
                numbers = {name: _number(told, name) for name in TOLD}
                owners = {
                    name: {field: _number(owner, field) for field in OwnerStats.__slots__}
                    for name, owner in told.get("owners", {}).items()
                }
            except (AttributeError, ArithmeticError, RecursionError, TypeError, ValueError) as error:
                raise damaged(row, error) from error
            given = (row.budget or None, row.cap, row.pid, row.program, row.key, row.bytes, row.wanted, answered)
            found.append(HostShare(*given, **numbers, owners=owners))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostBudget) and (self.max_bytes, self.name) == (other.max_bytes, other.name)

    def __hash__(self) -> int:
        return hash((self.max_bytes, self.name))

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"HostBudget({format_bytes(self.max_bytes)!r}{name})"


TOLD = ("leased_bytes", "in_flight_bytes", "free_bytes", "waits", "wait_seconds")
"""Fields of `PoolStats` that a pool tells of itself, besides those of its owners. Other versions may tell others."""


def _number(told: Any, name: str) -> Any:
    value = told.get(name, 0)
    if (value is not None or name != "at_most") and not (isinstance(value, int | float) and math.isfinite(value)):
        raise TypeError(f"{name} is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class HostShare:
    """What one pool has of a `HostBudget`."""

    budget: str | None
    """The budget's name; None for the user's default one."""
    max_bytes: int
    """The cap of all pools of this budget together."""
    pid: int
    """The process, by its number in its own container."""
    program: str
    """Its program, and its rank if it has one."""
    pool: str
    """Distinguishes it from other pools of the same process."""
    nbytes: int
    """Bytes that it may hold."""
    wanted_bytes: int
    """Bytes that it waits for."""
    answered: bool
    """Whether the process answered, so that the fields below are known. A stopped process does not answer."""
    leased_bytes: int = 0
    in_flight_bytes: int = 0
    free_bytes: int = 0
    waits: int = 0
    """Requests that had to wait."""
    wait_seconds: float = 0.0
    """Time spent waiting, summed over all requests."""
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The fields of `OwnerStats` for each owner."""


class Alone:
    """The share of a pool whose cap is its own: nothing is to be done."""

    allowed = sys.maxsize
    is_full = False
    others = None

    def serve(self, pool: Borrower, line: Line) -> None: ...

    def take(self, nbytes: int) -> None: ...

    def give(self, nbytes: int) -> None: ...

    def wake(self) -> None: ...


class HostIsFull(Exception):  # noqa: N818 - an answer, which the pool turns into waiting
    """There is no room now under the budget."""


class Borrower(Protocol):
    """What a share asks of its pool. All of it returns soon; `lend` may take as long as freeing takes."""

    closed: bool

    def lend(self, nbytes: int) -> None: ...

    def is_waited_for(self) -> bool: ...

    def report(self, waits: int, wait_seconds: float) -> dict[str, Any]: ...


class Share:
    """A pool's part of a budget.

    `take` and `give` are called by threads of ours, in which no interrupt comes. `give` and `wake` may be called by a
    finaliser: they wait for nothing.

    Raises:
        ValueError: another pool has a budget of this name with another cap.
        HostBudgetError: the host's ledger cannot be used.
    """

    def __init__(self, budget: HostBudget) -> None:
        self.allowed = budget.max_bytes
        """Bytes that the pool may hold as far as is known: all of the budget, until that is refused."""
        self.others = 0
        """Bytes that other pools had when this one asked last."""
        self._budget = budget
        self._name = budget.name or ""
        self._pool: weakref.ref[Borrower] | None = None
        self._line: Line
        # All of the rest is read and written in transactions, of which a process has one at a time.
        self._held = 0
        self._written = 0  # in the row
        self._given: deque[int] = deque()  # what was freed and is still in _held
        self._wanted = 0
        self._since = self._refused_at = 0.0
        self._asked: set[str] = set()  # pools, since `_asked_at`
        self._asked_at = self._told_at = 0.0
        self._told_held = 0
        self._is_behind = False
        with transaction() as entries:
            self._bell, self._key, self._pipe = self._register(entries)
            entries.commit()

    def serve(self, pool: Borrower, line: Line) -> None:
        """Say whose share it is, and begin to lend what is idle there to others. The pool is not kept alive."""
        self._pool = weakref.ref(pool)
        self._line = line
        _thread.start_new_thread(self._listen, ())

    @property
    def is_full(self) -> bool:
        """Whether the budget was taken when the pool asked last."""
        return self.allowed < self._budget.max_bytes

    def take(self, nbytes: int) -> None:
        """Have so many bytes more, before they are allocated. Blocks for the time of a transaction, not for room.

        Raises:
            HostIsFull: there is no room now; others are asked to make some.
            HostBudgetError: the host's ledger cannot be used.
        """
        with transaction() as entries:
            if self._bell.closed:  # the pool was closed meanwhile; who waits there is told so
                raise HostIsFull
            others = self._others(entries)
            now = time.monotonic()
            room = self._room(others, now)
            self.others = sum(row.bytes for row in others)
            if nbytes <= room:
                self._write(entries, self._held + nbytes, 0)
                self._held += nbytes
                self.allowed = self._budget.max_bytes
                return
            if not self._wanted:
                self._since = now
                self._asked.clear()
            self._refused_at = now
            self._write(entries, self._held, nbytes)
            self.allowed = self._held + max(0, room)
        self.wake()
        raise HostIsFull

    def give(self, nbytes: int) -> None:
        """Give back bytes that are freed. The ledger is told by a thread of ours."""
        if nbytes:
            self._given.append(nbytes)
            self.wake()

    def wake(self) -> None:
        if ring(self._pipe, _NEWS) is None:
            with contextlib.suppress(ValueError):  # closed
                self._bell.write(_NEWS)

    # -- the thread

    def _listen(self) -> None:
        bell = self._bell
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while True:
            if bell is not self._bell:  # the file was removed
                poll.unregister(bell)
                bell.close()
                bell = self._bell
                poll.register(bell, select.POLLIN)
            is_restless = self._wanted or self._is_behind
            poll.poll(1000 * (_LOOK_SECONDS if is_restless else _TOUCH_SECONDS))
            if self.look(bell.read(4096) or b""):
                return

    def look(self, heard: bytes) -> bool:
        """Do what is to be done: lend, answer, ask, give back, tell. Say whether it was the last time.

        Args:
            heard: what came through the pipe; empty if nothing did for a while.
        """
        try:
            if _LEND in heard:
                self._lend()
            over, calls = self._settle(heard)
            self._is_behind = False
        except Exception:  # noqa: BLE001 - of the ledger or the device: whoever uses the pool is told, nobody here
            self._is_behind = True  # what it has stays written down, which is safe
            return False
        for pipe, message in calls:
            ring(pipe, message)
        return over

    def _lend(self) -> None:
        """Free what is idle, as much as others wait for."""
        pool = None if self._pool is None else self._pool()
        if pool is None:
            return
        with transaction() as entries:
            others = self._others(entries)
            entries.commit()
        wanted = sum(row.wanted for row in others) - self._budget.max_bytes + self._taken(others)
        if wanted > 0:
            pool.lend(wanted)

    def _settle(self, heard: bytes) -> tuple[bool, list[tuple[Path, bytes]]]:
        """Bring the row up to date; return whether it is gone, and whom to wake with what."""
        pool = None if self._pool is None else self._pool()
        now = time.monotonic()
        is_old = now - self._told_at >= _TELL_SECONDS or self._told_held != self._held - sum(self._given)
        is_asked = _TELL in heard and is_old
        told = pool.report(self._line.waits, self._line.seconds) if pool is not None and is_asked else None
        with transaction() as entries:
            others = self._others(entries)
            waiting = [(entries.pipe(row.key), _NEWS) for row in others if row.wanted]
            if (pool is None or pool.closed) and not self._held:
                entries.remove(self._key)
                entries.commit()
                self._bell.close()
                return True, waiting
            calls = waiting if self._held < self._written or _LEND in heard else []
            calls += self._look_for_room(entries, others, pool, now)
            if told is not None:
                entries.tell(self._key, json.dumps({"at": now, **told}))
                self._told_at, self._told_held = now, self._held
            self._write(entries, self._held, self._wanted)
            os.utime(self._pipe)
        return False, calls

    def _look_for_room(
        self, entries: Entries, others: Sequence[Row], pool: Borrower | None, now: float
    ) -> list[tuple[Path, bytes]]:
        """See whether what the pool waits for has come free; if not, return the next one to be asked."""
        if not self._wanted:
            return []
        is_wanted = pool is not None and (pool.is_waited_for() or now - self._refused_at < _LOOK_SECONDS)
        if not is_wanted or self._wanted <= self._room(others, now):
            self.allowed = self._budget.max_bytes  # the one who waits looks every other millisecond
            if not is_wanted:
                self._wanted = 0
            return []
        if now - self._asked_at >= _LOOK_SECONDS:
            self._asked.clear()
            self._asked_at = now
        lenders = [row for row in others if row.bytes and row.key not in self._asked]
        if not lenders:
            return []
        largest = max(lenders, key=lambda row: row.bytes)
        self._asked.add(largest.key)
        return [(entries.pipe(largest.key), _LEND)]

    # -- in a transaction

    def _others(self, entries: Entries) -> list[Row]:
        """Return the other rows of this budget. Takes note of what was freed, and adds a row that is gone."""
        while self._given:
            self._held -= self._given.popleft()
        rows = entries.rows()
        if not any(row.key == self._key for row in rows):
            # Somebody removed the file. What is held is held: until there is room, nobody grows.
            old, old_key = self._bell, self._key
            self._bell, self._key, self._pipe = self._register(entries)
            entries.remove(old_key)
            old.write(_NEWS)  # the thread closes it
        return [row for row in rows if row.budget == self._name and row.key != self._key]

    def _register(self, entries: Entries) -> tuple[Bell, str, Path]:
        budget = self._budget
        for row in entries.rows():
            if row.budget == self._name and row.cap != budget.max_bytes:
                raise ValueError(
                    f"two caps for one budget: {budget!r} is {budget.max_bytes} bytes here, and {row.cap} bytes in "
                    f"process {row.pid} ({row.program}); give it the same cap everywhere, or another name"
                )
        key, bell = entries.add(self._name, budget.max_bytes, os.getpid(), _program(), self._held)
        return bell, key, entries.pipe(key)

    def _taken(self, others: Sequence[Row]) -> int:
        return self._held + sum(row.bytes for row in others)

    def _room(self, others: Sequence[Row], now: float) -> int:
        """Return by how much the pool may grow: not at all while it is the turn of one that has waited longer."""
        mine = (self._since if self._wanted else now, self._key)
        if any(row.wanted and (row.since, row.key) < mine and 0 <= now - row.since < _TURN_SECONDS for row in others):
            return 0
        return self._budget.max_bytes - self._taken(others)

    def _write(self, entries: Entries, nbytes: int, wanted: int) -> None:
        entries.write(self._key, nbytes, wanted, self._since if wanted else 0.0)
        entries.commit()
        self._written = nbytes
        self._wanted = wanted


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = (path.parent if path.name == "__main__.py" else path).name or "python"
    rank = os.environ.get("RANK")
    return name if rank is None else f"{name} rank {rank}"
