"""A ring of device slabs at fixed addresses, each used again when its batch is done with.

::

              take()             get(stream)             nobody holds it, or release()
    free  ------------>  taken  ------------>  handed out  ------------->  free, with an event for each
     ^                                                                     stream that was given the batch
     |          the copy stream waits for these events, the host never          |
     +--------------------------------------------------------------------------+

Views of a slab are made once for each layout and handed out again, so who still holds a batch cannot be told by the
death of a tensor. It is told by counting: every leaf that somebody holds, Python or autograd, counts as a reference of
the tensor beyond our own, and every tensor made from one (a slice, a ``detach()``, an array) as another user of the
slab's storage. When nobody holds anything, no more work on the batch can be begun, so an event recorded then on the
consumer's stream is behind all of it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import OrderedDict
from operator import attrgetter
from typing import Any, Literal

import torch

from .._errors import RingError
from .._layout import Layout, Plan, Table, put_together
from .._pool import Event
from .._sizes import format_bytes
from .._steps import step
from ._streams import ALONE
from ._targets import Target
from ._transfer import Transfer, memory_of

LAYOUTS_KEPT = 8
"""Layouts whose views a slab keeps. Batches of fixed shapes have a few: training, validation, the last one."""

Overflow = Literal["error", "fresh"]

_requires_grad, _number = attrgetter("requires_grad"), attrgetter("number")


class _Views:
    """The tensors of one layout in one slab."""

    def __init__(self, table: Table, slab: torch.Tensor) -> None:
        others = [None] * len(table.columns.passthrough)
        # Kept for batches that are staged in other modes than this one.
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaves = table.views(slab, others)
        self.packed: list[torch.Tensor] = [leaf for leaf in leaves if leaf is not None]  # the only list that has them
        bases = [base for leaf in self.packed if (base := leaf._base) is not None and base is not slab]
        self.storage_users = len(set(map(id, [*self.packed, *bases])))
        self._references = ALONE * len(self.packed)

    def are_held(self) -> bool:
        """Say whether somebody else holds one of them."""
        return sum(map(sys.getrefcount, self.packed)) > self._references

    def first_held(self) -> int:
        """Return which one somebody else holds, the first of those."""
        return next((index for index, count in enumerate(map(sys.getrefcount, self.packed)) if count > ALONE), 0)


class Place:
    """The right of one batch to a slab: held while it is packed, then by its transfer.

    The slab holds no reference to it. So a stage that ends anywhere, by an interrupt say, gives the slab back.
    """

    __slots__ = ("__weakref__", "slab")

    def __init__(self, slab: RingSlab) -> None:
        self.slab = slab


class RingSlab:
    """One device slab of a ring. Its methods are called with the ring's lock held, but for `carry` and `ready`."""

    def __init__(self, target: Target, nbytes: int) -> None:
        self._target = target
        with target.copying(), torch.inference_mode(mode=False):
            self._slab = torch.empty(nbytes, dtype=torch.uint8, device=target.device)
        self._nbytes = nbytes
        self._storage = self._slab.untyped_storage()
        self._storage_references = sys.getrefcount(self._storage)
        self._views: OrderedDict[Table, _Views] = OrderedDict()
        self._all_consumers: list[Any] = []
        self.number = 0  # of the batch in it
        self._in_use: Table | None = None
        self._place: weakref.ref[Place] | None = None
        self._layout: Layout | None = None
        self._consumers: list[Any] = []
        self._events: list[Event] = []

    def take(self, table: Table, number: int) -> Place:
        """Give the slab to a batch."""
        place = Place(self)
        self._place, self._layout = weakref.ref(place), None
        self._in_use, self.number = table, number
        return place

    def is_of(self, place: Place) -> bool:
        """Say whether a place in it still holds."""
        return self._place is not None and self._place() is place

    def carry(self, layout: Layout) -> None:
        """Take note that the batch is packed, and what it is; called by whoever has the place."""
        self._layout = layout

    def ready(self, nbytes: int) -> torch.Tensor:
        """Return the slab, with the copy stream ordered behind those who used it last; called as `carry` is."""
        for event in self._events:
            self._target.wait_before_copies(event)
        self._events = []
        return self._slab if nbytes == self._nbytes else self._slab[:nbytes]

    def hand_out(self, table: Table, consumer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the packed leaves, and the memory that a stream is given for the first time."""
        if consumer not in self._consumers:  # lists: to hash a stream takes longer than to compare it with a few
            self._consumers.append(consumer)
        new = []
        if consumer not in self._all_consumers:
            self._all_consumers.append(consumer)
            new = [self._slab]
        views = self._views.get(table)
        if views is None or any(map(_requires_grad, views.packed)):  # it was made a part of an autograd graph
            views = self._views[table] = _Views(table, self._slab)
            if len(self._views) > LAYOUTS_KEPT:
                self._views.popitem(last=False)
        self._views.move_to_end(table)
        return views.packed, new

    def free(self) -> None:
        """Take the slab back: whoever was given the batch has been told all that shall be done with it."""
        self._events += [event for stream in self._consumers if (event := self._target.record_on(stream)) is not None]
        self._consumers = []
        self._in_use = self._place = self._layout = None

    def is_free(self) -> bool:
        """Say whether the slab can be taken, after looking whether somebody still holds the batch in it."""
        if self._in_use is None:
            return True
        views = self._views_out()
        if self._has_place() or (views is not None and (views.are_held() or self._is_used_otherwise())):
            return False
        self.free()
        return True

    def holder(self) -> str:
        """Say in words who holds the batch."""
        if self._has_place():
            return "it is being packed" if self._layout is None else "its transfer is alive and was not released"
        views = self._views_out()
        if views is not None and views.are_held() and self._layout is not None:
            return f"batch{self._layout.slots[views.first_held()].path} is still referred to"
        return "a tensor or array made from one of its leaves (a slice, a detach()) is alive"

    def _has_place(self) -> bool:
        return self._place is not None and self._place() is not None

    def _views_out(self) -> _Views | None:
        """Return the leaves of the batch, if they were handed out."""
        return self._views.get(self._in_use) if self._consumers and self._in_use is not None else None

    def _is_used_otherwise(self) -> bool:
        """Say whether anything that is none of the views shows the slab."""
        known = 2 + sum(views.storage_users for views in self._views.values())  # the slab, and its storage's wrapper
        users = torch._C._storage_Use_Count(self._storage._cdata)
        return users > known or sys.getrefcount(self._storage) > self._storage_references


class Ring:
    """A fixed number of device slabs. May be used by several threads.

    Args:
        target: where they are.
        count: how many.
        nbytes: size of each; None takes that of the first batch.
        overflow: what becomes of a batch that finds no place: an error, or a slab of its own outside of the ring.

    Raises:
        ValueError: `count` or `nbytes` is less than 1, or no such `overflow`.
    """

    def __init__(self, target: Target, count: int, nbytes: int | None, overflow: Overflow) -> None:
        if count < 1:
            raise ValueError(f"ring must be at least 1: {count}; it is the number of batches held at once")
        if nbytes is not None and nbytes < 1:
            raise ValueError(f"ring_bytes must be positive: {nbytes}; it is the size of each device slab")
        if overflow not in ("error", "fresh"):
            raise ValueError(f"ring_overflow must be 'error' or 'fresh': {overflow!r}")
        self.count = count
        self.overflow = overflow
        self.overflows = 0
        self._given = nbytes is not None
        self._nbytes = nbytes
        self._target = target
        self._slabs: list[RingSlab] = []
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, table: Table) -> Place | None:
        """Take the free slab that was used longest ago.

        Returns:
            A place in it, or None where the batch shall have one of its own.

        Raises:
            RingError: the batch is larger than the slabs, or none is free.
        """
        with self._lock:
            if not self._slabs:
                self._nbytes = table.nbytes if self._nbytes is None else self._nbytes
                self._slabs = [RingSlab(self._target, self._nbytes) for _ in range(self.count)]
            assert self._nbytes is not None
            slab = None
            if table.nbytes <= self._nbytes:
                slab = self._free_slab()
                if slab is None and self.overflow == "error":
                    gc.collect()  # a reference cycle, such as an exception's, is nobody who holds it
                    slab = self._free_slab()
            if slab is None and self.overflow == "error":
                raise self._error(table)
            self._taken += 1
            if slab is not None:
                return slab.take(table, self._taken)
            self.overflows += 1
            return None

    def release(self, place: Place) -> None:
        """Take a slab back: its batch could not be sent, or its holder says so, whatever is still referred to."""
        with self._lock:
            if place.slab.is_of(place):
                place.slab.free()

    def hand_out(self, place: Place, table: Table, consumer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See `RingSlab.hand_out`."""
        with self._lock:
            return place.slab.hand_out(table, consumer)

    def _free_slab(self) -> RingSlab | None:
        free = [slab for slab in self._slabs if slab.is_free()]  # all are looked at, so that each is free early
        return min(free, key=_number, default=None)

    def _error(self, table: Table) -> RingError:
        assert self._nbytes is not None
        if table.nbytes > self._nbytes:
            origin = "as ring_bytes says" if self._given else "the size of the first batch"
            return RingError(
                f"batch does not fit the ring: it needs {format_bytes(table.nbytes)}, each of the {self.count} device "
                f"slabs has {format_bytes(self._nbytes)}, {origin}; pass ring_bytes= as large as the largest batch, or "
                "ring_overflow='fresh'"
            )
        held = "; ".join(f"batch number {slab.number}: {slab.holder()}" for slab in sorted(self._slabs, key=_number))
        return RingError(
            f"ring is full: batch number {self._taken + 1} needs a device slab, all {self.count} are held ({held}); "
            "drop batches sooner, clone() what has to stay, call Transfer.release() when all work on a batch has been "
            "issued, pass a larger ring=, or ring_overflow='fresh'"
        )


class RingTransfer(Transfer):
    """A transfer into a slab of a ring."""

    __slots__ = ("_parts", "_place", "_ring", "_table")

    def __init__(self, ring: Ring, place: Place, planned: Plan, *args: Any) -> None:
        super().__init__(*args)
        self._ring = ring
        self._place: Place | None = place
        self._table = planned.table
        place.slab.carry(self.layout)

    def get(self, stream: torch.cuda.Stream | None = None) -> Any:
        """See `Transfer.get`."""
        with step("get"):
            place = self._place
            if place is None:
                raise RingError(
                    "transfer was released: its device slab may hold another batch by now; get() the batch before "
                    "release()"
                )
            with step("views"):
                consumer = self._target.consumer(stream)
                leaves, new = self._ring.hand_out(place, self._table, consumer)
            self._target.hand_over(self._event, new, consumer)
            if self._moved:
                memory = [part for tensor in self._moved for part in memory_of(tensor)]
                self._target.hand_over(self._moved_event, memory, consumer)
                leaves = list(leaves)
                for position, tensor in zip(self._table.columns.passthrough, self._moved, strict=True):
                    leaves.insert(position, tensor)
            if not self._unpacked:
                self._batch = put_together(self._layout, leaves)
                self._unpacked = True
            return self._batch

    def release(self) -> None:
        """See `Transfer.release`."""
        if self._place is not None:
            self._ring.release(self._place)
        self._place = self._batch = self._slab = None  # a tensor of the slab would count as somebody who uses it
