"""Slow work: freeing and allocating slabs, in the pool's own threads.

Python handles signals in the main thread only, so no interrupt reaches these threads. Memory is
never lost between the call that allocates it and the line that records it. Nor do these threads
break the capture of a CUDA graph in another thread.
"""

from __future__ import annotations

import _thread
import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from .._memory import REFUSALS, Block, as_called_here, remedy
from .._reaper import running
from ._host_budget import HostIsFull
from ._lease import Lease
from ._refusals import Refusal, reserve_does_not_fit
from ._slab import Holdings, Slab
from ._waiting import Waiter

_PAUSE_SECONDS = 1e-3
"""Poll interval of `Growth.synchronize`. A reservation takes at least milliseconds."""

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
"""Plan to check whether other processes have given back bytes of the `HostBudget`, and then to
decide again.
"""

Decision = Lease | GrowthPlan | None


class Growth:
    """Carries out a plan in its own thread; also the fence that `SlabPool.reserve` returns.

    The thread makes the decision again, under the pool's lock, so an abandoned plan leaves nothing
    behind. Until it ends, `promised` returns the bytes that are set aside for it.

    Args:
        state: the pool's.
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
        self.plan = GrowthPlan()
        self.waiter = waiter
        self.freed = 0
        self.refusal: Refusal | None = None
        self._state = state
        self._decide = decide
        self._found: Lease | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._news: SimpleQueue[object] = SimpleQueue()  # gets an item at the end
        self._surroundings = as_called_here()

    def result(self) -> Lease | None:
        """Do the work, unless it is done, and wait for its end. Return the lease, if there is one.

        Raises:
            BaseException: the error that ended the work. Then nothing was allocated.
        """
        while not self._is_over:
            run = partial(self.run)
            # The thread may end before its first line, by a `MemoryError` or by a
            # ``PyThreadState_SetAsyncExc`` meant for its creator, whose thread id it has in CPython
            # 3.11 until it begins. Then the end of the object `run` wakes this loop.
            self._thread = weakref.ref(run, self._news.put)
            try:
                _thread.start_new_thread(run, ())
            finally:
                del run  # an error that is kept would keep it through this frame
            self._news.get()
        found, self._found = self._found, None
        # Else it and its traceback would keep each other alive.
        error, self._error = (
            self._error,
            None,
        )
        if error is not None:
            try:
                raise error
            finally:
                del error
        return found

    def promised(self) -> int:
        """Return the bytes of the cap that it needs beyond those of its remaining victims."""
        plan = self.plan
        return max(
            0, plan.capacity * plan.count - sum(slab.capacity for slab in plan.victims) + self.freed
        )

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        while not self._is_over:
            # Not a `threading.Event`: an interrupt may leave its lock locked.
            time.sleep(_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Do the work in this thread."""
        state = self._state
        try:
            running[self] = None
            with self._surroundings():
                self._found = self._attempt()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
            if self.waiter is None and isinstance(error, HostIsFull):
                self._error = reserve_does_not_fit(
                    state.figures(), self.plan.capacity, self.plan.count
                )
        finally:
            del self._state, self._decide  # so that a fence doesn't keep the pool alive
            self._is_over = True
            self._news.put(None)
            running.pop(self, None)
            state.wake_first()

    def _attempt(self) -> Lease | None:
        """Decide, and carry out the plan. Return the lease, if there is one."""
        state = self._state
        if state.host is not None:
            state.host.look()
        with state.lock:
            found = self._decide()
            if found is LOOK:
                return None
            if isinstance(found, GrowthPlan):
                if self.waiter is not None:
                    state.waiters.remove(self.waiter)  # an error if an interrupt has ended its wait
                for slab in found.victims:
                    slab.doomed = True
                self.plan = found
                state.growths[self] = None
        state.wake_first()  # the waiter has left the line
        return self._carry_out(found) if isinstance(found, GrowthPlan) else found

    def _carry_out(self, plan: GrowthPlan) -> Lease | None:
        state, blocks = self._state, list[Block]()
        try:
            for slab in plan.victims:
                self._free(slab)
            if plan.count > 1 and state.host is not None:  # all or none
                state.host.check_room(plan.capacity * plan.count)
            while len(blocks) < plan.count:
                blocks.append(self._allocate(plan.capacity))
        except BaseException:
            while blocks:
                with contextlib.suppress(Exception):  # the first error is raised
                    state.memory.deallocate(blocks.pop())
            raise
        finally:
            with state.lock:
                del state.growths[self]
                lease = self._settle(blocks)
        if plan.count and state.closed:
            state.reap()
        return lease

    def _allocate(self, nbytes: int) -> Block:
        state = self._state
        try:
            return state.memory.allocate(nbytes)
        except REFUSALS as error:
            total, until = state.promised(), time.monotonic() + RETRY_SECONDS
            before = total - nbytes * self.plan.count
            self.refusal = state.refusal = Refusal(
                f"{error}; {remedy(nbytes)}", total, before, until
            )
            raise

    def _free(self, slab: Slab) -> None:
        state = self._state
        try:
            state.memory.deallocate(slab.block)
        finally:  # a slab that could not be freed is never used again
            with state.lock:
                del state.slabs[slab]
                slab.stack.pop(slab, None)
                self.freed += slab.capacity
                state.trims += 1

    def _settle(self, blocks: list[Block]) -> Lease | None:
        """Make slabs of new blocks, and lease one to the waiter; make victims that were not freed
        idle again.
        """
        state, lease = self._state, None
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
