"""Slow work: freeing slabs and allocating others, in threads of ours.

No interrupt comes there, since handlers of signals run in the main thread alone. So what the kernel or CUDA has given
is never lost between the call and the line that takes note of it, as it would be by a Ctrl-C in the middle of a
``cudaHostRegister``. Nor do these threads spoil a CUDA graph that another one captures.

A thread may end before its first line: by a `MemoryError`, or by a ``PyThreadState_SetAsyncExc`` that was meant for its
creator, whose number it has in CPython 3.11 until it begins. Nothing else refers to the function that it runs, so the
death of that function says it, and what was reserved is given back.
"""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from .._memory import REFUSALS, MemoryResource, as_called_here, remedy
from .._reaper import reaper, running
from ._accounts import Account
from ._host_budget import LimitedMemory
from ._lease import Lease
from ._slab import Inbox, Slab


@dataclass(eq=False)
class Resize:
    """A change of what the pool holds: some slabs are freed, then others are allocated. Runs once."""

    memory: MemoryResource
    inbox: Inbox
    """Is told when the victims are gone, and when all is done."""
    slabs: dict[Slab, None]
    """All that the pool holds. What is freed leaves it, what is made enters it."""
    host: LimitedMemory | None
    """`memory`, if it allocates within a budget for the host."""
    keeper: object
    """Is kept alive until the end."""
    victims: Sequence[Slab] = ()
    """Idle slabs, out of the idle ones already."""
    capacity: int = 0
    """Bytes of each slab to be made."""
    count: int = 0
    """How many are made."""
    nbytes: int = 0
    """What is leased of the first one; 0 if nothing is."""
    account: Account | None = None
    """Whose lease that is."""

    def __post_init__(self) -> None:
        self.settled = 0
        """Victims that the ledger has taken note of."""
        self.gone = 0
        """Victims that are freed, or lost because freeing them failed."""
        self.promised = self.room_needed()
        """Bytes of the cap that are kept for it beyond those of the victims; the ledger's."""
        self.made: list[Slab] = []
        self.refusal = ""
        """What the platform said when it refused memory, and what to do; empty if it did not."""
        self.error: BaseException | None = None
        """What ended it; None if nothing did. Nothing is made then."""
        self.lease: Lease | None = None
        self._has_run = False
        self._end: SimpleQueue[object] = SimpleQueue()  # gets something when it is finished
        self._surroundings = as_called_here()

    def start(self, resizes: dict[Resize, Any]) -> None:
        """Begin, and be one of `resizes`, those under way. Where there can be no thread any more, that is the error."""
        run = partial(self._run)
        self._thread = weakref.ref(run)
        # Called in the reverse order, each by C alone. Not kept here: they would be a cycle.
        resizes[self] = weakref.ref(run, self._end.put), weakref.ref(run, partial(self.inbox.notices.setdefault, self))
        try:
            reaper.start()
            _thread.start_new_thread(run, ())
        except RuntimeError as error:  # the interpreter is about to end
            self.error = error
        finally:
            del run  # now the thread has the only one, or nobody: who keeps an error has the names of this function

    @property
    def finished(self) -> bool:
        """Whether all of this is final: the thread has done it, or ended before."""
        return self._has_run or self._thread() is None

    def wait(self) -> None:
        """Wait until it is done. Blocks."""
        self._end.get()

    def room_needed(self) -> int:
        """Return the bytes of the cap that it needs beyond those of the victims that are still there."""
        return max(0, self.capacity * self.count - sum(slab.capacity for slab in self.victims[self.settled :]))

    def outcome(self) -> Lease | None:
        """Return the lease, after the end, when the ledger has taken note of that; None if the thread never began.

        Raises:
            BaseException: what ended the work.
        """
        lease, self.lease = self.lease, None
        error, self.error = self.error, None  # or it and its traceback would keep one another
        if error is not None:
            try:
                raise error
            finally:
                del error
        return lease

    def _run(self) -> None:
        try:
            running[self] = None
            with self._surroundings():
                for slab in self.victims:
                    self._free(slab)
                if self.victims and self.count:
                    self.inbox.notices.setdefault(self)
                if self.count > 1 and self.host is not None:  # all or none
                    self.host.check_room(self.capacity * self.count)
                while len(self.made) < self.count:
                    self._make()
        except BaseException as error:  # noqa: BLE001 - raised by `outcome`
            self._undo()
            self.error = error
        finally:
            self.keeper = None
            self._has_run = True
            self.inbox.notices.setdefault(self)
            self._end.put(None)
            self.inbox.ring()
            running.pop(self, None)

    def _free(self, slab: Slab) -> None:
        try:
            self.memory.deallocate(slab.block)
        finally:  # one whose freeing fails is lost, not used again
            self.slabs.pop(slab, None)
            self.gone += 1

    def _make(self) -> None:
        try:
            block = self.memory.allocate(self.capacity)
        except REFUSALS as error:
            self.refusal = f"{error}; {remedy(self.capacity)}"
            raise
        slab = Slab(block, self.inbox)
        self.made.append(slab)
        self.slabs[slab] = None

    def _undo(self) -> None:
        while self.made:
            slab = self.made.pop()
            self.slabs.pop(slab, None)
            with contextlib.suppress(Exception):  # the first error is the one that is told
                self.memory.deallocate(slab.block)


def free_what_is_done(slabs: dict[Slab, None], memory: MemoryResource) -> bool:
    """Free the slabs of a pool that nobody has any more, but those whose event is not done; say whether that was all.

    Raises:
        Exception: of the first slab that could not be freed; the others are.
    """
    errors = []
    for slab in list(slabs):
        try:
            if all(fence.query() for fence in slab.fences()):
                del slabs[slab]
                memory.deallocate(slab.block)
        except Exception as error:  # noqa: BLE001 - raised below, when the others are free
            errors.append(error)
    if errors:
        raise errors[0]
    return not slabs
