"""Devices for staging, CUDA and the CPU: streams, events, and copies to and from it."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .. import _native
from .._batch import (
    ATOM_TYPES,
    WRAPPERS,
    Blocks,
    Gathering,
    Parts,
    Sharing,
    Table,
    make_blocks,
)
from .._compat.calls import cuda_calls, ids_of
from .._compat.views import check_is_plain, warn_of_tensors
from .._memory import (
    DeviceEvent,
    copy_error,
    disregard_captures,
    make_current,
    reads_pageable_memory,
    refuse_capture,
)
from .._pool import Fence
from .._steps import NOTHING
from ..errors import CudaUnavailableError

# -- streams and events ----------------------------------------------------------------------------

E = TypeVar("E", bound=torch.cuda.Event)

UNSHARED = next(map(sys.getrefcount, [object()]))
"""The result of `sys.getrefcount`, called in this way, for an object that only a list refers to."""

_TYPES = ATOM_TYPES, WRAPPERS
"""Types of leaves that stay as they are, and types of wrappers, whose contents are used without
them.
"""

_NO_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: no device is current for the driver in this thread."""

_EVENTS_KEPT = 32
"""Number of events that a cache keeps even while they are in use. A loop that runs ahead needs a
dozen.
"""


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Make a stream and its device current."""
    if cuda_calls().device() != stream.device_index:
        return _on_device_and_stream(stream)
    return _OnStream(stream)


class _OnStream:
    """``torch.cuda.stream`` for a stream of the current device, but without its cost of 31 us."""

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
    """Do what ``torch.cuda.stream`` does for a stream of another device, but create no context on
    the previous device.

    ``torch.cuda.stream`` restores that device by ``cudaSetDevice``, which creates a context since
    CUDA 12. ``torch.cuda.device`` checks first whether there is a context.
    """
    with torch.cuda.device(stream.device_index), _OnStream(stream):
        yield


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


# -- to a device -----------------------------------------------------------------------------------


AT_ONCE_BYTES = _native.core.AT_ONCE_BYTES
"""Copies of at most this size to a device are asynchronous with respect to the host, from pageable
memory too (CUDA Programming Guide, Asynchronous Concurrent Execution). The driver keeps the bytes
until the stream reaches the copy. Without a slab and a second stream, four leaves of 1 KiB take
0.03 ms instead of 0.05 ms."""


MOST_FEW = _native.core.MOST_FEW
"""The most tensors that `Target.move_few` copies."""

_MARKED_COPIES, _MARKED_BYTES = 256, 1024 * 1024
"""A quarter of the copies that the driver holds for a stream that hasn't reached them: it holds
1,021 copies, or 4,000 KiB, on an H100 with driver 580. The next copy waits for the device."""


class AtOnce:
    """Marks copies from ordinary memory that the driver may still hold. A guess if several threads
    send.

    Args:
        record: marks this point of the current stream.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record
        self._copies = self._bytes = 0  # since the last mark
        self.marks: deque[Any] = deque()
        """Events behind copies that may not be done."""

    def has_room(self) -> bool:
        """Return whether a few more copies can be sent without waiting for the device."""
        marks = self.marks
        if marks:
            with suppress(IndexError):  # until none is left; another thread may take the last one
                while marks[0].query():
                    marks.popleft()
        return len(marks) < 2

    def add(self, copies: int, nbytes: int) -> None:
        """Count copies that were sent on the current stream just now."""
        self._copies += copies
        self._bytes += nbytes
        if self._copies >= _MARKED_COPIES or self._bytes >= _MARKED_BYTES:
            self._copies = self._bytes = 0
            self.marks.append(self._record())


class HostBytes(NamedTuple):
    """The bytes of a batch in a host slab."""

    address: int
    """Where byte 0 of the batch is, or would be."""
    is_pinned: bool
    """Whether they are page-locked."""


class HostCopy(NamedTuple):
    """A copy to the host."""

    there: torch.Tensor
    """uint8 ``[n]`` on the device."""
    here: torch.Tensor
    """uint8 ``[n]`` on the host."""
    owned: bool
    """Whether only the copy uses `there`. If not, it is the caller's own tensor."""


class Arrival(NamedTuple):
    """Bytes on their way back to the device."""

    there: torch.Tensor
    """uint8 ``[n]`` on the device."""
    event: Fence | None
    """Behind the copy; None if it is done."""
    stream: Any
    """The stream that the memory of `there` belongs to."""


class Target:
    """A device that batches are copied to, and tensors are copied from.

    This base class is the CPU: a copy is done when the call returns. May be used by several
    threads.
    """

    device = torch.device("cpu")
    stream: Any = None
    """Our stream for copies to the device, idle when no copy is under way; None for a device
    without streams.
    """
    out_stream: Any = None
    """Our stream for copies from the device: the bus carries both directions at once."""

    # -- streams

    def refuse_capture(self) -> None:
        """Refuse to stage in a thread that captures a graph, on the current stream of this device
        or of the current one.

        Raises:
            PinstageError: it does.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            refuse_capture(self.device.index)

    def selected(self) -> AbstractContextManager[Any]:
        """Make the device current in this thread."""
        return NOTHING

    def on(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Make a stream and its device current in this thread."""
        return NOTHING

    def in_background(self) -> AbstractContextManager[Any]:
        """Make the device current in our thread, which may send and query events even while other
        threads capture.
        """
        return NOTHING

    def use_own_stream(self) -> None:
        """Make `stream` current for all further work of this thread on the device."""

    def consumer(self, stream: Any) -> Any:  # noqa: ARG002
        """Return the given stream, or the current one for None; None for a device without
        streams.
        """
        return None

    def is_default(self) -> bool:
        """Return whether the caller's current stream is the device's default one."""
        return True

    def record(self, stream: Any) -> Fence | None:  # noqa: ARG002
        """Mark this point of a stream by an event; None for a device without streams."""
        return None

    def wait(self, event: Any, stream: Any) -> None:
        """Make a stream wait for an event."""

    def hand_over(self, event: Fence | None, tensors: list[torch.Tensor], consumer: Any) -> None:
        """Make the consumer's stream wait for an event, and keep tensors' memory while that stream
        uses it.

        Args:
            event: the result of `record`.
            tensors: tensors on the device.
            consumer: the result of `consumer`.
        """

    # -- to the device

    def blocks(self, table: Table, sharing: Sharing, stream: Any) -> Blocks:  # noqa: ARG002
        """Make the tensors of a batch, whose memory belongs to a stream. The device must be
        `selected`.

        Args:
            table: the batch's table.
            sharing: which leaves share memory.
            stream: the stream that writes them first: the current one, or `stream`.
        """
        return make_blocks(table, sharing, self.device)

    def move_few(self, leaves: list[Any]) -> tuple[list[Any], int, int, int] | None:
        """Copy a few small leaves, each to its own tensor, on the current stream. Returns when they
        have been read.

        Args:
            leaves: the leaves of a batch.

        Returns:
            The leaves of the result, the number of copied leaves, their bytes, and the number of
            copies. None if the leaves are too many, too large, or not plain, or if the copies would
            wait for the device.
        """
        return _native.core.move_few(leaves, _TYPES, 0, 0, 0)  # type: ignore[no-any-return]

    def copy(self, blocks: Blocks, host: HostBytes, start: int, end: int, stream: Any) -> int:
        """Copy bytes of a host slab to their places; return the number of copies. The device must
        be `selected`.

        This doesn't call torch's ``copy_``, whose threads wait for busy CPUs, for milliseconds at a
        time.

        Args:
            blocks: the batch's blocks.
            host: the host slab.
            start: first byte.
            end: the byte behind the last one.
            stream: the stream that copies.
        """
        args = host.address, start, end, getattr(stream, "cuda_stream", 0), host.is_pinned
        copies = blocks.copy(*args)
        return copies if copies >= 0 else self._again(copies, blocks.copy, *args)

    def copy_leaves(
        self, blocks: Blocks, leaves: list[tuple[int, int, int, int]], stream: Any
    ) -> int:
        """Copy ranges of leaves, given as in `Borrowed.leaves`, from page-locked memory; otherwise
        as `copy`.
        """
        args = leaves, getattr(stream, "cuda_stream", 0)
        copies = blocks.copy_leaves(*args)
        return copies if copies >= 0 else self._again(copies, blocks.copy_leaves, *args)

    def fill(self, blocks: Blocks, parts: Parts, stream: Any) -> int:
        """Copy a batch of at most `AT_ONCE_BYTES` from ordinary memory, which has been read when
        the call returns.

        Otherwise as `copy`.
        """
        args = parts.sources, getattr(stream, "cuda_stream", 0)
        copies = blocks.fill(*args)
        if copies < 0:
            copies = self._again(copies, blocks.fill, *args)
        self.sent_at_once(copies, parts.table.nbytes)
        return copies

    def has_room(self) -> bool:
        """Return whether `fill` would return without waiting for the device."""
        return True

    def sent_at_once(self, copies: int, nbytes: int) -> None:
        """Count copies from ordinary memory, on the current stream."""

    def _again(self, code: int, send: Callable[..., Any], *args: Any) -> Any:
        """Copy again if the driver has no current device in this thread; raise any other error.

        Calls of CUDA's runtime set that device, but torch's allocator makes no such call while it
        has free memory.
        """
        if code == -_NO_CONTEXT:
            make_current(self.device.index)
            done = send(*args)
            code = done if isinstance(done, int) else 0
        if code < 0:
            raise copy_error(-code)
        return done

    # -- to the host, and back

    def to_host(
        self,
        copies: Sequence[HostCopy],
        *,
        hold: bool = True,  # noqa: ARG002
        after: Any = None,  # noqa: ARG002
    ) -> Fence | None:
        """Copy to the host, behind all work queued on the caller's current stream.

        Args:
            copies: sources and destinations.
            hold: whether later work on that stream waits for the copies of the caller's own
                tensors. Then these may be changed or freed as if the copies were work of that
                stream. If not, the caller keeps them, unchanged, until the event is done.
            after: an event that the copies have to wait for, too.

        Returns:
            The event behind the copies; None if they are done when the call returns. If the call
            raises, it has waited for the copies that it had started.
        """
        for there, here, _ in copies:  # not torch's ``copy_``, as in `copy`
            ctypes.memmove(here.data_ptr(), there.data_ptr(), here.numel())
        return None

    def bring_back(self, here: torch.Tensor, after: Any) -> Arrival:  # noqa: ARG002
        """Copy to the device, into new memory of the caller's current stream. That stream doesn't
        wait for the copy.

        The memory belongs to that stream, so that it is reused in that stream's order. Memory of
        our own stream could not be reused until the host has seen the consumer's work end, so a
        host that runs ahead would run out of it.

        Args:
            here: uint8 ``[n]`` on the host. Keep it, unchanged, until the event is done.
            after: an event that the copy has to wait for.
        """
        there = torch.empty(here.numel(), dtype=torch.uint8, device=self.device)
        check_is_plain(there)
        ctypes.memmove(there.data_ptr(), here.data_ptr(), here.numel())
        return Arrival(there, None, None)

    def take(self, arrival: Arrival) -> None:
        """Make the caller's current stream wait for a copy, and keep the copy's memory while that
        stream uses it.
        """
        consumer = self.consumer(None)
        self.hand_over(
            arrival.event, [] if arrival.stream == consumer else [arrival.there], consumer
        )

    def wait_for(self, event: Fence | None) -> None:
        """Make the caller's current stream wait for an event."""
        self.wait(event, self.consumer(None))


class CudaTarget(Target):
    """A GPU, with our own streams for copies.

    Device slabs are made on the copy stream. Memory made on the consumer's stream may still be in
    use by earlier work there, so the copy would have to wait for that work, and nothing would
    overlap.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise CudaUnavailableError(
                f"CUDA is not available: cannot stage to {device}; use device='cpu', or see "
                "torch.cuda"
            )
        index: int | None = device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.stream, self.out_stream = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._cuda, self._default = cuda_calls(), ids_of(torch.cuda.default_stream(self.device))
        if not _native.core.find_driver():
            raise CudaUnavailableError(
                f"CUDA's driver has no functions that copy to {device}: libcuda.so.1 is not "
                "loaded; use device='cpu', or move batches by .to()"
            )
        # Attributes instead of methods, which saves a call. None refers to `self`: a forked child
        # whose garbage collector frees the events of a cycle would be ended.
        self.record = record = EventCache(partial(DeviceEvent.of, self.device.index)).record  # type: ignore[method-assign]
        at_once = AtOnce(lambda: record(torch.cuda.current_stream()))
        self.has_room, self.sent_at_once = at_once.has_room, at_once.add  # type: ignore[method-assign]
        self._marks = at_once.marks
        self._reads_late = reads_pageable_memory(self.device.index)
        if self._reads_late:  # small batches take slabs too, which are kept until their events
            self.has_room = lambda: False  # type: ignore[method-assign]
        self._last_consumer: tuple[Any, torch.cuda.Stream] = ids_of(self.stream), self.stream

    def selected(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        return (
            NOTHING
            if self._cuda.device() == self.device.index
            else torch.cuda.device(self.device.index)
        )

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """See `Target`."""
        return on_stream(stream)

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        disregard_captures()
        return self.selected()

    def use_own_stream(self) -> None:
        """See `Target`."""
        with self.selected():
            self._cuda.set_stream(*ids_of(self.stream))

    def consumer(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        """See `Target`. Keeps the last current stream, since making a new object for it is ten
        times slower.
        """
        if stream is not None:
            return stream
        ids = self._cuda.stream(self.device.index)
        known, current = self._last_consumer
        if ids != known:
            current = torch.cuda.current_stream(self.device.index)
            self._last_consumer = ids, current  # in one assignment: threads may race for it
        return current

    def is_default(self) -> bool:
        """See `Target`."""
        return self._cuda.stream(self.device.index) == self._default

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None:
        """See `Target`."""
        event.wait(stream)

    def hand_over(
        self, event: Any, tensors: list[torch.Tensor], consumer: torch.cuda.Stream
    ) -> None:
        """See `Target`."""
        if event is not None:
            event.wait(consumer)
        for tensor in tensors:
            # Or the allocator could reuse the block while the consumer still uses it.
            if tensor.is_cuda:
                tensor.record_stream(consumer)

    def blocks(self, table: Table, sharing: Sharing, stream: torch.cuda.Stream) -> Blocks:
        """See `Target`."""
        with _OnStream(stream) if stream is self.stream else NOTHING:
            return make_blocks(table, sharing, self.device)

    def move_few(self, leaves: list[Any]) -> tuple[list[Any], int, int, int] | None:
        """See `Target`."""
        index = self.device.index
        if self._cuda.device() != index or self._reads_late:
            return None
        if self._marks and not self.has_room():
            return None
        args = leaves, _TYPES, 1, index, self._cuda.raw_stream(index)
        moved = _native.core.move_few(*args)
        if isinstance(moved, int):
            moved = self._again(moved, _native.core.move_few, *args)
        if moved is not None:
            _, _, nbytes, copies = moved  # the driver may hold the last piece of a larger copy
            self.sent_at_once(copies, min(nbytes, copies * AT_ONCE_BYTES))
        return moved  # type: ignore[no-any-return]

    def to_host(
        self, copies: Sequence[HostCopy], *, hold: bool = True, after: Any = None
    ) -> Fence | None:
        """See `Target`."""
        consumer, stream = self.consumer(None), self.out_stream
        self.wait(self.record(consumer), stream)
        if after is not None:
            after.wait(stream)
        try:
            with on_stream(stream):
                for there, here, owned in copies:
                    here.copy_(there, non_blocking=True)
                    # Freed when this call returns; the allocator has to wait for the copy.
                    if owned:
                        there.record_stream(stream)
            event = self.record(stream)
        except BaseException:
            stream.synchronize()
            raise
        if hold and not all(copy.owned for copy in copies):
            self.wait(event, consumer)
        return event

    def bring_back(self, here: torch.Tensor, after: Any) -> Arrival:
        """See `Target`."""
        consumer = self.consumer(None)
        there = torch.empty(here.numel(), dtype=torch.uint8, device=self.device)
        check_is_plain(there)
        self.wait(self.record(consumer), self.stream)  # for earlier users of that memory
        if after is not None:
            after.wait(self.stream)
        try:
            with on_stream(self.stream):
                there.copy_(here, non_blocking=True)
            return Arrival(there, self.record(self.stream), consumer)
        except BaseException:  # an interrupt, perhaps: the copy may be under way
            there.record_stream(self.stream)
            raise


class Targets:
    """Devices that tensors are fetched from. Each target is made when it is first needed. Safe for
    several threads.

    Args:
        known: targets that exist already.

    Attributes:
        gatherings: arrangements of the leaves of trees, by offset table. A loop fetches the same
            few kinds of trees over and over, and arranging a thousand leaves takes a millisecond.
    """

    def __init__(self, *known: Target) -> None:
        self.gatherings: dict[Table, Gathering] = {}
        self._made = {target.device: target for target in known}

    def of(self, device: torch.device) -> Target:
        """Return the target for a device that tensors are on."""
        target = self._made.get(device)
        if target is None:  # no lock: if two threads make one, one of them is used
            target = self._made.setdefault(
                device, CudaTarget(device) if device.type == "cuda" else Target()
            )
        return target


shared_targets = Targets()
"""The targets of the process, for users that can share their streams."""


def target_for(device: torch.device | str | int | None) -> Target:
    """Return the target for a device; for None, the current CUDA device if there is one, else the
    CPU.

    Raises:
        ValueError: the device is neither a CUDA device nor the CPU.
        CudaUnavailableError: CUDA is not available.
    """
    warn_of_tensors()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if type(device) is int:  # not torch.device(0), which fails without an accelerator
            device = f"cuda:{device}"
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"not a device: {device!r}; write 'cuda', 'cuda:0' or 'cpu'") from error
    if device.type == "cuda":
        return CudaTarget(device)
    if device.type == "cpu":
        return Target()
    raise ValueError(f"cannot stage to {device}: only CUDA devices and the CPU are supported")


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
