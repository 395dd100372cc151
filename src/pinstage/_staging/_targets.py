"""Where slabs are copied to: what staging needs of a device, for CUDA and for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .._errors import StagingError
from .._pool import Event


class Target(Protocol):
    """A device that batches are staged to."""

    device: torch.device
    all_copies: Event | None
    """Done when no copy is under way; None where a copy is done when the call returns."""

    def selected(self) -> AbstractContextManager[Any]:
        """Make the device current in this thread."""
        ...

    def copying(self) -> AbstractContextManager[Any]:
        """Make the copy stream current, so that a device slab made meanwhile belongs to it."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes of a host slab to a device slab, on the copy stream."""
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
        self.all_copies: Event | None = self.stream

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return _on_device(self.device.index)

    def copying(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return on_stream(self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Target`."""
        target.copy_(source, non_blocking=True)

    def record_copies(self) -> Event:
        """See `Target`."""
        return self._record(self.stream)

    def record_current(self) -> Event:
        """See `Target`."""
        return self._record(torch.cuda.current_stream(self.device.index))

    def consumer(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """See `Target`."""
        return torch.cuda.current_stream(self.device.index) if stream is None else stream

    def record_on(self, stream: torch.cuda.Stream) -> Event:
        """See `Target`."""
        return self._record(stream)

    def wait_before_copies(self, event: Any) -> None:
        """See `Target`."""
        self.stream.wait_event(event)

    def _record(self, stream: torch.cuda.Stream) -> Event:
        event = DeviceEvent()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def hand_over(self, event: Any, tensors: list[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """See `Target`."""
        consumer = self.consumer(stream)
        if event is not None:
            consumer.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:  # else the allocator may give the block away while the consumer still reads it
                tensor.record_stream(consumer)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Make a stream current, and its device."""
    if torch.cuda.current_device() != stream.device_index:
        return _on_device_and_stream(stream)
    return _OnStream(stream)


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
        with _on_device(self.device.index):
            return bool(super().query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with _on_device(self.device.index):
            super().synchronize()


def _on_device(index: int) -> AbstractContextManager[Any]:
    return _HERE if torch.cuda.current_device() == index else torch.cuda.device(index)


_HERE = nullcontext()


class CpuTarget:
    """No GPU: a copy is done when the call returns, and there is nothing to wait for."""

    device = torch.device("cpu")
    all_copies: Event | None = None

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return nullcontext()

    def copying(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Target`. Not torch's ``copy_``: its threads wait for busy cpus, for milliseconds at a time."""
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)

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
