"""Which way a batch goes to the device, and the ways.

::

    a few small leaves      one copy each, from ordinary memory, on the current stream    `Target.move_few`
    up to 64 KiB            one copy for each block, from ordinary memory, likewise       `Sender._send_at_once`
    everything else         through a host slab, in chunks on our stream                  `Sender._send_through_slab`
      page-locked leaves    straight from where they are                                  `Sender._send_borrowed`
      slab refused          in parts, through a smaller slab                              `Sender._copy_in_parts`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

from .._batch import (
    ALIGNMENT,
    Blocks,
    Borrowed,
    Keeping,
    OwnStorage,
    Parts,
    borrow,
    pack_by_threads,
    reuses_places,
    sharing_of,
    start_packing,
    take_apart,
    walk,
    windows,
)
from .._pool import Fence, Lease, guard_until_release
from .._region import pieces_of
from .._steps import step
from ._device import AT_ONCE_BYTES, Target
from ._host_slabs import HostSlabs
from ._run_ahead import RunAhead
from ._stats import Counters
from ._transfer import Sent, Transfer, keep_until, move_others, table_of

SMALL_BYTES = 1024 * 1024
"""`Stager.to_device` copies smaller batches on the caller's current stream. So short a copy overlaps with nothing, and
memory of a second stream would have to be recorded on the current one (5 us per tensor)."""

_PARTS = 2
"""Number of parts of a slab that is smaller than its batch. One part is packed while the other is copied. A batch of
64 MiB takes 1.8 ms through a slab of 2 MiB in two parts, 2.1 ms in three, 2.4 ms in four, 4.0 ms in eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends batches to a device. May be used by several threads.

    Args:
        target: the device.
        slabs: where host slabs come from.
        counters: count the batches.
        keeping: says which leaves stay on the host.
        own_storage: see `Stager`.
        threads: number of threads that may pack.
        borrows: whether page-locked leaves are copied without packing.
        run_ahead: bounds how far the host is ahead of each consumer's stream; None for a caller that does that itself.
    """

    target: Target
    slabs: HostSlabs
    counters: Counters
    keeping: Keeping | None
    own_storage: OwnStorage
    threads: int
    borrows: bool
    run_ahead: RunAhead | None

    def move(self, batch: Any) -> Any:
        """See `Stager.to_device`."""
        with step("stage"):
            with step("walk"):
                walked = leaves, structure = walk(batch)
            few = None
            if self.keeping is None and self.own_storage is not False and self.slabs.is_open():
                few = self.target.move_few(leaves)
            if few is not None:
                moved, count, nbytes, copies = few
                self.counters.add(copies, count, nbytes, nbytes, count, 0)
                return structure.rebuild(moved)
            parts = take_apart(batch, keeping=self.keeping, walked=walked)
            transfer = self.transfer(parts, SMALL_BYTES)
            self.count(transfer)
        return transfer.wait()

    def begin(self, batch: Any) -> Transfer[Any]:
        """See `Stager.stage`."""
        with step("stage"):
            transfer = self.transfer(take_apart(batch, keeping=self.keeping), AT_ONCE_BYTES)
            self.count(transfer)
            return transfer

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a stager cannot be copied or pickled; make another Stager, or pass this one on")

    def count(self, transfer: Transfer[Any]) -> None:
        """Count a staged batch."""
        self.counters.add(transfer.copies, transfer.blocks, *table_of(transfer)[1:5])

    def transfer(self, parts: Parts, inline_bytes: int, meanwhile: Callable[[], object] = int) -> Transfer[Any]:
        """Start the copies of a batch: of its packed leaves by `send`, of others by their own ``.to()``."""
        sent = self.send(parts, inline_bytes, meanwhile)
        moved = move_others(self.target, parts.structure, parts.table, parts.others())
        return Transfer(self.target, parts.structure, parts.table, sent, moved)

    def send(self, parts: Parts, inline_bytes: int, meanwhile: Callable[[], object]) -> Sent:
        """Send the packed leaves of a batch, and wait if the host is too far ahead of the device.

        The cases, in this order:

        1. up to 64 KiB, while the driver has room for them: from ordinary memory, on the current stream. A slab and a
           second stream would take longer than packing and copying;
        2. below `inline_bytes`: through a slab, on the current stream;
        3. everything else, and every batch while the current stream is captured: through a slab, on our stream.

        The host waits for earlier batches only in the second and third case, and not while the stream is captured,
        since a capture allows no events of other work.

        Args:
            parts: the batch's parts.
            inline_bytes: the size from which a batch is worth another stream: small for a caller who may use the batch
                much later, or elsewhere.
            meanwhile: called once; while threads pack, if they do.

        Raises:
            PoolError: the pool is closed, or has no slab.
        """
        target, nbytes = self.target, parts.table.nbytes

        def make(stream: Any) -> Blocks:
            blocks = target.blocks(parts.table, sharing_of(self.own_storage, parts.table.packed), stream)
            meanwhile()
            return blocks

        with target.selected():
            consumer, is_capturing = target.consumer(None), target.is_capturing()
            if is_capturing:
                return self._send_through_slab(parts, make, target.stream)
            if nbytes <= AT_ONCE_BYTES and (nbytes == 0 or target.has_room()):
                return self._send_at_once(parts, make(consumer), consumer)
            if self.run_ahead is not None:
                self.run_ahead.bound(target.record(consumer), consumer)
            return self._send_through_slab(parts, make, consumer if nbytes < inline_bytes else target.stream)

    def _send_at_once(self, parts: Parts, blocks: Blocks, stream: Any) -> Sent:
        """Send at most `AT_ONCE_BYTES` from ordinary memory."""
        copies, event = 0, None
        if parts.table.nbytes:
            self.slabs.check_open()
            with step("pack"):
                copies = self.target.fill(blocks, parts, stream)
            event = self.target.record(stream)
        return Sent(blocks, event, copies, stream)

    def _send_through_slab(self, parts: Parts, make: Callable[[Any], Blocks], stream: Any) -> Sent:
        """Send a batch through a host slab, apart from leaves that are borrowed."""
        if not parts.table.nbytes:
            return Sent(make(stream), None, 0, stream)
        borrowed = borrow(parts, pieces_of) if self.borrows else None
        if borrowed is None:
            return self._send_packed(parts, make, stream)
        return self._send_borrowed(borrowed, make(stream), stream)

    def _send_borrowed(self, borrowed: Borrowed, blocks: Blocks, stream: Any) -> Sent:
        """Send page-locked leaves from where they are, and the others through a host slab."""
        copies, rest = 0, borrowed.rest
        try:
            with step("copy"):
                copies = self.target.copy_leaves(blocks, borrowed.leaves, stream)
            if rest.table.nbytes:
                blocks.packed_as(rest.table.data)
                copies += self._send_packed(rest, lambda _: blocks, stream).copies
        finally:
            event = self.target.record(stream)
            keep_until(event, borrowed.lenders)
        return Sent(blocks, event, copies, stream)

    def _send_packed(self, parts: Parts, make: Callable[[Any], Blocks], stream: Any) -> Sent:
        """Send a batch through a host slab, which is released behind the copies.

        Args:
            parts: the batch's parts.
            make: makes the destination tensors for a stream.
            stream: the stream that copies.
        """
        lease = self.slabs.lease(parts.table.nbytes)
        guard_until_release(lease, stream)  # an interrupt may come before the release
        try:
            if lease.nbytes < parts.table.nbytes:
                blocks, copies = self._copy_in_parts(parts, lease, make(stream), stream)
            else:
                blocks, copies = self._copy_in_chunks(parts, lease, make, stream)
        finally:
            event = self.target.record(stream)
            lease.release(after=event)
        return Sent(blocks, event, copies, stream)

    def _copy_in_chunks(
        self, parts: Parts, lease: Lease, make: Callable[[Any], Blocks], stream: Any
    ) -> tuple[Blocks, int]:
        """Pack, and send each chunk as soon as it is complete.

        Returns:
            The destination tensors, which are made while threads pack, and the number of copies.
        """
        target, host = self.target, lease.data_ptr()
        reuses = reuses_places(parts) and not target.is_capturing()
        with step("pack"):
            job = start_packing(parts, lease, self.threads, reuses=reuses)
        if job is None:
            blocks = make(stream)
            return blocks, self._copy(blocks, host, (0, parts.table.nbytes), stream)
        sent: deque[tuple[int, Fence | None]] = deque()
        copies = start = 0
        with job:
            blocks = make(stream)
            for chunk, end in enumerate(job.ends):
                with step("pack"):
                    job.wait(chunk)
                copies += self._copy(blocks, host + job.place(chunk) - start, (start, end), stream)
                start = end
                if reuses:
                    sent.append((chunk, target.record(stream)))
                    _reuse_places(job, sent)
        return blocks, copies

    def _copy_in_parts(self, parts: Parts, lease: Lease, blocks: Blocks, stream: Any) -> tuple[Blocks, int]:
        """Pack and copy a batch through a slab that is smaller than the batch.

        The host waits for the copy from a part of the slab before it writes that part again.
        """
        size = lease.nbytes // _PARTS // ALIGNMENT * ALIGNMENT
        slab, copies = lease.tensor(), 0
        events: list[Fence | None] = [None] * _PARTS
        for number, (start, leaves) in enumerate(windows(parts, size)):
            part = number % _PARTS
            if (event := events[part]) is not None:
                with step("wait"):
                    event.synchronize()
            window, room = take_apart(leaves), slab[part * size : (part + 1) * size]
            with step("pack"):
                pack_by_threads(window, room, self.threads)
            copies += self._copy(blocks, room.data_ptr() - start, (start, start + window.table.nbytes), stream)
            events[part] = self.target.record(stream)
        return blocks, copies

    def _copy(self, blocks: Blocks, host: int, extent: tuple[int, int], stream: Any) -> int:
        with step("copy"):
            return self.target.copy(blocks, host, *extent, stream, pinned=self.slabs.is_pinned)


def _reuse_places(job: Any, sent: deque[tuple[int, Fence | None]]) -> None:
    """Let later chunks be packed in the places of chunks whose copies are done."""
    while sent:
        chunk, event = sent[0]
        if event is not None and not event.query():
            return
        job.reuse(chunk)
        sent.popleft()
