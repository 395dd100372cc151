"""Slow work: freeing and allocating slabs, in the pool's own threads.

No interrupt reaches these threads, so memory is never lost between the call that allocates it and
the line that records it. Nor do they break the capture of a CUDA graph in another thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._memory import REFUSALS, Block, more_may_help, remedy
from .._reaper import UninterruptedCall
from ._adaptor import RefusedForNow
from ._lease import Lease
from ._refusals import Refusal, reserve_does_not_fit
from ._slab import Holdings, Slab
from ._waiting import Waiter

RETRY_SECONDS = 60.0
"""Seconds for which a pool doesn't try to grow after memory was refused: a refusal may take as long
as an allocation."""


@dataclass(frozen=True)
class GrowthPlan:
    """A change of the pool's slabs: some are freed, then others are allocated."""

    victims: Sequence[Slab] = ()
    capacity: int = 0
    """Bytes of each slab to allocate."""
    count: int = 0


LOOK = GrowthPlan()
"""Plan to check whether the memory resource allows more, and then to decide again."""

Decision = Lease | GrowthPlan | None


class Growth(UninterruptedCall[Lease | None]):
    """Carries out a plan in its own thread; also the fence that `SlabPool.reserve` returns.

    The thread makes the decision again, under the pool's lock, so an abandoned plan leaves nothing
    behind. Until it ends, `promised` returns the bytes that are set aside for it. `result` returns
    the lease, if there is one. After an error nothing was allocated.

    Args:
        state: the pool's. It isn't kept beyond the end, so that a fence doesn't keep the pool
            alive.
        decide: returns a plan, a lease if no plan is needed, or None.
        waiter: the request that gets a lease of the first slab, and leaves the line once there is a
            plan; may be None.

    Attributes:
        plan: the steps; empty until the decision.
        freed: bytes given back to the system.
        refusal: the platform's refusal of memory; None if it didn't refuse.
    """

    def __init__(
        self, state: Holdings, decide: Callable[[], Decision], waiter: Waiter | None = None
    ) -> None:
        super().__init__(decide, state)
        self.plan = GrowthPlan()
        self.waiter = waiter
        self.freed = 0
        self.refusal: Refusal | None = None

    def promised(self) -> int:
        """Return the bytes of the cap that it needs beyond those of its remaining victims."""
        plan = self.plan
        return max(
            0, plan.capacity * plan.count - sum(slab.capacity for slab in plan.victims) + self.freed
        )

    def _call(self) -> Lease | None:
        """Decide, and carry out the plan. Return the lease, if there is one."""
        decide: Callable[[], Decision] = self._function
        state: Holdings = self._keeps
        try:
            state.memory.look()
            with state.lock:
                decision = decide()
                if decision is LOOK:
                    return None
                if not isinstance(decision, GrowthPlan):
                    return decision
                self._begin(state, decision)
            state.wake_first()  # the waiter has left the line
            return self._carry_out(state)
        except RefusedForNow:
            if self.waiter is not None:
                raise
            plan = self.plan
            raise reserve_does_not_fit(state.figures(), plan.capacity, plan.count) from None
        finally:
            state.wake_first()

    def _begin(self, state: Holdings, plan: GrowthPlan) -> None:
        """Record the plan. Call it under the pool's lock."""
        if self.waiter is not None:
            state.waiters.remove(self.waiter)  # an error if an interrupt has ended its wait
        for slab in plan.victims:
            slab.doomed = True
        self.plan = plan
        state.growths[self] = None

    def _carry_out(self, state: Holdings) -> Lease | None:
        plan, blocks = self.plan, list[Block]()
        try:
            for slab in plan.victims:
                self._free(state, slab)
            if plan.count:
                blocks = self._allocate(state)
        finally:
            with state.lock:
                del state.growths[self]
                lease = self._settle(state, blocks)
        if plan.count and state.closed:
            state.reap()
        return lease

    def _allocate(self, state: Holdings) -> list[Block]:
        nbytes, count = self.plan.capacity, self.plan.count
        deadline = math.inf if self.waiter is None else self.waiter.deadline
        try:
            return state.memory.allocate(nbytes, count, deadline)
        except REFUSALS as error:
            total, until = state.promised(), time.monotonic() + RETRY_SECONDS
            reason = f"{error}; {remedy(nbytes)}" if more_may_help(error) else str(error)
            refusal = Refusal(reason, total, total - nbytes * count, until)
            self.refusal = state.refusal = refusal
            raise

    def _free(self, state: Holdings, slab: Slab) -> None:
        try:
            state.memory.deallocate(slab.block)
        finally:  # a slab that could not be freed is never used again
            with state.lock:
                del state.slabs[slab]
                slab.stack.pop(slab, None)
                self.freed += slab.capacity
                state.trims += 1

    def _settle(self, state: Holdings, blocks: list[Block]) -> Lease | None:
        """Make slabs of new blocks, and lease one to the waiter; make victims that were not freed
        idle again.
        """
        lease = None
        for slab in self.plan.victims:
            slab.doomed = slab not in state.slabs
        for block in blocks:
            slab = Slab(block, state.stacks, next(state.clock))
            state.slabs[slab] = None
            state.total_held_bytes += slab.capacity
            if self.waiter is not None:
                state.misses += 1
                lease = Lease(state, slab, self.waiter.nbytes, self.waiter.account)
            else:
                slab.put(None)
        state.sizes = sorted({slab.capacity for slab in state.slabs})
        state.peak_held_bytes = max(state.peak_held_bytes, state.held_bytes)
        state.peak_held_slabs = max(state.peak_held_slabs, len(state.slabs))
        return lease
