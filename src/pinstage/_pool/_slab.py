"""A slab, what may keep it busy, and the notices by which the pool learns that it came back."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading

    from .._memory import Block
    from ._stats import Meter


class Event(Protocol):
    """Work that will be done at some time: all that the pool needs to know of CUDA. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Say whether the work is done, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait until the work is done."""
        ...


class Slab:
    """One contiguous host allocation of the pool.

    What keeps it busy is told by `holder`, `exporter` and `event`, and by nothing else: the state that is counted
    follows from these, so it can be found out again if an interrupt ends whoever was changing it.

    Attributes:
        block: its memory.
        ptr: address of its first byte.
        capacity: its size in bytes.
        requested: what the holder of its lease asked for; 0 if it is not leased.
        state: where it is counted; None until it is.
        holder: a weak reference to the lease; None if there is none, or it was released.
        exporter: a weak reference to what all views of the last lease keep alive; None if there was no view.
        event: what the slab has to wait for when it has come back; None for nothing.
    """

    __slots__ = ("block", "capacity", "event", "exporter", "holder", "ptr", "requested", "state")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.ptr = block.ptr
        self.capacity = block.nbytes
        self.requested = 0
        self.state: Meter | None = None
        self.holder: Notice | None = None
        self.exporter: Notice | None = None
        self.event: Event | None = None

    def has_lease(self) -> bool:
        """Say whether somebody has a lease of it that was not released."""
        return self.holder is not None and self.holder() is not None

    def has_view(self) -> bool:
        """Say whether a view of it is alive."""
        return self.exporter is not None and self.exporter() is not None


class Notice(weakref.ref[Any]):
    """A weak reference that lies in the pool's inbox when its object has died, or when a release puts it there."""

    __slots__ = ("slab",)

    slab: Slab


class Inbox:
    """What has come back, and who waits for it. Written by releases and finalisers, which take no lock.

    A finaliser may run at any point of any thread, also inside the pool, and an interrupt may end it between two steps
    of Python. So all that it does is one call of C: the callback of a weak reference is ``notices.append``.

    Attributes:
        notices: slabs to be looked at again, as `Notice`; and slow work that got on, as `Job`. Whoever next has the
            pool's lock works them off.
        bells: of those who wait for a slab, the one whose turn it is first. A bell is a lock that is rung by releasing it.
    """

    def __init__(self) -> None:
        self.notices: deque[Any] = deque()
        self.bells: deque[threading.Lock] = deque()

    def watch(self, thing: Any, slab: Slab) -> Notice:
        """Have the death of an object noticed."""
        notice = Notice(thing, self.notices.append)
        notice.slab = slab
        return notice

    def ring(self) -> None:
        """Let the first of those who wait look again."""
        try:
            self.bells[0].release()
        except (IndexError, RuntimeError):
            pass  # nobody waits, or it was rung and not heard yet
