"""Reading a source, and staging its batches, in a thread ahead of the loop.

The source's ``next()`` may sleep, or block forever, and nothing can end it. While the thread is there, only a caller
that is about to read the same source waits for it. While it stages, the end of the program waits for it, too.
"""

from __future__ import annotations

import _thread
import atexit
import contextvars
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._memory import as_called_here
from .._pool import give_up_waiting_if
from .._reaper import running
from ..errors import PinstageError
from ._device import Target
from ._hand_over import HandOver

_WAIT_SECONDS = 60.0
"""Seconds that a pass waits for the thread of an earlier one, if the loader has no timeout of its own."""

_GRACE_SECONDS = 0.2
"""Seconds that the end of the program waits for a thread in the source to return, and to end by an exception. Before
Python 3.14 a thread that wants the interpreter lock during finalisation is ended where it is, and the C++ of a call of
torch aborts the process then. A thread that sleeps, or waits for workers, is in C and can be left behind."""

_threads: dict[Any, weakref.ref[Background]] = {}
"""The threads that are there: their `Background`, by the lock that each holds until its end."""


class Surroundings:
    """The calling thread's state, for a thread that does a part of its work.

    Only the current stream is another one: that of the target, on which all is sent then.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._context = contextvars.copy_context()
        self._device = as_called_here()
        self._grad = torch.is_grad_enabled()
        self._modes: list[AbstractContextManager[Any]] = [torch.inference_mode(torch.is_inference_mode_enabled())]
        default = torch.get_default_device()
        if default.type != "cpu":
            self._modes.append(default)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
                self._modes.append(torch.autocast(kind, dtype, cache_enabled=cache))

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in a thread that is as the other one was."""
        self._context.run(self._run, function, args)

    def _run(self, function: Callable[..., None], args: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._device())
            self._target.use_own_stream()
            for mode in self._modes:
                stack.enter_context(mode)
            torch.set_grad_enabled(self._grad)
            function(*args)


_STOPPED = object()
"""Behind the last batch of a thread that ended before the source did."""


class Background:
    """One pass over a source in a thread.

    The thread refers to it only while it has something to do. Else a pass that is in a cycle of garbage would be kept
    alive by its own thread.

    Args:
        source: the iterable, which identifies other passes over it.
        read: reads a batch; None at the end. This is the source's code.
        stage: stages the batch.
        depth: how many batches may wait. The first `advance` is for the batch that the loop has already.
    """

    thread = 0
    """Its identifier."""

    def __init__(self, source: object, read: Callable[[], Any], stage: Callable[[Any], Any], depth: int) -> None:
        self.source = source
        self._read: Callable[[], Any] | None = read
        self._stage = stage
        self._ready = HandOver()
        self._room: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth - 1):
            self.advance()
        self._is_stopped = self.is_left = False
        self._pid = os.getpid()

    # -- the loop's thread

    def start(self, surroundings: Surroundings) -> bool:
        """Start the thread; say whether it could be: a container's limits, or the end of the program, may forbid it."""
        me, until_the_end = weakref.ref(self, self._room.put), _thread.allocate_lock()
        until_the_end.acquire()
        _threads[until_the_end] = me
        try:
            self.thread = _thread.start_new_thread(_serve, (surroundings, me, self._room, until_the_end))
        except RuntimeError:
            del _threads[until_the_end]
            return False
        return True

    def get(self) -> Any:
        """Return the next batch; None at the end. Blocks until it is there.

        Raises:
            PinstageError: in a forked child.
            BaseException: of the source or of staging, behind the batches before it.
        """
        if os.getpid() != self._pid:
            raise PinstageError(
                f"cannot go on with a pass of process {self._pid} in process {os.getpid()}: the thread that reads the "
                f"{type(self.source).__name__} is not in a forked child; begin a pass with a stager of this process"
            )
        item = self._ready.get()
        if item is not _STOPPED:
            return item
        self._ready.put(item)
        assert self._read is not None
        return read_here(self.source, self._read, self._stage)

    def advance(self) -> None:
        """Note that the loop has a batch, so that another one may be staged."""
        self._room.put(None)

    def stop(self) -> None:
        """Have the thread end when it has handed over what it reads now. The pass goes on without it."""
        self._is_stopped = True
        self.advance()

    def leave(self) -> None:
        """Have the thread end, and drop what it has. Does not block; finalisers call it."""
        self.is_left = True
        self.stop()

    # -- the thread

    def step(self) -> bool:
        """Read a batch, stage it and hand it over; say whether there may be another one."""
        if self._is_stopped:
            self._end()
            return False
        item = None
        try:
            assert self._read is not None
            item = self._read()
        except BaseException as error:  # noqa: BLE001 - raised when its turn comes
            item = error
        while _ended:  # too late for anything
            time.sleep(_WAIT_SECONDS)
        running[self] = None
        try:
            if self.is_left:
                return True  # to its end
            goes_on = not (item is None or isinstance(item, BaseException))
            self._ready.put(self._stage(item) if goes_on else item)
            return goes_on
        except BaseException as error:  # noqa: BLE001 - raised when its turn comes
            self._ready.put(error)
            return self.is_left  # to its end
        finally:
            del item
            del running[self]

    def _end(self) -> None:
        if not self.is_left:
            self._ready.put(_STOPPED)
            return
        running[self] = None
        self._ready = HandOver()
        del running[self]
        self._read = None  # the last reference to a generator, perhaps, whose end is the source's code

    def fail(self, error: BaseException) -> None:
        """Let the loop have an error of the thread itself."""
        self._ready.put(error)


def _serve(surroundings: Surroundings, me: weakref.ref[Background], room: SimpleQueue[Any], until_the_end: Any) -> None:
    try:
        surroundings.run(_work, me, room)
    except BaseException as error:  # noqa: BLE001 - of the surroundings; the loop waits
        background = me()
        if background is not None:
            background.fail(error)
    finally:
        _threads.pop(until_the_end, None)
        until_the_end.release()


def _work(me: weakref.ref[Background], room: SimpleQueue[Any]) -> None:
    give_up_waiting_if(lambda: (background := me()) is not None and background.is_left)
    while True:
        room.get()
        background = me()
        if background is None or not background.step():
            return
        del background


# -- one thread at a time in a source ----------------------------------------------------------------------------------


def read_here(source: object, read: Callable[[], Any], stage: Callable[[Any], Any]) -> Any:
    """Read a batch in the calling thread and stage it; None at the end."""
    stop_reading(source)
    batch = read()
    return None if batch is None else stage(batch)


def stop_reading(source: object) -> None:
    """See that no thread reads a source, since the caller is about to. Blocks until its ``next()`` has returned.

    Two threads on one iterator, such as that of a torch loader with persistent workers, would lose batches.

    Raises:
        PinstageError: it did not return within the loader's ``timeout``, or within a minute.
    """
    for until_the_end, me in list(_threads.items()):
        background = me()
        if background is None or background.source is not source:
            continue
        background.stop()
        seconds = float(source.timeout if isinstance(source, DataLoader) else 0) or _WAIT_SECONDS
        if not until_the_end.acquire(timeout=seconds):
            raise PinstageError(
                f"cannot read the {type(source).__name__}: the thread of an earlier pass has not left it after "
                f"{seconds:g} s{_place_of(background.thread)}; see what that waits for, or pass background=False"
            )
        until_the_end.release()


def _place_of(thread: int) -> str:
    """Say where a thread is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"


# -- the end -----------------------------------------------------------------------------------------------------------

_ended: list[bool] = []


@atexit.register  # before the reaper's, which waits for running tasks
def _end() -> None:
    for me in list(_threads.values()):
        background = me()
        if background is not None:
            background.stop()
    if _are_left() and sys.version_info < (3, 14):
        for me in list(_threads.values()):
            background = me()
            if background is not None and background not in running:  # a loop over calls of torch ends between them
                thread, error = ctypes.c_ulong(background.thread), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        _are_left()
    _ended.append(True)


def _are_left() -> bool:
    """Wait a moment for the threads; say whether any is still there."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while _threads and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(_threads)


os.register_at_fork(after_in_child=_threads.clear)  # they are the parent's
