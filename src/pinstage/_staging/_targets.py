"""Where slabs are copied to: what staging needs of a device, for CUDA and for the CPU."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from .._errors import StagingError
from .._pool import Event


class Target(Protocol):
    """A device that batches are staged to."""

    device: torch.device

    def copying(self) -> AbstractContextManager[Any]:
        """Make the copy stream current, so that a device slab made meanwhile belongs to it."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
        """Copy the bytes between two offsets of a host slab to the same place of a device slab."""
        ...

    def record_copies(self) -> Event | None:
        """Mark this point of the copy stream; None where a copy is done when the call returns."""
        ...

    def record_current(self) -> Event | None:
        """Mark this point of the caller's current stream; None where there are no streams."""
        ...

    def hand_over(self, event: Event | None, tensors: list[torch.Tensor], stream: Any) -> None:
        """Order the consumer's stream behind an event, and keep tensors' memory while that stream uses it.

        Args:
            event: what `record` returned.
            tensors: on the device.
            stream: the consumer's; None is the current one.
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

    def copying(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        if torch.cuda.current_device() != self.device.index:
            return torch.cuda.stream(self.stream)
        return _OnStream(self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
        """See `Target`."""
        if stop - start < len(target):
            target, source = target[start:stop], source[start:stop]
        target.copy_(source, non_blocking=True)

    def record_copies(self) -> Event:
        """See `Target`."""
        return self._record(self.stream)

    def record_current(self) -> Event:
        """See `Target`."""
        return self._record(torch.cuda.current_stream(self.device.index))

    def _record(self, stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def hand_over(self, event: Any, tensors: list[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """See `Target`."""
        consumer = torch.cuda.current_stream(self.device.index) if stream is None else stream
        if event is not None:
            consumer.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:  # else the allocator may give the block away while the consumer still reads it
                tensor.record_stream(consumer)


class _OnStream:
    """``torch.cuda.stream`` for a stream of the current device, without the 31 us that it takes."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._previous = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._previous)


class CpuTarget:
    """No GPU: a copy is done when the call returns, and there is nothing to wait for."""

    device = torch.device("cpu")

    def copying(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
        """See `Target`. Not torch's ``copy_``: its threads wait for busy cpus, for milliseconds at a time."""
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, stop - start)

    def record_copies(self) -> None:
        """See `Target`."""

    def record_current(self) -> None:
        """See `Target`."""

    def hand_over(self, event: Any, tensors: list[torch.Tensor], stream: Any) -> None:
        """See `Target`."""


def target_for(device: torch.device) -> Target:
    """Return the target for a device.

    Raises:
        ValueError: neither a CUDA device nor the CPU.
        StagingError: CUDA is not available.
    """
    if device.type == "cuda":
        return CudaTarget(device)
    if device.type == "cpu":
        return CpuTarget()
    raise ValueError(f"cannot stage to {device}: only CUDA devices and the CPU are supported")
