"""Slow work: freeing slabs and allocating others, in threads of ours.

No interrupt comes there, since handlers of signals run in the main thread alone. So what the kernel or CUDA has given
is never lost between the call and the line that takes note of it, as it would be by a Ctrl-C in the middle of a
``cudaHostRegister``. Nor do these threads spoil a CUDA graph that another one captures.
"""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Sequence

from .._memory import REFUSALS, MemoryResource, as_called_here, remedy
from .._reaper import reaper, running
from ._accounts import Account
from ._lease import Lease
from ._slab import Inbox, Slab

_START_SECONDS = 1.0
"""A thread that has not begun after so long is taken for dead; if it does begin, it finds nothing to do."""


class Job:
    """Slow work that a call has decided on: free some slabs, then allocate others. Runs once.

    Args:
        memory: frees and allocates.
        inbox: is told when the victims are gone, and when all is done.
        slabs: all that the pool holds: what is freed leaves it, what is made enters it.
        keeper: is kept alive until the end.
        victims: idle slabs, out of the idle ones already.
        capacity: of the slabs to be made.
        count: how many.
        nbytes: what the lease shall be of that the first slab is made for; 0 if for none.
        account: whose lease that is; None if for none.

    Attributes:
        promised: bytes of the cap that are kept for it beyond those of the victims; the ledger's.
        settled: victims that the ledger has taken note of.
        gone: victims that are freed, or lost because freeing them failed.
        made: new slabs.
        refusal: what the platform said when it refused memory, and what to do; empty if it did not.
        error: what ended it; None if nothing did. Nothing is made then.
        finished: whether all of this is final.
        lease: of the first slab.
    """

    def __init__(
        self,
        memory: MemoryResource,
        inbox: Inbox,
        slabs: dict[Slab, None],
        keeper: object,
        *,
        victims: Sequence[Slab] = (),
        capacity: int = 0,
        count: int = 0,
        nbytes: int = 0,
        account: Account | None = None,
    ) -> None:
        self.victims = victims
        self.account = account
        self.capacity = capacity
        self.count = count
        self.nbytes = nbytes
        self.settled = self.gone = 0
        self.promised = self.room_needed()
        self.made: list[Slab] = []
        self.refusal = ""
        self.error: BaseException | None = None
        self.finished = False
        self.lease: Lease | None = None
        self._claim = _thread.allocate_lock()  # taken by the thread that does it
        self._end = _thread.allocate_lock()  # free from the end on
        self._end.acquire()
        self._memory = memory
        self._inbox = inbox
        self._slabs = slabs
        self._keeper: object = keeper
        self._surroundings = as_called_here()

    def start(self, jobs: dict[Job, None]) -> None:
        """Begin, and be one of the jobs under way. Where there can be no thread any more, that is the error."""
        run, nothing = self._run, ()
        try:
            reaper.start()
            jobs[self] = None  # no call comes before that of the next line: an interrupt finds both done, or neither
            _thread.start_new_thread(run, nothing)
        except RuntimeError as error:  # the interpreter is about to end
            jobs[self] = None
            self.error, self.finished = error, True
            self._inbox.notices.setdefault(self)
            self._end.release()

    def wait(self) -> None:
        """Wait until it is done. Blocks.

        In CPython 3.11 a thread that has not begun has its creator's number, so an interrupt by
        ``PyThreadState_SetAsyncExc`` may hit it instead, and it never begins. Then another one is started.
        """
        while not self._end.acquire(timeout=_START_SECONDS):
            if not self._claim.locked():
                _thread.start_new_thread(self._run, ())
        self._end.release()

    def room_needed(self) -> int:
        """Return the bytes of the cap that it needs beyond those of the victims that are still there."""
        return max(0, self.capacity * self.count - sum(slab.capacity for slab in self.victims[self.settled :]))

    def outcome(self) -> Lease | None:
        """Return the lease, if it is there; after the end, when the ledger has taken note of that.

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
        if not self._claim.acquire(blocking=False):
            return
        running[self] = None
        try:
            with self._surroundings():
                for slab in self.victims:
                    self._free(slab)
                if self.victims and self.count:
                    self._inbox.notices.setdefault(self)
                while len(self.made) < self.count:
                    self._make()
        except BaseException as error:  # noqa: BLE001 - raised by `outcome`
            self._undo()
            self.error = error
        self.finished = True
        self._inbox.notices.setdefault(self)
        self._end.release()
        self._inbox.ring()
        self._keeper = None
        del running[self]

    def _free(self, slab: Slab) -> None:
        try:
            self._memory.deallocate(slab.block)
        finally:  # one whose freeing fails is lost, not used again
            self._slabs.pop(slab, None)
            self.gone += 1

    def _make(self) -> None:
        try:
            block = self._memory.allocate(self.capacity)
        except REFUSALS as error:
            self.refusal = f"{error}; {remedy(self.capacity)}"
            raise
        slab = Slab(block, self._inbox)
        self.made.append(slab)
        self._slabs[slab] = None

    def _undo(self) -> None:
        while self.made:
            slab = self.made.pop()
            self._slabs.pop(slab, None)
            with contextlib.suppress(Exception):  # the first error is the one that is told
                self._memory.deallocate(slab.block)


def free_what_is_done(slabs: dict[Slab, None], memory: MemoryResource) -> bool:
    """Free the slabs of a pool that nobody has any more, but those whose event is not done; say whether that was all.

    Raises:
        Exception: of the first slab that could not be freed; the others are.
    """
    errors = []
    for slab in list(slabs):
        try:
            if slab.event is None or slab.event.query():
                del slabs[slab]
                memory.deallocate(slab.block)
        except Exception as error:  # noqa: BLE001 - raised below, when the others are free
            errors.append(error)
    if errors:
        raise errors[0]
    return not slabs
