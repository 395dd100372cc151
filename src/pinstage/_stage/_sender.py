"""Which way a batch goes to the device, and the ways.

::

    a few small leaves    from ordinary memory, a copy for each        `Target.move_few`
    up to 64 KiB          from ordinary memory, a copy for each block  `Target.fill`
    everything else       through a host slab, in chunks               `Sender._copy_in_chunks`
      page-locked leaves  straight from where they are                 `Target.copy_leaves`
      slab refused        in parts, through a smaller slab             `Sender._copy_in_parts`

The first two ways use the current stream, the others our own one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import torch

from .._batch import (
    ALIGNMENT,
    Blocks,
    Borrowed,
    Keeping,
    OwnStorage,
    Parts,
    Stack,
    borrow,
    pack_by_threads,
    reuses_places,
    sharing_of,
    stack_samples,
    start_packing,
    take_apart,
    walk,
    windows,
)
from .._pool import Fence, Lease, guard_until_release, is_page_locked
from .._region import pieces_of
from .._steps import step
from ._device import AT_ONCE_BYTES, HostBytes, Target
from ._host_slabs import HostSlabs
from ._out import Destinations, detached, in_order, with_own_copies
from ._run_ahead import RunAhead
from ._stats import StagerCounters
from ._transfer import Sent, Transfer, keep_until, leaves_of, move_others, table_of

SMALL_BYTES = 1024 * 1024
"""`Stager.to_device` copies smaller batches on the caller's current stream. So short a copy
overlaps with nothing, and memory of a second stream would have to be recorded on the current one (5
us per tensor)."""

_CPU = torch.device("cpu")

_PARTS = 2
"""Number of parts of a slab that is smaller than its batch. One part is packed while the other is
copied. A batch of 64 MiB takes 1.8 ms through a slab of 2 MiB in two parts, 2.1 ms in three, 2.4 ms
in four, 4.0 ms in eight."""


@dataclass(slots=True)
class PendingSend:
    """A batch between `Sender.start` and `Sender.finish`. Threads may be packing it."""

    parts: Parts
    stream: Any
    """The stream of its copies."""
    borrowed: Borrowed | None = None
    """Its page-locked leaves, which are copied from where they are."""
    slab: Lease | None = None
    """For the other packed leaves; None: they go from ordinary memory."""
    reuses: bool = False
    """Whether chunks are packed in the places of earlier ones."""
    job: Any = None
    """Threads that pack into the slab; None: all bytes are there, or the slab is smaller than the
    batch.
    """

    @property
    def packed(self) -> Parts:
        """The leaves that aren't borrowed."""
        return self.parts if self.borrowed is None else self.borrowed.rest

    def pack_into(self, slab: Lease, threads: int) -> None:
        """Pack a small batch, or let threads begin."""
        job = start_packing(self.packed, slab, threads, reuses=self.reuses)
        if job is not None:
            self.job = job.__enter__()

    def close(self, event: Fence | None) -> None:
        """Stop packing. Give the slab back, and keep the borrowed leaves, until the event."""
        if self.job is not None:
            self.job.__exit__()
        if self.slab is not None:
            self.slab.release(after=event)
        if self.borrowed is not None:
            keep_until(event, self.borrowed.lenders)


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
        run_ahead: bounds how far the host is ahead of each consumer's stream; None for a caller
            that does that itself.
    """

    target: Target
    slabs: HostSlabs
    counters: StagerCounters
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
            few = self._move_few(leaves)
            if few is not None:
                return structure.rebuild(few)
            parts = take_apart(batch, keeping=self.keeping, walked=walked)
            transfer = self.transfer(parts, SMALL_BYTES)
        return transfer.wait()

    def move_into(self, batch: Any, out: Any) -> Any:
        """Move a batch as `move` does, and copy it into existing tensors, on the current stream."""
        with step("stage"):
            parts = detached(take_apart(batch, keeping=self.keeping), _CPU)
            device = self.target.device
            with step("check"):
                destinations = Destinations(parts, in_order(parts.structure, out), device)
            leaves = self._move_few(parts.leaves)
            if leaves is None:
                leaves = leaves_of(self.transfer(with_own_copies(parts, device), SMALL_BYTES))
            with step("unpack"):
                destinations.fill(leaves)
            return destinations.result()

    def begin(self, batch: Any, stacks: Mapping[int, Stack] | None = None) -> Transfer[Any]:
        """See `Stager.stage`; for `stacks`, see `take_apart`. All samples have been read when it
        returns.
        """
        with step("stage"):
            parts = take_apart(batch, keeping=self.keeping, stacks=stacks)
            return self.transfer(parts, AT_ONCE_BYTES)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a stager cannot be copied or pickled; make another Stager, or pass this one on"
        )

    def _move_few(self, leaves: list[Any]) -> list[Any] | None:
        """Move a few small leaves without a slab; None if they aren't small, few and plain."""
        is_possible = self.keeping is None and self.own_storage is not False
        few = self.target.move_few(leaves) if is_possible and self.slabs.is_open() else None
        if few is None:
            return None
        moved, count, nbytes, copies = few
        self.counters.add(copies, count, nbytes, nbytes, count, 0)
        return moved

    def transfer(self, parts: Parts, inline_bytes: int) -> Transfer[Any]:
        """Send a batch; see `start`."""
        return self.finish(self.start(parts, inline_bytes))

    def start(self, parts: Parts, inline_bytes: int, timeout: float | None = None) -> PendingSend:
        """Decide which way the packed leaves of a batch go, and let threads begin to pack them.

        The cases, in this order:

        1. up to 64 KiB, while the driver has room for them: from ordinary memory, on the current
           stream. A slab and a second stream would take longer than packing and copying;
        2. below `inline_bytes`: through a slab, on the current stream;
        3. everything else: through a slab, on our stream.

        The host waits for earlier batches only in the second and third case.

        Args:
            parts: the batch's parts. Its leaves must not change before `finish`.
            inline_bytes: the size from which a batch is worth another stream: small for a caller
                who may use the batch much later, or elsewhere.
            timeout: see `HostSlabs.lease`.

        Returns:
            What `finish` takes. Close it if there is an error before.

        Raises:
            PoolError: the pool is closed, or has no slab.
        """
        target, nbytes = self.target, parts.table.nbytes
        with target.selected():
            consumer = target.consumer(None)
            if nbytes <= AT_ONCE_BYTES and (nbytes == 0 or target.has_room()):
                stack_samples(parts.stacks.values())
                return PendingSend(parts, consumer)
            if self.run_ahead is not None:
                self.run_ahead.bound(target.record(consumer), consumer)
            return self._start_packing(
                parts, consumer if nbytes < inline_bytes else target.stream, timeout
            )

    def _start_packing(self, parts: Parts, stream: Any, timeout: float | None) -> PendingSend:
        """Lease a slab for the leaves that aren't borrowed, and let threads begin to pack, if it
        has room for all.
        """
        borrowed = borrow(parts, pieces_of) if self.borrows and parts.table.nbytes else None
        pending = PendingSend(parts, stream, borrowed)
        nbytes = pending.packed.table.nbytes
        if not nbytes:
            return pending
        pending.slab = slab = self.slabs.lease(nbytes, timeout)
        guard_until_release(slab, stream)  # an interrupt may come before the release
        if slab.nbytes >= nbytes:
            pending.reuses = reuses_places(pending.packed)
            try:
                with step("pack"):
                    pending.pack_into(slab, self.threads)
            except BaseException:
                pending.close(None)
                raise
        return pending

    def finish(self, pending: PendingSend) -> Transfer[Any]:
        """Start the copies of a batch: of its packed leaves as `start` decided, of others by their
        own ``.to()``.
        """
        parts, target = pending.parts, self.target
        with target.selected():
            sent = self._send(pending)
        moved = move_others(target, parts.structure, parts.table, parts.others())
        transfer: Transfer[Any] = Transfer(target, parts.structure, parts.table, sent, moved)
        self.count(transfer)
        return transfer

    def count(self, transfer: Transfer[Any]) -> None:
        """Count a staged batch."""
        self.counters.add(transfer.copies, transfer.blocks, *table_of(transfer)[1:5])

    def _send(self, pending: PendingSend) -> Sent:
        """Make the destinations of the packed leaves, and start their copies."""
        target, stream, table = self.target, pending.stream, pending.parts.table
        event, copies = None, 0
        try:
            blocks = target.blocks(table, sharing_of(self.own_storage, table.packed), stream)
            if pending.borrowed is not None:
                with step("copy"):
                    copies = target.copy_leaves(blocks, pending.borrowed.leaves, stream)
                blocks.packed_as(pending.packed.table.data)
            copies += self._copy_packed(pending, blocks)
        finally:
            if table.nbytes:
                event = target.record(stream)
            pending.close(event)
        return Sent(blocks, event, copies, stream)

    def _copy_packed(self, pending: PendingSend, blocks: Blocks) -> int:
        """Start the copies of the leaves that aren't borrowed; return their number."""
        nbytes = pending.packed.table.nbytes
        if not nbytes:
            return 0
        if pending.slab is None:
            self.slabs.check_open()
            with step("pack"):
                return self.target.fill(blocks, pending.packed, pending.stream)
        if pending.slab.nbytes < nbytes:
            return self._copy_in_parts(pending.packed, pending.slab, blocks, pending.stream)
        if pending.job is None:
            return self._copy(blocks, pending.slab, 0, (0, nbytes), pending.stream)
        return self._copy_in_chunks(pending, pending.slab, blocks)

    def _copy_in_chunks(self, pending: PendingSend, slab: Lease, blocks: Blocks) -> int:
        """Send each chunk as soon as it is packed."""
        job, stream = pending.job, pending.stream
        sent: deque[tuple[int, Fence | None]] = deque()
        copies = start = 0
        for chunk, end in enumerate(job.ends):
            with step("pack"):
                job.wait(chunk)
            copies += self._copy(blocks, slab, job.place(chunk) - start, (start, end), stream)
            start = end
            if pending.reuses:
                sent.append((chunk, self.target.record(stream)))
                _reuse_places(job, sent)
        return copies

    def _copy_in_parts(self, parts: Parts, lease: Lease, blocks: Blocks, stream: Any) -> int:
        """Pack and copy a batch through a slab that is smaller than the batch.

        The host waits for the copy from a part of the slab before it writes that part again.
        """
        stack_samples(parts.stacks.values())
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
            extent = start, start + window.table.nbytes
            copies += self._copy(blocks, lease, part * size - start, extent, stream)
            events[part] = self.target.record(stream)
        return copies

    def _copy(
        self, blocks: Blocks, slab: Lease, offset: int, extent: tuple[int, int], stream: Any
    ) -> int:
        """Copy a range of a batch, whose byte 0 would be at an offset in a slab."""
        host = HostBytes(slab.data_ptr() + offset, is_page_locked(slab))
        with step("copy"):
            return self.target.copy(blocks, host, *extent, stream)


def _reuse_places(job: Any, sent: deque[tuple[int, Fence | None]]) -> None:
    """Let later chunks be packed in the places of chunks whose copies are done."""
    while sent:
        chunk, event = sent[0]
        if event is not None and not event.query():
            return
        job.reuse(chunk)
        sent.popleft()
