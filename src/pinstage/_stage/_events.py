"""Events: recorded again, and several as one."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from .._memory import DeviceEvent
from .._pool import Fence

E = TypeVar("E", bound=torch.cuda.Event)

UNSHARED = next(map(sys.getrefcount, [object()]))
"""The result of `sys.getrefcount`, called in this way, for an object that only a list refers to."""

_EVENTS_KEPT = 32
"""Number of events that a cache keeps even while they are in use. A loop that runs ahead needs a
dozen.
"""


class EventCache(Generic[E]):
    """Events of one device, each recorded again when nothing else refers to it, which is faster
    than making a new one.

    May be used by several threads.

    Args:
        make: makes an event.
    """

    def __init__(self, make: Callable[[], E]) -> None:
        self._make = make
        self._made: deque[E] = deque()  # least recently recorded first

    def record(self, stream: Any) -> E:
        """Mark this point of a stream."""
        made = self._made
        try:
            oldest = [made.popleft()]
        except IndexError:
            event = self._make()
        else:
            if next(map(sys.getrefcount, oldest)) <= UNSHARED:
                event = oldest.pop()
            else:
                if len(made) < _EVENTS_KEPT:
                    made.appendleft(oldest.pop())
                event = self._make()
        event.record(stream)
        made.append(event)
        return event


class EventGroup:
    """Several events as one: done when all are."""

    def __init__(self, events: Sequence[Fence]) -> None:
        self.parts = events

    def query(self) -> bool:
        """Return whether all are done, without waiting."""
        return all(event.query() for event in self.parts)

    def synchronize(self) -> None:
        """Wait for all."""
        for event in self.parts:
            event.synchronize()


def wait_here(event: Fence | None) -> None:
    """Make the current stream of each device wait for its part of an event. The host doesn't
    wait.
    """
    if isinstance(event, EventGroup):
        for part in event.parts:
            wait_here(part)
    elif isinstance(event, DeviceEvent):
        event.wait(torch.cuda.current_stream(event.index))
