"""Objects that autograd keeps in place of tensors, and the order of saves on each device."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from .._compat.storages import Changes, version_of
from .._compat.views import range_of, view_of
from .._pool import Fence, Lease
from .._stage import Arrival, Target
from ._block import ALIGNMENT, Load, OffloadedBlock


class Saved:
    """Kept by autograd in place of an offloaded tensor. A block's bytes are freed with its last
    `Saved`.
    """

    def __init__(
        self, scheduler: OffloadScheduler, tensor: torch.Tensor, block: OffloadedBlock, seq: int
    ) -> None:
        self.scheduler = scheduler
        self.block = block
        self.seq = seq
        self.asked_in = 0  # the pass in which backward asked for it last
        self.changes = Changes(tensor)
        self.storage, self.version = weakref.ref(tensor.untyped_storage()), version_of(tensor)
        self.begin, self.end = range_of(tensor)
        self.has_gaps = self.end - self.begin != tensor.nbytes
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's elements were saved with this one, and are unchanged since."""
        if self.storage() is not tensor.untyped_storage() or self.version != version_of(tensor):
            return False
        begin, end = range_of(tensor)
        if self.has_gaps:
            mine = self.begin, self.end, self.shape, self.stride
            return bool(mine == (begin, end, tensor.shape, tensor.stride()))
        return self.begin <= begin < end <= self.end

    def unpack(self) -> torch.Tensor:
        if self.changes.are_there():
            raise changed(self.shape, self.dtype)
        return self.scheduler.bring(self)

    def on(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the tensor over memory that begins with the storage's byte `begin`, or has its
        elements alone.
        """
        if self.block.packed is None:
            return self._view(memory, self.begin - begin, self.stride)
        start = self.begin % ALIGNMENT
        room = torch.empty(start + self.end - self.begin, dtype=torch.uint8, device=memory.device)
        elements = self._view(memory, 0, self.block.packed)
        return self._view(room, start, self.stride).copy_(elements)

    def _view(self, memory: torch.Tensor, begin: int, stride: tuple[int, ...]) -> torch.Tensor:
        return view_of(memory.untyped_storage(), begin, self.dtype, self.shape, stride)


def changed(shape: Any, dtype: torch.dtype) -> RuntimeError:
    """Return the error for a tensor that was changed after it was saved. It begins like autograd's
    own.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of {dtype}, shape {tuple(shape)}, after save_on_cpu had saved it; "
        "change a clone() of it"
    )


class Stayed:
    """Kept by autograd in place of a tensor that stayed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # the tensor itself would hold the graph that holds this
        self._version = version_of(tensor)

    def unpack(self) -> torch.Tensor:
        if version_of(self._tensor) != self._version:
            raise changed(self._tensor.shape, self._tensor.dtype)
        return self._tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """Counters of `save_on_cpu`: a snapshot, returned by its `stats()`."""

    copies: int = 0
    """Copies to the host."""
    copied_bytes: int = 0
    """Bytes of the copies to the host."""
    shared: int = 0
    """Tensors whose bytes were copied already, with another tensor over the same memory."""
    stayed: int = 0
    """Tensors that always stay on the device: parameters and views of them, small tensors, tensors
    that `keep_on_device` selects, and kinds without plain memory (sparse, subclasses). Also tensors
    saved while a CUDA graph is captured."""
    stayed_at_cap: int = 0
    """Tensors that stayed because the pool had no room."""
    stayed_at_cap_bytes: int = 0
    """Bytes of the tensors that stayed because the pool had no room."""
    still_there: int = 0
    """Times that backward asked for a tensor whose device memory had not been freed yet."""
    ahead: int = 0
    """Times that backward asked for a tensor whose copy back had begun before."""
    late: int = 0
    """Times that backward asked for a tensor whose copy back began only then."""


class OffloadScheduler:
    """The saved tensors of one device, numbered as they were saved.

    Backward usually asks for them from the last to the first. So each request starts the copies of
    tensors saved before it, as far as `max_device_bytes` allows. Any other order is correct, too,
    but slower.

    May be used by several threads: autograd has a thread for each device, and the user's threads
    call it.

    Args:
        target: the device.
        max_device_bytes: device memory that copies may hold, in each direction.
        counters: counts the events of `OffloadStats`.

    Attributes:
        dropped: bytes of arrivals that were freed with their blocks; filled by finalisers.
    """

    def __init__(self, target: Target, max_device_bytes: int, counters: Counter[str]) -> None:
        self.target = target
        self.dropped: deque[int] = deque()
        self._max_device_bytes = max_device_bytes
        self._counters = counters
        self._lock = threading.RLock()
        # The last block that was sent in this pass, by the address of its storage.
        self._known: weakref.WeakValueDictionary[int, OffloadedBlock] = (
            weakref.WeakValueDictionary()
        )
        self._numbers = count(1)
        # Ascending; numbers of freed tensors are removed when they are found.
        self._seqs: list[int] = []
        self._alive: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        self._is_default_alone = True  # only the default stream was current at saves
        # Blocks being copied to the host, their bytes, and whether an operation made the tensor
        # here.
        self._leaving: deque[tuple[weakref.ref[OffloadedBlock], int, bool]] = deque()
        self._leaving_bytes = 0
        # Blocks copied back early and not yet requested, by the number of the saved tensor.
        self._ahead: weakref.WeakValueDictionary[int, OffloadedBlock] = (
            weakref.WeakValueDictionary()
        )
        self._ahead_bytes = 0  # of these blocks, and of blocks kept for another request
        # Saves from `_next` to `_top` were looked at; those below follow.
        self._top = self._next = 0
        self._pass = 1

    # -- block

    def find(self, tensor: torch.Tensor) -> Saved | None:
        """Save a tensor whose bytes were sent with another tensor over the same memory, and are
        unchanged since.
        """
        with self._lock:
            block = self._known.get(tensor.untyped_storage().data_ptr())
            known = None if block is None else self._oldest_of(block)
            if known is None or not known.has(tensor):
                return None
            self._counters["shared"] += 1
            return self._save(tensor, known.block)

    def send(self, tensor: torch.Tensor, load: Load, lease: Lease, after: Fence | None) -> Saved:
        """Save a tensor by sending a load to the host."""
        with self._lock:
            self._settle()
            block = OffloadedBlock(self.target, load, lease, after, self.dropped)
            self._counters["copies"] += 1
            self._counters["copied_bytes"] += block.nbytes
            self._is_default_alone &= self.target.is_default()
            if block.source is not None:
                is_made_here = tensor.grad_fn is not None or load.packed is not None
                self._leaving.append((weakref.ref(block), block.nbytes, is_made_here))
                self._leaving_bytes += block.nbytes
                self._hold_back()
            self._known[tensor.untyped_storage().data_ptr()] = block
            return self._save(tensor, block)

    def forget_storages(self) -> None:
        """Send later saves again, so that no memory is mistaken for that of an earlier pass."""
        self._known.clear()

    def _save(self, tensor: torch.Tensor, block: OffloadedBlock) -> Saved:
        saved = Saved(self, tensor, block, next(self._numbers))
        block.seqs.append(saved.seq)
        while self._seqs and self._seqs[-1] not in self._alive:
            self._seqs.pop()
        self._seqs.append(saved.seq)
        self._alive[saved.seq] = saved
        return saved

    def _oldest_of(self, block: OffloadedBlock) -> Saved | None:
        """Return the oldest living save of a block."""
        while block.seqs:
            saved = self._alive.get(block.seqs[0])
            if saved is not None:
                return saved
            del block.seqs[0]
        return None

    def _settle(self) -> None:
        """Free the device memory of finished copies. Not called in backward, which begins with the
        last save.
        """
        self._count_dropped()
        while self._leaving:
            block = self._leaving[0][0]()
            if block is not None and block.source is not None:
                if not block.event.query():  # type: ignore[union-attr]
                    break
                block.source = None
            self._leaving_bytes -= self._leaving.popleft()[1]

    def _count_dropped(self) -> None:
        while self.dropped:
            self._ahead_bytes -= self.dropped.popleft()

    def _hold_back(self) -> None:
        """Make the current stream wait for copies until unfinished ones hold no more device memory
        than allowed.

        Behind that wait, the memory may be used again if it belongs to this stream. The scheduler
        doesn't know its stream. It assumes this one if an autograd operation made the tensor, and
        only the default stream was seen. If not, it keeps the memory until it sees that the copy is
        done.
        """
        while self._leaving_bytes > self._max_device_bytes and self._leaving:
            reference, nbytes, is_made_here = self._leaving.popleft()
            self._leaving_bytes -= nbytes
            block = reference()
            if block is not None:
                block.let_source_go(at_once=is_made_here and self._is_default_alone)

    # -- back

    def bring(self, saved: Saved) -> torch.Tensor:
        """Return a saved tensor, for the current stream, and start copying back the tensors saved
        before it.

        Raises:
            PinstageError: the current stream captures a graph, which would wait for copies made
                before it.
        """
        self.target.refuse_capture()
        block = saved.block
        with self._lock:
            self._count_dropped()
            if saved.asked_in == self._pass:
                self._pass += 1  # another backward through a retained graph
            saved.asked_in = self._pass
            is_late = block.source is None and block.arrival is None
            if block.source is not None:
                self._counters["still_there"] += 1
                tensor = saved.on(block.source, 0)
            else:
                self._counters["late" if is_late else "ahead"] += 1
                arrival = block.arrival or self._fetch_now(saved)
                self.target.take(arrival)
                tensor = saved.on(arrival.there, block.begin)
                self._ahead.pop(block.ahead_for, None)
                if not self._is_asked_again(saved):
                    block.arrival = None
                    self._ahead_bytes -= block.nbytes
            self._fetch_ahead(saved.seq, is_late=is_late)
        return tensor

    def _is_asked_again(self, saved: Saved) -> bool:
        """Return whether to keep a returned block: it has an earlier saved tensor, too, and leaves
        room for another.
        """
        block = saved.block
        return 2 * block.nbytes <= self._max_device_bytes and any(
            seq < saved.seq and seq in self._alive for seq in block.seqs
        )

    def _fetch_now(self, saved: Saved) -> Arrival:
        if saved.seq < self._next:
            self._give_up(list(self._ahead))  # backward is past them
        try:
            arrival = saved.block.fetch()
        except torch.OutOfMemoryError:
            self._give_up(list(self._ahead))
            arrival = saved.block.fetch()
        self._ahead_bytes += saved.block.nbytes
        return arrival

    def _fetch_ahead(self, seq: int, *, is_late: bool) -> None:
        """Start the copies of tensors saved before the one just requested."""
        if not self._next <= seq <= self._top:
            self._top = self._next = seq
        position = bisect_left(self._seqs, self._next) - 1
        while position >= 0:
            saved = self._alive.get(self._seqs[position])
            if saved is None:
                del self._seqs[position]
            else:
                if saved.asked_in != self._pass and not self._see_it_come(saved, is_late=is_late):
                    return
                self._next = saved.seq
            position -= 1

    def _see_it_come(self, saved: Saved, *, is_late: bool) -> bool:
        """Start copying a tensor back, if it is not on the device; return whether there is room for
        it.

        If the requested tensor was late, because backward began again elsewhere, tensors farther
        ahead make room.
        """
        block = saved.block
        if block.source is not None or block.arrival is not None:
            return True
        if is_late:
            for seq in sorted(seq for seq in self._ahead if seq < saved.seq):
                if self._ahead_bytes + block.nbytes <= self._max_device_bytes:
                    break
                self._give_up([seq])
        if self._ahead_bytes + block.nbytes > self._max_device_bytes:
            return False
        try:
            block.fetch()
        except torch.OutOfMemoryError:
            return False  # there may be more memory when the tensor is needed
        block.ahead_for = saved.seq
        self._ahead[saved.seq] = block
        self._ahead_bytes += block.nbytes
        return True

    def _give_up(self, seqs: list[int]) -> None:
        """Drop blocks that were copied back and not requested."""
        for seq in seqs:
            block = self._ahead.pop(seq, None)
            # If freed, its bytes are in `dropped`.
            if block is not None and block.arrival is not None:
                self._ahead_bytes -= block.nbytes
                block.drop_arrival()
