"""The slabs of a loader."""

from __future__ import annotations

import os
import threading

from .._memory import SharedMemory, default_memory
from .._pool import SlabPool
from .._staging import Stager, Target


class Slabs:
    """The slabs of a loader and its iterators; freed when the last of these is gone.

    Args:
        target: where slabs are copied to.
        max_bytes: cap of the pool that is made when it is needed.
        pool: where they come from instead; it is not freed.
    """

    def __init__(self, target: Target, max_bytes: int | str | None, pool: SlabPool | None = None) -> None:
        self.pid = os.getpid()
        """The process that they belong to: neither they nor the locks here are of use in a forked child."""
        self.pool = pool
        self.starting = threading.RLock()
        """Held while an iterator is made: torch reads the loader then, which is changed for that time."""
        self._target = target
        self._max_bytes = max_bytes
        self._stager: Stager | None = None
        self._lock = threading.Lock()

    def shared(self) -> SlabPool:
        """Return the pool that workers' slots come from."""
        with self._lock:
            if self.pool is None:
                is_cuda = self._target.device.type == "cuda"
                memory = SharedMemory(self._target.device) if is_cuda else SharedMemory(register=False)
                self.pool = SlabPool(memory, max_bytes=self._max_bytes)
            return self.pool

    def stager(self) -> Stager:
        """Return what sends batches without workers."""
        with self._lock:
            if self._stager is None:
                device = self._target.device
                if self.pool is None:
                    self.pool = SlabPool(default_memory(device), max_bytes=self._max_bytes)
                self._stager = Stager(device, pool=self.pool)
            return self._stager
