"""CUDA's current device, streams and events, as staging uses them: torch makes objects anew where these are kept."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

import torch

from .._steps import NOTHING
from .._torch import cuda_calls, ids_of

E = TypeVar("E", bound=torch.cuda.Event)

UNSHARED = next(map(sys.getrefcount, [object()]))
"""What `sys.getrefcount` says of an object that nothing but a list has, asked in this way."""

_EVENTS_KEPT = 32
"""Events that are looked at again before new ones take their place: a loop that runs ahead needs a dozen."""


def on_device(index: int) -> AbstractContextManager[Any]:
    """Make a device current in this thread."""
    return NOTHING if cuda_calls().device() == index else torch.cuda.device(index)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Make a stream current, and its device."""
    if cuda_calls().device() != stream.device_index:
        return _on_device_and_stream(stream)
    return _OnStream(stream)


class _OnStream:
    """``torch.cuda.stream`` for a stream of the current device, without the 31 us that it takes."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        calls = cuda_calls()
        self._previous = calls.stream(self._stream.device_index)
        calls.set_stream(*ids_of(self._stream))

    def __exit__(self, *_: object) -> None:
        cuda_calls().set_stream(*self._previous)


@contextmanager
def _on_device_and_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Do what ``torch.cuda.stream`` does for a stream of another device, but make no context on the one gone back to.

    torch goes back by ``cudaSetDevice``, which makes one since CUDA 12; ``torch.cuda.device`` looks first whether there
    is one.
    """
    with torch.cuda.device(stream.device_index), _OnStream(stream):
        yield


_Base: Any = torch.cuda.Event.__base__
"""An event in C++. What torch puts over it are two calls of Python's around each of its functions. Without CUDA it has
none."""


class DeviceEvent(torch.cuda.Event):
    """An event of one device, which is asked there in any thread.

    In a thread that used no device yet, CUDA takes the first one, and makes a context of 500 MiB there to answer
    (meta-pytorch/torchcomms#777). Monitoring threads and those that close a pool are such.
    """

    index: int

    record = getattr(_Base, "record", torch.cuda.Event.record)
    wait = getattr(_Base, "wait", torch.cuda.Event.wait)

    @classmethod
    def of(cls, index: int) -> DeviceEvent:
        """Make an event of a device."""
        event = cls()
        event.index = index
        return event

    def query(self) -> bool:
        with on_device(self.index):
            return bool(_Base.query(self))

    def synchronize(self) -> None:
        with on_device(self.index):
            _Base.synchronize(self)


class EventCache(Generic[E]):
    """Events of one device, each recorded again when nobody else has it any more: to make and end one takes longer.

    May be used by several threads.

    Args:
        make: makes an event.
    """

    def __init__(self, make: Callable[[], E]) -> None:
        self._make = make
        self._made: deque[E] = deque()  # the one recorded longest ago comes first

    def record(self, stream: Any) -> E:
        """Mark this point of a stream."""
        event = self._unused() or self._make()
        event.record(stream)
        self._made.append(event)
        return event

    def _unused(self) -> E | None:
        try:
            oldest = [self._made.popleft()]
        except IndexError:
            return None
        if next(map(sys.getrefcount, oldest)) <= UNSHARED:
            return oldest[0]
        if len(self._made) < _EVENTS_KEPT:
            self._made.appendleft(oldest[0])
        return None
