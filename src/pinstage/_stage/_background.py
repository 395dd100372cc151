"""Reads a source and stages its batches in a thread, ahead of the loop.

The source's ``next()`` may block forever, and nothing can end it. So a caller that is about to read
the same source, and the end of the program, wait for the thread while it is in ``next()``.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._memory import as_called_here
from .._pool import give_up_waiting_if
from ..errors import PinstageError
from ._hand_over import HandOver
from ._target import Target

_WAIT_SECONDS = 60.0
"""Seconds that a pass waits for the thread of an earlier one, if the loader has no timeout of its
own.
"""

_POLL_SECONDS = 0.1
"""Interval at which a waiting thread checks whether the program is ending."""


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


class Reading:
    """One pass over a source: batches are read and staged ahead, and handed over in order.

    The loop's thread reads them when it asks for a batch. After `start`, another thread reads them.

    Args:
        source: the iterable, which identifies other passes over it.
        read: runs the source's code: returns a batch and the source's state after it, or None at
            the end.
        stage: stages the batch.
        depth: number of batches that may wait.
    """

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
        self._depth = depth
        self.ready = HandOver()
        self.room: SimpleQueue[Any] = SimpleQueue()
        self._goes_on = True
        self._is_stopped = False
        self._asked_by = threading.current_thread()
        self._pid: int | None = None  # of the process that has the thread

    # -- the loop's thread

    def start(self, call: Callable[..., None]) -> None:
        """Start the thread, unless a container's limits, or the end of the program, forbid it.

        Args:
            call: what `surroundings_of` returned when the pass began.
        """
        try:
            _Thread(self, call).start()
        except RuntimeError:
            return
        self._pid = os.getpid()
        # `advance` adds one when the loop has taken the batch that is ready.
        for _ in range(self._depth - 1):
            self.advance()

    def get(self) -> Any:
        """Return the next batch, staged, and the source's state after it. Blocks until the batch is
        there.

        Raises:
            PinstageError: the thread was stopped, or this process is a forked child.
            BaseException: the source or staging failed; raised after the batches before it.
                `Exhausted` after the last.
        """
        self._asked_by = threading.current_thread()
        if self._pid is None:
            while self._goes_on and self.ready.waiting() <= self._depth:
                self.read_here()
        elif os.getpid() != self._pid:
            raise PinstageError(
                f"cannot continue a pass of process {self._pid} in process {os.getpid()}: the "
                f"thread that reads the {type(self.source).__name__} is not in a forked child; "
                "begin a pass with a stager of this process"
            )
        item = None if self._is_stopped else self.ready.get()
        if self._is_stopped:
            raise PinstageError(
                f"cannot continue this pass over the {type(self.source).__name__}: its thread was "
                "stopped by another pass, load_state_dict or the end of the program; begin a new "
                "pass, or pass background=False for several at once"
            )
        return item

    def read_here(self) -> bool:
        """Read and stage a batch in the calling thread; return whether there may be another one."""
        stop_reading(self.source)
        self._goes_on = self.step(Exception)
        return self._goes_on

    def advance(self) -> None:
        """Note that the loop has taken a batch, so that the thread may stage another one."""
        if self._pid is not None:
            self.room.put(None)

    def stop(self) -> None:
        """Make the thread end after the batch that it is reading, and `get` raise an error."""
        self._is_stopped = True
        self.room.put(None)

    def leave(self) -> None:
        """Drop the batches that wait, and make the thread end. Does not block; finalisers call
        it.
        """
        self.stop()
        self.ready = HandOver()

    # -- either thread

    def step(self, errors: type[BaseException]) -> bool:
        """Read a batch, stage it and hand it over; return whether there may be another one.

        Args:
            errors: the kind of exceptions that are handed over.
        """
        try:
            read = self._read()
            if read is None:
                self.ready.put(Exhausted())
                return False
            batch, state = read
            if not self._is_stopped:
                self.ready.put((self._stage(batch), state))
        except errors as error:
            if not self._is_stopped:
                self.ready.put(error)
                return False
        return True

    # -- the thread

    def is_over(self) -> bool:
        """Return whether no other batch will be taken: the pass was stopped, or the program is
        ending. The main thread may end while others train.
        """
        asked_by = self._asked_by
        is_last = asked_by.daemon or not asked_by.is_alive()
        return self._is_stopped or (is_last and not threading.main_thread().is_alive())

    def end(self) -> None:
        """Let `get` raise an error from now on."""
        self._is_stopped = True
        self.ready.put(None)
        # Perhaps the last reference to a generator: closing it runs the source's code.
        del self._read


class _Thread(threading.Thread):
    """Reads batches for a pass. It refers to the pass only while it has something to do. Otherwise,
    a pass in a cycle of garbage would be kept alive by its own thread.
    """

    def __init__(self, reading: Reading, call: Callable[..., None]) -> None:
        super().__init__(name="pinstage.prefetch", daemon=False)
        self._call = call
        self._room = reading.room
        self.reading = weakref.ref(reading, self._room.put)

    def run(self) -> None:
        try:
            self._call(self._work)
        except BaseException as error:  # noqa: BLE001 - of `surroundings_of`; the loop waits for it
            reading = self.reading()
            if reading is not None:
                reading.ready.put(error)

    def _work(self) -> None:
        give_up_waiting_if(self._is_over)
        while not self._is_over():
            try:
                self._room.get(timeout=_POLL_SECONDS)  # until there is room for a batch
            except Empty:
                continue
            if not self._is_over() and not self._step():
                return
        reading = self.reading()
        if reading is not None:
            reading.end()

    def _is_over(self) -> bool:
        reading = self.reading()
        return reading is None or reading.is_over()

    def _step(self) -> bool:
        reading = self.reading()
        return reading is not None and reading.step(BaseException)


def stop_reading(source: object) -> None:
    """Stop any thread that reads a source, since the caller is about to. Blocks until its
    ``next()`` has returned.

    Two threads on one iterator, such as that of a torch loader with persistent workers, would lose
    batches.

    Raises:
        PinstageError: ``next()`` did not return within the loader's ``timeout``, or within a
            minute.
    """
    for thread in threading.enumerate():
        reading = thread.reading() if isinstance(thread, _Thread) else None
        if reading is None or reading.source is not source:
            continue
        reading.stop()
        seconds = float(source.timeout if isinstance(source, DataLoader) else 0) or _WAIT_SECONDS
        if thread.is_alive():  # else it is about to start, and reads nothing
            thread.join(seconds)
        if thread.is_alive():
            raise PinstageError(
                f"cannot read the {type(source).__name__}: the thread of an earlier pass has not "
                f"left it after {seconds:g} s{_place_of(thread)}; find out what it waits for, or "
                "pass background=False"
            )


def _place_of(thread: threading.Thread) -> str:
    """Say where a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"
