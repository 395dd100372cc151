"""The offset table: one compact buffer that says where each leaf of a batch is stored.

A header, then a row for each leaf of the batch, in order; see `row_type`. The extension writes and
reads the same format (``_native/core.h``), and other processes may read it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _native
from .._compat.views import learn_tensors
from .._sizes import round_up
from ..errors import LayoutError

_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "int1", "int2", "int3",
    "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
)  # fmt: skip
"""In the order of their codes, which are stored in tables: new names are added at the end."""

DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _NAMES)
"""By code; None if this torch does not have the dtype. A tensor of another dtype is moved by its
own ``.to()``.
"""

CODES: dict[torch.dtype, int] = {
    dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None
}


ALIGNMENT = 16
"""Each leaf starts at a multiple of this many bytes: the size of the largest element torch stores
(complex128; a view of another dtype needs an offset that is a multiple of its element), and of the
widest load of a GPU thread, which cuBLAS, bulk copies and vectorised kernels ask for."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Stand-ins for dtypes of each size, where only the bits count."""

_FORMATS = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "lq", "uint64": "LQ", "float16": "e", "float32": "f", "float64": "d",
    "complex64": "Zf", "complex128": "Zd",
}  # fmt: skip
"""numpy's characters for dtypes (each character of the right size counts)."""


def _tell_the_extension() -> None:
    samples = {}
    for dtype, code in CODES.items():
        _native.core.add_dtype(code, dtype.itemsize, _FORMATS.get(_NAMES[code], ""))
        # Such tensors are described in Python.
        with suppress(RuntimeError, TypeError, NotImplementedError):
            samples[code] = torch.zeros(ALIGNMENT, dtype=torch.uint8, device="cpu").view(dtype)
    learn_tensors(samples)


_tell_the_extension()


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name."""
    return str(dtype).removeprefix("torch.")


_HEADER = struct.Struct("=4q")  # magic, rows, width, nbytes
MOST_DIMS = 64
"""The most dimensions of a leaf in a table. In torch, only some functions have such a limit."""


class RowKind(IntEnum):
    """The treatment of a leaf."""

    OTHER = 0
    """It isn't a tensor, and stays as it is."""
    RAW = 1
    """Its memory is copied unchanged; it keeps its stride."""
    STRIDED = 2
    """It is copied element by element, and contiguous in the slab."""
    MOVED = 3
    """It can't be packed, and is moved by its own ``.to()``."""
    ALIAS = 4
    """It is the same object as an earlier row, whose number is stored in place of the offset."""
    LOCKED = 5
    """Its memory is page-locked, and is copied unchanged from where it is. It has a place behind
    the slab."""


PACKED = (RowKind.RAW, RowKind.STRIDED)
"""Kinds that are in the slab."""


@lru_cache(maxsize=16)
def _among(kinds: tuple[RowKind, ...]) -> np.ndarray[Any, np.dtype[np.bool]]:
    """Return, for each kind, whether it is one of `kinds`. ``np.isin`` would take five times as
    long for few leaves.
    """
    return np.array([kind in kinds for kind in RowKind])


@lru_cache(maxsize=MOST_DIMS + 1)
def row_type(width: int) -> np.dtype[np.void]:
    """Return the type of a row with room for that many dimensions."""
    return np.dtype(
        {
            "names": ["offset", "nbytes", "kind", "dtype", "ndim", "block", "shape", "stride"],
            "formats": [
                np.int64,
                np.int64,
                *[np.uint8] * 3,
                np.uint32,
                (np.int64, width),
                (np.int64, width),
            ],
            "offsets": [0, 8, 16, 17, 18, 20, 24, 24 + 8 * width],
            "itemsize": 24 + 16 * width,
        }
    )


class Place(NamedTuple):
    """Where a tensor is stored in a slab, or in a region."""

    offset: int
    """The first byte."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; dense."""


def place_of(entry: tuple[Any, ...]) -> Place:
    """Return the place of a packed leaf, given its row as `Table.entries` yields it."""
    offset, nbytes, _, code, ndim, _, shape, stride = entry
    dtype: Any = DTYPES[code]  # no table is made, or read, with a dtype that torch doesn't have
    return Place(offset, nbytes, dtype, tuple(shape[:ndim]), tuple(stride[:ndim]))


class Table(NamedTuple):
    """Where each leaf of a batch is stored in a slab. Holds nothing of the batch. Equal if the
    buffers are equal.
    """

    data: bytes
    """The buffer; the other fields can be read from it."""
    nbytes: int
    """Bytes from the first place to the end of the last one, padding included; a multiple of
    `ALIGNMENT`.
    """
    payload_bytes: int
    """Bytes of the leaves with places alone."""
    packed: int
    """Leaves with places; repeated ones count once."""
    moved: int
    """Tensors that are moved by their own ``.to()``."""
    others: int
    """Leaves that aren't tensors."""
    slab_bytes: int
    """Bytes of the host slab: `nbytes`, unless leaves are copied from where they are."""

    @classmethod
    def of_bytes(cls, data: bytes) -> Table:
        """Read a table.

        Args:
            data: a buffer from elsewhere. Rows that contradict themselves, overlap, or lead outside
                of their slab are refused.

        Raises:
            LayoutError: it is not such a table.
        """
        try:
            if not isinstance(data, bytes):
                raise ValueError(f"a {type(data).__name__}")
            return cls(*_native.core.figures(data))
        except ValueError as error:
            raise LayoutError(
                f"not an offset table of this version of pinstage: {error}; compute it again with "
                "Layout.of(batch)"
            ) from None

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """The rows, as a structured array of `row_type`: a view of the buffer."""
        width = _HEADER.unpack_from(self.data)[2]
        return np.frombuffer(self.data, dtype=row_type(width), offset=_HEADER.size)

    def entries(self) -> Iterator[tuple[Any, ...]]:
        """Yield each row as Python's own numbers and lists: offset, nbytes, kind, dtype, ndim,
        block, shape, stride.
        """
        rows = self.rows
        return zip(*(rows[name].tolist() for name in rows.dtype.names or ()), strict=True)

    def places(self) -> Iterator[tuple[int, Place]]:
        """Yield the number and the place of each packed leaf."""
        entries = enumerate(self.entries())
        return ((index, place_of(entry)) for index, entry in entries if entry[2] in PACKED)

    def positions(self, *kinds: RowKind) -> list[int]:
        """Return the numbers of the leaves of some kinds."""
        positions: list[int] = _among(kinds)[self.rows["kind"]].nonzero()[0].tolist()
        return positions

    def by_offset(self) -> list[int]:
        """Return the numbers of the packed leaves, in the order in which they are stored."""
        positions = np.array(self.positions(*PACKED), dtype=np.intp)
        rows = self.rows[positions]
        in_order = np.lexsort((rows["nbytes"], rows["offset"]))  # an empty leaf comes first
        order: list[int] = positions[in_order].tolist()
        return order

    def moved_to(self, rows: np.ndarray[Any, np.dtype[np.void]], nbytes: int) -> Table:
        """Return the same table with other places in the slab.

        Args:
            rows: a copy of `rows` with other offsets.
            nbytes: the new size of the slab.
        """
        magic, count, width, _ = _HEADER.unpack_from(self.data)
        return self._replace(
            data=_HEADER.pack(magic, count, width, nbytes) + rows.tobytes(),
            nbytes=nbytes,
            slab_bytes=nbytes,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Table.of_bytes, (self.data,)


def lay_out(rows: np.ndarray[Any, np.dtype[np.void]], order: Iterable[int], start: int = 0) -> int:
    """Give rows of a table places in the slab, one behind the other; return the end of the last
    one.
    """
    for index in order:
        rows["offset"][index] = start
        start += round_up(int(rows["nbytes"][index]), ALIGNMENT)
    return start
