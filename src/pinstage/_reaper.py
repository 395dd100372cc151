"""Tasks that finalisers hand over, and the thread that runs them.

A finaliser may run at any point in any thread: inside a lock, or in the middle of a graph capture.
An interrupt may end it half-way. So a finaliser never waits, calls CUDA or frees memory. It hands
the work over with a single C call, ``reaper.tasks.put``, as the callback of a weak reference.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ._memory import as_called_here
from .errors import StagingWarning

_POLL_SECONDS = 0.02
"""Poll interval for tasks that aren't done yet, such as waiting for a copy. Without tasks the
reaper sleeps.
"""

_EXIT_SECONDS = 10.0
"""Seconds for which the program's exit waits for our threads: a return from CUDA after the exit
would abort the process."""

running: dict[Any, None] = {}
"""Tasks that our threads are running now. The threads add and remove them."""

ending: list[bool] = []
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


class Task(Protocol):
    """A task for the reaper."""

    def reap(self) -> bool:
        """Do the work; return whether it is finished. If not, `reap` is called again a moment
        later.
        """
        ...


class Death(weakref.ref[Any]):
    """A weak reference that becomes a task when its object is gone."""

    __slots__ = ("reap",)

    reap: Callable[[], bool]
    # By identity: a weak reference uses its object's, and arrays can't be hashed.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def warn(text: str) -> None:
    """Warn from one of our threads. A warning that is turned into an error is suppressed, since it
    has no caller.
    """
    with contextlib.suppress(StagingWarning):
        warnings.warn(text, StagingWarning, stacklevel=2)


class _Remarks:
    """Lines for the package's logger.

    The reaper writes them: a handler takes locks, which the thread of a finaliser may hold, and
    which an interrupt may leave held.
    """

    def __init__(self) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()

    def add(self, line: str) -> None:
        self._lines.put(line)
        reaper.tasks.put(self)

    def reap(self) -> bool:
        with contextlib.suppress(Empty):
            while True:
                logging.getLogger("pinstage").warning("%s", self._lines.get_nowait())
        return True


class _Buried:
    def __init__(self, thing: object) -> None:
        self._thing = thing

    def reap(self) -> bool:
        self._thing = None
        return True


class Reaper:
    """Runs tasks in its own thread, one after the other.

    Attributes:
        tasks: the queue of tasks to run.
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        # Kept here: a weak reference that is garbage itself is never called back.
        self._deaths: set[Any] = set()
        self._is_running = False

    def watch(self, thing: Any, reap: Callable[[], bool]) -> None:
        """Run a task when an object is gone. The task must not keep the object alive.

        In a garbage cycle, the collector calls weak references back before finalisers, which may
        still use the object. So watch a numpy array that the object holds: the collector doesn't
        track arrays.
        """
        death = Death(thing, self.tasks.put)
        death.reap = reap
        self._deaths.add(death)
        self.start()

    def bury(self, thing: object) -> None:
        """Drop an object in the reaper's thread, where no interrupt can cut its finalisers
        short.
        """
        self.tasks.put(_Buried(thing))

    def start(self) -> None:
        """Start the thread, unless it is running.

        Raises:
            RuntimeError: the interpreter is shutting down.
        """
        if not self._is_running:
            _thread.start_new_thread(self._serve, ())
            self._is_running = (
                True  # two callers at once may start two threads, which share the tasks
            )

    def _serve(self) -> None:
        unfinished: list[Task] = []
        while True:
            if unfinished:
                time.sleep(_POLL_SECONDS)
            tasks, unfinished = unfinished, []
            # Take all tasks: a waiting task must not delay others.
            while not tasks or not self.tasks.empty():
                tasks.append(self.tasks.get())
            while tasks:
                while not begin(self):
                    time.sleep(_EXIT_SECONDS)
                if not self._is_done(tasks[0]):
                    unfinished.append(tasks[0])
                del tasks[0]  # perhaps the last reference to it
                del running[self]

    def _is_done(self, task: Task) -> bool:
        self._deaths.discard(task)
        try:
            with as_called_here()():
                return task.reap()
        except Exception as error:  # noqa: BLE001 - there is no caller
            what = "memory of a dropped pool or loader could not be freed"
            warn(f"{what}: {error!r}; close() it before its device fails")
            return True


reaper = Reaper()
"""The reaper of this process."""

remarks = _Remarks()
"""The lines of this process."""


_of_parents: list[Any] = []


def _forget() -> None:
    """Start afresh in a forked child, which has neither the threads nor their tasks.

    The parent's objects stay alive: the end of an event or of page-locked memory calls CUDA, which
    ends a forked child.
    """
    running.clear()
    ending.clear()
    _of_parents.append(vars(reaper).copy())
    reaper.__init__()  # type: ignore[misc]
    remarks.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _wait_for_the_last() -> None:
    ending.append(True)
    remarks.reap()  # the reaper begins no more tasks
    deadline = time.monotonic() + _EXIT_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.001)
