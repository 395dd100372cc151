"""The slabs that nobody uses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from ._stats import Meter

if TYPE_CHECKING:
    from ._lease import Slab


class IdleSlabs:
    """Idle slabs by capacity, and by when they were used last. All methods are called under the pool's lock.

    Attributes:
        meter: of free slabs: the idle ones, and those that are being freed right now.
        bytes: of the idle ones alone.
    """

    def __init__(self) -> None:
        self.meter = Meter()
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
                self.meter.leave(capacity)
                return slab
        return None

    def put(self, slab: Slab) -> None:
        """Take a slab in. Its capacity is known."""
        slab.event = None
        self._stacks[slab.capacity].append(slab)
        self._recency[slab] = None
        self.bytes += slab.capacity
        self.meter.enter(slab.capacity)

    def count(self, nbytes: int, bound: int) -> int:
        """Say how many there are of at least `nbytes` and at most `bound`."""
        first = bisect_left(self._capacities, nbytes)
        return sum(len(self._stacks[size]) for size in self._capacities[first:] if size <= bound)

    def pick_victims(self, nbytes: int) -> list[Slab]:
        """Take out so many bytes, or all, least recently used first. They count as free until `meter.leave`."""
        victims = []
        while nbytes > 0 and self._recency:
            slab, _ = self._recency.popitem(last=False)
            self._stacks[slab.capacity].popleft()  # each class is in the same order as _recency
            self.bytes -= slab.capacity
            nbytes -= slab.capacity
            victims.append(slab)
        return victims

    def learn(self, capacity: int) -> None:
        """Make a capacity known: the pool holds a slab of it."""
        if capacity not in self._stacks:
            self._stacks[capacity] = deque()
            insort(self._capacities, capacity)

    def unlearn(self, capacity: int) -> None:
        """Forget a capacity: the pool holds no slab of it any more."""
        del self._stacks[capacity]
        self._capacities.remove(capacity)
