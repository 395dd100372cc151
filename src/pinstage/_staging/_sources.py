"""Where tensors are fetched from: what the way to the host needs of a device, for CUDA and for the CPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from .._copy import Gathering
from .._layout import Table
from .._pool import Event
from ._streams import DeviceEvent, on_stream


class Piece(NamedTuple):
    """What one copy brings to the host."""

    there: torch.Tensor
    """uint8 ``[n]`` on the device."""
    here: torch.Tensor
    """uint8 ``[n]`` of a host slab."""
    owned: bool
    """Whether nobody but the copy uses `there`; else it is the caller's tensor itself."""


class Source(Protocol):
    """A device that tensors are fetched from."""

    all_copies: Event | None
    """Done when no copy is under way; None where a copy is done when the call returns."""

    def fetch(self, pieces: Sequence[Piece]) -> Event | None:
        """Copy pieces to the host, behind what the caller's current stream was given so far.

        What that stream is given afterwards comes after the copies that read the caller's own tensors, so these may be
        changed or freed as if the copies had been work of that stream.

        Returns:
            The event behind the copies; None where they are done when the call returns. If the call raises, what was
            begun has been waited for.
        """
        ...


class CudaSource:
    """A GPU, with a stream for copies to the host of its own: the bus carries both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.all_copies: Event | None = self.stream

    def fetch(self, pieces: Sequence[Piece]) -> Event:
        """See `Source`."""
        consumer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(consumer)
        event = DeviceEvent.of(self.stream.device_index)
        try:
            with on_stream(self.stream):
                for there, here, owned in pieces:
                    here.copy_(there, non_blocking=True)
                    if owned:  # it dies with this call; the allocator has to wait for the copy
                        there.record_stream(self.stream)
            event.record(self.stream)
        except BaseException:
            self.stream.synchronize()
            raise
        if not all(piece.owned for piece in pieces):
            event.wait(consumer)
        return event


class CpuSource:
    """No GPU: a copy is done when the call returns."""

    all_copies: Event | None = None

    def fetch(self, pieces: Sequence[Piece]) -> None:
        """See `Source`. Not torch's ``copy_``, as in `CpuTarget`."""
        for there, here, _ in pieces:
            ctypes.memmove(here.data_ptr(), there.data_ptr(), here.numel())


class Sources:
    """The sources of a stager, made when a device is first met. May be used by several threads.

    Attributes:
        gatherings: how the leaves of trees that come again are arranged, by their offset tables: a loop fetches the
            same few kinds of trees over and over, and to arrange a thousand leaves takes a millisecond.
    """

    def __init__(self) -> None:
        self.gatherings: dict[Table, Gathering] = {}
        self._made: dict[torch.device, Source] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> Source:
        """Return the source for a device that tensors are on."""
        source = self._made.get(device)
        if source is None:
            with self._lock:
                source = self._made.get(device)
                if source is None:
                    source = self._made[device] = CudaSource(device) if device.type == "cuda" else CpuSource()
        return source


class Events:
    """Several events as one: done when all are."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def query(self) -> bool:
        """Say whether all are done, without waiting."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Wait for all."""
        for event in self._events:
            event.synchronize()
