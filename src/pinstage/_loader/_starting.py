"""Starting workers: what must not happen meanwhile, here and in what is forked."""

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
"""Interrupts wait for workers to be started; but one that comes so long after the first one is an order: something
hangs."""


class _Starting(threading.local):
    workers = False
    handler: Any = None


_here = _Starting()
"""Whether this thread starts workers, and what handled its interrupts before."""


def start_workers(start: Callable[[], T]) -> T:
    """Call what starts workers.

    An interrupt (SIGINT) that comes meanwhile is handled afterwards: in the middle of a fork it would leave a process
    that nobody knows, and torch's half-made iterator writes to the screen.

    Workers that are forked leave alone what the main process had: their garbage collector would free what the main
    one's has not yet, and a CUDA tensor among it, that another stream had used, aborts them (rwth-i6/returnn#1494).
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return _start(start)
    came: list[float] = []

    def remember(number: int, frame: FrameType | None) -> Any:
        came.append(time.monotonic())
        if came[-1] - came[0] > INSISTED_SECONDS:
            return handler(number, frame)
        return None

    _here.handler = handler
    try:
        signal.signal(signal.SIGINT, remember)
        started = _start(start)
    finally:
        signal.signal(signal.SIGINT, handler)
        _here.handler = None
    if came:
        handler(signal.SIGINT, sys._getframe())
    return started


def _start(start: Callable[[], T]) -> T:
    _here.workers = True
    try:
        return start()
    finally:
        _here.workers = False


def _in_child() -> None:
    if _here.workers:
        gc.freeze()
    if _here.handler is not None:
        signal.signal(signal.SIGINT, _here.handler)


os.register_at_fork(after_in_child=_in_child)
