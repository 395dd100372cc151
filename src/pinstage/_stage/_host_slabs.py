"""Host slabs for one user of a pool; the slower ways where page-locking is refused."""

from __future__ import annotations

import threading
import warnings

from .._compat.probes import warn_once
from .._memory import REFUSALS, PageableMemory, remedy
from .._pool import Lease, SlabPool, check_open, state_of
from .._sizes import format_bytes
from ..errors import AcquireTimeoutError, PoolError, StagingWarning

LEAST_SLAB_BYTES = 1 << 20
"""Below this slab size, starting the copy of a part takes longer than copying its bytes."""

_CALLER = 6
"""Stack level of the warning of a refusal: the line that called `Stager.to_device`, or a frame near
it.
"""


class HostSlabs:
    """Leases slabs of a pool under one owner's name.

    Page-locking may be refused, for example in WSL or below a limit of locked memory. The first
    refusal is reported by a `StagingWarning`.

    Args:
        pool: the pool.
        owner: the name under which slabs are leased.
        timeout: the most seconds to wait for a slab; None forever.

    Attributes:
        pool: the pool.
        refusals: number of leases for which page-locking was refused.
    """

    def __init__(self, pool: SlabPool, owner: str, timeout: float | None) -> None:
        self.pool = pool
        self.refusals = 0
        self._owner = owner
        self._timeout = timeout
        self._state = state_of(pool)
        self._lock = threading.Lock()
        self._pageable: SlabPool | None = None  # made where nothing can be page-locked

    def is_open(self) -> bool:
        """Return whether the pool would lease a slab now or later. Takes no lock."""
        return not (self._state.closed or self._state.is_forked)

    def check_open(self) -> None:
        """Raise the pool's error if it is closed, or belongs to a parent process."""
        if not self.is_open():
            check_open(self.pool)

    def lease(self, nbytes: int, timeout: float | None = None) -> Lease:
        """Lease a slab, or a smaller one if page-locking is refused. Blocks while the pool is at
        its cap.

        A smaller slab has at least `LEAST_SLAB_BYTES`. If not even that can be page-locked, the
        slab is pageable, and has `nbytes`.

        Args:
            nbytes: its size.
            timeout: the most seconds to wait; None is that of these slabs.

        Raises:
            PoolError: as `SlabPool.acquire`.
        """
        size = nbytes
        while True:
            try:
                return self._acquire(size, timeout)
            except (PoolError, TimeoutError):  # a signal's handler may raise the latter
                raise
            except REFUSALS as error:
                if size == nbytes:
                    self._note_refusal(
                        nbytes, error, "the batch is sent in parts through a smaller slab"
                    )
            size //= 2
            if size < LEAST_SLAB_BYTES:
                return self._acquire_pageable(nbytes)

    def lease_whole(self, nbytes: int) -> Lease:
        """Lease a slab of `nbytes`, pageable if page-locking is refused. Blocks while the pool is
        at its cap.

        Raises:
            PoolError: as `SlabPool.acquire`.
        """
        try:
            return self._acquire(nbytes, None)
        except (PoolError, TimeoutError):
            raise
        except REFUSALS as error:
            self._note_refusal(nbytes, error, "tensors are fetched into pageable memory")
        return self._acquire_pageable(nbytes)

    def close(self) -> None:
        """Close the pool of pageable slabs, if there is one."""
        if self._pageable is not None:
            self._pageable.close()

    def _acquire(self, nbytes: int, timeout: float | None) -> Lease:
        timeout = self._timeout if timeout is None else timeout
        try:
            return self.pool.acquire(nbytes, timeout=timeout, owner=self._owner)
        except AcquireTimeoutError as error:
            error.add_note(
                "results of Stager.fetch(copy=False) hold their slabs until their tensors are "
                "freed: drop them sooner, or leave copy=False out"
            )
            raise

    def _acquire_pageable(self, nbytes: int) -> Lease:
        with self._lock:
            if self._pageable is None:
                self._pageable = SlabPool(self.pool.max_bytes, memory=PageableMemory())
        warn_once(
            "a stager falls back to pageable memory, which is slow: nothing can be page-locked; "
            "see `pinstage doctor`"
        )
        return self._pageable.acquire(nbytes, timeout=self._timeout, owner=self._owner)

    def _note_refusal(self, nbytes: int, error: Exception, consequence: str) -> None:
        """Count a refusal, and report the first one."""
        with self._lock:
            self.refusals += 1
            is_first = self.refusals == 1
        if is_first:
            warnings.warn(
                f"page-locking of {format_bytes(nbytes)} was refused, {consequence}: {error}; "
                f"{remedy(nbytes)}; this warning is shown once",
                StagingWarning,
                stacklevel=_CALLER,
            )
