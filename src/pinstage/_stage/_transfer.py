"""A batch on its way to the device."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch

from .._batch import (
    Blocks,
    OwnStorage,
    Parts,
    RowKind,
    Structure,
    Table,
    moves_in_silence,
    sharing_of,
    tensors_in,
)
from .._compat.calls import memory_of
from .._compat.probes import warn_once
from .._pool import Fence
from .._steps import step
from ._device import Target
from ._not_a_batch import B_co, NotABatch


class Sent(NamedTuple):
    """The packed leaves of a batch, whose copies have been started."""

    blocks: Blocks
    """The tensors."""
    event: Fence | None
    """Behind the last copy; None if no event was recorded."""
    copies: int
    stream: Any
    """The stream of the copies."""


class Transfer(NotABatch, Generic[B_co]):
    """A staged batch, whose copy may still be under way. Made by `Stager.stage`.

    You may change or free packed tensors as soon as `stage` returns. Don't use a transfer in several threads at once.
    """

    __slots__ = (
        "_batch",
        "_is_whole",
        "_leaves",
        "_moved",
        "_moved_event",
        "_others",
        "_sent",
        "_structure",
        "_table",
        "_target",
    )

    def __init__(
        self,
        target: Target,
        structure: Structure,
        table: Table,
        sent: Sent,
        others: list[Any],
        moved: list[Any],
        moved_event: Fence | None,
    ) -> None:
        self._target = target
        self._structure = structure
        self._table = table
        self._sent = sent
        self._others = others
        self._moved = moved
        self._moved_event = moved_event
        self._leaves: list[Any] | None = None  # between `_cut` and `wait`
        self._is_whole = False
        self._batch: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's host slab, padding included."""
        return self._table.nbytes

    @property
    def copies(self) -> int:
        """Host-to-device copies of the packed leaves: one per block, and several for a large block."""
        return self._sent.copies

    @property
    def blocks(self) -> int:
        """Device tensors made for the packed leaves: one per leaf with its own tensor, and one per shared block."""
        return len(self._sent.blocks)

    @property
    def passthrough_leaves(self) -> int:
        """Tensors, and objects with a ``to()`` method, that were moved by their own ``.to()``."""
        return len(self._moved)

    def query(self) -> bool:
        """Return whether the bytes are on the device. Does not block."""
        return all(event is None or event.query() for event in (self._sent.event, self._moved_event))

    def synchronize(self) -> None:
        """Block the host until the bytes are on the device. Rarely needed: with `wait`, only the stream waits."""
        for event in (self._sent.event, self._moved_event):
            if event is not None:
                event.synchronize()

    def wait(self, stream: torch.cuda.Stream | None = None) -> B_co:
        """Return the batch, safe to use on a stream.

        Does not block: the stream waits for the copy, the host does not. To use the batch on another stream too, call
        `wait` again with that stream; it returns the same batch.

        Args:
            stream: the consumer's stream; None is the current one. Ignored on the CPU.

        Returns:
            A batch of the same types. Tensors and arrays are tensors on the device. The stager's `own_storage`
            says which of them share memory.
        """
        with step("hand_over"):
            blocks, event, _, writer = self._sent
            consumer = self._target.consumer(stream)
            if consumer is not writer:
                self._target.hand_over(event, blocks.tensors, consumer)
            if self._moved:
                tensors = [tensor for thing in self._moved for tensor in tensors_in(thing)]
                self._target.hand_over(self._moved_event, [part for t in tensors for part in memory_of(t)], consumer)
            if not self._is_whole:
                self._cut()
                leaves, self._leaves, self._others = self._leaves, None, []
                assert leaves is not None
                with step("unflatten"):
                    self._batch = self._structure.rebuild(leaves)
                self._is_whole = True
            batch: B_co = self._batch
            return batch

    def _cut(self) -> None:
        """Make the leaves that `wait` puts together, if they are not there yet."""
        if self._leaves is None:
            with step("views"):
                self._leaves = self._sent.blocks.leaves(self._others)

    def __repr__(self) -> str:
        nbytes = self._table.nbytes
        done = " done" if self.query() else ""
        return f"<Transfer nbytes={nbytes} copies={self.copies} to {self._target.device}{done}>"


def packed_bytes_of(transfer: Transfer[Any]) -> int:
    """Return the bytes of the packed leaves, without padding."""
    return transfer._table.payload_bytes


def written(target: Target, parts: Parts, sent: Sent, leaves: list[Any], moved: list[Any]) -> Transfer[Any]:
    """Return the transfer of a batch that is written into existing tensors.

    Args:
        target: the device.
        parts: the batch's parts.
        sent: the copies, without tensors; the event is behind all of them.
        leaves: the leaves of the result.
        moved: the leaves that torch copied.
    """
    transfer: Transfer[Any] = Transfer(target, parts.structure, parts.table, sent, [], moved, None)
    transfer._leaves = leaves
    return transfer


def copy_event_of(transfer: Transfer[Any]) -> Fence | None:
    """Return the event to wait for before the host slab is written again; None if the copy is done already."""
    return transfer._sent.event


def move(thing: Any, device: torch.device, structure: Structure, leaf: int) -> Any:
    """Move a tensor, or an object with a ``to()`` method, by its own ``.to()``, on the current stream.

    The host waits for a copy from a device to the CPU, since no stream orders the host behind it.

    Raises:
        Exception: that ``.to()`` failed; a note says where in the batch.
    """
    try:
        return _move(thing, device)
    except Exception as error:
        error.add_note(f"batch{structure.path(leaf)} cannot be packed; its own .to('{device}') raised this")
        raise


def _move(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.to(device, non_blocking=device.type != "cpu")
    cls = type(thing)
    if not moves_in_silence(cls):
        warn_once(
            f"{cls.__module__}.{cls.__qualname__} holds tensors and isn't a known container: it moves by its "
            f"own .to(), which is a copy for each tensor; pinstage.register_node({cls.__qualname__}) packs them with "
            "the rest"
        )
    moved = thing.to(device)
    return thing if moved is None else moved  # as Lightning does for a to() that doesn't return the object


def move_others(
    target: Target, structure: Structure, table: Table, others: list[Any]
) -> tuple[list[Any], list[Any], Fence | None]:
    """Move the leaves that cannot be packed, each by its own ``.to()``, on the current stream.

    Args:
        target: the device.
        structure: the batch's structure.
        table: the batch's table.
        others: the leaves that are not in the slab, in order.

    Returns:
        These leaves after the move, the moved ones among them, and the event behind the moves.
    """
    if not table.moved:
        return others, [], None
    leaves = table.positions(RowKind.OTHER, RowKind.MOVED)
    result, moved = list(others), []
    for index in (table.rows["kind"][leaves] == RowKind.MOVED).nonzero()[0].tolist():
        result[index] = move(others[index], target.device, structure, leaves[index])
        moved.append(result[index])
    return result, moved, target.record(target.consumer(None))


def send_packed(
    target: Target,
    structure: Structure,
    table: Table,
    host: int | None,
    others: list[Any],
    own_storage: OwnStorage,
    *,
    pinned: bool,
) -> Transfer[Any]:
    """Start the copy of a batch that is packed in host memory already, and make its leaves.

    Does not block if the memory is page-locked. Don't change the memory until the transfer's `copy_event_of` is done.

    Args:
        target: the device.
        structure: the batch's structure.
        table: describes the memory.
        host: address of ``table.nbytes`` bytes; None if the table needs none.
        others: the leaves that are not packed, in order.
        own_storage: see `Stager`.
        pinned: whether the memory is page-locked.
    """
    stream, event, copies = target.stream, None, 0
    with target.selected():
        blocks = target.blocks(table, sharing_of(own_storage, table.packed), stream)
        if table.nbytes and host is not None:
            try:
                copies = target.copy(blocks, host, 0, table.nbytes, stream, pinned=pinned)
            finally:
                event = target.record(stream)
    sent = Sent(blocks, event, copies, stream)
    others, moved, moved_event = move_others(target, structure, table, others)
    transfer: Transfer[Any] = Transfer(target, structure, table, sent, others, moved, moved_event)
    transfer._cut()
    return transfer
