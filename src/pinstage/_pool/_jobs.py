"""Slow work: freeing slabs and allocating others, in threads of ours.

No interrupt comes there, since handlers of signals run in the main thread alone. So what the kernel or CUDA has given is
never lost between the call and the line that takes note of it, as it would be by a Ctrl-C in the middle of a
``cudaHostRegister``. Nor do these threads spoil a CUDA graph that another one captures.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from .._memory import MemoryResource, as_called_here
from ._lease import Lease
from ._slab import Inbox, Slab

_EXIT_SECONDS = 10.0
"""How long the end of the program waits for slow work: a thread that comes back from CUDA later would abort it."""

_REAPER_POLL_SECONDS = 0.02
"""How often the reaper looks whether what a dead pool had in flight is done. Nobody looks while there is none."""


class Job:
    """Slow work that a call has decided on: free some slabs, then allocate others. Runs once.

    Args:
        memory: frees and allocates.
        inbox: is told when the victims are gone, and when all is done.
        slabs: all that the pool holds: what is freed leaves it, what is made enters it.
        owner: is kept alive until the end.
        victims: idle slabs, out of the idle ones already.
        capacity: of the slabs to be made.
        count: how many.
        nbytes: what the lease shall be of that the first slab is made for; 0 if for none.

    Attributes:
        promised: bytes of the cap that are kept for it beyond those of the victims; the ledger's.
        settled: victims that the ledger has taken note of.
        gone: victims that are freed, or lost because freeing them failed.
        made: new slabs.
        error: what ended it; None if nothing did. Nothing is made then.
        finished: whether all of this is final.
        lease: of the first slab.
        bell: is rung at the end.
    """

    def __init__(
        self,
        memory: MemoryResource,
        inbox: Inbox,
        slabs: dict[Slab, None],
        owner: object,
        *,
        victims: Sequence[Slab] = (),
        capacity: int = 0,
        count: int = 0,
        nbytes: int = 0,
    ) -> None:
        self.victims = victims
        self.capacity = capacity
        self.count = count
        self.nbytes = nbytes
        self.settled = self.gone = 0
        self.promised = self.room_needed()
        self.made: list[Slab] = []
        self.error: BaseException | None = None
        self.finished = False
        self.lease: Lease | None = None
        self.bell: SimpleQueue[None] = SimpleQueue()
        self._memory = memory
        self._inbox = inbox
        self._slabs = slabs
        self._owner: object = owner
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
            self._inbox.notices.append(self)
            self.bell.put(None)

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
        running[self] = None
        try:
            with self._surroundings():
                for slab in self.victims:
                    self._free(slab)
                if self.victims and self.count:
                    self._inbox.notices.append(self)
                while len(self.made) < self.count:
                    self._make()
        except BaseException as error:  # noqa: BLE001 - raised by `outcome`
            self._undo()
            self.error = error
        self.finished = True
        self._inbox.notices.append(self)
        self.bell.put(None)
        self._inbox.ring()
        self._owner = None
        del running[self]

    def _free(self, slab: Slab) -> None:
        try:
            self._memory.deallocate(slab.block)
        finally:  # one whose freeing fails is lost, not used again
            self._slabs.pop(slab, None)
            self.gone += 1

    def _make(self) -> None:
        slab = Slab(self._memory.allocate(self.capacity))
        self.made.append(slab)
        self._slabs[slab] = None

    def _undo(self) -> None:
        while self.made:
            slab = self.made.pop()
            self._slabs.pop(slab, None)
            try:
                self._memory.deallocate(slab.block)
            except Exception:  # noqa: BLE001, S110 - the first error is the one that is told
                pass


class Death(weakref.ref[Any]):
    """A weak reference that the reaper gets when the object has died that had all of a pool: nobody has a lease or view.

    Attributes:
        slabs: what is to be freed.
        memory: frees it.
    """

    __slots__ = ("memory", "slabs")

    slabs: dict[Slab, None]
    memory: MemoryResource

    def reap(self) -> bool:
        """Free what nothing reads or writes any more; say whether that was all."""
        errors = []
        for slab in list(self.slabs):
            try:
                if slab.event is None or slab.event.query():
                    del self.slabs[slab]
                    self.memory.deallocate(slab.block)
            except Exception as error:  # noqa: BLE001 - raised below, when the others are free
                errors.append(error)
        if errors:
            raise errors[0]
        return not self.slabs


class Reaper:
    """Frees what dropped pools held, and what came back to closed ones, in a thread of its own.

    Finalisers and releases hand over to it by one call of C: ``tasks.put``.

    Attributes:
        tasks: what has a method `reap`, which says whether all is done; if not, it is called again later.
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Any] = SimpleQueue()
        self._deaths: set[Death] = set()
        self._is_running = False

    def watch(self, thing: Any, slabs: dict[Slab, None], memory: MemoryResource) -> None:
        """Free slabs when an object has died."""
        death = Death(thing, self.tasks.put)
        death.slabs, death.memory = slabs, memory
        self._deaths.add(death)

    def start(self) -> None:
        """See that the thread is there.

        Raises:
            RuntimeError: the interpreter is about to end.
        """
        if not self._is_running:
            _thread.start_new_thread(self._serve, ())
            self._is_running = True  # twice at the worst, of two threads at once; the tasks are shared then

    def _serve(self) -> None:
        unfinished: list[Any] = []
        while True:
            if unfinished:
                time.sleep(_REAPER_POLL_SECONDS)
            tasks, unfinished = unfinished, []
            if not tasks or not self.tasks.empty():
                tasks.append(self.tasks.get())
            while tasks:
                running[self] = None
                if not self._is_done(tasks[0]):
                    unfinished.append(tasks[0])
                del tasks[0]  # the last reference to it, perhaps
                del running[self]

    def _is_done(self, task: Any) -> bool:
        """Do what is to be done for a task now; say whether that was all."""
        self._deaths.discard(task)
        try:
            with as_called_here()():
                return bool(task.reap())
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _tell(error)
            return True


def _tell(error: Exception) -> None:
    with contextlib.suppress(RuntimeWarning):  # made an error: not here
        warnings.warn(
            f"memory of a pool that nobody has any more is leaked: {error!r}; close() pools before the device fails",
            RuntimeWarning,
            stacklevel=1,
        )


running: dict[Any, None] = {}
"""What works right now in a thread of ours."""

reaper = Reaper()


def _forget() -> None:
    """In a forked child: the threads are not there, and what they had to do is the parent's affair."""
    running.clear()
    reaper.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _wait_for_the_last() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.001)
