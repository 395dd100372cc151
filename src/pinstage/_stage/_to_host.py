"""Copies to the host: many tensors of one or more devices, through a host slab.

::

    tree --take apart--> leaves of each device
      small, or strided  --gather, on the current stream--> device slab --one copy-->  |
      large and dense    ---------------------------------------------a copy each-->  host slab
                                                                                       |
                                                               new tensors, or views <-'

`Fetcher.fetch` starts all copies. Its lease is released at once, with the copies' events: the pool
doesn't lend the slab again until the copies are done and the last view is gone. `Fetcher.to_host`
waits: the tensors go in chunks, which threads copy out of the slab while later ones cross the bus.
For tensors of their own, both send a few small ones in one call, on the current stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Any, Generic, NamedTuple, TypeAlias

import torch

from .. import _native
from .._batch import (
    ALIGNMENT,
    PACKED,
    Blocks,
    Gathering,
    IsContainer,
    Matched,
    Parts,
    RowKind,
    Sharing,
    Structure,
    Table,
    arrange,
    describe,
    gather,
    make_blocks,
    match,
    unpack,
    unwrapped,
    walk,
)
from .._compat.views import has_no_memory, range_of
from .._memory import capturing_device, refuse_capture
from .._pool import Fence, Lease, check_timeout, guard_until_release
from .._region import pieces_of
from .._sizes import count, format_bytes, round_up
from .._steps import step
from ..errors import PoolError
from ._at_once import AT_ONCE_BYTES
from ._events import EventGroup
from ._frames import clear_own_frames
from ._host_slabs import HostSlabs
from ._not_a_batch import B_co, NotABatch
from ._out import detached, fill, in_order, prepare
from ._target import MOST_FEW, Few, HostCopy, Target
from ._targets import Targets
from ._transfer import kept, move

DIRECT_FROM_BYTES = 64 * 1024
"""The device writes page-locked destinations of this size itself."""

_MOST_FEW_BYTES = 1 << 20
"""Up to this size, threads wouldn't fill new tensors sooner than the calling thread."""

_MOST_SLAB_BYTES = 64 << 20
"""The most bytes of a slab through which `Stager.to_host` copies."""

_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 4 << 20, 16 << 20
"""Bytes of a chunk of `Stager.to_host`. Waking the threads that copy it out takes 0.05 ms."""

_POLL_SECONDS = 1e-4
"""Poll interval of `HostTransfer.result` with a timeout."""

arranged = lru_cache(maxsize=32)(arrange)
"""A loop fetches the same few kinds of trees over and over, and arranging a thousand leaves takes a
millisecond."""

_CPU = torch.device("cpu")
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


Walked: TypeAlias = tuple[list[Any], Structure]
"""The result of `walk`."""
Source: TypeAlias = tuple[int, int, torch.Tensor]
"""Where a range of a slab comes from: its first byte, its size, and the tensor that has it."""


class Copied(NamedTuple):
    """Copies to the host that have been started."""

    host: torch.Tensor
    """uint8, the slab; empty if no leaf needs one."""
    event: Fence | None
    """Behind the copies; None if they are done."""
    copies: int


_NOTHING = Copied(_NO_BYTES, None, 0)
_NOT_FEW = None, _NOTHING


class HostTransfer(NotABatch, Generic[B_co]):
    """Tensors on their way to the host. Made by `Stager.fetch`.

    Only `result` returns the tensors, when their bytes are there. Don't use a transfer in several
    threads at once. In a thread whose current stream captures a CUDA graph, all methods raise
    `PinstageError`.
    """

    _call = "result()"

    __slots__ = (
        "_copied",
        "_device",
        "_fetched",
        "_leaves",
        "_structure",
        "_tables",
        "_threads",
        "copies",
        "nbytes",
    )

    def __init__(
        self,
        structure: Structure,
        leaves: list[Any],
        tables: list[Table],
        copied: Copied,
        *,
        threads: int,
        device: torch.device,
    ) -> None:
        self._structure = structure
        self._leaves: list[Any] | None = leaves  # those that aren't in the slab
        self._tables = tables  # none: `Target.fetch_few` has made the leaves
        self._copied = copied
        self._threads = threads  # that copy out of the slab; 0: the result has views of it
        self._device = device
        self._fetched: Any = None
        self.copies = copied.copies
        """Device-to-host copies issued: one for each device's gathered tensors, and one for each
        large tensor.
        """
        self.nbytes = copied.host.numel()
        """Bytes that go through the host slab, padding included."""

    def query(self) -> bool:
        """Return whether the bytes are on the host, so that `result` will not block. Does not
        block.
        """
        refuse_capture(self._device.index)
        return self._copied.event is None or self._copied.event.query()

    def synchronize(self) -> None:
        """Block until the bytes are on the host. Waits for the copies' own event, not for the
        device or a stream.
        """
        refuse_capture(self._device.index)
        if self._copied.event is not None:
            with step("wait"):
                self._copied.event.synchronize()

    def result(self, timeout: float | None = None) -> B_co:
        """Wait until the bytes are on the host, and return them.

        Blocks as `synchronize` does. Later calls return the same object.

        Args:
            timeout: the most seconds to wait; None waits until the bytes are there.

        Returns:
            A tree of the same types. Tensors that were copied have memory of their own. With
            ``copy=False`` they are views of one page-locked slab. The slab returns to the pool when
            the last view and this transfer, which keeps its result, are freed. Objects on the host
            are returned unchanged.

        Raises:
            TimeoutError: the bytes aren't there in time. You may call again.
        """
        refuse_capture(self._device.index)
        if self._leaves is not None:
            if timeout is not None:
                _wait(self, timeout)
            leaves = leaves_of(self)
            with step("unflatten"):
                self._fetched = self._structure.rebuild(leaves)
            self._leaves = None
            self._copied = self._copied._replace(host=_NO_BYTES)
        fetched: B_co = self._fetched
        return fetched

    def __repr__(self) -> str:
        is_done = capturing_device(self._device.index) is None and self.query()
        done = " done" if is_done else ""
        return f"<HostTransfer nbytes={self.nbytes} copies={self.copies}{done}>"


def leaves_of(transfer: HostTransfer[Any]) -> list[Any]:
    """Return the leaves of a tree, those in the slab as views of it, when their bytes are there."""
    leaves, start = transfer._leaves, 0
    assert leaves is not None
    threads, host = transfer._threads, transfer._copied.host
    copied_out = []
    with step("views"):  # before the wait, while the copy is under way
        for table in transfer._tables:
            slab = host[start : start + table.nbytes] if table.nbytes and not threads else None
            blocks = make_blocks(table, Sharing.EACH if threads else Sharing.ONE, _CPU, slab)
            leaves = _with_others(blocks, table, leaves)
            copied_out.append((blocks, start, table.nbytes))
            start += table.nbytes
            if threads:
                blocks.touch(threads)
    transfer.synchronize()
    if threads:
        with step("unpack"):
            for blocks, start, nbytes in copied_out:
                unpack(blocks, host.data_ptr() + start, (0, nbytes), threads)
            if not copied_out:
                _native.core.fill_few(leaves, host.data_ptr())
    return leaves


def _with_others(blocks: Blocks, table: Table, leaves: list[Any]) -> list[Any]:
    """Return the leaves of a tree: those in the slab from blocks, the others from a list."""
    return blocks.leaves([leaves[i] for i in table.positions(RowKind.OTHER, RowKind.MOVED)])


def _wait(transfer: HostTransfer[Any], timeout: float) -> None:
    check_timeout(timeout)
    deadline = time.monotonic() + timeout
    with step("wait"):
        while not transfer.query():
            if time.monotonic() >= deadline:
                copies = count(transfer.copies, "copy", "copies")
                raise TimeoutError(
                    f"results aren't on the host after {timeout} s: {copies} of "
                    f"{format_bytes(transfer.nbytes)}; call result() again, or wait longer"
                )
            time.sleep(_POLL_SECONDS)


def landings(transfer: HostTransfer) -> list[Any]:
    """Return the `Place` of each leaf in the slab, or the leaf itself if it isn't there. Call it
    before `result`.
    """
    assert transfer._leaves is not None
    landed, start = list(transfer._leaves), 0
    for table in transfer._tables:
        for index, row in table.places():
            landed[index] = row._replace(offset=start + row.offset)
        start += table.nbytes
    return landed


def event_of(transfer: HostTransfer) -> Fence | None:
    """Return the event that is done when all bytes are on the host; None if they are there
    already.
    """
    return transfer._copied.event


def duplicate_rest(transfer: HostTransfer, leaves: list[Any]) -> None:
    """Clone the tensors that aren't in the slab, because they were on the host and cannot be
    packed.

    Args:
        transfer: a transfer, before its `result`.
        leaves: the list of tensors that it was made from.
    """
    assert transfer._leaves is not None
    for index, (left, leaf) in enumerate(zip(transfer._leaves, leaves, strict=True)):
        if left is leaf:
            transfer._leaves[index] = leaf.clone()


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Starts the copies of trees of tensors to the host."""

    home: torch.device
    """The device of its user. CPU tensors are fetched, rather than left as they are, if it is the
    CPU.
    """
    slabs: HostSlabs
    targets: Targets
    threads: int = 1
    """The number of threads that may copy out of a slab, including the calling one."""
    hold: bool = True
    """See `Target.to_host`."""

    def to_host(self, tree: Any) -> tuple[Any, int, int]:
        """Copy a tree's tensors to new tensors on the host, and wait; see `Stager.to_host`.

        Returns:
            The result, the number of copies, and the bytes that went through a slab.
        """
        with step("walk"):
            walked = leaves, structure = walk(tree)
        few, _ = self._few(leaves, waits=True)
        if few is not None:
            return structure.rebuild(few.leaves), few.copies, few.nbytes
        plan = self.plan(tree, walked)
        leaves, copies = plan.left, 0
        for device, gathering in plan.gatherings.items():
            blocks = make_blocks(gathering.table, Sharing.EACH, _CPU)
            if gathering.table.nbytes:
                with self.targets.of(device).selected():
                    copies += self._bring(device, gathering, plan.parts.leaves, blocks)
            with step("views"):
                leaves = _with_others(blocks, gathering.table, leaves)
        with step("unflatten"):
            return plan.parts.structure.rebuild(leaves), copies, plan.nbytes

    def _few(self, leaves: list[Any], *, waits: bool) -> tuple[Few | None, Copied]:
        """Copy a few small tensors in one call, or start their copies, on the current stream; None
        if they aren't few, small and plain.

        A single tensor needs no slab if the call waits: ``.cpu()`` takes as long.
        """
        target, nbytes = self.targets.of(self.home), _bytes_of_few(leaves, self.home)
        if target.out_stream is None or nbytes == 0:
            return _NOT_FEW
        if waits and len(leaves) == 1 and _is_dense(leaves[0]):
            return Few([leaves[0].cpu()], 1, 0, 1, 0), _NOTHING
        lease = None
        with suppress(PoolError):  # the other way needs a slab of the tree's size at most
            size = min(max(nbytes, AT_ONCE_BYTES), self.slabs.pool.max_bytes)
            lease = self.slabs.lease_now(size)
        if lease is None:
            return _NOT_FEW
        consumer = after = target.consumer(None)
        guard_until_release(lease, consumer)  # after an error, the device may still write
        try:
            few = target.fetch_few(leaves, lease, waits=waits)
            if few is None or waits:
                after = None
                return few, _NOTHING
            after = target.record(consumer)
            return few, Copied(lease.tensor()[: few.nbytes], after, few.copies)
        finally:
            lease.release(after=after)

    def _bring(
        self, device: torch.device, gathering: Gathering, leaves: list[Any], blocks: Blocks
    ) -> int:
        """Copy a device's leaves to new tensors; return the number of copies.

        They cross the bus in chunks, through a slab that needn't hold all of them. While later
        chunks cross, threads copy earlier ones out of the slab. All copies are queued on the
        device's current stream, so its memory is safe if the call is interrupted.
        """
        target, nbytes = self.targets.of(device), gathering.table.nbytes
        half = max(self.slabs.largest() // 2 // ALIGNMENT, 1) * ALIGNMENT
        size = min(nbytes, _MOST_SLAB_BYTES, half)
        step_bytes = min(size, _chunk_bytes(nbytes))
        stream = after = target.consumer(None)
        lease = self.slabs.lease_whole(size)
        if stream is not None:
            guard_until_release(lease, stream)
        try:
            sources = _sources(device, gathering, leaves)
            places = [lease.data_ptr() + at for at in range(0, size - step_bytes + 1, step_bytes)]
            extents = _extents(nbytes, step_bytes)
            sending = _send(target, sources, extents, places, stream)
            on_the_way = deque(islice(sending, len(places)))
            with step("unpack"):
                blocks.touch(self.threads)  # while the first chunks cross the bus
            copies = 0
            while on_the_way:
                extent, host, pieces, event = on_the_way.popleft()
                copies += pieces
                if event is not None:
                    with step("wait"):
                        event.synchronize()
                with step("unpack"):
                    unpack(blocks, host, extent, self.threads)
                on_the_way.extend(islice(sending, 1))
            after = None
            return copies
        finally:
            lease.release(after=after)

    def fetch(self, tree: Any, *, copy: bool) -> HostTransfer[Any]:
        """Start the copies of a tree's tensors into a slab; see `Stager.fetch`.

        Args:
            tree: what to fetch.
            copy: whether to return ordinary tensors, instead of views of the slab.
        """
        with step("walk"):
            walked = leaves, structure = walk(tree)
        if copy:
            few, copied = self._few(leaves, waits=False)
            if few is not None:
                return HostTransfer(structure, few.leaves, [], copied, threads=1, device=self.home)
        plan = self.plan(tree, walked)
        return self.begin(plan, self._lease_for(plan), copy=copy)

    def plan(self, tree: Any, walked: Walked | None = None) -> FetchPlan:
        """Arrange a tree's tensors in a slab; for `walked`, see `_taken_apart`."""
        return _plan(*self._taken_apart(tree, walked), {})

    def begin(self, plan: FetchPlan, lease: Lease | None, *, copy: bool) -> HostTransfer[Any]:
        """Start the copies of a plan, and release the lease of its slab.

        Args:
            plan: what `plan` returned.
            lease: a slab of its bytes; None if it needs none.
            copy: see `fetch`.
        """
        copied = self._copy(plan, lease)
        return HostTransfer(
            plan.parts.structure,
            plan.left,
            plan.tables(),
            copied,
            threads=self.threads if copy else 0,
            device=self.home,
        )

    def fetch_into(self, tree: Any, out: Any) -> tuple[Any, int, int]:
        """Copy a tree's tensors into existing host tensors, and wait; see `Stager.to_host`.

        The device writes large page-locked tensors itself. Torch copies all others, from a slab.

        Args:
            tree: what to fetch.
            out: existing host tensors.

        Returns:
            The result, the number of copies, and the bytes that went through a slab.
        """
        parts, tables = self._taken_apart(tree, detach=True)
        with step("check"):
            existing = in_order(parts.structure, out)
            matched = alike, others = prepare(parts, existing, _CPU)
            direct = _direct(parts.leaves, existing, tables.values())
        for rows in (*alike.values(), others):
            rows[:] = [index for index in rows if index not in direct]
        plan = _plan(parts, tables, direct)
        try:
            copies = self._fill(existing, matched, plan)
        except BaseException as error:
            kept.until(self._streams(plan), list(direct.values()))  # the device may be writing
            clear_own_frames(error)
            raise
        return parts.structure.rebuild(existing), copies, plan.nbytes

    def _fill(self, existing: list[Any], matched: Matched, plan: FetchPlan) -> int:
        """Copy into existing tensors; return the number of copies to the host."""
        transfer = self.begin(plan, self._lease_for(plan), copy=False)
        leaves = leaves_of(transfer)
        with step("unpack"):
            fill(existing, leaves, matched)
        return transfer.copies

    def _taken_apart(
        self, tree: Any, walked: Walked | None = None, *, detach: bool = False
    ) -> tuple[Parts, dict[torch.device, Table]]:
        """Describe a tree for the home device, and then for each other GPU that has some of its
        tensors.

        Args:
            tree: what to fetch.
            walked: the result of `walk` for the tree, if it is known.
            detach: whether tensors that require grad are detached, so that they can be packed.

        Returns:
            The description for the home device, and the tables for all devices, the home device's
            first.
        """
        while True:
            if walked is None:
                with step("walk"):
                    walked = walk(tree)
            (leaves, structure), walked = walked, None
            with suppress(IsContainer), step("describe"):  # see `take_apart`
                parts = describe(leaves, structure, self.home, arrays=False)
                parts = detached(parts, self.home, arrays=False) if detach else parts
                leaves, tables = parts.leaves, {self.home: parts.table}
                for device in _gpus(leaves) - {self.home} if parts.table.moved else ():
                    tables[device] = describe(leaves, structure, device, arrays=False).table
                return parts, tables

    def _lease_for(self, plan: FetchPlan) -> Lease | None:
        return self.slabs.lease_whole(plan.nbytes) if plan.nbytes else None

    def _copy(self, plan: FetchPlan, lease: Lease | None) -> Copied:
        """Start the copies of all devices."""
        if lease is None:
            return self._begin(plan, _NO_BYTES)
        after: Fence | None = self._streams(plan)
        # An interrupt may come before the release, and before a copy's event.
        guard_until_release(lease, after)
        try:
            copied = self._begin(plan, lease.tensor())
            after = copied.event
            return copied
        except BaseException as error:
            clear_own_frames(error)  # an error that is kept must not keep views of the slab
            raise
        finally:
            lease.release(after=after)

    def _begin(self, plan: FetchPlan, host: torch.Tensor) -> Copied:
        """Start the copies of all devices into a slab, uint8 ``[n]``, and to the destinations
        outside of it.
        """
        events: list[Fence] = []
        copies = start = 0
        torch.autograd.graph.increment_version(list(plan.direct.values()))
        for device, gathering in plan.gatherings.items():
            sources = _sources(device, gathering, plan.parts.leaves)
            owned = [tensor for _, _, tensor in sources[: gathering.gathered_bytes > 0]]
            nbytes = gathering.table.nbytes
            pieces = [
                *_within(sources, (0, nbytes), host.data_ptr() + start),
                *plan.outside(device),
            ]
            start += nbytes
            if pieces:
                # The caller doesn't keep tensors that `describe` computed.
                hold = (self.hold or bool(plan.parts.kept)) and len(pieces) > len(owned)
                with step("copy"):
                    event = self.targets.of(device).to_host(pieces, hold=hold, owned=owned)
                events += [] if event is None else [event]
                copies += len(pieces)
        if len(events) > 1:
            return Copied(host, EventGroup(events), copies)
        return Copied(host, events[0] if events else None, copies)

    def _streams(self, plan: FetchPlan) -> EventGroup:
        """Return the streams that copy, as an event behind all their work."""
        streams = [self.targets.of(device).out_stream for device in plan.gatherings]
        return EventGroup([stream for stream in streams if stream is not None])


def _bytes_of_few(leaves: list[Any], device: torch.device) -> int:
    """Return the bytes that a device's few small tensors take in a slab; 0 if they are more, larger
    or elsewhere.
    """
    if len(leaves) > MOST_FEW:
        return 0
    tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
    if {tensor.device for tensor in tensors} != {device}:
        return 0
    nbytes = sum(round_up(tensor.numel() * tensor.itemsize, ALIGNMENT) for tensor in tensors)
    return nbytes if nbytes <= _MOST_FEW_BYTES else 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a GPU has the bytes of a tensor, in the order of its elements."""
    if not tensor.is_cuda or has_no_memory(tensor):
        return False
    return tensor.is_contiguous() and range_of(tensor)[1] <= tensor.untyped_storage().nbytes()


def _gpus(leaves: list[Any]) -> set[torch.device]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {tensor.device for tensor in tensors if tensor.is_cuda}


class FetchPlan(NamedTuple):
    """How a tree is copied to the host."""

    gatherings: dict[torch.device, Gathering]
    """How each device's leaves get into its part of the slab."""
    parts: Parts
    left: list[Any]
    """The leaves that don't go through the slab; see `_left`."""
    direct: dict[int, torch.Tensor]
    """Destinations that are written without a slab, by leaf."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return sum(table.nbytes for table in self.tables())

    def tables(self) -> list[Table]:
        """Return the tables of all devices, with places in the slab."""
        return [gathering.table for gathering in self.gatherings.values()]

    def outside(self, device: torch.device) -> Iterator[HostCopy]:
        """Yield the copies of a device's leaves to destinations outside of the slab."""
        for index, destination in self.direct.items():
            leaf = self.parts.leaves[index]
            if leaf.device == device:
                for start, end in pieces_of(destination):
                    yield HostCopy(destination.data_ptr() + start, leaf, start, end - start)


def _plan(
    parts: Parts, tables: dict[torch.device, Table], direct: dict[int, torch.Tensor]
) -> FetchPlan:
    gatherings = {device: arranged(_without(table, [*direct])) for device, table in tables.items()}
    return FetchPlan(gatherings, parts, _left(parts, tables.values()), direct)


def _chunk_bytes(nbytes: int) -> int:
    """Return the bytes of a chunk: a 16th of the tree, if that is worth waking threads for."""
    return min(max(nbytes // 16, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES) // ALIGNMENT * ALIGNMENT


def _extents(nbytes: int, step_bytes: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + step_bytes, nbytes)) for at in range(0, nbytes, step_bytes))


def _send(
    target: Target,
    sources: list[Source],
    extents: Iterable[tuple[int, int]],
    places: list[int],
    stream: Any,
) -> Iterator[tuple[tuple[int, int], int, int, Fence | None]]:
    """Start the copies of one chunk after the other, each to the next of some places.

    Yields:
        The chunk's extent, the address where the tree's first byte would be, the number of copies,
        and the event behind them; None if they are done.
    """
    for extent, place in zip(extents, cycle(places), strict=False):
        host = place - extent[0]
        pieces = [*_within(sources, extent, host)]
        with step("copy"):
            target.copy_out(pieces, stream)
        yield extent, host, len(pieces), target.record(stream)


def _sources(device: torch.device, gathering: Gathering, leaves: list[Any]) -> list[Source]:
    """Gather the small leaves of a device, and return where the slab's bytes come from: the
    gathered ones first.
    """
    sources = [(offset, nbytes, leaves[index]) for index, offset, nbytes in gathering.direct]
    if gathering.gathered_bytes:
        slab = torch.empty(gathering.gathered_bytes, dtype=torch.uint8, device=device)
        with step("gather"):
            gather(gathering, leaves, slab)
        sources.insert(0, (0, gathering.gathered_bytes, slab))
    return sources


def _within(sources: list[Source], extent: tuple[int, int], host: int) -> Iterator[HostCopy]:
    """Yield the copies of the bytes of an extent to a slab, whose first byte is at `host`."""
    for offset, nbytes, tensor in sources:
        start, end = max(offset, extent[0]), min(offset + nbytes, extent[1])
        if start < end:
            yield HostCopy(host + start, tensor, start - offset, end - start)


def _left(parts: Parts, tables: Collection[Table]) -> list[Any]:
    """Return the leaves that don't go through the slab, on the host; the others are None, so the
    caller may free them.

    Leaves that cannot be packed are moved by their own ``.to()``.

    Args:
        parts: the tree's parts.
        tables: its tables, for each device.
    """
    left: list[Any] = [None] * len(parts.leaves)
    if parts.table.packed == len(left):
        return left
    packed = {index for table in tables for index in table.positions(*PACKED)}
    moved = set(parts.table.positions(RowKind.MOVED)) - packed
    for index in {*parts.table.positions(RowKind.OTHER), *moved}:
        left[index] = unwrapped(parts.leaves[index])
    for index in moved:
        left[index] = _on_host(left[index], parts, index)
    return left


def _on_host(leaf: Any, parts: Parts, index: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device == _CPU:
        return leaf
    return move(leaf, _CPU, parts.structure, index)


def _direct(
    leaves: list[Any], existing: list[Any], tables: Iterable[Table]
) -> dict[int, torch.Tensor]:
    """Return the destinations that the device writes, by leaf: large page-locked ones, with bytes
    as in a slab.
    """
    direct = {}
    for table in tables:
        rows = table.rows
        is_large = (rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= DIRECT_FROM_BYTES)
        is_large[rows["offset"][rows["kind"] == RowKind.ALIAS]] = False  # others need its bytes
        alike, _ = match(leaves, existing, table, _CPU) if is_large.any() else ({}, [])
        for (code, its), group in alike.items():
            for index in group if code == its else ():
                tensor = existing[index]
                # Torch refuses to write inference tensors outside of the mode.
                may_write = torch.is_inference_mode_enabled() or not tensor.is_inference()
                if is_large[index] and may_write and pieces_of(tensor):
                    direct[index] = tensor
    return direct


def _without(table: Table, leaves: list[int]) -> Table:
    """Take leaves out of a slab."""
    if not leaves:
        return table
    rows = table.rows.copy()
    rows["kind"][leaves] = RowKind.MOVED
    return table.moved_to(rows, table.nbytes)
