"""Where tensors are stored in a region, and where its chunks end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._batch import ALIGNMENT, Place, Structure, as_tensor, contiguous_stride, dense_stride, walk
from .._sizes import format_bytes, round_up
from ..errors import LayoutError


def unit_of(place: Place, row_bytes: int | None) -> int:
    """Return the bytes at whose multiples chunks may cut a tensor; 0 if they may not.

    That is `row_bytes`, if the first dimension is the outermost in memory and advances by a
    multiple of it.
    """
    step = place.stride[0] * place.dtype.itemsize if place.shape else place.nbytes
    if not row_bytes or step % row_bytes or step * (*place.shape, 1)[0] != place.nbytes:
        return 0
    return row_bytes


class Nest(NamedTuple):
    """A tree whose tensors have places. Picklable."""

    structure: Structure
    leaves: list[Any]
    """A `Place` for each tensor and array, other leaves as they are."""
    nbytes: int


def arrange(tree: Any) -> Nest:
    """Give each tensor of a tree a place, in order; a tensor that appears twice gets one place.

    Raises:
        LayoutError: a tensor has no dense memory: it is sparse, quantised, nested, or of a
            subclass.
    """
    leaves, structure = walk(tree)
    end, arranged = 0, list(leaves)
    place_by_id: dict[int, Place] = {}
    for index, leaf in enumerate(leaves):
        tensor = as_tensor(leaf)
        if not isinstance(tensor, torch.Tensor):
            continue
        if not _is_plain(tensor):
            path = structure.path(index)
            kind = f"{type(tensor).__name__}, {tensor.layout}"
            raise LayoutError(
                f"tree{path} has no place in a region: {kind}; leave it out, or pass its parts",
                path,
            )
        if id(leaf) not in place_by_id:
            offset, nbytes = round_up(end, ALIGNMENT) if tensor.nbytes else 0, tensor.nbytes
            end = max(end, offset + nbytes)
            shape, stride = tuple(tensor.shape), tensor.stride()
            stride = stride if dense_stride(shape, stride) else contiguous_stride(shape)
            place_by_id[id(leaf)] = Place(offset, nbytes, tensor.dtype, shape, stride)
        arranged[index] = place_by_id[id(leaf)]
    return Nest(structure, arranged, end)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has ordinary memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def ends_of_chunks(
    pieces: Iterable[tuple[int, int, int]], nbytes: int, chunk_bytes: int
) -> tuple[int, ...]:
    """Decide where chunks end.

    A piece that doesn't fit into the current chunk begins another one. A piece of more than a chunk
    is cut at multiples of its unit; without a unit, it is a chunk by itself.

    Args:
        pieces: offset, bytes and unit of each, in order; a unit of 0 means that it isn't cut.
        nbytes: the end of the last chunk.
        chunk_bytes: the size of a chunk, unless a piece or its unit is larger.
    """
    ends, start = [], 0
    for offset, size, unit in pieces:
        if start < offset and offset + size - start > chunk_bytes:
            start = offset
            ends.append(start)
        step = max(chunk_bytes // unit, 1) * unit if unit else size
        while offset + size - start > max(chunk_bytes, step):
            start += step
            ends.append(start)
    return (*ends, nbytes)


def check_is_whole(
    place: Place, inside: Sequence[int], row_bytes: int | None, chunk_bytes: int
) -> None:
    """Refuse a tensor that crosses the end of a chunk, unless each of its rows is in one chunk.

    Raises:
        ValueError: the copy of a single row could touch two chunks.
    """
    unit = unit_of(place, row_bytes)
    is_whole = unit and all((border - place.offset) % unit == 0 for border in inside)
    if inside and not is_whole:
        raise ValueError(
            f"a tensor of shape {list(place.shape)} and {place.dtype} at byte {place.offset} "
            f"crosses the border of two chunks at byte {inside[0]}, and CUDA refuses a copy across "
            f"it: row_bytes={row_bytes}, chunks of {format_bytes(chunk_bytes)}. Make the region "
            "with row_bytes= the bytes by which the tensor's first dimension advances, and use "
            "offsets that are multiples of it; or with larger chunk_bytes"
        )
