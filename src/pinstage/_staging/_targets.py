"""Where slabs are copied to: what staging needs of a device, for CUDA and for the CPU."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from .._memory import disregard_captures, start_copy, why_unusable
from .._pool import Event
from .._steps import NOTHING
from .._torch import check_is_plain, cuda_calls, ids_of, tell_of_extension
from ..errors import StagingError
from ._streams import DeviceEvent, EventCache, on_device, on_stream


class Target(Protocol):
    """A device that batches are staged to."""

    device: torch.device
    all_copies: Event | None
    """Done when no copy is under way; None where a copy is done when the call returns."""

    def selected(self) -> AbstractContextManager[Any]:
        """Make the device current in this thread."""
        ...

    def in_background(self) -> AbstractContextManager[Any]:
        """Make the device current in a thread of ours, which may send and ask events whatever the others do."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Make a device slab, uint8 ``[nbytes]``, that belongs to the copy stream. While the device is `selected`."""
        ...

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int) -> None:
        """Copy bytes of a host slab to a device slab, on the copy stream. While the device is `selected`.

        Args:
            slab: of the device.
            host: address of the host slab.
            start: first byte.
            end: behind the last one.
        """
        ...

    def record_copies(self) -> Event | None:
        """Mark this point of the copy stream; None where a copy is done when the call returns."""
        ...

    def record_current(self) -> Event | None:
        """Mark this point of the caller's current stream; None where there are no streams."""
        ...

    def consumer(self, stream: Any) -> Any:
        """Return the stream that is meant: the current one for None; None where there are no streams."""
        ...

    def record_on(self, stream: Any) -> Event | None:
        """Mark this point of a consumer's stream; None where there are no streams."""
        ...

    def wait_before_copies(self, event: Any) -> None:
        """Let the copy stream wait for an event."""
        ...

    def hand_over(self, event: Event | None, tensors: list[torch.Tensor], consumer: Any) -> None:
        """Order the consumer's stream behind an event, and keep tensors' memory while that stream uses it.

        Args:
            event: what `record` returned.
            tensors: on the device.
            consumer: what `consumer` returned.
        """
        ...


class CudaTarget:
    """A GPU, with a stream for copies of its own.

    Why device slabs are made on the copy stream: memory made on the consumer's stream may still be in use by earlier
    work there, so the copy would have to wait for all of it, and nothing would overlap.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise StagingError(f"CUDA is not available: cannot stage to {device}; use device='cpu', or see torch.cuda")
        index: int | None = device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.all_copies: Event | None = self.stream
        self._stream_handle: int = self.stream.cuda_stream
        self._stream_ids = ids_of(self.stream)
        self._cuda = cuda_calls()
        self._has_bindings = why_unusable() is None
        self._events = EventCache(partial(DeviceEvent.of, self.device.index))
        self._sample = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._last_consumer = self._stream_ids, self.stream

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return on_device(self.device.index)

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        disregard_captures()
        return self.selected()

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Target`. Not by ``torch.cuda.stream``, which takes 20 us."""
        cuda = self._cuda
        before = cuda.stream(self.device.index)
        try:
            cuda.set_stream(*self._stream_ids)
            slab = self._sample.new_empty(nbytes)  # its dtype and device need no parsing: a third of the call
        finally:
            cuda.set_stream(*before)
        if type(slab) is not torch.Tensor:
            check_is_plain(slab)
        return slab

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int) -> None:
        """See `Target`. Not torch's ``copy_``: a tensor over the host slab takes longer to make than the copy."""
        if self._has_bindings:
            start_copy(slab.data_ptr() + start, host + start, end - start, self._stream_handle)
            return
        source = (ctypes.c_ubyte * (end - start)).from_address(host + start)
        with on_stream(self.stream):
            slab[start:end].copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)

    def record_copies(self) -> Event:
        """See `Target`."""
        return self._events.record(self.stream)

    def record_current(self) -> Event:
        """See `Target`."""
        return self._events.record(self.consumer(None))

    def consumer(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """See `Target`. The last current stream is kept: making an object of it takes ten times as long."""
        if stream is not None:
            return stream
        ids = self._cuda.stream(self.device.index)
        known, current = self._last_consumer
        if ids != known:
            current = torch.cuda.current_stream(self.device.index)
            self._last_consumer = ids, current  # at once: threads may race for it
        return current

    def record_on(self, stream: torch.cuda.Stream) -> Event:
        """See `Target`."""
        return self._events.record(stream)

    def wait_before_copies(self, event: Any) -> None:
        """See `Target`."""
        event.wait(self.stream)

    def hand_over(self, event: Any, tensors: list[torch.Tensor], consumer: torch.cuda.Stream) -> None:
        """See `Target`."""
        if event is not None:
            event.wait(consumer)
        for tensor in tensors:
            if tensor.is_cuda:  # else the allocator may give the block away while the consumer still reads it
                tensor.record_stream(consumer)


class CpuTarget:
    """No GPU: a copy is done when the call returns, and there is nothing to wait for."""

    device = torch.device("cpu")
    all_copies: Event | None = None

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return NOTHING

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return NOTHING

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Target`."""
        slab = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if type(slab) is not torch.Tensor:
            check_is_plain(slab)
        return slab

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int) -> None:
        """See `Target`. Not torch's ``copy_``: its threads wait for busy cpus, for milliseconds at a time."""
        ctypes.memmove(slab.data_ptr() + start, host + start, end - start)

    def record_copies(self) -> None:
        """See `Target`."""

    def record_current(self) -> None:
        """See `Target`."""

    def consumer(self, stream: Any) -> None:
        """See `Target`."""

    def record_on(self, stream: Any) -> None:
        """See `Target`."""

    def wait_before_copies(self, event: Any) -> None:
        """See `Target`."""

    def hand_over(self, event: Any, tensors: list[torch.Tensor], consumer: Any) -> None:
        """See `Target`."""


def target_for(device: torch.device | str | int | None) -> Target:
    """Return the target for a device; for None, the current CUDA device where there is one, else the CPU.

    Raises:
        ValueError: neither a CUDA device nor the CPU.
        StagingError: CUDA is not available.
    """
    tell_of_extension()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        return CudaTarget(device)
    if device.type == "cpu":
        return CpuTarget()
    raise ValueError(f"cannot stage to {device}: only CUDA devices and the CPU are supported")
