"""A loader's settings, and what its iterators share: slabs and counters."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .._batch import Keeping, OwnStorage, check_own_storage
from .._memory import PAGE_BYTES, SharedMemory, default_memory
from .._pool import HostBudget, SlabPool, cap_of, check_owner, check_pool
from .._sizes import Size
from .._stage import Sender, Stager, check_depth, sender_of, target_for
from ._stats import Counters


class Settings(NamedTuple):
    """The arguments that torch's loader does not have."""

    device: Any
    pool: SlabPool | None
    max_bytes: Size
    budget: HostBudget | None
    depth: int
    keep_on_host: Any
    own_storage: OwnStorage
    owner: str

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Settings:
        """Return the settings among a function's arguments, checked.

        Raises:
            TypeError, ValueError, CudaUnavailableError: as `DataLoader`.
        """
        return cls(**{name: arguments[name] for name in cls._fields}).checked()

    def checked(self) -> Settings:
        """Check the settings; return them with a `torch.device`, and with paths as a tuple.

        Raises:
            TypeError, ValueError, CudaUnavailableError: as `DataLoader`.
        """
        check_depth(self.depth)
        check_owner(self.owner)
        check_own_storage(self.own_storage)
        pool, max_bytes, kept = self.pool, self.max_bytes, self.keep_on_host
        if pool is None:
            cap_of(max_bytes, self.budget, PAGE_BYTES)
        else:
            check_pool(pool, max_bytes, self.budget)
            max_bytes = pool.max_bytes
            if not pool.memory.is_shared:
                raise ValueError(
                    f"workers cannot map the memory of this pool: {type(pool.memory).__name__} is "
                    "not shared; pass SlabPool(..., memory=SharedMemory(device))"
                )
        if kept is not None and not callable(kept):
            kept = Keeping(kept).paths
        return self._replace(
            device=target_for(self.device).device, max_bytes=max_bytes, keep_on_host=kept
        )

    def keeping(self) -> Keeping | None:
        """Return the rule for leaves that stay on the host; None if there isn't any."""
        return None if self.keep_on_host is None else Keeping(self.keep_on_host, may_miss=True)


class Slabs:
    """The slabs and counters of a loader and its iterators. When the last of these is gone, the
    slabs are freed.

    Args:
        settings: the loader's settings. If they have a pool, it is the user's, and is not freed. If
            not, a pool is made when it is needed.
    """

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        """The process that made this object. A forked child can use neither its slabs nor its
        locks.
        """
        self.settings = settings
        self.target = target_for(settings.device)
        self.pool = settings.pool
        self.counters = Counters()
        self.starting = threading.RLock()
        """Held while an iterator is made: meanwhile, attributes of the loader that torch reads are
        changed.
        """
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        """The iterators that are alive."""
        self.reported: set[str] = set()
        """The paths of leaves to keep that a warning has named."""
        self._sender: Sender | None = None
        self._lock = threading.RLock()

    def shared(self) -> SlabPool:
        """Return the pool of the workers' slabs. Makes it first, if needed."""
        with self._lock:
            # A pool of passes without workers.
            if self.pool is None or not self.pool.memory.is_shared:
                self._sender = None
                is_cuda = self.target.device.type == "cuda"
                memory = SharedMemory(self.target.device if is_cuda else None, register=is_cuda)
                self.pool = SlabPool(
                    self.settings.max_bytes, budget=self.settings.budget, memory=memory
                )
            return self.pool

    def sender(self) -> Sender:
        """Return the sender of passes without workers. Makes it first, if needed."""
        with self._lock:
            if self._sender is None:
                device, settings = self.target.device, self.settings
                if self.pool is None:
                    self.pool = SlabPool(
                        settings.max_bytes, budget=settings.budget, memory=default_memory(device)
                    )
                stager = Stager(
                    device,
                    pool=self.pool,
                    owner=settings.owner,
                    own_storage=settings.own_storage,
                    run_ahead=None,  # the iterator has its own bound
                )
                self._sender = replace(sender_of(stager), keeping=settings.keeping())
            return self._sender
