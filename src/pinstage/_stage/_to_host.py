"""The way back: many tensors of one or more devices into one host slab.

::

    tree --take apart--> leaves of each device
      small, or strided   --gather, on the current stream--> device slab  --one copy-->  |
      large and dense     --------------------------------------------------a copy each-->  host slab (leased)
                                                                                            | wait(): event, views

The lease is released at once, after the copies' events: from then on the pool keeps the slab from others until the
copies are done and the last view is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, NamedTuple, NoReturn, SupportsIndex

import torch

from .._batch import (
    DTYPES,
    PACKED,
    WRAPPERS,
    Gathering,
    IsContainer,
    RowKind,
    Structure,
    Table,
    arrange,
    cut,
    describe,
    duplicate,
    flat,
    gather,
    view_of,
    walk,
)
from .._compat.views import check_is_plain
from .._pool import Fence, Lease, guard_until_release
from .._region import pieces_of
from .._steps import step
from ._device import EventGroup, HostCopy, Targets
from ._frames import clear_own_frames
from ._not_a_batch import B_co, NotABatch
from ._out import DIRECT_FROM_BYTES, check, copy_all, in_order, make_readable, results, writing
from ._transfer import move

_MOST_GATHERINGS = 16
_CPU = torch.device("cpu")


class Share(NamedTuple):
    """The leaves of a tree that are on one device."""

    device: torch.device
    gathering: Gathering
    kept: list[torch.Tensor]
    """Objects to keep alive until the copies are under way."""

    @property
    def table(self) -> Table:
        """With their places in this share's part of the host slab."""
        return self.gathering.table

    def without(self, chosen: Iterable[int]) -> Share:
        """Return the share without some leaves, whose rows say then that they are moved."""
        rows = self.table.rows.copy()
        theirs = [index for index in chosen if rows["kind"][index] in PACKED]
        if not theirs:
            return self
        rows["kind"][theirs] = RowKind.MOVED
        return self._replace(gathering=arrange(self.table.moved_to(rows, self.table.nbytes)))


class HostTransfer(NotABatch, Generic[B_co]):
    """Tensors on their way to the host. Made by `Stager.fetch`.

    `wait` is the only way to the bytes, and waits for them. Not for use by several threads at the same time.
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
        "_writes",
        "copies",
    )

    def __init__(
        self,
        structure: Structure,
        leaves: list[Any],
        tables: list[Table],
        host: torch.Tensor | None,
        event: Fence | None,
        copies: int,
        *,
        copy: bool,
        writes: list[Write] | None = None,
    ) -> None:
        self._structure = structure
        self._writes = writes
        self._leaves: list[Any] | None = leaves
        self._tables = tables
        self._host = host
        self._event = event
        self._copy = copy
        self._nbytes = sum(table.nbytes for table in tables)
        self._fetched: Any = None
        self.copies = copies
        """Device-to-host copies issued: one for each device's gathered tensors, and one for each large tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that go through the host slab, padding included."""
        return self._nbytes

    def query(self) -> bool:
        """Say whether the bytes are on the host, so that `wait` will not block. Does not block."""
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
            views of one page-locked slab, which goes back to the pool when the last view and this transfer, which keeps
            its result, are freed. Objects on the host are returned unchanged. With `out` these are the
            existing tensors, which the first call fills.
        """
        fetched: B_co
        if self._leaves is None:
            fetched = self._fetched
            return fetched
        if self._writes is not None:
            self._write(self._writes)
            self._fetched = fetched = self._structure.rebuild(self._leaves)
            self._leaves = self._host = self._writes = None
            return fetched
        with step("views"):
            leaves = self._cut()  # before the wait: meanwhile the copy is on its way
        self.synchronize()
        if self._copy:
            leaves = self._duplicated(leaves)
        with step("unflatten"):
            self._fetched = fetched = self._structure.rebuild(leaves)
        self._leaves = self._host = None
        return fetched

    def _cut(self) -> list[Any]:
        """Cut the slab into the leaves. Not to be shown before `synchronize` has returned."""
        assert self._leaves is not None
        leaves, start = self._leaves, 0
        for table in self._tables:
            slab = torch.empty(0, dtype=torch.uint8, device="cpu")
            if self._host is not None:
                slab = self._host[start : start + table.nbytes]
            others = [leaves[i] for i in table.positions(RowKind.OTHER, RowKind.MOVED)]
            leaves = cut(table, slab, others)
            start += table.nbytes
        return leaves

    def _write(self, writes: list[Write]) -> None:
        """Fill existing tensors from the slab."""
        self.synchronize()
        host = self._host
        if host is not None and writes:
            with step("unpack"):
                copy_all([place for place, _, _ in writes], [view_of(row, host[start:]) for _, row, start in writes])

    def _duplicated(self, leaves: list[Any]) -> list[Any]:
        """Give the copied leaves memory of their own."""
        for table in self._tables:
            for index in table.positions(*PACKED):
                leaves[index] = duplicate(leaves[index])
            first = table.rows["offset"]
            for index in table.positions(RowKind.ALIAS):
                leaves[index] = leaves[int(first[index])]
        return leaves

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a transfer cannot be copied or pickled: {self!r}; copy what wait() returns")

    def __repr__(self) -> str:
        return f"<HostTransfer nbytes={self._nbytes} copies={self.copies}{' done' if self.query() else ''}>"


class Write(NamedTuple):
    """A copy from the slab into an existing tensor."""

    place: torch.Tensor
    row: Any
    """Of the offset table."""
    start: int
    """Where the slab of that table begins."""


class Landing(NamedTuple):
    """The place of a tensor in the host slab."""

    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; dense."""


def landings(transfer: HostTransfer) -> list[Any]:
    """Return where each leaf lands, as a `Landing`, or the leaf itself if it isn't in a slab. Before `wait`."""
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
    """Return the event that is done when all bytes are on the host; None where they are there already."""
    return transfer._event


def duplicate_rest(transfer: HostTransfer, leaves: list[Any]) -> None:
    """Give tensors that aren't in a slab, since they were on the host and cannot be packed, memory of their own.

    Args:
        transfer: before `wait`.
        leaves: what it was made from, a list of tensors.
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
    hold: bool = True,
) -> HostTransfer[Any]:
    """Start the copies of a tree's tensors to the host; see `Stager.fetch`.

    Args:
        tree: what to fetch.
        home: the stager's device; CPU tensors are fetched, rather than left as they are, if it is the CPU.
        acquire: leases a host slab of a number of bytes.
        targets: the stager's.
        copy: return ordinary tensors.
        hold: see `Target.to_host`.
    """
    while True:
        with step("walk"):
            leaves, structure = walk(tree)
        try:
            with step("describe"):
                shares, left, alone = _divide(leaves, structure, home, targets)
            break
        except IsContainer:
            continue  # see `take_apart`
    for index in alone:
        thing = left[index]
        if not isinstance(thing, torch.Tensor) or thing.device.type != "cpu":
            left[index] = move(thing, _CPU, structure, index)
    host, event, copies = _copy_out(shares, leaves, {}, acquire, targets, hold=hold)
    return HostTransfer(structure, left, [share.table for share in shares], host, event, copies, copy=copy)


def fetch_into(
    tree: Any, out: Any, home: torch.device, acquire: Callable[[int], Lease], targets: Targets
) -> tuple[HostTransfer[Any], list[torch.Tensor]]:
    """Start the copies of a tree's tensors into host tensors that exist; see `Stager.fetch`.

    Page-locked destinations are written by the device. The others are filled from a slab by `HostTransfer.wait`.

    Returns:
        The transfer, and the destinations that the device writes: to be kept until its event is done.
    """
    while True:
        leaves, structure = walk(tree)
        places = in_order(structure, out)
        try:
            with step("describe"):
                parts = describe(leaves, structure, home, arrays=False)
                readable = make_readable(parts, places)
                if readable is not None:
                    leaves = readable
                    parts = describe(leaves, structure, home, arrays=False)
                shares, _, _ = _divide(leaves, structure, home, targets)
            with step("check"):
                tables = [share.table for share in shares if share.device != home]
                plain, same, others = check(parts, [parts.table, *tables], places, _CPU)
            break
        except IsContainer:
            continue
    direct = {index: places[index] for share in shares for index in _direct_in(share, same, places)}
    shares = [share.without(direct) for share in shares]
    writes, start = [], 0
    for share in shares:
        rows, packed = share.table.rows, set(share.table.positions(*PACKED))
        writes += [(index, Write(places[index], rows[index], start)) for index in (*same, *others) if index in packed]
        start += share.table.nbytes
    for _, place, source in plain:
        with writing([place]):
            place.copy_(source)
    torch.autograd.graph.increment_version(list(direct.values()))
    host, event, copies = _copy_out(shares, leaves, direct, acquire, targets, hold=True)
    in_turn = [write for _, write in sorted(writes, key=lambda found: found[0])]
    made: HostTransfer[Any] = HostTransfer(
        structure,
        results(parts, places),
        [share.table for share in shares],
        host,
        event,
        copies,
        copy=False,
        writes=in_turn,
    )
    return made, list(direct.values())


def _direct_in(share: Share, same: list[int], places: list[Any]) -> Iterator[int]:
    """Yield the leaves of a share that the device can write to their places without a slab."""
    rows = share.table.rows
    for index in same:
        if (
            rows["kind"][index] == RowKind.RAW
            and rows["nbytes"][index] >= DIRECT_FROM_BYTES
            and pieces_of(places[index])
        ):
            yield index


def _copy_out(
    shares: list[Share],
    leaves: list[Any],
    direct: dict[int, torch.Tensor],
    acquire: Callable[[int], Lease],
    targets: Targets,
    *,
    hold: bool,
) -> tuple[torch.Tensor | None, Fence | None, int]:
    """Start the copies of all shares.

    Args:
        shares: of the tree.
        leaves: of the tree.
        direct: destinations that are written without a slab, by leaf.
        acquire: leases a host slab of a number of bytes.
        targets: the stager's.
        hold: see `Target.to_host`.

    Returns:
        The slab, the event behind the copies, and how many there are.
    """
    nbytes = sum(share.table.nbytes for share in shares)
    if not nbytes and not direct:
        return None, None, 0
    lease = acquire(nbytes) if nbytes else None
    streams = [targets.of(share.device).out_stream for share in shares]
    after: Any = EventGroup([stream for stream in streams if stream is not None])
    if lease is not None:
        guard_until_release(lease, after)  # an interrupt may come before the release, and in front of a copy's event
    host = event = None
    try:
        host = None if lease is None else lease.tensor()
        events, copies = _start(shares, leaves, direct, host, targets, hold)
        after = event = events[0] if len(events) == 1 else EventGroup(events) if events else None
    except BaseException as error:
        if direct:
            with suppress(Exception):  # of a device that has failed
                after.synchronize()
            error.add_note(f"{len(direct)} page-locked tensors of out may be written in part")
        clear_own_frames(error)  # who keeps the error must not keep views of the slab
        host = None
        raise
    finally:
        if lease is not None:
            lease.release(after=after)
    return host, event, copies


def _divide(
    leaves: list[Any], structure: Structure, home: torch.device, targets: Targets
) -> tuple[list[Share], list[Any], set[int]]:
    """Divide leaves by the device that they are on.

    Returns:
        Each device's share; the leaves that are in none, in their places; and which of those are tensors, or objects
        that hold some.
    """
    left: list[Any] = [None] * len(leaves)  # the caller's copied tensors may go
    shares: list[Share] = []
    devices = [home]
    on_their_own: set[int] = set()
    for device in devices:  # grows when tensors of another one are met
        parts = describe(leaves, structure, device, arrays=False)
        table = parts.table
        if table.packed:
            shares.append(Share(device, _gathering(table, targets), parts.kept))
        if device != home:
            for index in table.positions(*PACKED):
                on_their_own.discard(index)
                left[index] = None
        elif table.packed < len(leaves):
            for index in table.positions(RowKind.OTHER, RowKind.MOVED, RowKind.ALIAS):
                left[index] = leaf.obj if type(leaf := leaves[index]) in WRAPPERS else leaf
            on_their_own = set(table.positions(RowKind.MOVED))
            there = (left[i].device for i in on_their_own if isinstance(left[i], torch.Tensor))
            devices += dict.fromkeys(device for device in there if device.type == "cuda")
            if home in devices[1:]:  # of a tensor there that cannot be packed
                devices.remove(home)
    return shares, left, on_their_own


def _gathering(table: Table, targets: Targets) -> Gathering:
    """Arrange leaves for the host, as was done before if leaves like these were met."""
    known = targets.gatherings
    found = known.get(table)
    if found is None:
        if len(known) >= _MOST_GATHERINGS:
            known.clear()  # all at once: other threads add some
        found = known[table] = arrange(table)
    return found


def _start(
    shares: list[Share],
    leaves: list[Any],
    direct: dict[int, torch.Tensor],
    host: torch.Tensor | None,
    targets: Targets,
    hold: bool,
) -> tuple[list[Fence], int]:
    """Start the copies of all shares; return their events, and how many copies there are."""
    events: list[Fence] = []
    copies = start = 0
    if host is None:
        host = torch.empty(0, dtype=torch.uint8, device="cpu")
    for device, gathering, _ in shares:
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
