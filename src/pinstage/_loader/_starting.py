"""The start of workers, and what must not happen meanwhile: an interrupt here, garbage collection in the child."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

INSISTED_SECONDS = 1.0
"""Interrupts wait until the workers are started. One that comes so long after the first one does not wait: something
hangs, and the user insists."""


class _Starting(threading.local):
    workers = False
    handler: Any = None


_here = _Starting()
"""Whether this thread is starting workers, and the handler of interrupts from before."""


def start_workers(start: Callable[[], T]) -> T:
    """Call a function that starts workers, and return its result.

    An interrupt (SIGINT) that comes meanwhile is handled afterwards. In the middle of a fork it would leave a process
    that nobody knows of, and torch's half-made iterator would print an error.

    The garbage collector of a forked worker leaves alone what the main process had. To free a CUDA tensor that another
    stream had used would abort the worker (rwth-i6/returnn#1494).
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
    came: list[float] = []

    def remember(number: int, frame: FrameType | None) -> Any:
        came.append(time.monotonic())
        if not _here.workers or came[-1] - came[0] > INSISTED_SECONDS:  # or an exception has left this handler there
            return handler(number, frame)
        return None

    try:
        _here.workers = True
        if callable(handler):
            _here.handler = handler
            signal.signal(signal.SIGINT, remember)
        started = start()
    finally:
        _here.workers = False
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            _here.handler = None
    if came:
        handler(signal.SIGINT, sys._getframe())
    return started


def _in_child() -> None:
    if _here.workers:
        gc.freeze()
    if _here.handler is not None:
        signal.signal(signal.SIGINT, _here.handler)


os.register_at_fork(after_in_child=_in_child)
