"""A batch in runs of bytes, each a batch of its own: for a slab that is smaller than the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._describe import Parts, take_apart
from ._gather import flat
from ._pack import pack
from ._table import ALIGNMENT, PACKED, RowKind


def windows(parts: Parts, nbytes: int) -> Iterator[tuple[int, Parts]]:
    """Cut the packed part of a batch into runs of bytes.

    Args:
        parts: of the batch, whose leaves lie one behind the other in the slab.
        nbytes: of the longest run; a multiple of `ALIGNMENT`.

    Yields:
        Where each run starts in the slab, and the pieces of leaves in it, at the places that they have there.
    """
    start, room = 0, nbytes
    pieces: list[torch.Tensor] = []
    for index in parts.table.by_offset(*PACKED):
        left = _bytes_of(parts, index)
        while left.numel():
            piece, left = left[:room], left[room:]
            pieces.append(piece)
            room -= -(-piece.numel() // ALIGNMENT) * ALIGNMENT
            if not room:
                yield start, take_apart(pieces)
                start, room, pieces = start + nbytes, nbytes, []
    if pieces:
        yield start, take_apart(pieces)


def _bytes_of(parts: Parts, index: int) -> torch.Tensor:
    """Return a leaf's bytes as they lie in a slab, uint8: its memory, or a copy where that is not as it has to be."""
    leaf = parts.leaves[index]
    row = parts.table.rows[index]
    if row["kind"] == RowKind.RAW and isinstance(leaf, torch.Tensor):
        return flat(leaf.detach()).view(torch.uint8)
    alone = take_apart([leaf])
    memory = torch.empty(alone.table.nbytes, dtype=torch.uint8, device="cpu")
    pack(alone, memory)
    return memory[: int(row["nbytes"])]
