"""Which way a batch goes to the device, and the ways.

::

    a few, up to 1 MiB    from ordinary memory, a copy for each        `Target.move_few`
    up to 64 KiB          from ordinary memory, a copy for each block  `Target.fill`
    page-locked leaves    from where they are, in one call             `Target.copy_locked`
    everything else       through a host slab, in chunks               `Sender._copy_in_chunks`
      slab refused        in parts, through a smaller slab             `Sender._copy_in_parts`

The first two ways use the current stream, as does a slab below 1 MiB; everything else uses our own
one. With ``borrow_pinned``, a few page-locked leaves go the first way, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import torch

from .._batch import (
    ALIGNMENT,
    Blocks,
    Keeping,
    OwnStorage,
    Parts,
    Structure,
    match,
    pack_by_threads,
    reuses_places,
    sharing_of,
    start_packing,
    take_apart,
    walk,
    windows,
)
from .._pool import Fence, Lease, guard_until_release, is_page_locked
from .._steps import step
from ._at_once import AT_ONCE_BYTES
from ._host_slabs import HostSlabs
from ._out import detached, fill, in_order, prepare
from ._run_ahead import RunAhead
from ._stats import StagerCounters
from ._target import MOST_FEW, Few, HostBytes, Target
from ._transfer import Sent, Sizes, Transfer, kept, leaves_of, move_others, sizes_of

SMALL_BYTES = 1024 * 1024
"""Smaller batches are copied on the caller's current stream. Such a copy takes 20 us, in which
little else could run, and memory of a second stream would have to be recorded on the current one (5
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
    slab: Lease | None = None
    """For the packed leaves; None: there are none, or they go from ordinary memory."""
    job: Any = None
    """Threads that pack into the slab; None: all bytes are there, or the slab is smaller than the
    batch.
    """
    moved: tuple[list[Any], list[Sent]] | None = None
    """See `move_others`; None before it was called."""

    def close(self, event: Fence | None) -> None:
        """Stop packing. Give the slab back, and keep the page-locked leaves, until the event."""
        if self.job is not None:
            self.job.__exit__()
        if self.slab is not None:
            self.slab.release(after=event)
        if self.parts.locked:
            kept.drop_oldest()
            kept.until(event, self.parts.lenders())


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
        borrows: whether page-locked leaves may be read after the call; else the call waits until
            they have been.
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
                return structure.rebuild(few.leaves)
            parts = self.take_apart(batch, walked=walked)
            transfer = self.transfer(parts)
        return transfer.wait()

    def move_into(self, batch: Any, out: Any) -> Any:
        """Move a batch as `move` does, and copy it into existing tensors, on the current stream."""
        with step("stage"):
            with step("walk"):
                walked = walk(batch)
            few = self._move_few_into(*walked, out)
            if few is not None:
                return few
            parts = detached(self.take_apart(batch, walked=walked), _CPU)
            existing = in_order(parts.structure, out)
            with step("check"):
                matched = prepare(parts, existing, self.target.device)
            leaves = leaves_of(self.transfer(parts))
            with step("unpack"):
                fill(existing, leaves, matched)
            return parts.structure.rebuild(existing)

    def _move_few_into(self, leaves: list[Any], structure: Structure, out: Any) -> Any:
        """Move a few leaves as `_move_few` does, and copy them into existing tensors."""
        if len(leaves) > MOST_FEW or self.keeping is not None:
            return None
        existing = in_order(structure, out)
        _, others = matched = match(leaves, existing, None, self.target.device)
        moved = None if others else self._move_few(leaves)
        if moved is None:
            return None
        fill(existing, moved.leaves, matched)
        return structure.rebuild(existing)

    def begin(self, batch: Any) -> Transfer[Any]:
        """See `Stager.stage`. All samples of stacks have been read when it returns."""
        with step("stage"):
            with step("walk"):
                walked = leaves, structure = walk(batch)
            few = self._move_few(leaves, is_later=True)
            if few is None:
                return self.transfer(self.take_apart(batch, walked=walked))
            consumer = self.target.consumer(None)
            sent = Sent(few.made(), self.target.record(consumer), few.copies, consumer)
            sizes = Sizes(few.nbytes, few.nbytes, few.tensors, 0)
            return Transfer(self.target, structure, sizes, [sent], few.leaves)

    def take_apart(self, batch: Any, **known: Any) -> Parts:
        """Take a batch apart; for `known`, see the function of this name."""
        locked = self.target.find_locked(each=self.borrows)
        return take_apart(batch, keeping=self.keeping, locked=locked, **known)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a stager cannot be copied or pickled; make another Stager, or pass this one on"
        )

    def _move_few(self, leaves: list[Any], *, is_later: bool = False) -> Few | None:
        """Move a few leaves without a slab, on the current stream; return None if they aren't
        small, few and plain. For `is_later`, see `Target.move_few`.
        """
        if self.keeping is not None or self.own_storage is False or not self.slabs.is_open():
            return None
        target = self.target
        few = target.move_few(
            leaves, borrows=self.borrows, most_bytes=SMALL_BYTES, is_later=is_later
        )
        if isinstance(few, int):
            few = self._borrow_few(leaves, few)
        elif few is not None and few.locked and self.borrows:
            kept.drop_oldest()
            kept.until(target.record(target.consumer(None)), leaves)
        elif few is not None and few.locked:  # our stream has read them
            target.wait(target.record(target.stream), target.consumer(None))
        if few is None:
            return None
        self.counters.add(few.copies, few.tensors, few.nbytes, few.nbytes, few.tensors, 0)
        return few

    def _borrow_few(self, leaves: list[Any], nbytes: int) -> Few | None:
        """Send a few page-locked leaves of many bytes by our stream, since the current one is
        busy.
        """
        target = self.target
        consumer = target.consumer(None)
        if self.run_ahead is not None:
            self.run_ahead.bound(target.record(consumer), consumer)
        with target.on(target.stream):
            few = target.move_few(leaves, borrows=True, most_bytes=nbytes)
        if not isinstance(few, Few):
            return None
        event = target.record(target.stream)
        kept.drop_oldest()
        kept.until(event, leaves)
        target.hand_over(event, few.made(), consumer)
        return few

    def transfer(self, parts: Parts) -> Transfer[Any]:
        """Send a batch; see `start`."""
        return self.finish(self.start(parts))

    def start(self, parts: Parts, timeout: float | None = None) -> PendingSend:
        """Decide which way the packed leaves of a batch go, and let threads begin to pack them.

        The cases, in this order:

        1. up to 64 KiB, while the driver has room for them: from ordinary memory, on the current
           stream. A slab and a second stream would take longer than packing and copying;
        2. below 1 MiB, without page-locked leaves: through a slab, on the current stream;
        3. everything else: through a slab, on our stream; page-locked leaves from where they are.

        The host waits for earlier batches only in the second and third case.

        Args:
            parts: the batch's parts. Its leaves must not change before `finish`.
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
                return PendingSend(parts, consumer)
            if self.run_ahead is not None:
                self.run_ahead.bound(target.record(consumer), consumer)
            is_inline = nbytes < SMALL_BYTES and not parts.locked
            return self._start_packing(parts, consumer if is_inline else target.stream, timeout)

    def _start_packing(self, parts: Parts, stream: Any, timeout: float | None) -> PendingSend:
        """Lease a slab for the packed leaves, and let threads begin to pack, if it has room for
        all.
        """
        pending = PendingSend(parts, stream)
        nbytes = parts.table.slab_bytes
        if not nbytes:
            return pending
        pending.slab = slab = self.slabs.lease(nbytes, timeout)
        guard_until_release(slab, stream)  # an interrupt may come before the release
        if slab.nbytes >= nbytes:
            try:
                with step("pack"):
                    reuses = reuses_places(parts)
                    job = start_packing(parts, slab, self.threads, reuses=reuses)
                    pending.job = None if job is None else job.__enter__()
            except BaseException:
                pending.close(None)
                raise
        return pending

    def finish(self, pending: PendingSend) -> Transfer[Any]:
        """Start the copies of a batch: of its packed leaves as `start` decided, of others by their
        own ``.to()``.

        If the driver refuses to copy page-locked leaves from where they are, all are packed.
        """
        transfer = self._send(pending)
        if transfer is None:
            again = self.start(pending.parts.unlocked())
            again.moved = pending.moved
            return self.finish(again)
        self.count(transfer)
        return transfer

    def count(self, transfer: Transfer[Any]) -> None:
        """Count a staged batch."""
        self.counters.add(transfer.copies, transfer.blocks, *sizes_of(transfer))

    def _send(self, pending: PendingSend) -> Transfer[Any] | None:
        """Make the destinations of the leaves, and start their copies; return None if the driver
        refuses one.

        Page-locked leaves cross the bus first if they may be read later, and last if the call waits
        for them.
        """
        parts, target, stream, table = (
            pending.parts,
            self.target,
            pending.stream,
            pending.parts.table,
        )
        event, copies, locked = None, 0, 0
        with target.selected():
            try:
                blocks = target.blocks(table, sharing_of(self.own_storage, table.packed), stream)
                if self.borrows:
                    locked = self._copy_locked(parts, blocks, stream)
                copies = self._copy_packed(pending, blocks) if locked >= 0 else 0
                if pending.moved is None:
                    pending.moved = move_others(target, parts.structure, table, parts.others())
                others, moved = pending.moved
                with step("views"):
                    leaves = blocks.leaves(others)
                if not self.borrows:
                    locked = self._copy_locked(parts, blocks, stream)
            finally:
                if table.nbytes:
                    event = target.record(stream)
                pending.close(event)
        if locked < 0:
            return None
        sent = Sent(blocks.tensors, event, copies + locked, stream)
        return Transfer(target, parts.structure, Sizes.of(table), [sent, *moved], leaves)

    def _copy_locked(self, parts: Parts, blocks: Blocks, stream: Any) -> int:
        """Copy page-locked leaves; return the number of copies, or -1 if the driver refused."""
        if not parts.locked:
            return 0
        with step("copy"):
            return self.target.copy_locked(blocks, parts, stream, at_once=not self.borrows)

    def _copy_packed(self, pending: PendingSend, blocks: Blocks) -> int:
        """Start the copies of the packed leaves; return their number."""
        nbytes = pending.parts.table.slab_bytes
        if not nbytes:
            return 0
        if pending.slab is None:
            self.slabs.check_open()
            with step("pack"):
                return self.target.fill(blocks, pending.parts, pending.stream)
        if pending.slab.nbytes < nbytes:
            return self._copy_in_parts(pending.parts, pending.slab, blocks, pending.stream)
        if pending.job is None:
            return self._copy(blocks, pending.slab, 0, (0, nbytes), pending.stream)
        return self._copy_in_chunks(pending, pending.slab, blocks)

    def _copy_in_chunks(self, pending: PendingSend, slab: Lease, blocks: Blocks) -> int:
        """Send each chunk as soon as it is packed."""
        job, stream, reuses = pending.job, pending.stream, reuses_places(pending.parts)
        sent: deque[tuple[int, Fence | None]] = deque()
        copies = start = 0
        for chunk, end in enumerate(job.ends):
            with step("pack"):
                job.wait(chunk)
            copies += self._copy(blocks, slab, job.place(chunk) - start, (start, end), stream)
            start = end
            if reuses:
                sent.append((chunk, self.target.record(stream)))
                _reuse_places(job, sent)
        return copies

    def _copy_in_parts(self, parts: Parts, lease: Lease, blocks: Blocks, stream: Any) -> int:
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
