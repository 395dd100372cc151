"""Tasks that finalisers leave, and the thread that does them.

A finaliser may run at any point of any thread: inside a lock, in the middle of a graph capture, or ended half-way by an
interrupt. So it never waits, calls CUDA or frees memory. It hands over by one call of C, ``reaper.tasks.put``, which is
the callback of a weak reference.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from ._memory import as_called_here
from .errors import StagingWarning

_POLL_SECONDS = 0.02
"""Poll interval for tasks that aren't done yet, such as waiting for a copy. Without tasks the reaper sleeps."""

_EXIT_SECONDS = 10.0
"""Seconds that the end of the program waits for our threads: a later return from CUDA would abort it."""

running: dict[Any, None] = {}
"""Tasks that our threads are doing now; written by these."""

ending: list[bool] = []
"""Not empty from when the end of the program has begun to wait for them."""


def begin(task: Any) -> bool:
    """Note that the calling thread does a task; say whether it may: not at the end of the program.

    Noted first and asked then: so either the end of the program finds the task, or the task finds the end.
    """
    running[task] = None
    if ending:
        running.pop(task, None)
    return not ending


class Task(Protocol):
    """A task for the reaper."""

    def reap(self) -> bool:
        """Do the work; say whether that was all. If not, it is called again a moment later."""
        ...


class Death(weakref.ref[Any]):
    """A weak reference that becomes a task when its object is gone."""

    __slots__ = ("reap",)

    reap: Callable[[], bool]
    __eq__ = object.__eq__  # else those of what it refers to, and an array has none
    __hash__ = object.__hash__


def warn(text: str) -> None:
    """Warn from one of our threads, where a warning that is made an error has no caller."""
    with contextlib.suppress(StagingWarning):
        warnings.warn(text, StagingWarning, stacklevel=2)


class _Buried:
    def __init__(self, thing: object) -> None:
        self._thing = thing

    def reap(self) -> bool:
        self._thing = None
        return True


class Reaper:
    """Does tasks in a thread of its own, one after the other.

    Attributes:
        tasks: to be done.
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        self._deaths: set[Any] = set()  # a weak reference in a cycle of garbage would never be called back
        self._is_running = False

    def watch(self, thing: Any, reap: Callable[[], bool]) -> None:
        """Add a task for when an object is gone. It must not keep the object alive.

        Of an object that may be in a cycle of garbage the collector says so before it calls the finalisers there, which
        may still use the object. Objects that hold numpy's arrays are safe: the collector doesn't track these.
        """
        death = Death(thing, self.tasks.put)
        death.reap = reap
        self._deaths.add(death)
        self.start()

    def bury(self, thing: object) -> None:
        """Let an object end in the reaper's thread: its finalisers are not ours, and an interrupt would end them."""
        self.tasks.put(_Buried(thing))

    def start(self) -> None:
        """See that the thread is there.

        Raises:
            RuntimeError: the interpreter is about to end.
        """
        if not self._is_running:
            _thread.start_new_thread(self._serve, ())
            self._is_running = True  # twice at the worst, of two threads at once; the tasks are shared then

    def _serve(self) -> None:
        unfinished: list[Task] = []
        while True:
            if unfinished:
                time.sleep(_POLL_SECONDS)
            tasks, unfinished = unfinished, []
            while not tasks or not self.tasks.empty():  # all of them: a task that waits must not delay others
                tasks.append(self.tasks.get())
            while tasks:
                while not begin(self):
                    time.sleep(_EXIT_SECONDS)
                if not self._is_done(tasks[0]):
                    unfinished.append(tasks[0])
                del tasks[0]  # the last reference to it, perhaps
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
"""The process's."""


_of_parents: list[Any] = []


def _forget() -> None:
    """In a forked child: the threads are not there, and what they had to do is the parent's affair.

    Things stay alive. The end of an event, or of page-locked memory, calls CUDA, which ends a forked child.
    """
    running.clear()
    ending.clear()
    _of_parents.append(vars(reaper).copy())
    reaper.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _wait_for_the_last() -> None:
    ending.append(True)
    deadline = time.monotonic() + _EXIT_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.001)
