"""The table of ``pinstage top``: the bytes of each `HostBudget` that each process holds.

It reads the files of the pools, which they write when they grow or shrink, and once a second.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .._pool import PoolUsage, held_bytes, usage_of_host
from .._sizes import count, format_bytes
from ._report import Line, Section, TextTable, as_text, duration, show, watch

_PAUSE_SECONDS = 1.0
"""Time between two updates of the table."""
_COLUMNS = ("process", "program", "owner", ">held", ">leased", ">in flight", ">idle", ">wanted", ">waits", ">waited")


def run_top(*, once: bool, as_json: bool) -> int:
    """Show the budgets of this host (on a terminal: repeatedly, until Ctrl-C); return the exit status."""
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
                "wanted_bytes": sum(pool.wanted_bytes for pool in pools),
                "pools": [dataclasses.asdict(pool) for pool in pools],
            }
            for name, pools in _by_budget(usage)
        ]
    }


def sections(usage: Sequence[PoolUsage]) -> list[Section]:
    """Return a table for each budget, with a row for each pool and each of its owners."""
    found: list[Section] = []
    for name, pools in _by_budget(usage):
        held, cap = held_bytes(pools), pools[0].max_bytes
        title = f"HostBudget {name}: {format_bytes(held)} of {format_bytes(cap)} in {count(len(pools), 'pool')}"
        rows = [(row, pool) for pool in pools for row in _rows(pool)]
        styles = ["warning" if pool.wanted_bytes or not pool.answered else "" for _, pool in rows]
        found.append(TextTable(_COLUMNS, [row for row, _ in rows], title, styles))
        found += [
            Line(f"process {pool.pid} does not answer, so it gives nothing back: is it stopped?", "warning")
            for pool in pools
            if not pool.answered
        ]
    return found or [Line("no pool on this host has a HostBudget")]


def _by_budget(usage: Sequence[PoolUsage]) -> Iterator[tuple[str, list[PoolUsage]]]:
    for name, pools in itertools.groupby(usage, key=lambda pool: pool.budget):
        yield name, list(pools)


def _rows(pool: PoolUsage) -> list[tuple[str, ...]]:
    whose = (str(pool.pid), pool.program, "", _bytes(pool.held_bytes))
    wanted = _bytes(pool.wanted_bytes)
    if not pool.answered:
        return [(*whose, "-", "-", "-", wanted, "-", "-")]
    used = (_bytes(pool.leased_bytes), _bytes(pool.in_flight_bytes), _bytes(pool.free_bytes))
    rows: list[tuple[str, ...]] = [(*whose, *used, wanted, f"{pool.waits:,}", duration(pool.wait_seconds))]
    for name, owner in pool.owners.items():
        held, leased, in_flight = (_bytes(owner[f"{state}_bytes"]) for state in ("held", "leased", "in_flight"))
        waits = (f"{owner['waits']:,}", duration(owner["wait_seconds"]))
        rows.append(("", "", name, held, leased, in_flight, "", "", *waits))
    return rows


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "0"
