"""A piece of a device's memory whose bytes were copied to the host."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

import torch

from .._compat.views import range_of, view_of
from .._pool import Fence, Lease, SlabPool, lease_in_flight
from .._stage import Arrival, EventGroup, HostCopy, HostSlabs, Target, kept
from ..errors import ForkedPoolError, PoolClosedError

OWNER = "offload"
"""The name under which the pool counts the slabs."""

ALIGNMENT = 512
"""Copies begin at a multiple of this offset in the storage. CUDA's allocator aligns storages to it,
so tensors keep their alignment, and kernels choose the same algorithms."""

GAPS = 2
"""A tensor whose elements are spread over more than this multiple of their bytes, such as the
queries in a tensor of queries, keys and values, is sent without the gaps."""

_leases: dict[int, Lease] = {}
"""Leases by the id of their living `OffloadedBlock`. They aren't its attributes: in a cycle of
garbage, the collector could report the lease as unreleased to the pool before the block's finaliser
releases it."""


def lease_now(slabs: HostSlabs, nbytes: int) -> tuple[Lease, Fence | None] | None:
    """Lease a slab without waiting for one to become free; a pageable one if page-locking is
    refused.

    Slabs in flight are taken first: a host that runs ahead finds no idle slab, and the pool would
    grow with each step that the host is ahead.

    Returns:
        The lease, and the event to wait for before the slab is written; None if the pool has no
        room.

    Raises:
        PoolClosedError, ForkedPoolError: as `SlabPool.acquire`.
        TimeoutError: a signal's handler raised it.
    """
    leased = lease_in_flight(slabs.pool, nbytes, owner=OWNER)
    if leased is not None:
        lease, after = leased
        if hasattr(after, "wait"):
            return leased
        lease.release(after=after)  # `after` is a stream, because a copy had failed
    try:
        own = slabs.lease_now(nbytes)
    except (PoolClosedError, ForkedPoolError, TimeoutError, torch.AcceleratorError):
        raise
    except (MemoryError, OSError, RuntimeError):  # frozen, too small, or out of memory
        return None
    return None if own is None else (own, None)


def keep_until(event: Fence | None, memory: torch.Tensor) -> None:
    """Keep memory alive that a copy on our stream reads or writes."""
    kept.until(event, [memory])


def drop_arrival(target: Target, arrival: Arrival) -> None:
    """Free the device memory of a copy that isn't needed, behind the copy; on its own stream, if
    that is current.
    """
    if arrival.event is not None and arrival.stream == target.consumer(None):
        target.wait_for(arrival.event)
    else:
        keep_until(arrival.event, arrival.there)


class Load(NamedTuple):
    source: torch.Tensor
    """uint8 ``[n]``"""
    begin: int
    """The byte offset of the source in the tensor's storage; 0 if the elements are sent without
    gaps.
    """
    packed: tuple[int, ...] | None
    """The strides of the elements, if they are sent without gaps."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Load:
        """Return the tensor to send. Elements that are spread out are gathered, on the current
        stream.
        """
        begin, end = range_of(tensor)
        if end - begin > GAPS * tensor.nbytes:
            elements = tensor.detach().clone()
            return cls(
                bytes_of(elements.untyped_storage(), 0, elements.nbytes), 0, elements.stride()
            )
        begin = begin // ALIGNMENT * ALIGNMENT
        return cls(bytes_of(tensor.untyped_storage(), begin, end), begin, None)


class OffloadedBlock:
    """Bytes of one storage on the host; also on the device, during the copy to the host and after
    the copy back.

    The finaliser gives the slab back, behind the last copy. The garbage collector may call it.

    Args:
        target: the device that the bytes come from.
        load: the bytes there.
        lease: the lease of a slab for them, which this object owns from now on.
        after: the event to wait for before the slab is written.
        dropped: gets the number of bytes if this object is freed while it has an arrival.

    Attributes:
        ahead_for: the number of the saved tensor for which the block was last copied back early; 0
            for none.
        arrival: the bytes on the device again, while they are kept there.
        event: behind the last copy of the slab.
        source: the bytes on the device, until the copy is done or that memory's stream waits for
            it.
        seqs: numbers of the saved tensors in this block.
    """

    ahead_for = 0
    arrival: Arrival | None = None
    here: torch.Tensor | None = None
    source: torch.Tensor | None = None

    def __init__(
        self,
        target: Target,
        load: Load,
        lease: Lease,
        after: Fence | None,
        dropped: deque[int] | None = None,
    ) -> None:
        self.begin, self.packed = load.begin, load.packed
        self.nbytes = load.source.numel()
        self.target = target
        self.seqs: list[int] = []
        self.dropped = dropped
        # An interrupt may come before the copy's own event.
        ends = [event for event in (after, target.out_stream) if event is not None]
        self.event: Fence | None = EventGroup(ends)
        _leases[id(self)] = lease
        self.here = lease.tensor()
        copy = HostCopy(self.here.data_ptr(), load.source, 0, self.nbytes)
        self.event = target.to_host([copy], after=after)
        if self.event is not None:
            self.source = load.source

    def fetch(self) -> Arrival:
        assert self.here is not None
        self.arrival = arrival = self.target.bring_back(self.here, self.event)
        self.event = arrival.event
        return arrival

    def take(self) -> torch.Tensor:
        """Return the bytes that were copied back, uint8 ``[n]``, for the current stream."""
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        self.target.take(arrival)
        return arrival.there

    def drop_arrival(self) -> None:
        """Free the device memory of bytes that were copied back."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            drop_arrival(self.target, arrival)

    def let_source_go(self, *, at_once: bool) -> None:
        """Make the current stream wait for the copy, and free the device's memory.

        Args:
            at_once: whether the memory is the current stream's, which may use it again behind the
                wait. If not, it is freed when the copy is done.
        """
        source, self.source = self.source, None
        if source is not None:
            self.target.wait_for(self.event)
            if not at_once:
                keep_until(self.event, source)

    def __del__(self) -> None:
        arrival, source = self.arrival, self.source
        if source is not None:
            keep_until(self.event, source)
        if arrival is not None:
            keep_until(arrival.event, arrival.there)
            if self.dropped is not None:
                self.dropped.append(self.nbytes)
        self.here = None
        lease = _leases.pop(id(self), None)
        if lease is not None:
            # A forked child collected the parent's graph.
            with contextlib.suppress(ForkedPoolError):
                lease.release(after=self.event)


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes and strides describe it completely."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def can_leave(tensor: torch.Tensor, pool: SlabPool) -> bool:
    """Return whether a tensor can be offloaded: not a parameter or subclass, nor a CPU tensor to
    page-locked memory.
    """
    if type(tensor) is not torch.Tensor or not has_plain_memory(tensor):
        return False
    return tensor.is_cuda or (tensor.is_cpu and not pool.memory.is_pinned)


def bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> torch.Tensor:
    """Return a part of a storage as uint8 ``[n]``, unknown to autograd."""
    return view_of(storage, begin, torch.uint8, (end - begin,), (1,))
