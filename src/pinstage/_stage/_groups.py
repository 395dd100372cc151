"""Writing a batch of any size into existing tensors, in groups of leaves.

Each group is staged while the one before is copied into place. So neither the host nor the device needs memory for the
whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from .._batch import ALIGNMENT, Parts, RowKind, Whole, as_tensor
from .._pool import Fence
from .._sizes import round_up
from ._out import note_written, overlap
from ._transfer import TransferInto, copy_event_of

GROUP_BYTES = 64 << 20
"""The most bytes of a group. The bus takes 1.2 ms for them, more than ten times as long as starting a group."""

_MOST_GROUPS = 2
"""The most groups that are on the device: one is copied into place while the next one crosses the bus."""


class Write(NamedTuple):
    """A leaf, and the tensor it is copied to."""

    name: str
    """For errors."""
    source: Any
    place: torch.Tensor
    key: Any = None
    """Writes with the same key are in different groups: the later one counts."""
    ends_group: bool = False
    """Whether it must be copied before the next one is read."""


Stage: TypeAlias = Callable[[list[Any], list[torch.Tensor]], TransferInto[Any]]
"""Stages leaves, to be copied into tensors."""


def write_in_groups(
    writes: Iterable[Write],
    check: Callable[[list[str]], None],
    group_bytes: int,
    stage: Stage,
) -> None:
    """Copy leaves into existing tensors, as operations of the current stream.

    Blocks until all sources have been read, and while more than `_MOST_GROUPS` groups are on the device.

    Args:
        writes: read as far as the group that is staged.
        check: called with the names of a group when it is packed, before it is written.
        group_bytes: the most bytes of a group.
        stage: stages a group.
    """
    begun: dict[str, None] = {}
    copied: deque[Fence | None] = deque()
    try:
        for group in groups_of(writes, group_bytes):
            if len(copied) == _MOST_GROUPS and (event := copied.popleft()) is not None:
                event.synchronize()
            transfer = stage([write.source for write in group], [write.place for write in group])
            names = dict.fromkeys(write.name for write in group)
            check(list(names))
            begun |= names
            transfer.write()
            copied.append(copy_event_of(transfer))
    except BaseException as error:
        note_written(error, begun)
        raise


def groups_of(writes: Iterable[Write], group_bytes: int) -> Iterator[list[Write]]:
    """Yield groups of at most `group_bytes` in a slab, in order; larger leaves are cut into several."""
    group: list[Write] = []
    keys: set[Any] = set()
    room = group_bytes
    for write in writes:
        nbytes = _bytes_of(write.source)
        for piece, needed in [(write, nbytes)] if nbytes <= group_bytes else _cut(write, group_bytes):
            is_full = needed > room or (write.key is not None and write.key in keys)
            if group and is_full:
                yield group
                group, keys, room = [], set(), group_bytes
            group.append(piece)
            room -= round_up(needed, ALIGNMENT)
        keys.add(write.key)
        if write.ends_group and group:
            yield group
            group, keys, room = [], set(), group_bytes
    if group:
        yield group


def _cut(write: Write, most: int) -> Iterator[tuple[Write, int]]:
    """Cut a leaf, and its destination in the same way, along the destination's largest stride.

    Yields:
        Pieces of at most `most` bytes, and the bytes of each.
    """
    name, source, place, *_ = write
    tensor = as_tensor(source)
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if place.layout is not torch.strided or hasattr(place, "__tensor_flatten__"):
        yield Write(name, Whole(tensor), place), 0  # moves by its own .to(), so it needs no slab
    elif tensor.nbytes <= most or not dims:
        yield Write(name, tensor, place), tensor.nbytes
    else:
        dim = max(dims, key=place.stride)
        size = tensor.shape[dim]
        rows = max(1, size * most // tensor.nbytes)
        for start in range(0, size, rows):
            count = min(rows, size - start)
            piece = Write(name, tensor.narrow(dim, start, count), place.narrow(dim, start, count))
            yield from _cut(piece, most)


def _bytes_of(source: Any) -> int:
    """Return the bytes of a dense leaf; 0 for any other, which isn't cut."""
    if isinstance(source, torch.Tensor) and source.layout is not torch.strided:
        return 0
    return source.nbytes if isinstance(source, np.ndarray | torch.Tensor) else 0


def unpacked_bytes(parts: Parts) -> int:
    """Return the bytes of a batch's dense leaves that aren't packed, such as tensors that are on the device already."""
    moved = parts.table.positions(RowKind.MOVED) if parts.table.moved else []
    return sum(_bytes_of(parts.leaves[index]) for index in moved)


def with_own_sources(writes: list[Write]) -> list[Write]:
    """Copy the sources that share memory with a destination, since earlier groups would change them."""
    device = writes[0].place.device
    tensors = [as_tensor(write.source) for write in writes]
    near = [number for number, tensor in enumerate(tensors) if tensor.device == device]
    share = overlap([tensors[number] for number in near], [write.place for write in writes] if near else [])
    for number, shares in zip(near, share, strict=True):
        if shares:
            writes[number] = writes[number]._replace(source=tensors[number].detach().clone())
    return writes
