"""What a loader was told, and what its iterators share: slabs and counters."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import torch

from .._memory import SharedMemory, cap_bytes, default_memory
from .._pool import SlabPool
from .._staging import Stager, check_depth, target_for
from ._stats import Counters


class Settings(NamedTuple):
    """The arguments of a loader that torch's has not."""

    device: torch.device
    pool: SlabPool | None
    max_bytes: int | str
    depth: int

    def without_pool(self) -> Settings:
        """Return those of a loader in another process, or of a copy, which has a pool of its own."""
        return self._replace(pool=None)


def checked(
    device: torch.device | str | int | None, pool: SlabPool | None, max_bytes: int | str, depth: int
) -> Settings:
    """Return settings that can be met.

    Raises:
        TypeError, ValueError, StagingError: as `DataLoader`.
    """
    check_depth(depth)
    if pool is not None and max_bytes not in ("auto", pool.max_bytes):
        raise ValueError(f"pool and max_bytes exclude each other: max_bytes={max_bytes!r}; give the cap to the pool")
    if pool is not None and not pool.memory.is_shared:
        raise ValueError(
            f"workers cannot map the memory of this pool: {type(pool.memory).__name__} is not shared; pass "
            "SlabPool(SharedMemory(device), max_bytes=...)"
        )
    if max_bytes != "auto" and cap_bytes(max_bytes)[0] <= 0:
        raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
    return Settings(target_for(device).device, pool, max_bytes if pool is None else pool.max_bytes, depth)


class Slabs:
    """The slabs of a loader and its iterators, freed when the last of these is gone, and what is counted of them.

    Args:
        settings: of the loader. A pool that is given is not freed; else one is made when it is needed.
    """

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        """The process that they belong to: neither they nor the locks here are of use in a forked child."""
        self.settings = settings
        self.target = target_for(settings.device)
        self.pool = settings.pool
        self.counters = Counters()
        self.starting = threading.RLock()
        """Held while an iterator is made: torch reads the loader then, which is changed for that time."""
        self.is_used = False
        """Whether there was an iterator, or a loader that was made anew of this one."""
        self._stager: Stager | None = None
        self._lock = threading.Lock()

    def shared(self) -> SlabPool:
        """Return the pool that workers get slabs of."""
        with self._lock:
            if self.pool is None or not self.pool.memory.is_shared:  # that of passes without workers
                self._stager = None
                is_cuda = self.target.device.type == "cuda"
                memory = SharedMemory(self.target.device) if is_cuda else SharedMemory(register=False)
                self.pool = SlabPool(memory, max_bytes=self.settings.max_bytes)
            return self.pool

    def stager(self) -> Stager:
        """Return what sends batches without workers."""
        with self._lock:
            if self._stager is None:
                device = self.target.device
                if self.pool is None:
                    self.pool = SlabPool(default_memory(device), max_bytes=self.settings.max_bytes)
                self._stager = Stager(device, pool=self.pool)
            return self._stager
