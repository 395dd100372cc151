"""Slow work: freeing and allocating slabs, in the pool's own threads.

No interrupt reaches these threads, so memory is never lost between the call that allocates it and
the line that records it. Nor do they break the capture of a CUDA graph in another thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._memory import REFUSALS, Block, more_may_help, remedy
from ._adaptor import RefusedForNow
from ._refusals import Refusal
from ._rows import NOW
from ._slab import Lease, PoolState, Slab, free, total

RETRY_SECONDS = 60.0
"""Seconds for which a pool doesn't try to grow after memory was refused: a refusal may take as long
as an allocation."""


@dataclass(eq=False)
class Growth:
    """A decision to free some slabs, then to allocate others. `carry_out` does that."""

    waiter: Any
    """The request. It gets a lease of the new slab, unless it asks for no bytes, or an interrupt
    has ended it."""
    victims: Sequence[Slab] = ()
    """Idle slabs to free."""
    capacity: int = 0
    """Bytes of each slab to allocate."""
    count: int = 0
    """The number of slabs to allocate."""
    promised = 0
    """Bytes of the cap that are set aside for it: those to allocate, or those of its victims if
    they have more."""
    refusal: Refusal | None = None
    """The platform's refusal of memory; None if it didn't refuse."""


def carry_out(state: PoolState, growth: Growth) -> Lease | None:
    """Free slabs, then allocate others. Call it in a thread that no interrupt reaches.

    Until then, a decision changes nothing. So an interrupt may come before, and so may another
    call's thread, which takes the slabs or the bytes.

    Returns:
        The lease of the request, if there is one.

    Raises:
        RefusedForNow: there is no room any more; the request has to be decided again.
        BudgetExceededError: there is no room, and nothing waits for it.
        Exception: as `ResourceAdaptor.allocate`; nothing was allocated.
    """
    lease, waiter, nbytes = None, growth.waiter, growth.capacity * growth.count
    blocks = list[Block]()
    try:
        with state.lock:
            _begin(state, growth)
        state.wake(1)
        free(state.slabs, growth.victims, state.memory)
        growth.promised = nbytes
        if nbytes:
            blocks = _allocate(state, growth)
    except RefusedForNow:
        if waiter.nbytes:
            raise
        raise state.figures().reserve_does_not_fit(growth.capacity, growth.count) from None
    finally:
        with state.lock:
            state.growths.discard(growth)
            for block in blocks:
                slab = state.add(block)
                if waiter.nbytes and not waiter.is_over and not state.closed:
                    state.misses += 1
                    lease = Lease(state, slab, waiter.nbytes, waiter.account)
                else:
                    slab.put(None)
        state.wake(1)
    if nbytes and state.closed:
        state.reap()
    return lease


def _begin(state: PoolState, growth: Growth) -> None:
    """Set its bytes aside, and mark the slabs that are still free. Call it under the lock."""
    nbytes = growth.capacity * growth.count
    growth.victims = list(filter(Slab.is_free, growth.victims))
    victims = total(growth.victims)
    if nbytes > state.max_bytes - state.promised() + victims:
        raise RefusedForNow
    growth.promised = max(nbytes, victims)
    state.growths.add(growth)
    for slab in growth.victims:
        slab.doomed = True
    if not growth.waiter.was_refused:
        state.waiters.discard(growth.waiter)  # later requests needn't wait for that


def _allocate(state: PoolState, growth: Growth) -> list[Block]:
    nbytes, count, waiter = growth.capacity, growth.count, growth.waiter
    try:
        return state.memory.allocate(nbytes, count, NOW if waiter.was_refused else waiter.deadline)
    except REFUSALS as error:
        most, until = state.promised(), time.monotonic() + RETRY_SECONDS
        reason = f"{error}; {remedy(nbytes)}" if more_may_help(error) else str(error)
        growth.refusal = state.refusal = Refusal(reason, most, most - nbytes * count, until)
        raise
