"""Copies from a device to the host and back that only streams wait for: a stream of its own for each direction.

::

    the caller's stream   ... work that made it | next work ...          | fetch: memory for it | wait | use ...
    out                                         | copy to the host |
    back                                                                        | copy to the device |

Memory for returning bytes is the caller's stream's, so that it is used again in that stream's order: memory of a stream
of our own would be kept from reuse until the host has seen the consumer's work end, and a host that runs ahead would
find none.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, NamedTuple

import torch

from .._compat.calls import ids_of
from .._compat.views import check_is_plain
from .._memory import DeviceEvent
from .._pool import Fence
from ._device import EventCache, on_stream

NO_STREAM = (0, 0, 0)


class Arrival(NamedTuple):
    """Bytes on their way back to the device."""

    there: torch.Tensor
    """uint8 ``[n]`` on the device."""
    event: Fence | None
    """Behind the copy; None where it is done."""
    stream: tuple[int, int, int]
    """The ids of the stream that its memory belongs to."""


class Shuttle:
    """The way from a device to the host and back. This one is the CPU's: a copy is done when the call returns.

    May be used by several threads.
    """

    device = torch.device("cpu")
    all_leaving: Fence | None = None
    """Done when no copy to the host is under way; None where a copy is done when the call returns."""

    def stream(self) -> tuple[int, int, int]:
        """Return the ids of the caller's current stream of this device."""
        return NO_STREAM

    def is_default(self, stream: tuple[int, int, int]) -> bool:  # noqa: ARG002
        """Say whether ids are those of the device's default stream."""
        return True

    def is_capturing(self) -> bool:
        """Say whether a graph is being captured on the caller's current stream."""
        return False

    def leave(self, there: torch.Tensor, here: torch.Tensor, after: Any) -> Fence | None:  # noqa: ARG002
        """Copy to the host, behind what the caller's current stream was given so far.

        Args:
            there: uint8 ``[n]`` on the device; to be kept, unchanged, until the event is done.
            here: uint8 ``[n]`` on the host.
            after: an event that the copy has to wait for, too.

        Returns:
            The event behind the copy; None where it is done when the call returns.
        """
        ctypes.memmove(here.data_ptr(), there.data_ptr(), here.numel())  # not torch's ``copy_``, as in `Target.copy`
        return None

    def fetch(self, here: torch.Tensor, after: Any) -> Arrival:  # noqa: ARG002
        """Copy to the device, into fresh memory of the caller's current stream.

        Args:
            here: uint8 ``[n]`` on the host; to be kept, unchanged, until the event is done.
            after: an event that the copy has to wait for.
        """
        there = torch.empty(here.numel(), dtype=torch.uint8, device=self.device)
        check_is_plain(there)
        ctypes.memmove(there.data_ptr(), here.data_ptr(), here.numel())
        return Arrival(there, None, NO_STREAM)

    def hand_over(self, arrival: Arrival) -> None:
        """Order the caller's current stream behind the copy, and keep the memory while that stream uses it."""

    def wait(self, event: Any) -> None:
        """Order the caller's current stream behind an event."""


class CudaShuttle(Shuttle):
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self.all_leaving = self._out
        self._events = EventCache(partial(DeviceEvent.of, device.index))
        self._default = ids_of(torch.cuda.default_stream(device))

    def stream(self) -> tuple[int, int, int]:
        """See `Shuttle`."""
        return ids_of(torch.cuda.current_stream(self.device))

    def is_default(self, stream: tuple[int, int, int]) -> bool:
        """See `Shuttle`."""
        return stream == self._default

    def is_capturing(self) -> bool:
        """See `Shuttle`."""
        return torch.cuda.is_current_stream_capturing()

    def leave(self, there: torch.Tensor, here: torch.Tensor, after: Any) -> Fence:
        """See `Shuttle`."""
        self._events.record(torch.cuda.current_stream(self.device)).wait(self._out)
        if after is not None:
            after.wait(self._out)
        try:
            with on_stream(self._out):
                here.copy_(there, non_blocking=True)
            return self._events.record(self._out)
        except BaseException:  # an interrupt, perhaps: the copy may be under way
            there.record_stream(self._out)
            raise

    def fetch(self, here: torch.Tensor, after: Any) -> Arrival:
        """See `Shuttle`."""
        current = torch.cuda.current_stream(self.device)
        there = torch.empty(here.numel(), dtype=torch.uint8, device=self.device)
        check_is_plain(there)
        self._events.record(current).wait(self._back)  # what used that memory before
        if after is not None:
            after.wait(self._back)
        try:
            with on_stream(self._back):
                there.copy_(here, non_blocking=True)
            return Arrival(there, self._events.record(self._back), ids_of(current))
        except BaseException:
            there.record_stream(self._back)
            raise

    def hand_over(self, arrival: Arrival) -> None:
        """See `Shuttle`."""
        current = torch.cuda.current_stream(self.device)
        arrival.event.wait(current)  # type: ignore[union-attr]
        if ids_of(current) != arrival.stream:
            arrival.there.record_stream(current)

    def wait(self, event: Any) -> None:
        """See `Shuttle`."""
        event.wait(torch.cuda.current_stream(self.device))


_made: dict[torch.device, Shuttle] = {}


def shuttle_for(device: torch.device) -> Shuttle:
    """Return the process's shuttle for a device that tensors are on: CUDA's streams are few."""
    shuttle = _made.get(device)
    if shuttle is None:  # no lock: if two threads make one, one of them is used
        shuttle = _made.setdefault(device, CudaShuttle(device) if device.type == "cuda" else Shuttle())
    return shuttle
