"""A slab, what may keep it busy, where it is counted, and the notices by which the pool learns that it came back."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from .._memory import Block
from ._accounts import Account, Waiter


class Fence(Protocol):
    """What a slab has to wait for: all that the pool needs to know of CUDA. A `torch.cuda.Event` is one, or a stream.

    `query` says whether the work is done, without waiting; `synchronize` waits until it is.
    """

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Meter:
    """Bytes and slabs in one state: current, peak and total ever entered."""

    __slots__ = ("bytes", "peak_bytes", "peak_slabs", "slabs", "total_bytes", "total_slabs")

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = self.total_bytes = 0
        self.slabs = self.peak_slabs = self.total_slabs = 0

    def enter(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.slabs += 1
        self.total_bytes += nbytes
        self.total_slabs += 1
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        if self.slabs > self.peak_slabs:
            self.peak_slabs = self.slabs

    def leave(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self.slabs -= 1

    def recount(self, sizes: list[int]) -> None:
        self.bytes, self.slabs = sum(sizes), len(sizes)

    def figures(self, state: str) -> dict[str, int]:
        """Return all six, named as in `PoolStats`."""
        return {
            f"{which}{state}_{unit}": getattr(self, f"{which}{unit}")
            for which in ("", "peak_", "total_")
            for unit in ("bytes", "slabs")
        }


class Slab:
    """One contiguous host allocation of the pool.

    What keeps it busy is told by `holder`, `exporter`, `event` and `guards`, and by nothing else: the state that is
    counted follows from these, so it can be found out again if an interrupt ends whoever was changing it.

    Attributes:
        block: its memory.
        ptr: address of its first byte.
        capacity: its size in bytes.
        requested: what the holder of its lease asked for; 0 if it is not leased.
        account: of the owner whose lease it has, or had last while it is in flight; None if it is idle.
        state: where it is counted; None until it is.
        holder: a weak reference to the lease; None if there is none, or it was released.
        exporter: a weak reference to what all views of the last lease keep alive; None if there was no view.
        event: what the last lease was released behind, or is if it is never released; None for nothing.
        guards: what the slab has to wait for besides.
        came_back: puts the slab into the pool's inbox, whatever it is given.
    """

    def __init__(self, block: Block, inbox: Inbox) -> None:
        self.block = block
        self.came_back: Callable[[object], object] = partial(inbox.notices.setdefault, self)
        self.ptr = block.ptr
        self.capacity = block.nbytes
        self.requested = 0
        self.account: Account | None = None
        self.state: Meter | None = None
        self.holder: weakref.ref[Any] | None = None
        self.exporter: weakref.ref[Any] | None = None
        self.event: Fence | None = None
        self.guards: tuple[Fence, ...] = ()

    def enter(self, state: Meter) -> None:
        before, nbytes = self.state, self.capacity
        if before is not state:
            if before is not None:
                before.bytes -= nbytes
                before.slabs -= 1
            self.state = state
            state.enter(nbytes)

    def fences(self) -> tuple[Fence, ...]:
        """Return all that the slab has to wait for when it has come back."""
        return self.guards if self.event is None else (*self.guards, self.event)

    def has_lease(self) -> bool:
        return self.holder is not None and self.holder() is not None

    def has_view(self) -> bool:
        return self.exporter is not None and self.exporter() is not None


class IdleSlabs:
    """Idle slabs by capacity, and by when they were used last. All methods are called under the pool's lock."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stacks: dict[int, deque[Slab]] = {}  # by capacity; most recently used at the right
        self._capacities: list[int] = []  # the keys of _stacks, sorted
        self._recency: OrderedDict[Slab, None] = OrderedDict()  # least recently used first

    def take(self, nbytes: int, bound: int) -> Slab | None:
        """Take out the smallest slab of at least `nbytes` and at most `bound`."""
        if self.bytes < nbytes:
            return None  # the steady state of one loop: its only slab is in flight until somebody looks
        capacities = self._capacities
        for position in range(bisect_left(capacities, nbytes), len(capacities)):
            capacity = capacities[position]
            if capacity > bound:
                return None
            if stack := self._stacks[capacity]:
                slab = stack.pop()
                del self._recency[slab]
                self.bytes -= capacity
                return slab
        return None

    def put(self, slab: Slab) -> None:
        stack = self._stacks.get(slab.capacity)
        if stack is None:
            stack = self._stacks[slab.capacity] = deque()
            insort(self._capacities, slab.capacity)
        stack.append(slab)
        self._recency[slab] = None
        self.bytes += slab.capacity

    def count(self, nbytes: int, bound: int) -> int:
        """Say how many there are of at least `nbytes` and at most `bound`."""
        first = bisect_left(self._capacities, nbytes)
        return sum(len(self._stacks[size]) for size in self._capacities[first:] if size <= bound)

    def take_oldest(self, nbytes: int) -> list[Slab]:
        """Take out so many bytes, or all, least recently used first."""
        taken = []
        while nbytes > 0 and self._recency:
            slab, _ = self._recency.popitem(last=False)
            self._stacks[slab.capacity].popleft()  # each class is in the same order as _recency
            self.bytes -= slab.capacity
            nbytes -= slab.capacity
            taken.append(slab)
        return taken

    def slabs(self) -> list[Slab]:
        return list(self._recency)

    def forget(self, capacity: int) -> None:
        """Forget a capacity of which the pool holds no slab any more."""
        if self._stacks.pop(capacity, None) is not None:
            self._capacities.remove(capacity)


class Inbox:
    """What has come back, and who waits for it. Written by releases and finalisers, which take no lock.

    A finaliser may run at any point of any thread, also inside the pool, and an interrupt may end it between two steps
    of Python. So all that it does is one call of C: the callback of a weak reference is ``notices.setdefault`` with the
    slab, made once for each slab.

    Attributes:
        notices: slabs to be looked at again, and slow work that got on, in the order in which they came. Whoever next
            has the pool's lock works them off.
        line: who waits for a slab, the one who has waited longest first.
    """

    def __init__(self) -> None:
        self.notices: dict[Any, Any] = {}
        self.line: deque[Waiter] = deque()

    def ring(self) -> None:
        """Let the first of those who wait look again."""
        try:  # noqa: SIM105 - contextlib.suppress is Python, where an interrupt may come
            self.line[0].ring()
        except (IndexError, RuntimeError):
            pass  # nobody waits, or it was rung and not heard yet
