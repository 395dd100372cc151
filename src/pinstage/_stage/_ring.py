"""A ring of device slabs at fixed addresses, each used again when its batch is done with.

::

              take()             get(stream)             nobody uses it, or release()
    free  ------------>  taken  ------------>  handed out  ------------->  free, with an event for each
     ^                                                                     stream that was given the batch
     |       the stream that writes next waits for these, the host never        |
     +--------------------------------------------------------------------------+

The views of a batch are made anew each time: a tensor object that was handed out before may have been changed in any
way (``unsqueeze_``, ``.data =``, an attribute). The ring counts the users of the slab's storage: every tensor over it
is one, whether Python or autograd holds it. When there is none, nobody can issue work on the batch any more. So an
event recorded then on the consumer's stream is behind all of that work. If that stream itself writes the next batch, as
it does with small ones, its order is enough.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from typing import Any

import torch

from .._batch import Layout, Structure, Table
from .._compat.calls import ownership
from .._compat.storages import StorageUsers, check_storages_can_be_counted
from .._pool import Fence
from .._sizes import format_bytes, size_to_paste
from ..errors import RingError
from ._device import Target


class RingLease:
    """The right of one batch to a slab: held while it is packed, then by its transfer.

    The slab holds no reference to it. So a stage that ends anywhere, by an interrupt say, gives the slab back.
    """

    __slots__ = ("__weakref__", "_released", "_target", "is_released", "slab")

    def __init__(self, slab: RingSlab, target: Target, released: deque[RingLease]) -> None:
        self.slab = slab
        self.is_released = False
        self._target = target
        self._released = released

    def ready(self, stream: Any) -> torch.Tensor:
        """Return the slab, with the stream that will write it ordered behind those who used it last."""
        slab = self.slab
        slab.record_events(self._target, stream)
        for event in slab.events:
            self._target.wait(event, stream)
        slab.events, slab.consumers, slab.writer = [], [], stream
        return slab.memory

    def hand_out(self, consumer: Any) -> list[torch.Tensor]:
        """Take note that a stream is given the batch; return the slab if it is for the first time in its life."""
        slab = self.slab
        if consumer not in slab.consumers:  # lists: to hash a stream takes longer than to compare it with a few
            slab.consumers.append(consumer)
        if consumer in slab.all_consumers:
            return []
        slab.all_consumers.append(consumer)
        return [slab.memory]

    def release(self) -> None:
        """Give the slab back: its batch could not be sent, or its holder says so, whatever is still referred to.

        A finaliser may call this in the middle of `Ring.take`. So it takes no lock: whoever has it next looks.
        """
        if not self.is_released:
            self.slab.record_events(self._target, self.slab.writer)
            self.is_released = True
            self._released.append(self)


class RingSlab:
    """One device slab of a ring.

    Attributes:
        memory: uint8 ``[nbytes]`` on the device.
        number: of the batch in it.
        content: structure and table of this batch; None until it is packed.
        writer: the stream that wrote this batch: the caller's for a small one, else the stream for copies.
        consumers: streams that were given this batch, and have no event behind it.
        all_consumers: streams that were given any batch of it.
        events: what the stream that writes the next batch here has to wait for.
        in_use: whether it was taken, and not seen free since.
    """

    def __init__(self, target: Target, nbytes: int) -> None:
        self._nbytes = nbytes
        self._make_memory(target)
        self.number = 0
        self.content: tuple[Structure, Table] | None = None
        self.writer: Any = None
        self.consumers: list[Any] = []
        self.events: list[Fence] = []
        self.in_use = False
        self._lease: weakref.ref[RingLease] | None = None

    def _make_memory(self, target: Target) -> None:
        with target.selected(), torch.inference_mode(mode=False):
            self.memory = target.empty(self._nbytes, target.stream)
        self.all_consumers: list[Any] = []
        self._users = StorageUsers(self.memory)

    def record_events(self, target: Target, writer: Any) -> None:
        """Record an event on each stream that was given the batch, behind all work it has been given so far.

        But not on the stream that writes here next, whose work is done in order. While that is not known, it is most
        likely the one that wrote this batch; `RingLease.ready` records what is missing.
        """
        left = []
        for stream in self.consumers:
            if stream is writer:
                left.append(stream)
            elif (event := target.record(stream)) is not None:
                self.events.append(event)
        self.consumers = left

    # -- for the ring, which holds its lock

    def take(self, number: int, lease: RingLease, target: Target) -> None:
        """Give the slab to a batch, with memory of its own if somebody has freed or resized what it had."""
        if self._users.have_moved():
            self._make_memory(target)
        self._lease, self.content = weakref.ref(lease), None
        self.in_use, self.number = True, number

    def free(self) -> None:
        """Take the slab back, after `record_events`."""
        self._lease = self.content = None
        self.in_use = False

    def free_if_unused(self, target: Target) -> None:
        """Take the slab back if nobody uses the batch in it any more."""
        lease = self._lease
        if (lease is None or lease() is None) and not self._users.are_there():
            self.record_events(target, self.writer)
            self.free()

    def is_of(self, lease: RingLease) -> bool:
        """Say whether a lease of it still holds."""
        return self._lease is not None and self._lease() is lease

    def holder(self) -> str:
        """Say in words who uses the batch."""
        if self._lease is not None and self._lease() is not None:
            return "it is being packed" if self.content is None else "its transfer is alive and was not released"
        path = None if self.content is None else _path_of_a_leaf_over(self.memory, Layout(*self.content))
        if path is not None:
            return f"batch{path} is still referred to"
        return "a tensor or array made from one of its leaves (a slice, a detach(), what autograd saved) is alive"


def _path_of_a_leaf_over(slab: torch.Tensor, layout: Layout) -> str | None:
    """Return where in the batch a leaf is that is alive as a tensor of Python's. Takes long; for an error."""
    start = slab.data_ptr()
    paths = {(start + slot.offset, slot.dtype, slot.shape): slot.path for slot in layout.slots}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device == slab.device and thing.layout is torch.strided:
            path = paths.get((thing.data_ptr(), thing.dtype, tuple(thing.shape)))
            if path is not None and thing is not slab:
                return path
    return None


class Ring:
    """A fixed number of device slabs. May be used by several threads.

    Args:
        target: where they are.
        count: how many.
        nbytes: size of each; None takes that of the first batch.

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` or `nbytes` is less than 1.
        StagingError: this torch does not tell who uses a storage.
    """

    def __init__(self, target: Target, count: int, nbytes: int | None) -> None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"ring is a number of device slabs: {count!r}; pass an int, such as ring=3")
        if count < 1:
            raise ValueError(f"ring must be at least 1: {count}; it is the number of batches held at once")
        if nbytes is not None and nbytes < 1:
            raise ValueError(f"ring_bytes must be positive: {nbytes}; it is the size of each device slab")
        check_storages_can_be_counted()
        self.count = count
        self._given = nbytes is not None
        self._nbytes = nbytes
        self._target = target
        self._slabs: list[RingSlab] = []
        self._taken = 0
        self._released: deque[RingLease] = deque()  # written without the lock: see `RingLease.release`
        self._lock = threading.RLock()
        self._is_entered = ownership(self._lock)

    def take(self, nbytes: int) -> RingLease:
        """Take the free slab that was used longest ago.

        Raises:
            RingError: the batch is larger than the slabs, or none is free, or a finaliser asks in the middle of a call.
        """
        if self._is_entered():
            raise RingError(
                "ring is in the middle of a call of this very thread: a finaliser, such as the end of a generator, "
                "asked for a slab; a finaliser may release() transfers, nothing else"
            )
        lease = self._try_to_take(nbytes)
        if lease is None and self._fits(nbytes):
            gc.collect()  # a reference cycle, such as an exception's, is nobody who holds it
            lease = self._try_to_take(nbytes)
        if lease is None:
            raise self._error(nbytes)
        return lease

    def _try_to_take(self, nbytes: int) -> RingLease | None:
        target = self._target
        with self._lock:
            while self._released:
                lease = self._released[0]
                if lease.slab.is_of(lease):
                    lease.slab.free()
                self._released.popleft()  # last: an interrupt would lose it
            if not self._slabs:
                self._nbytes = nbytes if self._nbytes is None else self._nbytes
                self._slabs = [RingSlab(target, self._nbytes) for _ in range(self.count)]
            if not self._fits(nbytes):
                return None
            found: RingSlab | None = None
            for slab in self._slabs:  # all are looked at, so that each is free early
                if slab.in_use:
                    slab.free_if_unused(target)
                if not slab.in_use and (found is None or slab.number < found.number):
                    found = slab
            if found is None:
                return None
            lease = RingLease(found, target, self._released)
            self._taken += 1
            found.take(self._taken, lease, target)
            return lease

    def _fits(self, nbytes: int) -> bool:
        return self._nbytes is None or nbytes <= self._nbytes

    def _error(self, nbytes: int) -> RingError:
        assert self._nbytes is not None
        if nbytes > self._nbytes:
            origin = "as ring_bytes says" if self._given else "the size of the first batch"
            return RingError(
                f"batch does not fit the ring: it needs {format_bytes(nbytes)}, each of the {self.count} device "
                f'slabs has {format_bytes(self._nbytes)}, {origin}; pass ring_bytes="{size_to_paste(nbytes)}", or more '
                "if there are larger batches"
            )
        held = "; ".join(
            f"batch number {slab.number}: {slab.holder()}" for slab in sorted(self._slabs, key=lambda slab: slab.number)
        )
        return RingError(
            f"ring is full: batch number {self._taken + 1} needs a device slab, all {self.count} are held ({held}); "
            f"pass ring={self.count + 1}; or drop batches sooner, clone() what has to stay, "
            "and call Transfer.release() when all work on a batch has been issued"
        )
