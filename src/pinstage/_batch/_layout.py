"""`Layout`, the offset table as users see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._sizes import count
from ..errors import LayoutError
from ._blocks import cut
from ._describe import Parts, contiguous_stride, take_apart
from ._pack import pack
from ._structure import Structure
from ._table import ALIGNMENT, RowKind, Table, name_of, place_of


class Slot(NamedTuple):
    """One row of the offset table: where a tensor is stored in the slab."""

    path: str
    """Where it is in the batch, as you would write it after the batch's name; the first path if it
    appears twice.
    """
    offset: int
    """First byte, a multiple of `ALIGNMENT`."""
    nbytes: int
    """Bytes, without padding."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements. Dense and empty tensors keep theirs (channels-last, for example); others are
    contiguous.
    """
    block: int
    """Slots with the same number may share a tensor on the device; see `own_storage` of
    `Stager`.
    """


class Layout:
    """The offset table of a nested batch, and its structure.

    Made by `Layout.of`. Immutable, hashable, picklable. Two layouts are equal if their structures
    and slots are equal, and the same leaves are contiguous. A layout holds nothing of a batch:
    neither its values nor the leaves that are not in the slab (strings, numbers, tensors that
    cannot be packed).
    """

    __slots__ = ("_slots", "_structure", "_table")

    def __init__(self, structure: Structure, table: Table) -> None:
        self._structure = structure
        self._table = table
        self._slots: tuple[Slot, ...] | None = None

    @classmethod
    def of(cls, batch: Any) -> Layout:
        """Compute the layout of a batch.

        Raises:
            LayoutError: an object that holds tensors is not a known container, an array cannot
                become a tensor, or a tensor has no memory.
        """
        parts = take_apart(batch)
        return cls(parts.structure, parts.table)

    @property
    def nbytes(self) -> int:
        """Bytes a slab needs for this layout, padding included; a multiple of `ALIGNMENT`."""
        return self._table.nbytes

    @property
    def slots(self) -> tuple[Slot, ...]:
        """A row for each tensor in the slab, in the order of the batch. Aligned, disjoint, inside
        ``[0, nbytes)``.
        """
        if self._slots is None:
            paths, blocks = self._structure.paths(), self._table.rows["block"].tolist()
            places = self._table.places()
            self._slots = tuple(Slot(paths[leaf], *place, blocks[leaf]) for leaf, place in places)
        return self._slots

    def others(self, batch: Any) -> list[Any]:
        """Return the leaves of a batch of this layout that are not in the slab, in order; for
        `unpack`.

        Raises:
            LayoutError: the batch has another layout.
        """
        return self._parts_of(batch).others()

    def pack(self, batch: Any, dst: torch.Tensor) -> None:
        """Write a batch of this layout into host memory. Blocks until the bytes are written, by one
        thread.

        Args:
            batch: a batch of this layout; its values may differ from those of the first batch.
            dst: uint8 ``[>= nbytes]``, contiguous, on the CPU, starting at a multiple of
                `ALIGNMENT` bytes.

        Raises:
            LayoutError: the batch has another layout; nothing was written.
            ValueError: `dst` is not such a tensor; nothing was written.
        """
        parts = self._parts_of(batch)
        self._check_slab(dst, "dst")
        if not dst.is_cpu:
            raise ValueError(
                f"dst must be on the CPU: it is on {dst.device}; pack into a lease's tensor, then "
                "copy"
            )
        if self.nbytes:
            pack(parts, dst)

    def unpack(self, src: torch.Tensor, others: Sequence[Any] = ()) -> Any:
        """Cut a slab into the batch stored in it. Copies nothing; the views keep `src` alive.

        Args:
            src: uint8 ``[>= nbytes]``, contiguous, on any device, starting at a multiple of
                `ALIGNMENT` bytes.
            others: the leaves that are not in the slab, in the order of the batch, as `others`
                returns them.

        Returns:
            A batch of the same types, in which tensors and arrays are views of `src`.

        Raises:
            ValueError: `src` is not such a tensor, or `others` are too few or too many.
        """
        self._check_slab(src, "src")
        return self._structure.rebuild(cut(self._table, src, list(others)))

    def _parts_of(self, batch: Any) -> Parts:
        parts = take_apart(batch)
        if not parts.structure.matches(self._structure):
            raise LayoutError(
                f"batch has another structure than the layout: {parts.structure} instead of "
                f"{self._structure}; make a layout with Layout.of(batch)"
            )
        if parts.table != self._table:
            raise self._mismatch(parts.table)
        return parts

    def _check_slab(self, slab: torch.Tensor, name: str) -> None:
        if not _holds_bytes(slab):
            is_tensor = isinstance(slab, torch.Tensor)
            given = f" {slab.dtype} {list(slab.shape)}" if is_tensor else ""
            raise ValueError(
                f"{name} must be a contiguous uint8 tensor of one dimension: {type(slab).__name__}"
                f"{given}; pass lease.tensor(), or torch.empty(layout.nbytes, dtype=torch.uint8)"
            )
        if slab.numel() < self.nbytes:
            raise ValueError(
                f"{name} is too small: {slab.numel()} bytes for a layout of {self.nbytes}; pass at "
                "least layout.nbytes"
            )
        if not self.nbytes:
            return
        held = slab.untyped_storage().nbytes() - slab.storage_offset()
        if held < self.nbytes or (slab.is_cpu and not slab.data_ptr()):
            raise ValueError(
                f"{name} lacks the memory for its shape: {slab.numel()} bytes in a storage of "
                f"{slab.untyped_storage().nbytes()}; it was freed or cut by resize_() of its "
                "storage: pass another one"
            )
        if slab.storage_offset() % ALIGNMENT or slab.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {ALIGNMENT} bytes: offset "
                f"{slab.storage_offset()}, address {slab.data_ptr():#x}; pass a whole slab or an "
                "aligned part of one"
            )

    def _mismatch(self, table: Table) -> LayoutError:
        for leaf, rows in enumerate(zip(self._table.entries(), table.entries(), strict=True)):
            expected, given = map(_in_words, rows)
            if given != expected:
                path = self._structure.path(leaf)
                return LayoutError(
                    f"batch{path} does not match the layout: {given} instead of {expected}; make "
                    "a layout with Layout.of(batch)",
                    path,
                )
        return LayoutError(
            "batch does not match the layout: its leaves have other places in the slab; make a "
            "layout with Layout.of(batch)"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self._table == other._table
            and self._structure.matches(other._structure)
        )

    def __hash__(self) -> int:
        return hash(self._table)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._structure, self._table)

    def __repr__(self) -> str:
        return f"<Layout nbytes={self.nbytes} slots={self._table.packed} {self._structure}>"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("path", "offset", "bytes", "dtype", "shape")]
        for slot in self.slots:
            cells = slot.path or "(batch)", slot.offset, slot.nbytes, name_of(slot.dtype)
            rows.append((*map(str, cells), str(list(slot.shape))))
        path, offset, nbytes, dtype, _ = (
            max(map(len, column)) for column in zip(*rows, strict=True)
        )
        lines = [
            f"{a:<{path}}  {b:>{offset}}  {c:>{nbytes}}  {d:<{dtype}}  {e}"
            for a, b, c, d, e in rows
        ]
        padding = self.nbytes - self._table.payload_bytes
        lines.append(
            f"{count(len(self.slots), 'slot')}, {self.nbytes} bytes, {padding} of them padding"
        )
        return "\n".join(lines)


def content_of(layout: Layout) -> tuple[Structure, Table]:
    """Return the structure and the table of a layout.

    Raises:
        TypeError: it isn't a `Layout`.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout: {layout!r}; pass Layout.of(batch)")
    return layout._structure, layout._table


def check_content(structure: Any, table: Any) -> None:
    """Refuse a structure and an offset table from elsewhere that don't belong together.

    Raises:
        LayoutError: they don't, or one of them has another type.
    """
    if not isinstance(structure, Structure) or not isinstance(table, Table):
        raise LayoutError(
            f"not a layout: {type(structure).__name__} and {type(table).__name__} in place of a "
            "structure and an offset table; compute the layout again with Layout.of(batch)"
        )
    if len(table.rows) != structure.num_leaves:
        raise LayoutError(
            f"the structure has {structure.num_leaves} leaves and the offset table "
            f"{len(table.rows)}; compute the layout again with Layout.of(batch)"
        )


def _restore(structure: Structure, table: Table) -> Layout:
    check_content(structure, table)
    return Layout(structure, table)


def _holds_bytes(slab: Any) -> bool:
    return (
        type(slab) is torch.Tensor
        and slab.dtype is torch.uint8
        and slab.ndim == 1
        and slab.is_contiguous()
    )


def _in_words(entry: tuple[Any, ...]) -> str:
    """Describe a row in words, for errors."""
    kind = RowKind(entry[2])
    if kind is RowKind.OTHER:
        return "a leaf that isn't a tensor"
    if kind is RowKind.ALIAS:
        return f"the same object as leaf number {entry[0]}"
    if kind is RowKind.MOVED:
        return "a tensor that cannot be packed"
    _, _, dtype, shape, stride = place_of(entry)
    is_contiguous = stride == contiguous_stride(shape)
    strides = "" if is_contiguous else f" with stride {list(stride)}"
    how = ", strided" if kind is RowKind.STRIDED else ""
    return f"{name_of(dtype)} {list(shape)}{strides}{how}"
