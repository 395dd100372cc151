"""CUDA's current device, streams and events, as staging uses them: torch makes objects anew where these are kept."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from .._torch import cuda_calls, ids_of

E = TypeVar("E", bound=torch.cuda.Event)

ALONE = next(map(sys.getrefcount, [object()]))
"""What `sys.getrefcount` says of an object that nothing but a list has, asked in this way."""

_EVENTS_KEPT = 32
"""Events that are looked at again before new ones take their place: a loop that runs ahead needs a dozen."""

_HERE = nullcontext()


def on_device(index: int) -> AbstractContextManager[Any]:
    """Make a device current in this thread."""
    return _HERE if cuda_calls().device() == index else torch.cuda.device(index)


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


class DeviceEvent(torch.cuda.Event):
    """An event that is asked on its own device, in any thread.

    In a thread that used no device yet, CUDA takes the first one, and makes a context of 500 MiB there to answer
    (meta-pytorch/torchcomms#777). Monitoring threads and those that close a pool are such.
    """

    def query(self) -> bool:
        if cuda_calls().device() == self.device.index:
            return bool(super().query())  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device.index):
            return bool(super().query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with on_device(self.device.index):
            super().synchronize()


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
        if next(map(sys.getrefcount, oldest)) <= ALONE:
            return oldest[0]
        if len(self._made) < _EVENTS_KEPT:
            self._made.appendleft(oldest[0])
        return None
