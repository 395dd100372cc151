"""A batch on its way to the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import torch

from .._batch import (
    OwnStorage,
    RowKind,
    Structure,
    Table,
    moves_in_silence,
    sharing_of,
    tensors_in,
)
from .._compat.calls import memory_of
from .._compat.probes import warn_once
from .._memory import capturing_device
from .._pool import Fence
from .._reaper import reaper
from .._steps import step
from ._not_a_batch import B_co, NotABatch
from ._target import HostBytes, Target


class Sent(NamedTuple):
    """Leaves of a batch, whose copies have been started."""

    tensors: list[torch.Tensor]
    """Made for them."""
    event: Fence | None
    """Behind the last copy; None if no event was recorded."""
    copies: int
    stream: Any
    """The stream of the copies, for which `tensors` are safe; None if other code made them."""


class Sizes(NamedTuple):
    """Figures of a batch, as those of its `Table`."""

    nbytes: int
    payload_bytes: int
    packed: int
    moved: int

    @classmethod
    def of(cls, table: Table) -> Sizes:
        """Return the figures of a table."""
        return cls(*table[1:5])


class Kept:
    """Objects that are kept alive until events are done.

    A sender drops earlier ones, so that a loader uses page-locked memory again which the caches
    still have. The reaper's thread drops the last ones. It looks every 20 ms while there are any,
    so a call wakes it only if there were none for that long. Waking it takes as long as a small
    copy.
    """

    def __init__(self) -> None:
        # By numbers, each used once, so that a thread that drops a pair drops no other.
        self.things = dict[int, tuple[Fence, list[Any]]]()
        self._numbers = itertools.count()
        self.look: Look | None = None  # the task that looks again

    def until(self, event: Fence | None, things: list[Any]) -> None:
        """Keep objects alive until an event is done. Finalisers may call this, also in a thread
        that captures a graph, or in a forked child.
        """
        if event is not None and things:
            self.things[next(self._numbers)] = event, things
            if self.look is None:
                reaper.tasks.put(Look(self))

    def drop_oldest(self) -> None:
        """Drop objects up to the first whose event isn't done. Finalisers mustn't call this: to ask
        an event may invalidate a capture.
        """
        for number, (event, _) in self.things.copy().items():
            if not _is_done(event):
                break
            self.things.pop(number, None)


class Look:
    """A task for the reaper: drop kept objects whose events are done."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def reap(self) -> bool:
        """Return whether this task is finished: nothing is kept, or another task looks again."""
        kept = self._kept
        if kept.look is None:
            kept.look = self  # from the next time on
            return False
        for number, (event, _) in kept.things.copy().items():
            if _is_done(event):
                kept.things.pop(number, None)
        if kept.look is self:
            kept.look = None  # before the check, since `until` adds before it asks
            kept.look = self if kept.things else None
        return kept.look is not self


def _is_done(event: Fence) -> bool:
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - the device has failed, and reads nothing any more
        return True


kept = Kept()
"""Of this process."""


class Transfer(NotABatch, Generic[B_co]):
    """A staged batch, whose copy may still be under way. Made by `Stager.stage`.

    You may change or free packed tensors as soon as `stage` returns. Don't use a transfer in
    several threads at once. In a thread whose current stream captures a CUDA graph, all methods
    raise `PinstageError`.
    """

    __slots__ = (
        "_batch",
        "_leaves",
        "_sent",
        "_sizes",
        "_structure",
        "_target",
        "blocks",
        "copies",
    )

    def __init__(
        self,
        target: Target,
        structure: Structure,
        sizes: Sizes,
        sent: list[Sent],
        leaves: list[Any],
    ) -> None:
        self._target = target
        self._structure = structure
        self._sizes = sizes
        self._sent = sent  # the packed leaves, and then those moved by their own ``.to()``
        self._leaves: list[Any] | None = leaves  # until `wait` puts the batch together
        self._batch: Any = None
        self.copies = sent[0].copies
        """Host-to-device copies of the packed leaves: one per block, and several for a large
        block.
        """
        self.blocks = len(sent[0].tensors)
        """Device tensors made for the packed leaves: one per leaf with its own tensor, and one per
        shared block.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the batch on the host, with the padding of a slab."""
        return self._sizes.nbytes

    @property
    def passthrough_leaves(self) -> int:
        """Tensors, and objects with a ``to()`` method, that were moved by their own ``.to()``."""
        return self._sizes.moved

    def query(self) -> bool:
        """Return whether the bytes are on the device. Does not block."""
        self._target.refuse_capture()
        return all(part.event is None or part.event.query() for part in self._sent)

    def synchronize(self) -> None:
        """Block the host until the bytes are on the device. Rarely needed: with `wait`, only the
        stream waits.
        """
        self._target.refuse_capture()
        for part in self._sent:
            if part.event is not None:
                part.event.synchronize()

    def wait(self, stream: torch.cuda.Stream | None = None) -> B_co:
        """Return the batch, safe to use on a stream.

        Does not block: the stream waits for the copy, the host does not. To use the batch on
        another stream too, call `wait` again with that stream; it returns the same batch.

        Args:
            stream: the consumer's stream; None is the current one. Ignored on the CPU.

        Returns:
            A batch of the same types. Tensors and arrays are tensors on the device. The stager's
            `own_storage` says which of them share memory.
        """
        self._target.refuse_capture()
        with step("hand_over"):
            self._hand_over(self._target.consumer(stream))
            if self._leaves is not None:
                with step("unflatten"):
                    self._batch = self._structure.rebuild(self._leaves)
                self._leaves = None
            batch: B_co = self._batch
            return batch

    def _hand_over(self, consumer: Any) -> None:
        """Make a stream wait for the bytes, and keep the memory while that stream uses it."""
        for tensors, event, _, writer in self._sent:
            if consumer is not writer:
                self._target.hand_over(event, tensors, consumer)

    def __repr__(self) -> str:
        device = self._target.device
        done = " done" if capturing_device(device.index) is None and self.query() else ""
        return f"<Transfer nbytes={self.nbytes} copies={self.copies} to {device}{done}>"


def leaves_of(transfer: Transfer[Any]) -> list[Any]:
    """Return the leaves of a batch, safe to use on the current stream."""
    with step("hand_over"):
        transfer._hand_over(transfer._target.consumer(None))
        assert transfer._leaves is not None
        return transfer._leaves


def sizes_of(transfer: Transfer[Any]) -> Sizes:
    """Return the figures of a batch."""
    return transfer._sizes


def structure_of(transfer: Transfer[Any]) -> Structure:
    """Return the structure of a batch."""
    return transfer._structure


def move(thing: Any, device: torch.device, structure: Structure, leaf: int) -> Any:
    """Move a tensor, or an object with a ``to()`` method, by its own ``.to()``, on the current
    stream.

    The host waits for a copy from a device to the CPU, since no stream orders the host behind it.

    Raises:
        Exception: that ``.to()`` failed; a note says where in the batch.
    """
    try:
        return _move(thing, device)
    except Exception as error:
        error.add_note(
            f"batch{structure.path(leaf)} cannot be packed; its own .to('{device}') raised this"
        )
        raise


def _move(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.to(device, non_blocking=device.type != "cpu")
    cls = type(thing)
    if not moves_in_silence(cls):
        warn_once(
            f"{cls.__module__}.{cls.__qualname__} holds tensors and isn't a known container: it "
            "moves by its own .to(), which is a copy for each tensor; "
            f"pinstage.register_node({cls.__qualname__}) packs them with the rest"
        )
    moved = thing.to(device)
    # As Lightning does for a to() that doesn't return the object.
    return thing if moved is None else moved


def move_others(
    target: Target, structure: Structure, table: Table, others: list[Any]
) -> tuple[list[Any], list[Sent]]:
    """Move the leaves that cannot be packed, each by its own ``.to()``, on the current stream.
    Return all leaves that aren't in the slab, and those that were moved, if there are some.

    Args:
        target: the device.
        structure: the batch's structure.
        table: the batch's table.
        others: the leaves that are not in the slab, in order.
    """
    if not table.moved:
        return others, []
    leaves = table.positions(RowKind.OTHER, RowKind.MOVED)
    result: list[Any] = list(others)
    memory: list[torch.Tensor] = []
    for index in (table.rows["kind"][leaves] == RowKind.MOVED).nonzero()[0].tolist():
        result[index] = move(others[index], target.device, structure, leaves[index])
        for tensor in tensors_in(result[index]):
            memory += memory_of(tensor)
    return result, [Sent(memory, target.record(target.consumer(None)), 0, None)]


class Packed(NamedTuple):
    """A batch that is packed in host memory."""

    structure: Structure
    table: Table
    """Describes the memory."""
    others: list[Any]
    """The leaves that are not packed, in order."""


def send_packed(
    target: Target,
    packed: Packed,
    host: HostBytes | None,
    own_storage: OwnStorage,
    release: Callable[[Fence | None], object],
) -> Transfer[Any]:
    """Start the copy of a batch that is packed in host memory already, and make its leaves.

    Does not block if the memory is page-locked.

    Args:
        target: the device.
        packed: the batch.
        host: ``packed.table.nbytes`` bytes; None if the table needs none.
        own_storage: see `Stager`.
        release: takes the memory back, to be written again behind this event. It is called after an
            error, too.
    """
    structure, table, others = packed
    stream, event, copies = target.stream, None, 0
    try:
        with target.selected():
            blocks = target.blocks(table, sharing_of(own_storage, table.packed), stream)
            if table.nbytes and host is not None:
                copies = target.copy(blocks, host, 0, table.nbytes, stream)
                event = target.record(stream)
        sent = Sent(blocks.tensors, event, copies, stream)
        others, moved = move_others(target, structure, table, others)
        with step("views"):
            leaves = blocks.leaves(others)
        return Transfer(target, structure, Sizes.of(table), [sent, *moved], leaves)
    except BaseException:
        event = target.record(stream)
        raise
    finally:
        release(event)
