"""Gathering leaves into a slab on their own device, by torch, in few kernels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from .._sizes import round_up
from ._blocks import view_at
from ._describe import contiguous_stride
from ._table import ALIGNMENT, INTEGERS, Place, RowKind, Table, lay_out

DIRECT_BYTES = 1024 * 1024
"""From this size on, a dense tensor is copied from where it is. Smaller ones are gathered first: a
copy call costs 8 us, in which the bus carries 0.4 MB, and a gathering kernel moves a megabyte in a
microsecond."""

FEW_LEAVES, FEW_BYTES = 8, 64 * 1024
"""Up to these, leaves are copied from where they are."""

_ROW_GROUP = 4
"""From this number on, leaves that share dtype and trailing shape are joined as they are. Fewer are
flattened and joined with other leaves of their dtype, since a kernel costs more than a few views.
"""

COPIED_AS_THEY_ARE = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
"""Dtypes that torch copies bit for bit everywhere; others are copied as integers of their size.
That includes bools, whose bytes ``torch.cat`` would make 0 or 1."""


class Group(NamedTuple):
    """Neighbours in the slab that one ``torch.cat`` moves."""

    dtype: torch.dtype
    offset: int
    nbytes: int
    trailing: tuple[int, ...]
    """The shape of a row."""
    members: list[int]
    """The numbers of the leaves. Without trailing dimensions they are joined flat."""


class Gathering(NamedTuple):
    """How the leaves of a tree that are on one device reach a host slab."""

    table: Table
    """The offset table, with places in the host slab."""
    groups: list[Group]
    strided: list[tuple[int, Place]]
    """The number and the place of each leaf that is copied element by element."""
    gathered_bytes: int
    """The groups and the strided leaves end here in the slab."""
    direct: list[tuple[int, int, int]]
    """The number, offset and size of each large leaf; these are copied from where they are."""


def arrange(table: Table) -> Gathering:
    """Give leaves places so that few kernels gather them: those of one kind side by side, large
    ones last. A few small ones aren't gathered: as many copies start sooner than a kernel.
    """
    rows, places = table.rows.copy(), dict(table.places())
    raw, strided = table.positions(RowKind.RAW), table.positions(RowKind.STRIDED)
    groups, end = [], 0
    most = 0 if table.packed <= FEW_LEAVES and table.nbytes <= FEW_BYTES else DIRECT_BYTES
    small = {index: places[index] for index in raw if places[index].nbytes < most}
    for (dtype, trailing), members in _joined(small).items():
        start = end
        for index in members:
            rows["offset"][index] = end
            end += places[index].nbytes
        if end > start:
            groups.append(Group(dtype, start, end - start, trailing, members))
        end = round_up(end, ALIGNMENT)
    large = [index for index in raw if index not in small]
    gathered = lay_out(rows, strided, end)
    end = lay_out(rows, large, gathered)
    offsets = rows["offset"].tolist()
    copied = [(index, places[index]._replace(offset=offsets[index])) for index in strided]
    direct = [(index, offsets[index], places[index].nbytes) for index in large]
    return Gathering(table.moved_to(rows, end), groups, copied, gathered, direct)


def _joined(places: dict[int, Place]) -> dict[tuple[torch.dtype, tuple[int, ...]], list[int]]:
    """Return the dense leaves that one kernel can join, by dtype and shape of a row (``()``: joined
    flat).
    """
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    joined: defaultdict[Any, list[int]] = defaultdict(list)
    for index, (_, _, dtype, shape, stride) in places.items():
        # Permuted tensors are flattened: joined directly, they would lose their stride.
        alike[dtype, shape[1:] if stride == contiguous_stride(shape) else ()].append(index)
    for (dtype, trailing), members in alike.items():
        are_flat = len(members) < _ROW_GROUP or 0 in trailing
        joined[dtype, () if are_flat else trailing] += members
    return joined


def gather(gathering: Gathering, leaves: list[Any], slab: torch.Tensor) -> None:
    """Copy the small and the strided leaves to their places in a slab, on their device's current
    stream.

    Args:
        gathering: as `arrange` returned it.
        leaves: of the tree.
        slab: uint8 ``[>= gathering.gathered_bytes]`` on the device that the leaves are on.
    """
    for dtype, offset, nbytes, trailing, members in gathering.groups:
        rows = slab[offset : offset + nbytes].view(dtype)
        pieces = [leaves[index] for index in members]
        if not trailing:
            pieces = [piece if piece.ndim == 1 else flat(piece) for piece in pieces]
        _join(pieces, rows.view(-1, *trailing))
    for index, (offset, _, dtype, shape, stride) in gathering.strided:
        _join([leaves[index]], view_at(slab, offset, dtype, shape, stride))


def _join(pieces: list[torch.Tensor], rows: torch.Tensor) -> None:
    """Copy tensors of one dtype bit for bit: several into the rows of a tensor, or one into a
    tensor of its shape.
    """
    if rows.dtype not in COPIED_AS_THEY_ARE:
        pieces, rows = list(map(as_integers, pieces)), as_integers(rows)
    if len(pieces) == 1:
        rows.copy_(pieces[0])
    else:
        torch.cat(pieces, out=rows)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor, of at most 8 bytes an element, as integers of its shape."""
    return tensor.view(INTEGERS[tensor.itemsize])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order in which they are stored, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))
