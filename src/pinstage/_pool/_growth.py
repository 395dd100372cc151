"""Slow work: freeing and allocating slabs, in the pool's own threads.

No interrupt reaches these threads, so memory is never lost between the call that allocates it and
the line that records it. Nor do they break the capture of a CUDA graph in another thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from .._memory import REFUSALS, Block, more_may_help, remedy
from .._reaper import UninterruptedCall
from . import _refusals
from ._adaptor import RefusedForNow
from ._slab import Lease, PoolState, Slab, free, total

RETRY_SECONDS = 60.0
"""Seconds for which a pool doesn't try to grow after memory was refused: a refusal may take as long
as an allocation."""


class Growth(UninterruptedCall[Lease | None]):
    """Frees some slabs, then allocates others, in its own thread; also the fence that
    `SlabPool.reserve` returns.

    Make it under the pool's lock. From then on, nothing else may use the slabs, and `promised`
    bytes are set aside; `PoolState.scan` drops it if an interrupt ended the call of its request
    before the thread began. `result` returns the lease, if there is one. After an error nothing was
    allocated.

    Without slabs, it only checks whether the memory resource allows more.

    Args:
        state: the pool's. It isn't kept beyond the end, so that a fence doesn't keep the pool
            alive.
        waiter: the request. It gets a lease of the new slab, unless it asks for no bytes, or an
            interrupt has ended it.
        victims: idle slabs to free.
        capacity: bytes of each slab to allocate.
        count: the number of slabs to allocate.

    Attributes:
        refusal: the platform's refusal of memory; None if it didn't refuse.
    """

    def __init__(
        self,
        state: PoolState,
        waiter: Any,
        victims: Sequence[Slab] = (),
        capacity: int = 0,
        count: int = 0,
    ) -> None:
        super().__init__(keeps=state)
        self.waiter, self.victims = waiter, victims
        self.capacity, self.count = capacity, count
        self.refusal: _refusals.Refusal | None = None
        self._has_begun = False
        state.growths[self] = None
        for slab in victims:
            slab.doomed = True

    def promised(self) -> int:
        """Return the bytes of the cap that it has: those to allocate, or those of its victims if
        they have more.
        """
        return max(self.capacity * self.count, total(self.victims))

    def is_abandoned(self) -> bool:
        """Return whether an interrupt ended the call of its request before the thread began. Then
        it never begins.
        """
        return self.waiter.is_over and not self._has_begun

    def _call(self) -> Lease | None:
        state: PoolState = self._keeps
        with state.lock:
            if self.is_abandoned():
                return None
            self._has_begun = True
        lease, waiter = None, self.waiter
        blocks: Iterable[Block] = ()
        try:
            free(state.slabs, self.victims, state.memory)
            self.victims = ()
            state.memory.look()
            if self.count:
                blocks = self._allocate(state)
        except RefusedForNow:
            if waiter.nbytes:
                raise
            figures = state.figures()
            raise _refusals.reserve_does_not_fit(figures, self.capacity, self.count) from None
        finally:
            with state.lock:
                del state.growths[self]
                for block in blocks:
                    slab = state.add(block)
                    if waiter.nbytes and not waiter.is_over and not state.closed:
                        state.misses += 1
                        lease = Lease(state, slab, waiter.nbytes, waiter.account)
                    else:
                        slab.put(None)
            state.wake(1)
        if self.count and state.closed:
            state.reap()
        return lease

    def _allocate(self, state: PoolState) -> Iterable[Block]:
        nbytes, count = self.capacity, self.count
        try:
            return state.memory.allocate(nbytes, count, self.waiter.deadline)
        except REFUSALS as error:
            most, until = state.promised(), time.monotonic() + RETRY_SECONDS
            reason = f"{error}; {remedy(nbytes)}" if more_may_help(error) else str(error)
            refusal = _refusals.Refusal(reason, most, most - nbytes * count, until)
            self.refusal = state.refusal = refusal
            raise
