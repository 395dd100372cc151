"""A GPU, and the streams that carry batches to it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from .. import _native
from .._batch import Blocks, FindLocked, Parts, Sharing, Table, make_blocks
from .._compat.calls import cuda_calls, ids_of
from .._compat.views import check_is_plain
from .._memory import (
    DeviceEvent,
    copy_error,
    disregard_captures,
    make_current,
    reads_pageable_memory,
)
from .._pool import Fence, Lease
from .._region import pieces_at
from .._steps import NOTHING
from ..errors import CudaUnavailableError
from ._at_once import AT_ONCE_BYTES, AtOnce
from ._events import EventCache
from ._target import FEW_TYPES, Arrival, Few, HostCopy, Target


class CudaTarget(Target):
    """A GPU, with our own streams for copies.

    Device slabs are made on the copy stream. Memory made on the consumer's stream may still be in
    use by earlier work there, so the copy would have to wait for that work, and nothing would
    overlap.

    Args:
        device: the GPU.
        stages: whether `stream` is for a stager. Such a stream carries copies to the device only,
            and waits for no other, since `copy_locked` waits for its earlier work. torch's streams
            are shared with the program: there are 32 of them.
    """

    def __init__(self, device: torch.device, *, stages: bool = False) -> None:
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
        if stages:
            self.stream = _stream_for_copies(self)
        # Neither refers to `self`: a forked child whose garbage collector frees the events of a
        # cycle would be ended.
        self._events = events = EventCache(partial(DeviceEvent.of, self.device.index))
        self._at_once = AtOnce(lambda: events.record(torch.cuda.current_stream()))
        self._reads_late = reads_pageable_memory(self.device.index)
        self._find, self._find_each = (FindLocked(pieces_at, each) for each in (False, True))
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
        return _OnStream(stream)

    def in_background(self) -> AbstractContextManager[Any]:
        """See `Target`."""
        disregard_captures()
        return self.selected()

    def use_own_stream(self) -> None:
        """See `Target`."""
        with self.selected():
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._cuda.set_stream(*ids_of(stream))

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

    def record(self, stream: torch.cuda.Stream) -> Fence:
        """See `Target`."""
        return self._events.record(stream)

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

    def find_locked(self, *, each: bool) -> FindLocked | None:
        """See `Target`."""
        if not _native.core.has_context():
            make_current(self.device.index)
        return self._find_each if each else self._find

    def blocks(self, table: Table, sharing: Sharing, stream: torch.cuda.Stream) -> Blocks:
        """See `Target`."""
        with _OnStream(stream) if stream is self.stream else NOTHING:
            return make_blocks(table, sharing, self.device)

    def move_few(
        self, leaves: list[Any], *, borrows: bool, most_bytes: int, is_later: bool = False
    ) -> Few | int | None:
        """See `Target`."""
        index = self.device.index
        if self._cuda.device() != index or self._reads_late:
            return None
        if self._at_once.marks and not self._at_once.has_room():
            return None
        if not _native.core.has_context():
            make_current(index)
        streams = self._cuda.raw_stream(index), self.stream.cuda_stream
        args = leaves, FEW_TYPES, 1, index, *streams, borrows, most_bytes, is_later
        moved = self._call(_native.core.move_few, *args)
        if not isinstance(moved, tuple):
            return moved  # type: ignore[no-any-return]
        few: Few = tuple.__new__(Few, moved)
        if copies := few.copies - few.locked:
            # The driver may hold the last piece of a larger copy.
            self._at_once.add(copies, min(few.nbytes, copies * AT_ONCE_BYTES))
        return few

    def has_room(self) -> bool:
        """See `Target`. If the device reads ordinary memory late, small batches take slabs, which
        are kept until their events.
        """
        return not self._reads_late and self._at_once.has_room()

    def fill(self, blocks: Blocks, parts: Parts, stream: torch.cuda.Stream) -> int:
        """See `Target`."""
        copies = super().fill(blocks, parts, stream)
        self._at_once.add(copies, parts.table.nbytes)
        return copies

    def to_host(
        self,
        copies: Sequence[HostCopy],
        *,
        hold: bool = False,
        owned: Sequence[torch.Tensor] = (),
        after: Any = None,
    ) -> Fence | None:
        """See `Target`."""
        consumer, stream = self.consumer(None), self.out_stream
        self.wait(self.record(consumer), stream)
        if after is not None:
            after.wait(stream)
        try:
            self.copy_out(copies, stream)
            for tensor in owned:
                tensor.record_stream(stream)
            event = self.record(stream)
        except BaseException:
            stream.synchronize()
            raise
        if hold:
            self.wait(event, consumer)
        return event

    def copy_out(self, copies: Sequence[HostCopy], stream: torch.cuda.Stream) -> None:
        """See `Target`."""
        pieces = [copy.memory() for copy in copies]
        with self.selected():
            self._call(_native.core.copy_out, pieces, stream.cuda_stream)

    def fetch_few(self, leaves: list[Any], slab: Lease, *, waits: bool) -> Few | None:
        """See `Target`."""
        index = self.device.index
        if self._cuda.device() != index:
            return None
        memory = self._cuda.raw_stream(index), slab.data_ptr(), slab.nbytes
        few = self._call(_native.core.fetch_few, leaves, FEW_TYPES, index, *memory, waits)
        return None if few is None else tuple.__new__(Few, few)

    def bring_back(self, here: torch.Tensor, after: Any) -> Arrival:
        """See `Target`."""
        consumer = self.consumer(None)
        there = torch.empty(here.numel(), dtype=torch.uint8, device=self.device)
        check_is_plain(there)
        self.wait(self.record(consumer), self.stream)  # for earlier users of that memory
        if after is not None:
            after.wait(self.stream)
        try:
            with self.selected(), _OnStream(self.stream):
                there.copy_(here, non_blocking=True)
            return Arrival(there, self.record(self.stream), consumer)
        except BaseException:  # an interrupt, perhaps: the copy may be under way
            there.record_stream(self.stream)
            raise


class _OnStream:
    """``torch.cuda.stream`` for a stream of the current device, but without its cost of 31 us.

    If the device may be another one, enter `CudaTarget.selected` first. ``torch.cuda.stream``
    restores that device by ``cudaSetDevice``, which creates a context since CUDA 12.
    """

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        calls = cuda_calls()
        self._previous = calls.stream(self._stream.device_index)
        calls.set_stream(*ids_of(self._stream))

    def __exit__(self, *_: object) -> None:
        cuda_calls().set_stream(*self._previous)


_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of stagers that are gone. Later stagers use them again, since torch's allocator keeps
memory for each stream."""


def _stream_for_copies(target: CudaTarget) -> torch.cuda.Stream:
    """Return a stream that no other code has until the target is gone. The driver makes it, and it
    is kept for the life of the process.
    """
    idle = _idle_streams[target.device]
    try:
        stream = idle.pop()
    except IndexError:
        with target.selected():
            make_current(target.device.index)
            handle = _native.core.make_stream()
        if handle < 0:
            raise copy_error(-handle) from None
        stream = torch.cuda.ExternalStream(handle, target.device)  # type: ignore[no-untyped-call]
    weakref.finalize(target, idle.append, stream).atexit = False
    return stream
