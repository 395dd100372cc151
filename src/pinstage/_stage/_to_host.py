"""Copies to the host: many tensors of one or more devices into one host slab.

::

    tree --take apart--> leaves of each device
      small, or strided   --gather, on the current stream--> device slab  --one copy-->  |
      large and dense     --------------------------------------------------a copy each-->  host slab (leased)
                                                                                            | wait(): event, views

The lease is released at once, with the copies' events: the pool doesn't lend the slab again until the copies are done
and the last view is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple

import torch

from .._batch import (
    DTYPES,
    PACKED,
    Gathering,
    IsContainer,
    Parts,
    RowKind,
    Sharing,
    Structure,
    Table,
    arrange,
    describe,
    duplicate,
    flat,
    gather,
    make_blocks,
    walk,
)
from .._compat.views import check_is_plain
from .._pool import Fence, Lease, guard_until_release
from .._region import pieces_of
from .._steps import step
from ..errors import BudgetExceededError
from ._device import EventGroup, HostCopy, Targets
from ._frames import clear_own_frames
from ._not_a_batch import B_co, NotABatch
from ._out import (
    DIRECT_FROM_BYTES,
    LEAST_OF_CAP_BYTES,
    OutPlan,
    check,
    copy_all,
    in_groups,
    in_order,
    make_readable,
    note_written,
    writing,
)
from ._transfer import move

_MOST_GATHERINGS = 16
_CPU = torch.device("cpu")


class HostTransfer(NotABatch, Generic[B_co]):
    """Tensors on their way to the host. Made by `Stager.fetch`.

    Only `wait` returns the tensors, when their bytes are there. Don't use a transfer in several threads at once.
    """

    __slots__ = (
        "_copy",
        "_event",
        "_fetched",
        "_host",
        "_leaves",
        "_nbytes",
        "_structure",
        "_tables",
        "_written",
        "copies",
    )

    def __init__(
        self,
        structure: Structure,
        leaves: list[Any],
        tables: list[Table],
        host: torch.Tensor,
        event: Fence | None,
        copies: int,
        *,
        copy: bool,
        written: list[int] | None,
        nbytes: int | None = None,
    ) -> None:
        self._structure = structure
        self._written = written  # leaves that are existing tensors, filled from the slab; None without `out`
        self._leaves: list[Any] | None = leaves
        self._tables = tables
        self._nbytes = sum(table.nbytes for table in tables) if nbytes is None else nbytes
        self._host: torch.Tensor | None = host
        self._event = event
        self._copy = copy
        self._fetched: Any = None
        self.copies = copies
        """Device-to-host copies issued: one for each device's gathered tensors, and one for each large tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that go through the host slab, padding included."""
        return self._nbytes

    def query(self) -> bool:
        """Return whether the bytes are on the host, so that `wait` will not block. Does not block."""
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        """Block until the bytes are on the host. Waits for the copies' own event, not for the device or a stream."""
        if self._event is not None:
            with step("wait"):
                self._event.synchronize()

    def wait(self) -> B_co:
        """Wait until the bytes are on the host, and return them.

        Blocks as `synchronize` does. Later calls return the same object.

        Returns:
            A tree of the same types. Tensors that were copied have memory of their own. With ``copy=False`` they are
            views of one page-locked slab. The slab returns to the pool when the last view and this transfer, which
            keeps its result, are freed. Objects on the host are returned unchanged. With `out`, the tensors are the
            existing ones, which the first call fills.
        """
        fetched: B_co
        if self._leaves is None:
            fetched = self._fetched
            return fetched
        with step("views"):
            leaves = self._cut()  # before the wait, while the copy is under way
        self.synchronize()
        if self._written is not None:
            if self._written:
                with step("unpack"):
                    copy_all([self._leaves[i] for i in self._written], [leaves[i] for i in self._written])
            leaves = self._leaves
        elif self._copy:
            leaves = self._duplicated(leaves)
        with step("unflatten"):
            self._fetched = fetched = self._structure.rebuild(leaves)
        self._leaves = self._host = None
        return fetched

    def _cut(self) -> list[Any]:
        """Cut the slab into the leaves. Their bytes are valid only after `synchronize`."""
        assert self._leaves is not None
        assert self._host is not None
        leaves, start = self._leaves, 0
        for table in self._tables:
            others = [leaves[i] for i in table.positions(RowKind.OTHER, RowKind.MOVED)]
            slab = self._host[start : start + table.nbytes] if table.nbytes else None
            leaves = make_blocks(table, Sharing.ONE, _CPU, slab).leaves(others)
            start += table.nbytes
        return leaves

    def _duplicated(self, leaves: list[Any]) -> list[Any]:
        """Give the copied leaves memory of their own."""
        for table in self._tables:
            for index in table.positions(*PACKED):
                leaves[index] = duplicate(leaves[index])
            first = table.rows["offset"]
            for index in table.positions(RowKind.ALIAS):
                leaves[index] = leaves[int(first[index])]
        return leaves

    def __repr__(self) -> str:
        return f"<HostTransfer nbytes={self.nbytes} copies={self.copies}{' done' if self.query() else ''}>"


class Landing(NamedTuple):
    """The place of a tensor in the host slab."""

    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; dense."""


def landings(transfer: HostTransfer) -> list[Any]:
    """Return where each leaf lands, as a `Landing`, or the leaf itself if it isn't in a slab. Call it before `wait`."""
    assert transfer._leaves is not None
    found, start = list(transfer._leaves), 0
    for table in transfer._tables:
        for index, (offset, _, kind, code, ndim, _, shape, stride) in enumerate(table.entries()):
            if kind in PACKED:
                dtype = DTYPES[code]
                assert dtype is not None
                found[index] = Landing(start + offset, dtype, tuple(shape[:ndim]), tuple(stride[:ndim]))
        start += table.nbytes
    return found


def event_of(transfer: HostTransfer) -> Fence | None:
    """Return the event that is done when all bytes are on the host; None if they are there already."""
    return transfer._event


def duplicate_rest(transfer: HostTransfer, leaves: list[Any]) -> None:
    """Clone the tensors that aren't in the slab, because they were on the host and cannot be packed.

    Args:
        transfer: a transfer, before its `wait`.
        leaves: the list of tensors that it was made from.
    """
    assert transfer._leaves is not None
    for index, (left, leaf) in enumerate(zip(transfer._leaves, leaves, strict=True)):
        if left is leaf:
            transfer._leaves[index] = leaf.clone()


def fetch(
    tree: Any,
    home: torch.device,
    acquire: Callable[[int], Lease],
    targets: Targets,
    *,
    copy: bool,
    out: Any = None,
    keep: Callable[[Fence | None, list[Any]], None] | None = None,
    hold: bool = True,
) -> HostTransfer[Any]:
    """Start the copies of a tree's tensors to the host; see `Stager.fetch`.

    Args:
        tree: what to fetch.
        home: the stager's device; CPU tensors are fetched, rather than left as they are, if it is the CPU.
        acquire: leases a host slab of a number of bytes.
        targets: the stager's.
        copy: whether to return ordinary tensors.
        out: existing host tensors, or None. The device writes page-locked ones; `HostTransfer.wait` fills the others
            from the slab.
        keep: keeps objects alive until an event is done: the tensors that the device writes.
        hold: see `Target.to_host`.
    """
    places: list[Any] = []
    plan: OutPlan | None = None
    while True:
        with step("walk"):
            leaves, structure = walk(tree)
        try:
            with step("describe"):
                parts = describe(leaves, structure, home, arrays=False)
                if out is not None:
                    places = in_order(structure, out)
                    parts = make_readable(parts, places, home, arrays=False)
                by_device = _by_device(parts, home)
            if out is not None:
                with step("check"):
                    plan = check(list(by_device.values()), places, _CPU)
            break
        except IsContainer:
            continue  # see `take_apart`
    if not hold:  # the caller doesn't keep tensors that `describe` computed
        hold = any(map(operator.is_not, parts.leaves, walk(tree)[0]))
    tables = {device: there.table for device, there in by_device.items()}
    direct: dict[int, torch.Tensor] = {}
    written = None
    if plan is None:
        left = _left(parts, [table for device, table in tables.items() if device != home])
    else:
        left = plan.leaves
        for device, table in tables.items():
            tables[device], found = _without_direct(table, plan)
            direct |= found
        written = sorted({*plan.direct, *plan.scratch} - direct.keys())
    shares = {device: _gathering(table, targets) for device, table in tables.items()}
    plain = [] if plan is None else plan.plain
    try:
        host, event, copies = _copy_out(shares, parts, direct, plain, acquire, targets, hold=hold)
    except BudgetExceededError as error:
        if plan is None or error.requested_bytes < 2 * LEAST_OF_CAP_BYTES:
            raise
        most = error.requested_bytes // 2
    else:
        if keep is not None:
            keep(event, list(direct.values()))
        arranged = [share.table for share in shares.values()]
        return HostTransfer(structure, left, arranged, host, event, copies, copy=copy, written=written)
    again = partial(fetch, home=home, acquire=acquire, targets=targets, copy=copy, keep=keep, hold=hold)
    return _in_parts(plan, structure, most, again)


def _in_parts(
    plan: OutPlan, structure: Structure, most: int, again: Callable[..., HostTransfer[Any]]
) -> HostTransfer[Any]:
    """Fetch leaves into existing tensors in parts of at most `most` bytes, by `again`. Waits for each part's copies."""
    chosen = sorted(plan.direct + plan.scratch)
    parts = [*in_groups(plan.pairs(chosen), most)]
    if plan.plain:
        parts.append(([source for _, _, source in plan.plain], [place for _, place, _ in plan.plain]))
    copies = nbytes = 0
    try:
        for sources, places in parts:
            part = again(sources, out=places)
            part.wait()
            copies, nbytes = copies + part.copies, nbytes + part.nbytes
    except BaseException as error:
        note_written(error, structure, [*chosen, *(index for index, _, _ in plan.plain)])
        raise
    host = torch.empty(0, dtype=torch.uint8, device="cpu")
    return HostTransfer(structure, plan.leaves, [], host, None, copies, copy=True, written=[], nbytes=nbytes)


def _by_device(parts: Parts, home: torch.device) -> dict[torch.device, Parts]:
    """Describe a tree again for each other GPU that has some of its tensors."""
    found = {home: parts}
    if parts.table.moved:
        for leaf in parts.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" and leaf.device not in found:
                found[leaf.device] = describe(parts.leaves, parts.structure, leaf.device, arrays=False)
    return found


def _left(parts: Parts, elsewhere: list[Table]) -> list[Any]:
    """Return the leaves that don't go through the slab, on the host; the others are None, so the caller may free them.

    Leaves that cannot be packed are moved by their own ``.to()``.

    Args:
        parts: the tree's parts.
        elsewhere: the tree's tables for other devices.
    """
    left: list[Any] = [None] * len(parts.leaves)
    if parts.table.packed == len(left):
        return left
    for index, leaf in zip(parts.table.positions(RowKind.OTHER, RowKind.MOVED), parts.others(), strict=True):
        left[index] = leaf
    packed = {index for table in elsewhere for index in table.positions(*PACKED)}
    for index in parts.table.positions(RowKind.MOVED):
        leaf = left[index]
        if index in packed:
            left[index] = None
        elif not isinstance(leaf, torch.Tensor) or leaf.device != _CPU:
            left[index] = move(leaf, _CPU, parts.structure, index)
    return left


def _without_direct(table: Table, plan: OutPlan) -> tuple[Table, dict[int, torch.Tensor]]:
    """Take leaves out of the slab if the device can write to their places; also return these places, by leaf."""
    rows = table.rows.copy()
    is_large = (rows["kind"] == RowKind.RAW) & (rows["nbytes"] >= DIRECT_FROM_BYTES)
    places = {index: plan.leaves[index] for index in plan.direct if is_large[index] and pieces_of(plan.leaves[index])}
    rows["kind"][list(places)] = RowKind.MOVED
    return table.moved_to(rows, table.nbytes), places


def _gathering(table: Table, targets: Targets) -> Gathering:
    """Arrange leaves for the host, or return the earlier arrangement of leaves like these."""
    known = targets.gatherings
    found = known.get(table)
    if found is None:
        if len(known) >= _MOST_GATHERINGS:
            known.clear()  # in one call, since other threads may add to it
        found = known[table] = arrange(table)
    return found


def _copy_out(
    shares: dict[torch.device, Gathering],
    parts: Parts,
    direct: dict[int, torch.Tensor],
    plain: list[tuple[int, torch.Tensor, torch.Tensor]],
    acquire: Callable[[int], Lease],
    targets: Targets,
    *,
    hold: bool,
) -> tuple[torch.Tensor, Fence | None, int]:
    """Start the copies of all devices. If it can't have a slab, nothing has been written.

    Args:
        shares: how each device's leaves get into its part of the slab.
        parts: the tree's parts.
        direct: destinations that are written without a slab, by leaf.
        plain: see `OutPlan`.
        acquire: leases a host slab of a number of bytes.
        targets: the stager's.
        hold: see `Target.to_host`.

    Returns:
        The slab, the event behind the copies, and their number.
    """
    nbytes = sum(share.table.nbytes for share in shares.values())
    if not (nbytes or direct or plain):
        return torch.empty(0, dtype=torch.uint8, device="cpu"), None, 0
    lease = acquire(nbytes) if nbytes else None
    streams = [targets.of(device).out_stream for device, share in shares.items() if share.table.packed or direct]
    after: Any = EventGroup([stream for stream in streams if stream is not None])
    if lease is not None:
        guard_until_release(lease, after)  # an interrupt may come before the release, and before a copy's event
    host: Any = None
    event = None
    try:
        for _, place, source in plain:
            with writing([place]):
                place.copy_(source)
        torch.autograd.graph.increment_version(list(direct.values()))
        host = torch.empty(0, dtype=torch.uint8, device="cpu") if lease is None else lease.tensor()
        events, copies = _start(shares, parts.leaves, direct, host, targets, hold)
        after = event = events[0] if len(events) == 1 else EventGroup(events) if events else None
    except BaseException as error:
        if direct:
            with suppress(Exception):  # the device may have failed
                after.synchronize()
        note_written(error, parts.structure, [*direct, *(index for index, _, _ in plain)])
        clear_own_frames(error)  # an error that is kept must not keep views of the slab
        host = None
        raise
    finally:
        if lease is not None:
            lease.release(after=after)
    return host, event, copies


def _start(
    shares: dict[torch.device, Gathering],
    leaves: list[Any],
    direct: dict[int, torch.Tensor],
    host: torch.Tensor,
    targets: Targets,
    hold: bool,
) -> tuple[list[Fence], int]:
    """Start the copies of all devices; return their events, and the number of copies."""
    events: list[Fence] = []
    copies = start = 0
    for device, gathering in shares.items():
        here = host[start : start + gathering.table.nbytes]
        check_is_plain(here)
        start += gathering.table.nbytes
        pieces = []
        if gathering.gathered_bytes:
            slab = torch.empty(gathering.gathered_bytes, dtype=torch.uint8, device=device)
            with step("gather"):
                gather(gathering, leaves, slab)
            pieces.append(HostCopy(slab, here[: gathering.gathered_bytes], owned=True))
        for index, offset, nbytes in gathering.direct:
            there = flat(leaves[index]).view(torch.uint8)
            pieces.append(HostCopy(there, here[offset : offset + nbytes], owned=False))
        for index in (index for index in direct if leaves[index].device == device):
            there, place = flat(leaves[index]).view(torch.uint8), flat(direct[index].detach()).view(torch.uint8)
            pieces += [HostCopy(there[a:b], place[a:b], owned=False) for a, b in pieces_of(direct[index])]
        if pieces:
            with step("copy"):
                event = targets.of(device).to_host(pieces, hold=hold)
            if event is not None:
                events.append(event)
            copies += len(pieces)
    return events, copies
