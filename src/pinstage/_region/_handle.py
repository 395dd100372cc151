"""How another process gets the memory of a region: its descriptor."""

from __future__ import annotations

import os
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from .._pool import HostBudget
from ._places import Nest


class RegionPlan(NamedTuple):
    """The description of a region, in every process."""

    nbytes: int
    chunk_bytes: int
    row_bytes: int | None
    huge_page_bytes: int
    budget: HostBudget | None
    nest: Nest | None
    """Where tensors are; None if it was made of a size."""


class RegionHandle:
    """Says how to map a `HostRegion` in another process, by `HostRegion.from_handle`; it keeps the memory alive.

    Picklable by ``multiprocessing`` and ``torch.multiprocessing``, as an argument of a process or through a queue or
    pipe: the descriptor of the memory is inherited, or sent over a socket of the process that pickles it. Send it to
    each process by itself: a pickle can be unpickled once.
    """

    __slots__ = ("_ends", "_fd", "_plan")

    def __init__(self, plan: RegionPlan, ends: tuple[int, ...], fd: int) -> None:
        self._plan, self._ends, self._fd = plan, ends, fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._plan, self._ends, DupFd(self._fd))

    def __del__(self) -> None:
        os.close(self._fd)


def _received(plan: RegionPlan, ends: tuple[int, ...], fd: Any) -> RegionHandle:
    return RegionHandle(plan, ends, fd.detach())
