"""CUDA events that any thread may query; events and captures of the current streams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .._compat.calls import cuda_calls
from .._steps import NOTHING
from ..errors import LeaseError, PinstageError
from ._cuda import has_context


def on_device(index: int) -> AbstractContextManager[Any]:
    """Make a device current in this thread."""
    return NOTHING if cuda_calls().device() == index else torch.cuda.device(index)


_NULL_STREAM = 1
"""The largest handle of the null stream: 0, or ``cudaStreamLegacy``."""

_Base: Any = torch.cuda.Event.__base__
"""torch's event class in C++. Its Python subclass adds two Python calls to each method. Without
CUDA it has no methods."""


class DeviceEvent(torch.cuda.Event):
    """An event of one device, which any thread queries on that device.

    In a thread that has used no device yet, CUDA would take the first one, and make a context of
    500 MiB there to answer (meta-pytorch/torchcomms#777). Examples are monitoring threads, and
    threads that close a pool.
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
        # `on_device` without a call, since this runs for each batch.
        if cuda_calls().device() == self.index:
            return bool(_Base.query(self))
        with torch.cuda.device(self.index):
            return bool(_Base.query(self))

    def synchronize(self) -> None:
        with on_device(self.index):
            _Base.synchronize(self)


def capturing_device(index: int | None = None) -> int | None:
    """Return the device whose current stream in this thread captures a graph: the current device or
    device `index`; None if neither does.

    The null stream isn't asked: it can't capture, and ``cudaStreamIsCapturing`` fails for it while
    another thread captures a stream that waits for it.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    here = cuda_calls().device()
    if _captures(here):
        return here
    if index is None or index == here or not _captures(index):
        return None
    return index


def _captures(index: int) -> bool:
    if cuda_calls().raw_stream(index) <= _NULL_STREAM:
        return False
    with on_device(index):
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(index: int | None = None) -> None:
    """Refuse to stage in a thread that captures a graph.

    Querying an event and allocating may invalidate a capture, and each replay would copy from a
    slab that is used again.

    Args:
        index: a device whose current stream counts, beside that of the current device.

    Raises:
        PinstageError: one of these streams captures.
    """
    device = capturing_device(index)
    if device is not None:
        raise PinstageError(
            f"nothing can be staged while the current stream captures a graph: cuda:{device}. "
            "Stage and wait before the capture, and copy later batches into the graph's tensors "
            "before each replay, by stager.to_device(batch, out=tensors)."
        )


def record_current_streams() -> tuple[DeviceEvent, ...]:
    """Mark this point of the calling thread's current stream on each device that has a context in
    this process.

    Makes no context. Without CUDA, or before torch has initialised it, there is nothing to mark.

    Raises:
        LeaseError: one of these streams captures a graph. No event can say when its last replay is
            over.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    events = []
    for index in filter(has_context, range(torch.cuda.device_count())):
        with on_device(index):
            if _captures(index):
                raise LeaseError(
                    f"the block of a lease ended while the current stream of cuda:{index} captures "
                    "a graph, and each replay uses the slab: the lease stays held; call "
                    "lease.release(after=event) behind the last replay"
                )
            event = DeviceEvent.of(index)
            event.record(torch.cuda.current_stream(index))
        events.append(event)
    return tuple(events)
