"""Work in threads of our own: tasks that finalisers hand over, and calls that no interrupt may cut
short.

A finaliser may run at any point in any thread: inside a lock, or in the middle of a graph capture.
An interrupt may end it half-way. So a finaliser never waits, calls CUDA or frees memory. It hands
the work over with a single C call, ``reaper.tasks.put``, as the callback of a weak reference.

An interrupt may also come between a C call that maps, opens or locks something and the line that
stores the result. So such calls run in threads of our own, by `uninterrupted`, and store their
results in an object that was made before. That object is watched by the reaper, and what it holds
is given back when it is gone.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ._memory import as_called_here
from .errors import StagingWarning

T = TypeVar("T")

_POLL_SECONDS = 0.02
"""Poll interval for tasks that aren't done yet, such as waiting for a copy. Without tasks the
reaper sleeps.
"""

_PAUSE_SECONDS = 1e-3
"""Poll interval of `UninterruptedCall.synchronize`, whose calls take at least milliseconds."""

_EXIT_SECONDS = 10.0
"""Seconds for which the program's exit waits for our threads: a return from CUDA after the exit
would abort the process."""

running = dict[Any, None]()
"""Tasks that our threads are running now. The threads add and remove them."""

ending = list[bool]()
"""Not empty once the program's exit has begun to wait for the running tasks."""


def begin(task: Any) -> bool:
    """Record that the calling thread starts a task; return False if the program is exiting, so that
    it must not.

    The task is recorded before `ending` is checked, so either the exit sees the task, or the task
    sees the exit.
    """
    running[task] = None
    if ending:
        running.pop(task, None)
    return not ending


class UninterruptedCall:
    """A call in a thread of our own. Python handles signals in the main thread only, so no
    interrupt reaches it.

    An interrupt may end the wait for the call. Then the call goes on, and its result is dropped.

    Args:
        function: called without arguments.
        keeps: an object that stays alive until the call has ended, even if nothing waits for the
            call any longer.
    """

    def __init__(self, function: Callable[[], Any] = lambda: None, keeps: Any = None) -> None:
        self._function, self._keeps = function, keeps
        # In a list, so that it is raised from no variable: its traceback would keep that.
        self._errors = list[BaseException]()
        self._is_over = False
        self._results = SimpleQueue[Any]()  # gets one at the end, None after an error
        self._surroundings = as_called_here()

    def result(self) -> Any:
        """Make the call, and wait for its end. Return the result.

        Raises:
            BaseException: the call's error.
        """
        if sys.is_finalizing():  # no thread begins any more, and no interrupt arrives
            self.reap()
        else:
            self.begin()
        result = self._results.get()
        if self._errors:
            raise self._errors.pop()
        return result

    def begin(self) -> None:
        """Begin the call, and don't wait for it."""
        reaper.start()  # first: no thread runs on after an error
        run = partial(self.reap)
        try:
            _thread.start_new_thread(run, ())
            # The thread may end before its first line, by a `MemoryError` or by a
            # ``PyThreadState_SetAsyncExc`` meant for its creator, whose thread id it has in CPython
            # 3.11 until it begins. Then the reaper makes the call.
            reaper.note(run, self.reap, in_children=False)
        finally:
            del run  # an error that is kept would keep it through this frame

    def reap(self) -> bool:
        """Make the call in this thread, unless it was made; return True, as a task does."""
        if self._is_over:
            return True
        result = None
        try:
            running[self] = None
            with self._surroundings():
                result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._errors.append(error)
        finally:
            del self._function, self._keeps
            self._is_over = True
            self._results.put(result)
            running.pop(self, None)
        return True

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        while not self._is_over:
            # Not a `threading.Event`: an interrupt may leave its lock locked.
            time.sleep(_PAUSE_SECONDS)
        if self._errors:
            raise self._errors[0]


def uninterrupted(function: Callable[[], T], keeps: object = None) -> T:
    """Call a function in a thread of our own, and wait for its result; see `UninterruptedCall`."""
    call = UninterruptedCall(function, keeps)
    del keeps  # an error that is kept would keep it through this frame
    return call.result()  # type: ignore[no-any-return]


class Death(weakref.ref[Any]):
    """A weak reference that becomes a task when its object is gone."""

    reap: Any
    in_children: bool
    # By identity: a weak reference uses its object's, and arrays can't be hashed.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def warn(text: str) -> None:
    """Warn from one of our threads. A warning that is turned into an error is suppressed, since it
    has no caller.
    """
    with contextlib.suppress(StagingWarning):
        warnings.warn(text, StagingWarning, stacklevel=2)


class Reaper:
    """Runs tasks in its own thread, one after the other.

    Attributes:
        tasks: the queue of tasks to run. Each has a method ``reap``, which does the work, and
            returns whether it is finished. If not, it is called again a moment later.
    """

    def __init__(self) -> None:
        self.tasks = SimpleQueue[Any]()
        # Kept here: a weak reference that is garbage itself is never called back.
        self._deaths = set[Any]()
        self._claimed = _thread.allocate_lock()  # by the thread, until it ends
        self._taken = list[Any]()  # by the thread, from the queue

    def watch(self, thing: Any, reap: Callable[[], bool], *, in_children: bool = False) -> None:
        """Run a task when an object is gone. The task must not keep the object alive.

        In a garbage cycle, the collector calls weak references back before finalisers, which may
        still use the object. So watch a numpy array that the object holds: the collector doesn't
        track arrays.

        Args:
            thing: the object.
            reap: the task.
            in_children: also run it in a forked child, when the child's copy of the object is gone.
                The child needs a thread for that, which its first call that uses the reaper starts.
        """
        self.note(thing, reap, in_children)
        self.start()

    def note(self, thing: Any, reap: Callable[[], bool], in_children: bool) -> None:
        """Do so without starting the thread."""
        death = Death(thing, self.tasks.put)
        death.reap, death.in_children = reap, in_children
        self._deaths.add(death)

    def bury(self, thing: object) -> None:
        """Drop an object in the reaper's thread, where no interrupt can cut its finalisers
        short.
        """
        self.tasks.put(UninterruptedCall(keeps=thing))

    def start(self) -> None:
        """Start the thread, unless it is running.

        Raises:
            RuntimeError: the interpreter is shutting down.
        """
        if not self._claimed.locked():
            _thread.start_new_thread(self._serve, ())

    def _serve(self) -> None:
        if self._claimed.locked():
            return  # several callers at once have started several threads
        try:
            with self._claimed:  # rarely, a second thread waits here
                while True:
                    self._run_all()
        finally:  # an exception from outside, by ``PyThreadState_SetAsyncExc``
            self.start()

    def _run_all(self) -> None:
        """Add new tasks to those that aren't done yet, run each once, and drop those that are done.

        An exception from outside may come after any call: it loses no task, and doubles none.
        """
        running.pop(self, None)
        tasks = self._taken
        if tasks:
            time.sleep(_POLL_SECONDS)
        # Take all tasks: a waiting task must not delay others.
        while not tasks or not self.tasks.empty():
            tasks.extend(map(SimpleQueue.get, [self.tasks]))
        for task in list(tasks):
            while not begin(self):
                time.sleep(_EXIT_SECONDS)
            if self._is_done(task):
                tasks.remove(task)

    def _is_done(self, task: Any) -> bool:
        self._deaths.discard(task)
        try:
            with as_called_here()():
                return task.reap()  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 - there is no caller
            warn(
                f"memory of a dropped pool, loader or region could not be freed: {error!r}; "
                "close() it before its device fails"
            )
            # Once more: the rest of its work may wait for events.
            is_done, task.has_failed = getattr(task, "has_failed", False), True
            return is_done
        except BaseException:  # noqa: BLE001 - from outside, or of a task that must not stop others
            return False


reaper = Reaper()
"""The reaper of this process."""


_of_parents = list[Any]()


def _forget() -> None:
    """Start afresh in a forked child, which has neither the threads nor their tasks.

    The parent's objects stay alive: the end of an event or of page-locked memory calls CUDA, which
    ends a forked child.
    """
    running.clear()
    ending.clear()
    of_parent = vars(reaper).copy()
    _of_parents.append(of_parent)
    reaper.__init__()  # type: ignore[misc]
    for death in of_parent["_deaths"]:
        thing = death()
        if death.in_children and thing is not None:
            reaper.note(thing, death.reap, in_children=True)


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _wait_for_the_last() -> None:
    ending.append(True)
    deadline = time.monotonic() + _EXIT_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.001)
