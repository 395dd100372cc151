"""Which way a batch goes into existing tensors.

A batch is staged, and copied into place by the transfer's `wait`. `Writer.write_batch` does both.
It takes a larger batch in groups, each staged while the one before is copied into place, so that
neither the host nor the device needs memory for the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import ALIGNMENT, Parts, RowKind, Structure, Whole, as_tensor, take_apart, walk
from .._sizes import round_up
from .._steps import step
from ..errors import AcquireTimeoutError
from ._device import AT_ONCE_BYTES, MOST_FEW
from ._out import Destinations, note_written, overlap, readable, with_own_copies
from ._sender import SMALL_BYTES, PendingSend, Sender
from ._transfer import TransferInto

GROUP_BYTES = 64 << 20
"""The most bytes of a group. The bus takes 1.2 ms for them, more than ten times as long as starting
a group.
"""

_CPU = torch.device("cpu")


class Write(NamedTuple):
    """A leaf, and the tensor it is copied to."""

    name: str
    """For errors."""
    source: Any
    destination: torch.Tensor
    key: Any = None
    """Writes with the same key are in different groups: the later one counts."""
    ends_group: bool = False
    """Whether it must be copied before the next one is read."""


class Started(NamedTuple):
    """A batch between `Writer.start` and `Writer.finish`."""

    pending: PendingSend
    destinations: Destinations


@dataclass(frozen=True, slots=True)
class Writer:
    """Copies batches into existing tensors.

    Args:
        sender: stages them, each in one device slab.
    """

    sender: Sender

    def begin_into(self, batch: Any, out: Any) -> TransferInto[Any]:
        """See `Stager.stage`."""
        with step("stage"):
            parts = take_apart(batch, keeping=self.sender.keeping)
            transfer = self.finish(self.start(parts, out, AT_ONCE_BYTES))
            transfer.is_handed_out = True
            return transfer

    def write_batch(self, batch: Any, out: Any) -> Any:
        """See `Stager.to_device`.

        The cases, in this order:

        1. on a GPU, a few small leaves whose destinations are like them: one copy each, on the
           current stream;
        2. a few small leaves that a stager moves without a slab: moved so, and copied into place;
        3. what fits into one group: staged, and copied into place;
        4. any other batch: in groups.
        """
        with step("stage"):
            with step("walk"):
                walked = leaves, structure = walk(batch)
            written = self._write_few(leaves, structure, out)
            if written is not None:
                return structure.rebuild(written)
            parts = take_apart(batch, keeping=self.sender.keeping, walked=walked)
            moved, tally = self.sender.move_few(parts.leaves)
            if moved is not None:
                destinations = self._destinations(parts, out)
                destinations.fill(lambda: moved)
                self.sender.counters.add(*tally)
                return parts.structure.rebuild(destinations.leaves)
            if parts.table.nbytes + _unpacked_bytes(parts) <= self._group_bytes():
                return self.finish(self.start(parts, out, SMALL_BYTES)).wait_now()
            parts = readable(parts, _CPU)
            destinations = self._destinations(parts, out)
            names = parts.structure.paths()
            writes = [
                Write(f"out{names[index]}", parts.leaves[index], destinations.leaves[index])
                for index in destinations.writes()
            ]
            self.write_all(_with_own_sources(writes))
            return parts.structure.rebuild(destinations.leaves)

    def write_all(
        self, writes: Iterable[Write], check: Callable[[list[str]], None] | None = None
    ) -> None:
        """Copy leaves into existing tensors, in groups, as operations of the current stream.

        Blocks until all sources have been read, and while two groups are on the device: one is
        copied into place while the next one crosses the bus.

        Args:
            writes: read as far as the group that is packed.
            check: called with the names of a group when it is packed, before it is written. Then
                the next group isn't read earlier.
        """
        groups = _Groups(self, check)
        try:
            for group in groups_of(writes, self._group_bytes()):
                groups.start(group)
                if check is not None or group[-1].ends_group:
                    groups.finish()
            groups.finish()
        except BaseException as error:
            groups.close()
            note_written(error, groups.begun)
            raise

    def start(
        self, parts: Parts, out: Any, inline_bytes: int, timeout: float | None = None
    ) -> Started:
        """Let threads begin to pack a batch, and check its destinations meanwhile.

        Args:
            parts: the batch's parts.
            out: the destinations.
            inline_bytes: see `Sender.start`.
            timeout: see `Sender.start`.
        """
        parts = readable(parts, _CPU)
        pending = self.sender.start(
            with_own_copies(parts, self.sender.target.device), inline_bytes, timeout
        )
        try:
            return Started(pending, self._destinations(parts, out))
        except BaseException:
            pending.close(None)
            raise

    def finish(self, started: Started) -> TransferInto[Any]:
        """Start the copies of a batch to the device."""
        return TransferInto(self.sender.finish(started.pending), started.destinations)

    def _destinations(self, parts: Parts, out: Any) -> Destinations:
        with step("check"):
            return Destinations(parts, out, self.sender.target.device)

    def _write_few(self, leaves: list[Any], structure: Structure, out: Any) -> list[Any] | None:
        """Write a few small leaves; return the leaves of the result, or None if they aren't small,
        few and plain.
        """
        sender, target = self.sender, self.sender.target
        if len(leaves) > MOST_FEW or sender.keeping is not None or target.stream is None:
            return None
        existing, its_own = walk(out)
        is_alike = its_own == structure and sender.slabs.is_open()
        few = target.move_few(leaves, existing) if is_alike else None
        if few is None:
            return None
        written, count, nbytes, copies = few
        tensors = [new for new, leaf in zip(written, leaves, strict=True) if new is not leaf]
        torch.autograd.graph.increment_version(tensors)
        target.hand_over(None, tensors, target.consumer(None))
        sender.counters.add(copies, 0, nbytes, nbytes, count, 0)
        return written

    def _group_bytes(self) -> int:
        return min(GROUP_BYTES, self.sender.slabs.pool.max_bytes // 2)


# -- groups ----------------------------------------------------------------------------------------


class _Groups:
    """Groups of writes on their way: one is packed while the one before is sent, and two are on the
    device.

    Args:
        writer: stages them.
        check: see `Writer.write_all`.

    Attributes:
        begun: the names of the writes that may have been done, at least in part.
    """

    def __init__(self, writer: Writer, check: Callable[[list[str]], None] | None) -> None:
        self.begun: dict[str, None] = {}
        self._writer, self._check = writer, check
        self._names: list[str] = []
        self._started: Started | None = None
        self._sent: deque[TransferInto[Any]] = deque()

    def start(self, group: list[Write]) -> None:
        """Let threads begin to pack a group, and send the group before."""
        numbered = {(write.name, number): write for number, write in enumerate(group)}
        parts = take_apart({key: write.source for key, write in numbered.items()})
        out = {key: write.destination for key, write in numbered.items()}
        try:
            started = self._writer.start(parts, out, SMALL_BYTES, timeout=0)
        except AcquireTimeoutError:
            self.finish()  # with its slab, two writers could wait for each other's
            started = self._writer.start(parts, out, SMALL_BYTES)
        self.finish()
        self._started, self._names = started, list(dict.fromkeys(write.name for write in group))

    def finish(self) -> None:
        """Send the group that was started, if there is one, and copy it into place."""
        if self._started is None:
            return
        if len(self._sent) > 1:
            self._sent.popleft().synchronize()  # or a third group would need memory
        started, self._started = self._started, None
        transfer = self._writer.finish(started)
        if self._check is not None:
            self._check(self._names)
        self.begun |= dict.fromkeys(self._names)
        transfer.wait_now()
        self._sent.append(transfer)

    def close(self) -> None:
        """Stop packing, after an error."""
        if self._started is not None:
            self._started.pending.close(None)


def groups_of(writes: Iterable[Write], group_bytes: int) -> Iterator[list[Write]]:
    """Yield groups of at most `group_bytes` in a slab, in order; larger leaves are cut into
    several.
    """
    group: list[Write] = []
    keys: set[Any] = set()
    room = group_bytes
    for write in writes:
        nbytes = _bytes_of(write.source)
        is_again = write.key is not None and write.key in keys
        for piece, needed in (
            [(write, nbytes)] if nbytes <= group_bytes else _cut(write, group_bytes)
        ):
            if group and (needed > room or is_again):
                yield group
                group, keys, room, is_again = [], set(), group_bytes, False
            group.append(piece)
            keys.add(piece.key)
            room -= round_up(needed, ALIGNMENT)
        if room <= 0 or write.ends_group:
            yield group
            group, keys, room = [], set(), group_bytes
    if group:
        yield group


def _cut(write: Write, most: int) -> Iterator[tuple[Write, int]]:
    """Cut a leaf, and its destination in the same way, along the destination's largest stride.

    Yields:
        Pieces of at most `most` bytes, and the bytes of each.
    """
    tensor, destination = as_tensor(write.source), write.destination
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if destination.layout is not torch.strided or hasattr(destination, "__tensor_flatten__"):
        yield write._replace(source=Whole(tensor)), 0  # moves by its own .to(), so it needs no slab
    elif tensor.nbytes <= most or not dims:
        yield write._replace(source=tensor), tensor.nbytes
    else:
        dim = max(dims, key=destination.stride)
        size = tensor.shape[dim]
        rows = max(1, size * most // tensor.nbytes)
        for start in range(0, size, rows):
            count = min(rows, size - start)
            source, there = tensor.narrow(dim, start, count), destination.narrow(dim, start, count)
            yield from _cut(write._replace(source=source, destination=there), most)


def _bytes_of(source: Any) -> int:
    """Return the bytes of a dense leaf; 0 for any other, which isn't cut."""
    if isinstance(source, torch.Tensor) and source.layout is not torch.strided:
        return 0
    return source.nbytes if isinstance(source, np.ndarray | torch.Tensor) else 0


def _unpacked_bytes(parts: Parts) -> int:
    """Return the bytes of a batch's dense leaves that aren't packed, such as tensors that are on
    the device already.
    """
    if not parts.table.moved:
        return 0
    return sum(_bytes_of(parts.leaves[index]) for index in parts.table.positions(RowKind.MOVED))


def _with_own_sources(writes: list[Write]) -> list[Write]:
    """Copy the sources that share memory with a destination, since earlier groups would change
    them.
    """
    device = writes[0].destination.device
    tensors = [as_tensor(write.source) for write in writes]
    near = [number for number, tensor in enumerate(tensors) if tensor.device == device]
    share = overlap(
        [tensors[number] for number in near],
        [write.destination for write in writes] if near else [],
    )
    for number, shares in zip(near, share, strict=True):
        if shares:
            writes[number] = writes[number]._replace(source=tensors[number].detach().clone())
    return writes
