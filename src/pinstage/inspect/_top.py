"""The table of ``pinstage top``: the bytes of each `HostBudget` that each process holds.

It reads the files of the pools, which they write when they grow or shrink.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .._pool import PoolUsage, held_bytes, usage_of_host
from .._sizes import count, format_bytes
from ._report import Line, Section, TextTable, as_text, show, watch

_PAUSE_SECONDS = 1.0
"""Time between two updates of the table."""


def run_top(*, once: bool, as_json: bool) -> int:
    """Show the budgets of this host (on a terminal: repeatedly, until Ctrl-C); return the exit
    status.
    """
    if as_json:
        show(to_dict(usage_of_host()))
    elif once or not sys.stdout.isatty():
        sys.stdout.write(as_text(sections(usage_of_host())) + "\n")
    else:
        watch(lambda: sections(usage_of_host()), _PAUSE_SECONDS)
    return 0


def to_dict(usage: Sequence[PoolUsage]) -> dict[str, Any]:
    return {
        "budgets": [
            {
                "name": name,
                "max_bytes": pools[0].max_bytes,
                "held_bytes": held_bytes(pools),
                "pools": [dataclasses.asdict(pool) for pool in pools],
            }
            for name, pools in by_budget(usage)
        ]
    }


def sections(usage: Sequence[PoolUsage]) -> list[Section]:
    """Return a table for each budget, with a row for each pool."""
    tables: list[Section] = []
    for name, pools in by_budget(usage):
        held, cap = format_bytes(held_bytes(pools)), format_bytes(pools[0].max_bytes)
        rows = [(str(pool.pid), pool.program, format_bytes(pool.held_bytes)) for pool in pools]
        title = f"HostBudget {name}: {held} of {cap} in {count(len(pools), 'pool')}"
        tables.append(TextTable(["process", "program", ">held"], rows, title))
    return tables or [Line("no pool on this host has a HostBudget")]


def by_budget(usage: Sequence[PoolUsage]) -> Iterator[tuple[str, list[PoolUsage]]]:
    """Yield the name of each budget with its pools; `usage` is sorted by budget."""
    for name, pools in itertools.groupby(usage, key=lambda pool: pool.budget):
        yield name, list(pools)
