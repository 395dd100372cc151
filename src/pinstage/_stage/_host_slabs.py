"""Host slabs for one user of a pool; what happens where page-locking is refused.

Pageable slabs are in pools of their own, which belong to a `SlabPool`, so that the cap limits them
for all users together. They are shared for users that send them to other processes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import warnings
from collections.abc import Sequence

from .._compat.probes import warn_once
from .._memory import REFUSALS, PageableMemory, SharedMemory, remedy
from .._pool import (
    Lease,
    SlabPool,
    check_open,
    is_first_refusal,
    largest_for,
    state_of,
    timed_out,
    why_never,
)
from .._sizes import format_bytes
from ..errors import AcquireTimeoutError, BudgetExceededError, PoolError, StagingWarning

LEAST_SLAB_BYTES = 1 << 20
"""Below this slab size, starting the copy of a part takes longer than copying its bytes."""

SLAB_BYTES = 256 << 20
"""Many tensors are gathered in slabs of at most this size. Systems that refuse a single large
registration take it, and a copy of about 16 MiB or more reaches the bandwidth of the bus."""

LOOK_AGAIN_SECONDS = 0.01
"""Poll interval of a request for several slabs: it can't wait in the pool's line."""

_CALLER = 6
"""Stack level of the warning of a refusal: the line that called `Stager.to_device`, or a frame near
it.
"""

_making = threading.Lock()


class HostSlabs:
    """Leases slabs of a pool under one owner's name.

    Page-locking may be refused, for example in WSL, below a limit of locked memory, or for a single
    large block. A `StagingWarning` reports the pool's first refusal.

    Args:
        pool: the pool.
        owner: the name under which slabs are leased.
        timeout: the most seconds to wait for a slab; None forever.
        most: initial value of `most`.
        shares: whether other processes map the slabs, if the pool's memory is shared.

    Attributes:
        pool: the pool.
        most: bytes of the slabs into which `lease_all`'s caller divides what it stages. The first
            refusal of a larger slab sets it.
        refusals: number of leases for which page-locking was refused.
    """

    def __init__(
        self,
        pool: SlabPool,
        owner: str,
        timeout: float | None,
        *,
        most: int = sys.maxsize,
        shares: bool = False,
    ) -> None:
        self.pool = pool
        self.most = most
        self.refusals = 0
        self._owner = owner
        self._timeout = timeout
        self._shares = shares and pool.memory.is_shared
        self._state = state_of(pool)
        self._lock = threading.Lock()

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
                warn_once(
                    "a stager falls back to pageable memory, which is slow: nothing can be "
                    "page-locked; see `pinstage doctor`"
                )
                return self._acquire_pageable(nbytes, self._timeout, None)

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
            return self._acquire_pageable(nbytes, self._timeout, error)

    def lease_now(self, nbytes: int) -> Lease | None:
        """Lease a slab of `nbytes`, pageable if page-locking is refused. Doesn't wait for room.

        Returns:
            The lease; None if there is no room under the cap.

        Raises:
            PoolError: as `SlabPool.acquire`, but `AcquireTimeoutError`.
        """
        try:
            return self.pool.acquire(nbytes, timeout=0, owner=self._owner)
        except AcquireTimeoutError:
            # If the pool was refused memory, it has warned of that.
            is_at_cap = self._state.refusal is None or nbytes > self.room()
            return None if is_at_cap else self._pageable_now(nbytes)
        except (PoolError, TimeoutError):
            raise
        except REFUSALS as error:
            return self._pageable_now(nbytes, error) if nbytes <= self.room() else None

    def lease_all(self, sizes: Sequence[int], timeout: float | None = None) -> list[Lease] | None:
        """Lease several slabs, all or none. Blocks while the pool is at its cap, without holding a
        slab, so that two callers don't wait for each other.

        Slabs are pageable if page-locking is refused.

        Args:
            sizes: bytes of each slab.
            timeout: the most seconds to wait; None is that of these slabs.

        Returns:
            The leases. None if page-locking of a single slab was refused, and slabs of at most
            `most`, which is smaller now, may be allowed.

        Raises:
            BudgetExceededError: all slabs together exceed the cap.
            PoolError: as `SlabPool.acquire`.
        """
        timeout = self._timeout if timeout is None else timeout
        if len(sizes) == 1:
            lease = self._lease_single(sizes[0], timeout)
            return None if lease is None else [lease]
        self.check_open()
        state, total = self._state, sum(sizes)
        never = why_never(self.pool, self._owner, total)
        if isinstance(never, BudgetExceededError):
            try:
                raise never
            finally:
                del never  # it and this frame would keep one another
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (leases := self._all_now(sizes)) is None:
            if time.monotonic() >= deadline:
                raise timed_out(state.figures(), total, timeout, len(state.waiters))
            time.sleep(LOOK_AGAIN_SECONDS)
        return leases

    def room(self) -> int:
        """Return the bytes that the owner may lease in addition, page-locked and pageable together.
        Call it after a request.
        """
        room = self.pool.stats().owners[self._owner].available_bytes
        for pageable in list(self._state.pageable.values()):
            stats = pageable.stats()
            room -= stats.leased_bytes + stats.in_flight_bytes
        return room

    def largest(self) -> int:
        """Return the bytes of the largest slab that the owner can ever have."""
        return largest_for(self.pool, self._owner)

    def close(self) -> None:
        """Free the pageable slabs that are idle."""
        for pageable in list(self._state.pageable.values()):
            pageable.trim()

    def _lease_single(self, nbytes: int, timeout: float | None) -> Lease | None:
        """See `lease_all`."""
        try:
            return self.pool.acquire(nbytes, timeout=timeout, owner=self._owner)
        except (PoolError, TimeoutError):
            raise
        except REFUSALS as error:
            most = max([SLAB_BYTES, *self._state.sizes])
            if nbytes > most < self.most:
                self.most = most
                # Smaller slabs may be allowed, even if they have more bytes together.
                self._state.refusal = None
                self._note_refusal(
                    nbytes,
                    error,
                    f"slabs of at most {format_bytes(most)} are used, or pageable memory",
                )
                return None
            return self._acquire_pageable(nbytes, timeout, error)

    def _all_now(self, sizes: Sequence[int]) -> list[Lease] | None:
        """Lease slabs without waiting: all, or none."""
        leases: list[Lease] = []
        try:
            for nbytes in sizes:
                lease = self.lease_now(nbytes)
                if lease is None and self._are_in_the_way(leases, sizes):
                    lease = self._pageable_now(nbytes)
                if lease is None:
                    return None
                leases.append(lease)
            all_of_them, leases = leases, []
            return all_of_them
        finally:
            for lease in leases:
                lease.release()

    def _are_in_the_way(self, leases: Sequence[Lease], sizes: Sequence[int]) -> bool:
        """Return whether there would be room for all sizes if the slabs that were leased for the
        first ones weren't larger than these: waiting wouldn't help.
        """
        room = self.room() + sum(lease.capacity for lease in leases)
        kept_by_others = max(0, self.pool.max_bytes - self._state.memory.allowed)
        return sum(sizes) <= room - kept_by_others

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

    def _pageable_now(self, nbytes: int, refusal: Exception | None = None) -> Lease | None:
        """Lease a pageable slab without waiting; None if all are in use."""
        with contextlib.suppress(AcquireTimeoutError):
            return self._acquire_pageable(nbytes, 0, refusal)
        return None

    def _acquire_pageable(
        self, nbytes: int, timeout: float | None, refusal: Exception | None
    ) -> Lease:
        """Lease a pageable slab, and report the refusal that was its reason, if there is one."""
        with _making:
            pool = self._state.pageable.get(self._shares)
            if pool is None:
                memory = SharedMemory(register=False) if self._shares else PageableMemory()
                pool = SlabPool(self.pool.max_bytes, memory=memory)
                self._state.pageable[self._shares] = pool
        lease: Lease = pool.acquire(nbytes, timeout=timeout, owner=self._owner)
        if refusal is not None:
            try:
                self._note_refusal(nbytes, refusal, "pageable memory is used, which is slow")
            except BaseException:
                lease.release()
                raise
        return lease

    def _note_refusal(self, nbytes: int, error: Exception, consequence: str) -> None:
        """Count a refusal, and report the pool's first one."""
        with self._lock:
            self.refusals += 1
        if is_first_refusal(self.pool):
            warnings.warn(
                f"page-locking of {format_bytes(nbytes)} was refused, {consequence}: {error}; "
                f"{remedy(nbytes)}; this warning is shown once",
                StagingWarning,
                stacklevel=_CALLER,
            )
