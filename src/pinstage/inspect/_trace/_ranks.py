"""A file, or a folder with a file for each rank: what `pinstage trace` is given, and what it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._bus import Bus
from .._errors import TraceError
from ._analysis import Analysis, analyse
from ._events import read
from ._model import Packing, packing
from ._stream import TraceFile
from ._verdict import verdict

_SUFFIXES = (".json", ".json.gz")
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class RankReport:
    """What the trace of one process says, and what packing would change in it."""

    rank: int
    analysis: Analysis
    packing: Packing

    @property
    def verdict(self) -> str:
        """It in two sentences."""
        return verdict(self.analysis, self.packing)


@dataclass(frozen=True)
class TraceReport:
    """What the traces of all ranks say.

    Attributes:
        ranks: one for each file, by rank.
    """

    ranks: tuple[RankReport, ...]

    @property
    def worst(self) -> RankReport:
        """The rank whose GPU waits longest for staging in a step: what the others wait for."""
        return max(self.ranks, key=lambda rank: rank.packing.stall_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON. Seconds and bytes."""
        return {
            "verdict": self.worst.verdict,
            "worst_rank": self.worst.rank,
            "ranks": [
                {"rank": rank.rank, "verdict": rank.verdict, "packing": rank.packing.to_dict()}
                | {"trace": rank.analysis.to_dict()}
                for rank in self.ranks
            ],
        }


def trace_report(
    path: Path | str, *, bus: Bus | None = None, advance: Callable[[int], None] | None = None
) -> TraceReport:
    """Read the trace or traces at a path and say what copies cost.

    Args:
        path: a file that the PyTorch profiler wrote, ``.json`` or ``.json.gz``, or a folder with one for each rank.
        bus: of the machine that it is from.
        advance: called with the bytes of the files that were read since the last call.

    Raises:
        TraceError: there is no such file, or it is broken, or it is something else.
    """
    reports = []
    for index, file in enumerate(trace_files(Path(path))):
        analysis = analyse(read(TraceFile(file, advance=advance)))
        rank = analysis.rank
        if rank is None:
            named = _RANK.search(file.name)
            rank = int(named[1]) if named else index
        reports.append(RankReport(rank, analysis, packing(analysis, bus)))
    return TraceReport(tuple(sorted(reports, key=lambda report: report.rank)))


def trace_files(path: Path) -> Sequence[Path]:
    """Return the file at a path, or the traces in the folder at it, by name.

    Raises:
        TraceError: there is nothing there.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
        if not files:
            raise TraceError(f"no .json or .json.gz in the folder {path}; give the file, or the folder of all ranks")
        return files
    if not path.exists():
        raise TraceError(f"no file {path}")
    return [path]
