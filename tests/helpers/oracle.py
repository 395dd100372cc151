"""The offset table, packing and cutting in plain Python: slow and obvious, for properties of the
extension.
"""

import ctypes
import math
import struct
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import torch

from pinstage._batch import (
    ALIGNMENT,
    DTYPES,
    PACKED,
    RowKind,
    Table,
    contiguous_stride,
    dense_stride,
    walk,
)
from pinstage._batch._describe import _describe_leaf
from pinstage._batch._table import INTEGERS, MOST_DIMS, row_type

HEADER = struct.Struct("=4q")  # magic, rows, width, nbytes
MAGIC = 0x70696E7374616705

PLACED = (*PACKED, RowKind.LOCKED)
"""Kinds with places."""

GROUPS_FROM = (64 * 1024, 4 * 1024 * 1024)
"""Leaf sizes at which the second and the third group begin; the leaves of a block are in one
group.
"""

MOST_IN_BLOCK = (1024 * 1024, 4 * 1024 * 1024, 0)
"""Most bytes of a block in each group; a leaf of the third group has its own block."""


class Described(NamedTuple):
    """A leaf, with its place in a slab, without the offset."""

    kind: RowKind
    dtype: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Its strides in the slab."""
    nbytes: int
    source: torch.Tensor | None
    address: int


class Whole(NamedTuple):
    """A batch: its leaves, their descriptions, and the table."""

    leaves: list
    described: list[Described]
    table: Table


def take_apart(batch):
    """Describe the leaves of a batch and place them in a slab."""
    leaves, structure = walk(batch)
    device = torch.device("cpu")
    described = [
        describe(leaves, structure, device, leaf, index) for index, leaf in enumerate(leaves)
    ]
    rows, first = [], {}
    for index, (leaf, found) in enumerate(zip(leaves, described, strict=True)):
        same = index if found.kind is RowKind.OTHER else first.setdefault(id(leaf), index)
        if same != index:
            rows.append((same, 0, RowKind.ALIAS, 0, 0, 0, (), ()))
        else:
            rows.append(
                (
                    -1,
                    found.nbytes,
                    found.kind,
                    found.dtype,
                    len(found.shape),
                    0,
                    found.shape,
                    found.stride,
                )
            )

    def key(row):
        return bisect_right(GROUPS_FROM, row[1]), row[3]

    packed = sorted(
        (index for index, row in enumerate(rows) if row[2] in PACKED),
        key=lambda index: key(rows[index]),
    )
    end = start = block = 0
    before = None
    for index in packed:
        row = rows[index]
        if before is not None and (
            key(row) != before or end + row[1] - start > MOST_IN_BLOCK[key(row)[0]]
        ):
            block, start = block + 1, end
        rows[index] = (end, *row[1:5], block, *row[6:])
        before, end = key(row), end + -(-row[1] // ALIGNMENT) * ALIGNMENT
    return Whole(leaves, described, table_of(rows, end))


def describe(leaves, structure, device, leaf, index):
    """Describe a leaf, and decide how it is stored: dense and empty leaves keep their strides."""
    kind, dtype, shape, stride, source, address = _describe_leaf(
        leaves, structure, device, True, index
    )
    if source is None:
        return Described(kind, dtype, (), (), 0, None, 0)
    if source.numel() and not dense_stride(shape, stride):
        kind, stride = RowKind.STRIDED if kind is RowKind.RAW else kind, contiguous_stride(shape)
    return Described(kind, dtype, shape, stride, source.nbytes, source, address)


def table_of(rows, nbytes):
    """Write a table of rows: offset, nbytes, kind, dtype, ndim, block, shape, stride."""
    width = max((len(row[6]) for row in rows), default=1) or 1
    array = np.zeros(len(rows), dtype=row_type(width))
    for name, column in zip(array.dtype.names, zip(*rows, strict=True), strict=False):
        sizes = name in ("shape", "stride")
        array[name] = [(*one, *[0] * (width - len(one))) for one in column] if sizes else column
    kinds = array["kind"].tolist()
    figures = (
        nbytes,
        sum(row[1] for row in rows if row[2] in PACKED),
        sum(kind in PACKED for kind in kinds),
        kinds.count(RowKind.MOVED),
        kinds.count(RowKind.OTHER),
        nbytes,
    )
    return Table(HEADER.pack(MAGIC, len(rows), width, nbytes) + array.tobytes(), *figures)


def pack(whole, slab):
    """Write all leaves to their places, with zeros between them."""
    base, end = slab.data_ptr(), 0
    offsets = whole.table.rows["offset"].tolist()
    for index in whole.table.by_offset():
        offset, found = offsets[index], whole.described[index]
        ctypes.memset(base + end, 0, offset - end)
        end = offset + found.nbytes
        if found.kind is RowKind.RAW:
            ctypes.memmove(base + offset, found.address, found.nbytes)
        else:
            copy_elements(found, slab[offset:end])
    ctypes.memset(base + end, 0, whole.table.nbytes - end)


def copy_elements(found, target):
    """Copy a strided leaf as integers: copying bools would make them 0 or 1, and some dtypes can't
    be copied.
    """
    source, size = found.source.detach(), found.source.itemsize
    # Torch's loops want aligned elements: complex128 crashes otherwise.
    if source.data_ptr() % size:
        start, steps = source.storage_offset() * size, [step * size for step in source.stride()]
        of_bytes = torch.empty(0, dtype=torch.uint8)
        of_bytes.set_(source.untyped_storage(), start, (*source.shape, size), (*steps, 1))
        target.view(of_bytes.shape).copy_(of_bytes)
        return
    integer = INTEGERS.get(size, source.dtype)
    target.view(integer).view(source.shape).copy_(source.view(integer))


def figures_of(data):
    """Return the totals of an untrusted table: ``nbytes`` to ``slab_bytes``.

    Raises:
        ValueError: it isn't a table, or its bytes overflow an int64.
    """
    magic, count, width, nbytes = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
    if (
        magic != MAGIC
        or not 1 <= width <= MOST_DIMS
        or min(nbytes, count) < 0
        or nbytes % ALIGNMENT
        or len(data) != HEADER.size + count * row_type(width).itemsize
    ):
        raise ValueError("its header or its length is wrong")
    table = Table(data, *[0] * 6)
    rows = list(table.entries())
    wrong = next(
        (index for index, row in enumerate(rows) if not is_possible(row, index, nbytes)), None
    )
    if wrong is None:
        wrong = first_overlap(rows)
    if wrong is not None:
        raise ValueError(
            f"row {wrong} has an unknown kind or dtype, contradicts itself, overlaps another row, "
            f"or leads outside of its {nbytes} bytes"
        )
    kinds = [row[2] for row in rows]
    placed = [row[1] for row in rows if row[2] in PLACED]
    ends = [row[0] + row[1] for row in rows if row[2] in PACKED]
    slab = -(-max(ends, default=0) // ALIGNMENT) * ALIGNMENT if RowKind.LOCKED in kinds else nbytes
    others = kinds.count(RowKind.MOVED), kinds.count(RowKind.OTHER)
    return nbytes, sum(placed), len(placed), *others, slab


def is_possible(row, index, nbytes):
    """Return whether a table whose slab has `nbytes` bytes may have such a row."""
    offset, _, kind = row[:3]
    if kind in PLACED:
        return lies_in_slab(row, nbytes)
    return 0 <= offset < index if kind == RowKind.ALIAS else kind in (RowKind.MOVED, RowKind.OTHER)


def first_overlap(rows):
    """Return the number of the first row, by offset and size, that begins inside another; None if
    none does.
    """
    end = 0
    for offset, size, index in sorted(
        (row[0], row[1], index) for index, row in enumerate(rows) if row[2] in PLACED
    ):
        if offset < end:
            return index
        end = offset + size
    return None


def lies_in_slab(row, nbytes):
    """Return whether a packed leaf stays inside a slab of `nbytes` bytes, and fills its bytes."""
    offset, size, _, code, ndim, _, shape, stride = row
    dtype = DTYPES[code] if code < len(DTYPES) else None
    shape, stride = shape[:ndim], stride[:ndim]
    if dtype is None or ndim > len(row[6]) or min(offset, *shape, *stride, 0) < 0:
        return False
    if (
        offset % dtype.itemsize
        or size != math.prod(shape) * dtype.itemsize
        or offset + size > nbytes
    ):
        return False
    return not size or dense_stride(tuple(shape), tuple(stride))
