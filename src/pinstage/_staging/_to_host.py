"""The way back: many tensors of one or more devices into one host slab.

::

    tree --take apart--> tensors of each device
      small, or strided   --gather, on the current stream--> device slab  --one copy-->  |
      large and dense     --------------------------------------------------a copy each-->  host slab (leased)
                                                                                            | result(): event, views

The lease is released at once, after the copies' events: from then on the pool keeps the slab from others until the
copies are done and the last view has died.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from .._layout import Parts, Table, duplicate, flat, gather, table_of, take_apart
from .._pool import Event, SlabPool
from .._steps import step
from ._frames import clear_own_frames
from ._host_slab import acquire
from ._sources import Events, Piece, Sources

DIRECT_BYTES = 1024 * 1024
"""From here on a dense tensor is copied from where it is. Smaller ones are gathered first: a copy call costs 8 us, in
which the bus carries 0.4 MB, and a gathering kernel moves a megabyte in a microsecond."""


class Share(NamedTuple):
    """Tensors of one device that reach the host slab in the same way."""

    device: torch.device
    table: Table
    positions: list[int] | None
    """Which of the tree's tensors they are; None: all, in order."""
    tensors: list[torch.Tensor]
    direct: bool
    """Whether each is copied from where it is; else they are gathered in a device slab first."""


class HostTransfer:
    """Tensors on their way to the host. Made by `Stager.to_host`.

    The bytes are out of reach until they are there: `result` is the only way to them, and waits. Not for use by several
    threads at the same time.
    """

    __slots__ = ("_copy", "_event", "_host", "_moved", "_nbytes", "_parts", "_result", "_shares", "copies")

    def __init__(
        self,
        parts: Parts,
        shares: list[Share],
        host: torch.Tensor | None,
        event: Event | None,
        moved: list[list[torch.Tensor]],
        copies: int,
        *,
        copy: bool,
    ) -> None:
        self._parts: Parts | None = parts
        self._shares = shares
        self._host = host
        self._event = event
        self._moved = moved
        self._copy = copy
        self._nbytes = sum(share.table.nbytes for share in shares)
        self._result: Any = None
        self.copies = copies
        """Device-to-host copies issued: one for each device's gathered tensors, and one for each large tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel through the host slab, padding included."""
        return self._nbytes

    @property
    def done(self) -> bool:
        """Whether the bytes are on the host, so that `result` will not block. Does not block."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until the bytes are on the host: on the copies' own event, not on the device or on a stream."""
        if self._event is not None:
            with step("wait"):
                self._event.synchronize()

    def result(self) -> Any:
        """Wait until the bytes are on the host, and return them.

        Blocks as `wait` does. Later calls return the same object.

        Returns:
            A tree of the same types. Tensors that travelled are tensors on the CPU: views of one page-locked slab,
            which goes back to the pool when the last view has died (and this transfer, which keeps what it
            returned); or, if the transfer was made with ``copy=True``, ordinary tensors. What was on the host already
            is the object it was.
        """
        parts = self._parts
        if parts is None:
            return self._result
        with step("views"):
            views = self._views()  # before the wait: meanwhile the copy is on its way
        self.wait()
        tensors: list[Any] = parts.tensors
        for share, moved, of_share in zip(self._shares, self._moved, views, strict=True):
            if self._copy:
                by_to = set(map(id, moved))
                of_share = [view if id(view) in by_to else duplicate(view) for view in of_share]  # noqa: PLW2901
            if share.positions is None:
                tensors = of_share
            else:
                for position, view in zip(share.positions, of_share, strict=True):
                    tensors[position] = view
        with step("unflatten"):
            self._result = parts.together(tensors)
        self._parts = self._host = None
        self._shares, self._moved = [], []
        return self._result

    def _views(self) -> list[list[torch.Tensor]]:
        """Cut the slab into the tensors of each share. Not to be shown before `wait` has returned."""
        views, start = [], 0
        for share, moved in zip(self._shares, self._moved, strict=True):
            end = start + share.table.nbytes
            slab = torch.empty(0, dtype=torch.uint8, device="cpu") if self._host is None else self._host[start:end]
            views.append(share.table.views(slab, moved))
            start = end
        return views

    def __repr__(self) -> str:
        return f"<HostTransfer nbytes={self._nbytes} copies={self.copies}{' done' if self.done else ''}>"


def to_host(
    tree: Any, home: torch.device, pool: SlabPool, sources: Sources, *, copy: bool, timeout: float | None
) -> HostTransfer:
    """Start the copies of a tree's tensors to the host; see `Stager.to_host`.

    Args:
        tree: what to fetch.
        home: the stager's device; CPU tensors are fetched, rather than left as they are, if it is the CPU.
        pool: where the host slab is leased.
        sources: the stager's.
        copy: whether the result shall be ordinary tensors.
        timeout: of the lease.
    """
    parts, shares = _divide(tree, home, sources)
    nbytes = sum(share.table.nbytes for share in shares)
    host, event, copies = None, None, 0
    if nbytes:
        lease = acquire(pool, nbytes, timeout, "to_host")
        streams = [sources.of(share.device).all_copies for share in shares]
        after: Event | None = Events([stream for stream in streams if stream is not None])
        lease.guard(after)  # an interrupt may come before the release, and in front of a copy's event
        try:
            host = lease.tensor()
            events, copies = _fetch(shares, host, sources)
            after = event = events[0] if len(events) == 1 else Events(events) if events else None
        except BaseException as error:
            clear_own_frames(error)  # who keeps the error must not keep views of the slab
            host = None
            raise
        finally:
            lease.release(after=after)
    moved = [[share.tensors[i].to("cpu") for i in share.table.columns.passthrough] for share in shares]
    return HostTransfer(_without_travellers(parts, shares), shares, host, event, moved, copies, copy=copy)


def _without_travellers(parts: Parts, shares: list[Share]) -> Parts:
    """Return the parts with None for tensors that travel, and empty the shares: the caller's tensors may go."""
    left: list[Any] = list(parts.tensors)
    for share in shares:
        for position in range(len(left)) if share.positions is None else share.positions:
            left[position] = None
        share.tensors.clear()
    return parts._replace(tensors=left)


def _fetch(shares: list[Share], host: torch.Tensor, sources: Sources) -> tuple[list[Event], int]:
    """Start the copies of all shares; return their events, and how many copies there are."""
    events: list[Event] = []
    copies = start = 0
    for share in shares:
        table, tensors = share.table, share.tensors
        here = host[start : start + table.nbytes]
        start += table.nbytes
        pieces = []
        if share.direct:
            for position, offset, nbytes in zip(table.raw, table.raw_offsets, table.raw_nbytes, strict=True):
                there = flat(tensors[position]).view(torch.uint8)
                pieces.append(Piece(there, here[offset : offset + nbytes], owned=False))
        elif table.nbytes:
            slab = torch.empty(table.nbytes, dtype=torch.uint8, device=share.device)
            with step("gather"):
                gather(table, tensors, slab)
            pieces.append(Piece(slab, here, owned=True))
        if pieces:
            with step("copy"):
                event = sources.of(share.device).fetch(pieces)
            if event is not None:
                events.append(event)
            copies += len(pieces)
    return events, copies


def _divide(tree: Any, home: torch.device, sources: Sources) -> tuple[Parts, list[Share]]:
    """Take a tree apart and divide its tensors, as was done before if a tree like this was met."""

    def describe(parts: Parts) -> tuple[list[Share], Table | None]:
        shares = list(_shares(parts.tensors, home))
        by_to = any(share.table.columns.passthrough for share in shares)
        return [share._replace(tensors=[]) for share in shares], None if by_to or not shares else shares[0].table

    parts, shares = take_apart(tree, sources.recall, describe, arrays=False)
    return parts, [share._replace(tensors=_chosen(parts.tensors, share.positions)) for share in shares]


def _chosen(tensors: list[torch.Tensor], positions: list[int] | None) -> list[torch.Tensor]:
    return list(tensors) if positions is None else [tensors[position] for position in positions]


def _shares(tensors: list[torch.Tensor], home: torch.device) -> Iterable[Share]:
    """Divide tensors by their device, and into small and large ones."""
    devices = [tensor.device for tensor in tensors]
    for device in dict.fromkeys(devices):
        if device.type == "cpu" and home.type != "cpu":
            continue
        positions = None
        if len(set(devices)) > 1:
            positions = [position for position, other in enumerate(devices) if other == device]
        chosen = _chosen(tensors, positions)
        place: Literal["cpu", "cuda"] = "cpu" if device.type == "cpu" else "cuda"
        table = table_of(chosen, place)
        if max(table.raw_nbytes, default=0) < DIRECT_BYTES:
            yield Share(device, table, positions, chosen, direct=False)
            continue
        sizes = dict(zip(table.raw, table.raw_nbytes, strict=True))
        large = [i for i in range(len(chosen)) if sizes.get(i, 0) >= DIRECT_BYTES]
        small = [i for i in range(len(chosen)) if sizes.get(i, 0) < DIRECT_BYTES]
        for members, direct in ((small, False), (large, True)):
            if members:
                part = [chosen[i] for i in members]
                where = members if positions is None else [positions[i] for i in members]
                yield Share(device, table_of(part, place), where, part, direct=direct)
