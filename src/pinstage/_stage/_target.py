"""`Target`: a device that batches are copied to, and tensors from. The base class is the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from .. import _native
from .._batch import (
    ATOM_TYPES,
    WRAPPERS,
    Blocks,
    FindLocked,
    Parts,
    Sharing,
    Table,
    make_blocks,
)
from .._compat.views import check_is_plain
from .._memory import copy_error, make_current, refuse_capture
from .._pool import Fence, Lease
from .._steps import NOTHING

MOST_FEW = _native.core.MOST_FEW
"""The most tensors that `Target.move_few` copies."""

FEW_TYPES = ATOM_TYPES, WRAPPERS
"""Types of leaves that stay as they are, and types of wrappers, whose contents are used without
them.
"""

_NO_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: no device is current for the driver in this thread."""


class HostBytes(NamedTuple):
    """The bytes of a batch in a host slab."""

    address: int
    """Where byte 0 of the batch is, or would be."""
    is_pinned: bool
    """Whether they are page-locked."""


class Few(NamedTuple):
    """A few leaves that were moved without a slab."""

    leaves: list[Any]
    """The leaves of the result."""
    tensors: int
    """The number of copied leaves."""
    nbytes: int
    copies: int
    locked: int
    """The number of leaves that are sent from page-locked memory."""

    def made(self) -> list[torch.Tensor]:
        """Return the tensors that were made."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class HostCopy(NamedTuple):
    """A copy to the host."""

    here: int
    """The address on the host."""
    there: torch.Tensor
    """The tensor on the device. Its elements are dense."""
    start: int
    """The first of its bytes to copy."""
    nbytes: int

    def memory(self) -> tuple[int, int, int]:
        """Return the addresses on the host and on the device, and the number of bytes."""
        return self.here, self.there.data_ptr() + self.start, self.nbytes


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
        """Make a stream current in this thread. Its device must be `selected`."""
        return NOTHING

    def in_background(self) -> AbstractContextManager[Any]:
        """Make the device current in our thread, which may send and query events even while other
        threads capture.
        """
        return NOTHING

    def use_own_stream(self) -> None:
        """Make a stream of its own current for all further work of this thread on the device."""

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

    def find_locked(self, *, each: bool) -> FindLocked | None:  # noqa: ARG002
        """Return how page-locked leaves are found, to be sent by `copy_locked`; None if they are
        packed.

        Args:
            each: whether each large leaf is asked; see `FindLocked`.
        """
        return None

    def blocks(self, table: Table, sharing: Sharing, stream: Any) -> Blocks:  # noqa: ARG002
        """Make the tensors of a batch, whose memory belongs to a stream. The device must be
        `selected`.

        Args:
            table: the batch's table.
            sharing: which leaves share memory.
            stream: the stream that writes them first: the current one, or `stream`.
        """
        return make_blocks(table, sharing, self.device)

    def move_few(
        self, leaves: list[Any], *, borrows: bool, most_bytes: int, is_later: bool = False
    ) -> Few | int | None:
        """Copy a few leaves, each to its own tensor, which belongs to the current stream.

        Page-locked leaves take `stream` if that is idle, unless they may be read after the call.

        Args:
            leaves: the leaves of a batch.
            borrows: whether page-locked leaves may be read after the call.
            most_bytes: what such leaves may have together if the stream is busy.
            is_later: whether the batch is for later work, so that page-locked leaves, too, count as
                too large.

        Returns:
            None if the leaves are too many, too large, or not plain, or if the copies would wait
            for the device. The bytes of page-locked leaves that have more than `most_bytes`.
        """
        few = _native.core.move_few(leaves, FEW_TYPES, 0, 0, 0, 0, borrows, most_bytes, is_later)
        return tuple.__new__(Few, few) if isinstance(few, tuple) else few

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
        handle = getattr(stream, "cuda_stream", 0)
        copies: int = self._call(blocks.copy, host.address, start, end, handle, host.is_pinned)
        return copies

    def copy_locked(self, blocks: Blocks, parts: Parts, stream: Any, *, at_once: bool) -> int:
        """Copy page-locked leaves from where they are, in one call; return the number of copies, or
        -1 if the driver refused the call and nothing was copied.

        Args:
            blocks: the batch's blocks.
            parts: the batch.
            stream: our stream.
            at_once: whether the leaves have been read when the call returns. Then it waits for all
                earlier work of the stream.
        """
        handle = getattr(stream, "cuda_stream", 0)
        return blocks.copy_locked(parts.sources, parts.locked, handle, at_once)

    def fill(self, blocks: Blocks, parts: Parts, stream: Any) -> int:
        """Copy a batch of at most `AT_ONCE_BYTES` from ordinary memory, which has been read when
        the call returns.

        Otherwise as `copy`.
        """
        handle = getattr(stream, "cuda_stream", 0)
        copies: int = self._call(blocks.fill, parts.sources, handle, parts.stacks)
        return copies

    def has_room(self) -> bool:
        """Return whether `fill` would return without waiting for the device."""
        return True

    def _call(self, send: Callable[..., Any], *args: Any) -> Any:
        """Copy by a native function, which returns the negative code of the driver's error; raise
        such an error. If the driver has no current device in this thread, set it, and copy again.

        Calls of CUDA's runtime set that device, but torch's allocator makes no such call while it
        has free memory.
        """
        done = send(*args)
        if done == -_NO_CONTEXT:
            make_current(self.device.index)
            done = send(*args)
        if isinstance(done, int) and done < 0:
            raise copy_error(-done)
        return done

    # -- to the host, and back

    def to_host(
        self,
        copies: Sequence[HostCopy],
        *,
        hold: bool = False,  # noqa: ARG002
        owned: Sequence[torch.Tensor] = (),  # noqa: ARG002
        after: Any = None,  # noqa: ARG002
    ) -> Fence | None:
        """Copy to the host, behind all work queued on the caller's current stream.

        Args:
            copies: from where to where. The host memory is page-locked, or the call blocks.
            hold: whether later work on that stream waits for the copies. Then the sources may be
                changed or freed as if the copies were work of that stream. If not, the caller keeps
                them, unchanged, until the event is done.
            owned: sources that only the copies use; the caller frees them when this call returns.
            after: an event that the copies have to wait for, too.

        Returns:
            The event behind the copies; None if they are done when the call returns. If the call
            raises, it has waited for the copies that it had started.
        """
        self.copy_out(copies, None)
        return None

    def copy_out(self, copies: Sequence[HostCopy], stream: Any) -> None:  # noqa: ARG002
        """Copy to the host, behind a stream's earlier work; see `to_host`."""
        for copy in copies:  # not torch's ``copy_``, as in `copy`
            ctypes.memmove(*copy.memory())

    def fetch_few(self, leaves: list[Any], slab: Lease, *, waits: bool) -> Few | None:  # noqa: ARG002
        """Copy a few small tensors of the device to new ones on the host, behind the current
        stream's earlier work.

        Args:
            leaves: the leaves of a tree.
            slab: host memory for them.
            waits: whether to wait for the copies. If not, they go to the slab only, and `fill_few`
                fills the new tensors when the bytes are there.

        Returns:
            None if they are too many, too large, or not plain.
        """
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
