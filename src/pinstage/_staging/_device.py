"""What staging needs of a device, for CUDA and for the CPU: streams and events, copies to it, and copies from it."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from .._copy import Gathering
from .._layout import Table
from .._memory import disregard_captures, start_copy, why_unusable
from .._pool import Fence
from .._steps import NOTHING
from .._torch import check_is_plain, cuda_calls, ids_of, tell_of_extension
from ..errors import StagingError

# -- streams and events ------------------------------------------------------------------------------------------------

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


# -- to a device -------------------------------------------------------------------------------------------------------


AT_ONCE_BYTES = 64 * 1024
"""Copies of at most so much to a device are asynchronous with respect to the host, from pageable memory too (CUDA
Programming Guide, Asynchronous Concurrent Execution). The driver keeps the bytes until the stream is there. Without a
slab, and a stream to wait for, four leaves of 1 KiB take 0.03 ms instead of 0.05."""


class Target(Protocol):
    """A device that batches are staged to."""

    device: torch.device
    stream: Any
    """The stream of its own for copies, which is done when none is under way; None where there are no streams, and a
    copy is done when the call returns."""

    def takes_at_once(self, nbytes: int) -> bool:
        """Say whether `copy` has read so much pageable memory when it returns, and does not wait for the device.

        For a copy on the caller's current stream. While the device is `selected`.
        """
        ...

    def is_capturing(self) -> bool:
        """Say whether a graph is being captured on the caller's current stream: no event may be asked then."""
        ...

    def selected(self) -> AbstractContextManager[Any]:
        """Make the device current in this thread."""
        ...

    def in_background(self) -> AbstractContextManager[Any]:
        """Make the device current in a thread of ours, which may send and ask events whatever the others do."""
        ...

    def use_own_stream(self) -> None:
        """Let all further work of this thread on the device go to `stream`."""
        ...

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        """Make a device slab, uint8 ``[nbytes]``, that belongs to a stream. While the device is `selected`."""
        ...

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int, stream: Any) -> None:
        """Copy bytes of a host slab to a device slab. While the device is `selected`.

        Args:
            slab: of the device.
            host: address of the host slab.
            start: first byte.
            end: behind the last one.
            stream: on which.
        """
        ...

    def consumer(self, stream: Any) -> Any:
        """Return the stream that is meant: the current one for None; None where there are no streams."""
        ...

    def record(self, stream: Any) -> Fence | None:
        """Mark this point of a stream; None where there are no streams."""
        ...

    def wait(self, event: Any, stream: Any) -> None:
        """Let a stream wait for an event."""
        ...

    def hand_over(self, event: Fence | None, tensors: list[torch.Tensor], consumer: Any) -> None:
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
        self._cuda = cuda_calls()
        self._has_bindings = why_unusable() is None
        self._events = EventCache(partial(DeviceEvent.of, self.device.index))
        self._sample = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._last_consumer = ids_of(self.stream), self.stream

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return on_device(self.device.index)

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        disregard_captures()
        return self.selected()

    def use_own_stream(self) -> None:
        """See `Target`."""
        with self.selected():
            self._cuda.set_stream(*ids_of(self.stream))

    def takes_at_once(self, nbytes: int) -> bool:
        """See `Target`. While a graph is captured it would be read again at each replay."""
        return nbytes <= AT_ONCE_BYTES and not self.is_capturing()

    def is_capturing(self) -> bool:
        """See `Target`."""
        return torch.cuda.is_current_stream_capturing()

    def empty(self, nbytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """See `Target`. Not by ``torch.cuda.stream``, which takes 20 us."""
        cuda, ids = self._cuda, ids_of(stream)
        before = cuda.stream(self.device.index)
        try:
            if before != ids:
                cuda.set_stream(*ids)
            slab = self._sample.new_empty(nbytes)  # its dtype and device need no parsing: a third of the call
        finally:
            if before != ids:
                cuda.set_stream(*before)
        if type(slab) is not torch.Tensor:
            check_is_plain(slab)
        return slab

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int, stream: torch.cuda.Stream) -> None:
        """See `Target`. Not torch's ``copy_``: a tensor over the host slab takes longer to make than the copy."""
        if self._has_bindings:
            start_copy(slab.data_ptr() + start, host + start, end - start, stream.cuda_stream)
            return
        source = (ctypes.c_ubyte * (end - start)).from_address(host + start)
        with on_stream(stream):
            slab[start:end].copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)

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

    def record(self, stream: torch.cuda.Stream) -> Fence:
        """See `Target`."""
        return self._events.record(stream)

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None:
        """See `Target`."""
        event.wait(stream)

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
    stream: Any = None

    def takes_at_once(self, nbytes: int) -> bool:
        """See `Target`. It always does; a large batch takes a slab here as it does on a GPU."""
        return nbytes <= AT_ONCE_BYTES

    def is_capturing(self) -> bool:
        """See `Target`."""
        return False

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return NOTHING

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return NOTHING

    def use_own_stream(self) -> None:
        """See `Target`."""

    def empty(self, nbytes: int, stream: Any = None) -> torch.Tensor:  # noqa: ARG002
        """See `Target`."""
        slab = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if type(slab) is not torch.Tensor:
            check_is_plain(slab)
        return slab

    def copy(self, slab: torch.Tensor, host: int, start: int, end: int, stream: Any) -> None:  # noqa: ARG002
        """See `Target`. Not torch's ``copy_``: its threads wait for busy CPUs, for milliseconds at a time."""
        ctypes.memmove(slab.data_ptr() + start, host + start, end - start)

    def consumer(self, stream: Any) -> None:
        """See `Target`."""

    def record(self, stream: Any) -> None:
        """See `Target`."""

    def wait(self, event: Any, stream: Any) -> None:
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
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"not a device: {device!r}; write 'cuda', 'cuda:0' or 'cpu'") from error
    if device.type == "cuda":
        return CudaTarget(device)
    if device.type == "cpu":
        return CpuTarget()
    raise ValueError(f"cannot stage to {device}: only CUDA devices and the CPU are supported")


# -- from a device -----------------------------------------------------------------------------------------------------


class HostCopy(NamedTuple):
    """What one copy brings to the host."""

    there: torch.Tensor
    """uint8 ``[n]`` on the device."""
    here: torch.Tensor
    """uint8 ``[n]`` of a host slab."""
    owned: bool
    """Whether nobody but the copy uses `there`; else it is the caller's tensor itself."""


class Source(Protocol):
    """A device that tensors are fetched from."""

    stream: Any
    """See `Target`."""

    def fetch(self, pieces: Sequence[HostCopy], *, hold: bool = True) -> Fence | None:
        """Copy pieces to the host, behind what the caller's current stream was given so far.

        Args:
            pieces: what is copied.
            hold: whether what that stream is given afterwards comes after the copies that read the caller's own
                tensors, so that these may be changed or freed as if the copies had been work of that stream.

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

    def fetch(self, pieces: Sequence[HostCopy], *, hold: bool = True) -> Fence:
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
        if hold and not all(piece.owned for piece in pieces):
            event.wait(consumer)
        return event


class CpuSource:
    """No GPU: a copy is done when the call returns."""

    stream: Any = None

    def fetch(self, pieces: Sequence[HostCopy], *, hold: bool = True) -> None:  # noqa: ARG002
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

    def of(self, device: torch.device) -> Source:
        """Return the source for a device that tensors are on."""
        source = self._made.get(device)
        if source is None:  # no lock: if two threads make one, one of them is used
            source = self._made.setdefault(device, CudaSource(device) if device.type == "cuda" else CpuSource())
        return source


class Events:
    """Several events as one: done when all are."""

    def __init__(self, events: Sequence[Fence]) -> None:
        self.parts = events

    def query(self) -> bool:
        """Say whether all are done, without waiting."""
        return all(event.query() for event in self.parts)

    def synchronize(self) -> None:
        """Wait for all."""
        for event in self.parts:
            event.synchronize()


def wait_here(event: Fence | None) -> None:
    """Let the current stream of each device wait for its part of an event; the host does not."""
    for part in event.parts if isinstance(event, Events) else [event]:
        if isinstance(part, DeviceEvent):
            part.wait(torch.cuda.current_stream(part.index))
