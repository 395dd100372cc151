"""The slabs that nobody uses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque

from ._slab import Slab


class IdleSlabs:
    """Idle slabs by capacity, and by when they were used last. All methods are called under the pool's lock.

    Attributes:
        bytes: of all of them.
    """

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
        """Take a slab in."""
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
        """Return all of them, least recently used first."""
        return list(self._recency)

    def forget(self, capacity: int) -> None:
        """Forget a capacity of which the pool holds no slab any more."""
        if self._stacks.pop(capacity, None) is not None:
            self._capacities.remove(capacity)
