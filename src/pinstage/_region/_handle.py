"""Sharing the memory of a region with another process, by its file descriptor."""

from __future__ import annotations

import os
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from .._pool import HostBudget
from ._places import Nest


class RegionPlan(NamedTuple):
    """The description of a region, the same in every process."""

    nbytes: int
    chunk_bytes: int
    row_bytes: int | None
    huge_page_bytes: int
    budget: HostBudget | None
    nest: Nest | None
    """Where tensors are; None if the region was made from a size."""


class RegionHandle:
    """Lets `HostRegion.from_handle` map a region in another process. A handle keeps the memory alive.

    Picklable by ``multiprocessing`` and ``torch.multiprocessing``, as an argument of a process or through a queue or
    pipe: the descriptor of the memory is inherited, or sent over a socket of the process that pickles it. Pickle it
    separately for each process: a pickle can be unpickled only once.
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
