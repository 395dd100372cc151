"""Reads a source and stages its batches in a thread, ahead of the loop.

The source's ``next()`` may sleep or block forever, and nothing can end it. While the thread is in
``next()``, only a caller that is about to read the same source waits for it. While it stages, the
end of the program waits for it, too.
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
from .._reaper import begin, running
from ..errors import PinstageError
from ._hand_over import HandOver
from ._target import Target

_WAIT_SECONDS = 60.0
"""Seconds that a pass waits for the thread of an earlier one, if the loader has no timeout of its
own.
"""

_GRACE_SECONDS = 0.2
"""Seconds that the end of the program waits for a thread to leave the source, and again for it to
end by an exception. Before Python 3.14, a thread that wants the interpreter lock during
finalisation is ended where it is. In a call of torch, its C++ then aborts the process. A thread
that sleeps or waits for workers is in C, and can be left behind."""

_threads: dict[Any, weakref.ref[Reading]] = {}
"""The pass of each running thread, by the lock that the thread holds until its end."""


def surroundings_of(target: Target) -> Callable[..., None]:
    """Return a function that calls another one, in another thread, with the present settings of the
    calling thread.

    Only the current stream differs: it is the target's own, which then carries all copies.
    """
    device, grad = as_called_here(), torch.is_grad_enabled()
    modes: list[AbstractContextManager[Any]] = [
        torch.inference_mode(torch.is_inference_mode_enabled())
    ]
    default = torch.get_default_device()
    if default.type != "cpu":
        modes.append(default)
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            modes.append(torch.autocast(kind, dtype, cache_enabled=cache))

    def call(function: Callable[..., None], *args: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(device())
            target.use_own_stream()
            for mode in modes:
                stack.enter_context(mode)
            torch.set_grad_enabled(grad)
            function(*args)

    context = contextvars.copy_context()
    return lambda function, *args: context.run(call, function, *args)


class Exhausted(Exception):  # noqa: N818 - handed over behind the last batch
    """All batches have been handed over."""


class _Stopped(Exception):  # noqa: N818
    """Follows the last batch of a thread that ended before the source did."""


class Reading:
    """One pass over a source: batches are read and staged ahead, and handed over in order.

    The loop's thread reads them when it asks for a batch. After `start`, another thread reads them.
    That thread refers to the pass only while it has something to do. Otherwise, a pass in a cycle
    of garbage would be kept alive by its own thread.

    Args:
        source: the iterable, which identifies other passes over it.
        read: runs the source's code: returns a batch and the source's state after it, or None at
            the end.
        stage: stages the batch.
        depth: number of batches that may wait.
    """

    thread = 0
    """The thread's identifier."""

    def __init__(
        self,
        source: object,
        read: Callable[[], tuple[Any, Any] | None],
        stage: Callable[[Any], Any],
        depth: int,
    ) -> None:
        self.source = source
        self._read = read
        self._stage = stage
        self._depth = self._most_waiting = depth
        self._ready = HandOver()
        self._room: SimpleQueue[Any] = SimpleQueue()
        self._goes_on = True
        self._is_stopped = self.is_left = False
        self._pid: int | None = None  # of the process that has the thread

    # -- the loop's thread

    def start(self, call: Callable[..., None]) -> None:
        """Start the thread, unless a container's limits, or the end of the program, forbid it.

        Args:
            call: what `surroundings_of` returned when the pass began.
        """
        me, until_the_end = weakref.ref(self, self._room.put), _thread.allocate_lock()
        until_the_end.acquire()
        _threads[until_the_end] = me
        try:
            self.thread = _thread.start_new_thread(_serve, (call, me, self._room, until_the_end))
        except RuntimeError:
            del _threads[until_the_end]
            return
        self._pid = os.getpid()
        # `advance` adds one when the loop has taken the batch that is ready.
        for _ in range(self._depth - 1):
            self.advance()

    def get(self) -> Any:
        """Return the next batch, staged, and the source's state after it. Blocks until the batch is
        there.

        Raises:
            PinstageError: this process is a forked child.
            BaseException: the source or staging failed; raised after the batches before it.
                `Exhausted` after the last.
        """
        if self._pid is not None:
            if os.getpid() != self._pid:
                raise PinstageError(
                    f"cannot continue a pass of process {self._pid} in process {os.getpid()}: the "
                    f"thread that reads the {type(self.source).__name__} is not in a forked child; "
                    "begin a pass with a stager of this process"
                )
            try:
                return self._ready.get()
            except _Stopped:
                self._pid = None
        while self._goes_on and self._ready.waiting() <= self._most_waiting:
            self.read_here()
        return self._ready.get()

    def read_here(self) -> bool:
        """Read and stage a batch in the calling thread; return whether there may be another one."""
        try:
            if _threads:
                stop_reading(self.source)
            self._goes_on = self._hand_over(self._read())
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._goes_on = self._hand_over(error)
        return self._goes_on

    def advance(self) -> None:
        """Note that the loop has taken a batch, so that the thread may stage another one."""
        if self._pid is not None:
            self._room.put(None)

    def stop(self) -> None:
        """Make the thread end after the batch that it is reading. The pass goes on without it."""
        self._is_stopped = True
        self._room.put(None)

    def leave(self) -> None:
        """Drop the batches that wait, and make the thread end. Does not block; finalisers call
        it.
        """
        self.is_left = True
        self.stop()
        self._ready = HandOver()

    # -- either thread

    def _hand_over(self, read: tuple[Any, Any] | BaseException | None) -> bool:
        """Stage the batch that was read, and hand it over; return whether there may be more."""
        if read is None or isinstance(read, BaseException):
            self._ready.put(Exhausted() if read is None else read)
            return False
        batch, said = read
        self._ready.put((self._stage(batch), said))
        self._most_waiting = 0 if said.is_last else self._depth
        return True

    # -- the thread

    def step(self) -> bool:
        """Read a batch, stage it and hand it over; return whether there may be another step."""
        if self._is_stopped:
            self._ready.put(_Stopped())
            if self.is_left:
                # Perhaps the last reference to a generator: closing it runs the source's code.
                del self._read
            return False
        read: tuple[Any, Any] | BaseException | None = None
        try:
            read = self._read()
        except BaseException as error:  # noqa: BLE001 - raised when its turn comes
            read = error
        while not begin(self):  # the program is ending
            time.sleep(_WAIT_SECONDS)
        try:
            return self.is_left or self._hand_over(read)
        except BaseException as error:  # noqa: BLE001 - raised when its turn comes
            return self._hand_over(error) or self.is_left
        finally:
            if self.is_left:
                self._ready = HandOver()
            del read
            del running[self]


def _serve(
    call: Callable[..., None], me: weakref.ref[Reading], room: SimpleQueue[Any], until_the_end: Any
) -> None:
    try:
        call(_work, me, room)
    except BaseException as error:  # noqa: BLE001 - of `surroundings_of`; the loop waits for it
        reading = me()
        if reading is not None:
            reading._hand_over(error)
    finally:
        _threads.pop(until_the_end, None)
        until_the_end.release()


def _work(me: weakref.ref[Reading], room: SimpleQueue[Any]) -> None:
    give_up_waiting_if(lambda: (reading := me()) is not None and reading.is_left)
    while True:
        room.get()
        reading = me()
        if reading is None or not reading.step():
            return
        del reading


# -- one thread at a time in a source --------------------------------------------------------------


def stop_reading(source: object) -> None:
    """End any thread that reads a source, since the caller is about to. Blocks until its ``next()``
    has returned.

    Two threads on one iterator, such as that of a torch loader with persistent workers, would lose
    batches.

    Raises:
        PinstageError: ``next()`` did not return within the loader's ``timeout``, or within a
            minute.
    """
    for until_the_end, reading in _readings():
        if reading.source is not source:
            continue
        reading.stop()
        seconds = float(source.timeout if isinstance(source, DataLoader) else 0) or _WAIT_SECONDS
        if not until_the_end.acquire(timeout=seconds):
            raise PinstageError(
                f"cannot read the {type(source).__name__}: the thread of an earlier pass has not "
                f"left it after {seconds:g} s{_place_of(reading.thread)}; find out what it waits "
                "for, or pass background=False"
            )
        until_the_end.release()


def _readings() -> list[tuple[Any, Reading]]:
    """Return the passes that have a thread, each with its lock."""
    readings = ((lock, me()) for lock, me in _threads.copy().items())
    return [(lock, reading) for lock, reading in readings if reading is not None]


def _place_of(thread: int) -> str:
    """Say where a thread is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"


# -- the end ---------------------------------------------------------------------------------------


@atexit.register  # runs before the reaper's, which waits for running tasks
def _end() -> None:
    for _, reading in _readings():
        reading.stop()
    if _are_left() and sys.version_info < (3, 14):
        for _, reading in _readings():
            # The exception ends a loop over calls of torch between two calls.
            if reading not in running:
                thread, error = ctypes.c_ulong(reading.thread), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        _are_left()


def _are_left() -> bool:
    """Wait a moment for the threads to end; return whether any is left."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while _threads and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(_threads)


os.register_at_fork(after_in_child=_threads.clear)  # they are the parent's
