"""Which offset tables are kept."""

from __future__ import annotations

import threading
from typing import TypeVar

from ._arrange import RunKinds
from ._table import Columns, Table

K = TypeVar("K")
V = TypeVar("V")


class TableCache:
    """Keeps the tables of batches that come again; one that was met once is dropped soon.

    Batches of fixed shapes need a few tables for ever. Ragged ones need a new table each time, a thousand small objects
    that would outlive several batches and make the garbage collector walk the whole program for nothing: staging the
    demo's batches took twice as long. So a table is kept from the second time its columns are met: at once if that is
    soon, else after computing it once more, by the hash that was remembered.

    May be used by several threads.

    Args:
        kept: tables of batches met again.
        fresh: tables of batches met once, the last ones.
        remembered: hashes of batches met once.
    """

    def __init__(self, *, kept: int = 64, fresh: int = 2, remembered: int = 4096) -> None:
        self.capacities = (kept, fresh, remembered)
        # By the hash of their columns, which takes as long as comparing them. Where two have one, the later one stays.
        self._kept: dict[int, Table] = {}
        self._fresh: dict[int, Table] = {}
        self._remembered: dict[int, None] = {}
        self._lock = threading.Lock()

    def table_of(self, columns: Columns, kinds: RunKinds | None = None) -> Table:
        """Return the table for columns, computing it if it is not there; for `kinds` see `Table`."""
        key = hash(columns)
        table = self._kept.get(key)
        if table is not None and table.columns == columns:
            return table
        kept, fresh, remembered = self.capacities
        with self._lock:
            table = self._fresh.pop(key, None)
            again = table is not None or key in self._remembered
        if table is None or table.columns != columns:
            table = Table(columns, kinds)
        with self._lock:
            if again:
                put_bounded(self._kept, key, table, kept)
                self._remembered.pop(key, None)
            else:
                put_bounded(self._fresh, key, table, fresh)
                put_bounded(self._remembered, key, None, remembered)
        return table

    def unlock(self) -> None:
        """In a forked child: forget the lock, which a thread that is not there may hold."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Tables in memory."""
        return len(self._kept) + len(self._fresh)


def put_bounded(entries: dict[K, V], key: K, value: V, capacity: int) -> None:
    """Add an entry; drop the oldest ones beyond `capacity`."""
    entries[key] = value
    while len(entries) > capacity:
        del entries[next(iter(entries))]
