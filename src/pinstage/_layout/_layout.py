"""`Layout`, the offset table as users see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from .._errors import LayoutError
from .._steps import step
from ._leaves import ALIGNMENT
from ._moves import Moves
from ._nodes import NodeType, node_types, path_text, path_texts
from ._parts import together
from ._plan import TABLES, Plan, plan
from ._table import Columns, Table


class Slot(NamedTuple):
    """One row of the offset table: where a tensor lives in the slab."""

    path: str
    """Where it is in the batch, as one would write it after the batch's name; the first place of an aliased one."""
    offset: int
    """First byte, a multiple of `ALIGNMENT`."""
    nbytes: int
    """Bytes, without padding."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements. Dense permuted tensors (channels last) keep theirs, others are contiguous."""


class Layout:
    """The offset table of a nested batch.

    Made by `Layout.of`. Immutable, hashable, picklable; equal if structure and slots are equal. Values of the batch
    play no part, but leaves that do not live in the slab (strings, numbers, tensors that cannot be packed) are
    remembered, so that `unpack` can put the batch together.
    """

    __slots__ = ("_order", "_passthrough", "_rest", "_slots", "_table", "_treespec")

    def __init__(
        self,
        table: Table,
        treespec: optree.PyTreeSpec,
        order: tuple[int, ...] | None,
        rest: Sequence[Any],
        passthrough: Sequence[torch.Tensor],
    ) -> None:
        self._table = table
        self._treespec = treespec
        self._order = order
        self._rest = rest
        self._passthrough = passthrough
        self._slots: tuple[Slot, ...] | None = None

    @classmethod
    def of(cls, batch: Any) -> Layout:
        """Compute the layout of a batch, or find it if a batch like this was seen lately.

        Raises:
            LayoutError: an object that holds tensors is no known container, or an array cannot become a tensor.
        """
        return cls.of_plan(plan(batch))

    @classmethod
    def of_plan(cls, planned: Plan) -> Layout:
        """Return the layout that a plan was made with."""
        return cls(planned.table, planned.treespec, planned.order, planned.rest, planned.passthrough())

    @property
    def nbytes(self) -> int:
        """Bytes a slab needs for this layout, padding included; a multiple of `ALIGNMENT`."""
        return self._table.nbytes

    @property
    def treespec(self) -> optree.PyTreeSpec:
        """The structure of the batch."""
        return self._treespec

    @property
    def slots(self) -> tuple[Slot, ...]:
        """A row for each tensor in the slab, in the order of the batch. Aligned, disjoint, inside ``[0, nbytes)``."""
        if self._slots is None:
            paths: dict[int, str] = {}
            for leaf, path in enumerate(path_texts(self._treespec)):
                paths.setdefault(leaf if self._order is None else self._order[leaf], path)
            self._slots = tuple(self._slot(position, paths[position]) for position in self._packed())
        return self._slots

    def pack(self, batch: Any, dst: torch.Tensor) -> None:
        """Write a batch of this layout into host memory. Blocks until the bytes are there; one thread does it.

        Args:
            batch: has this layout; values may be others than those the layout was made of.
            dst: uint8 ``[>= nbytes]``, contiguous, on the CPU, starting at a multiple of `ALIGNMENT` bytes.

        Raises:
            LayoutError: the batch has another layout; nothing was written.
            ValueError: `dst` is not such a tensor; nothing was written.
        """
        planned = plan(batch)
        if (planned.treespec, planned.order, planned.table.columns) != self._identity():
            raise self._mismatch(planned)
        self._check_slab(dst, "dst")
        if not dst.is_cpu:
            raise ValueError(f"dst must be on the CPU: it is on {dst.device}; pack into a lease's tensor, then copy")
        Moves(self._table, planned.tensors, dst).everything()

    def unpack(self, src: torch.Tensor, passthrough: Sequence[torch.Tensor] | None = None) -> Any:
        """Cut a slab into the batch that lies in it. Copies nothing; the views keep `src` alive.

        Args:
            src: uint8 ``[>= nbytes]``, contiguous, on any device, starting at a multiple of `ALIGNMENT` bytes.
            passthrough: what stands for the tensors that cannot be packed, in the order of the batch; None: themselves.

        Returns:
            A batch of the same types, in which tensors and arrays are views of `src`. Leaves that are neither are those
            that the layout was made of.

        Raises:
            ValueError: `src` is not such a tensor.
        """
        self._check_slab(src, "src")
        expected = len(self._table.columns.passthrough)
        if passthrough is not None and len(passthrough) != expected:
            raise ValueError(
                f"passthrough has the wrong length: {len(passthrough)} for {expected} tensors that cannot be packed; "
                "pass one for each, or None"
            )
        return put_together(self, cut(self, src, self._passthrough if passthrough is None else passthrough))

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """Return the offset table as a structured array.

        Returns:
            Fields ``path`` (text), ``offset``, ``nbytes`` (int64), ``dtype`` (text), ``ndim`` (int64), ``shape`` and
            ``stride`` (int64, as wide as the largest number of dimensions; -1 where a row has fewer).
        """
        slots = self.slots
        width = max((len(slot.shape) for slot in slots), default=0)

        def padded(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes, *[-1] * (width - len(sizes)))

        rows = [
            (s.path, s.offset, s.nbytes, _name(s.dtype), len(s.shape), padded(s.shape), padded(s.stride)) for s in slots
        ]
        path_width = max((len(slot.path) for slot in slots), default=1) or 1
        name_width = max((len(_name(slot.dtype)) for slot in slots), default=1)
        fields: list[Any] = [
            ("path", f"U{path_width}"),
            ("offset", np.int64),
            ("nbytes", np.int64),
            ("dtype", f"U{name_width}"),
            ("ndim", np.int64),
            ("shape", np.int64, (width,)),
            ("stride", np.int64, (width,)),
        ]
        return np.array(rows, dtype=fields)

    def _packed(self) -> list[int]:
        return [position for position, offset in enumerate(self._table.offsets) if offset >= 0]

    def _leaf(self, leaf: int) -> tuple[int, str]:
        """Return which tensor a leaf is, and what it looks like; (-1, ...) if it is none."""
        position = leaf if self._order is None else self._order[leaf]
        if position >= len(self._table.offsets):
            return -1, "no tensor"
        return position, self._table.describe(position)

    def _slot(self, position: int, path: str) -> Slot:
        table = self._table
        dtype, shape = table.columns.dtypes[position], tuple(table.columns.shapes[position])
        nbytes = dtype.itemsize * math.prod(shape)
        return Slot(path, table.offsets[position], nbytes, dtype, shape, table.stride_of(position))

    def _check_slab(self, slab: torch.Tensor, name: str) -> None:
        if slab.dtype is not torch.uint8 or slab.ndim != 1 or not slab.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous uint8 tensor of one dimension: {slab.dtype} {list(slab.shape)}; pass "
                "lease.tensor(), or torch.empty(layout.nbytes, dtype=torch.uint8)"
            )
        if slab.numel() < self.nbytes:
            raise ValueError(
                f"{name} is too small: {slab.numel()} bytes for a layout of {self.nbytes}; pass at least layout.nbytes"
            )
        if self.nbytes and (slab.storage_offset() % ALIGNMENT or slab.data_ptr() % ALIGNMENT):
            raise ValueError(
                f"{name} must start at a multiple of {ALIGNMENT} bytes: offset {slab.storage_offset()}, address "
                f"{slab.data_ptr():#x}; pass a whole slab or an aligned part of one"
            )

    def _mismatch(self, planned: Plan) -> LayoutError:
        if planned.treespec != self._treespec:
            return LayoutError(
                f"batch has another structure than the layout: {planned.treespec} instead of {self._treespec}; make a "
                "layout with Layout.of(batch)"
            )
        other = Layout.of_plan(planned)
        for leaf in range(self._treespec.num_leaves):
            (position, expected), (other_position, found) = self._leaf(leaf), other._leaf(leaf)
            path = path_text(self._treespec, leaf)
            if expected != found:
                return LayoutError(
                    f"batch{path} does not match the layout: {found} instead of {expected}; make "
                    "a layout with Layout.of(batch)",
                    path,
                )
            if position != other_position:
                return LayoutError(
                    f"batch{path} does not match the layout: which leaves are one tensor differs from there on, "
                    f"{len(planned.table.offsets)} distinct tensors instead of {len(self._table.offsets)}; "
                    "make a layout with Layout.of(batch)",
                    path,
                )
        raise AssertionError("a batch that does not match differs in some leaf")

    def _identity(self) -> tuple[Any, ...]:
        return self._treespec, self._order, self._table.columns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[Any, ...]:
        nodes = node_types(self._treespec)  # unpickled first, so that the structure finds its classes registered
        return _restore, (nodes, self._treespec, self._table.columns, self._order, self._rest, self._passthrough)

    def __repr__(self) -> str:
        return f"<Layout nbytes={self.nbytes} slots={len(self._packed())} {self._treespec}>"

    def __str__(self) -> str:
        header = ("path", "offset", "bytes", "dtype", "shape")
        rows = [
            header,
            *(
                (s.path or "(batch)", str(s.offset), str(s.nbytes), _name(s.dtype), str(list(s.shape)))
                for s in self.slots
            ),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = []
        for path, offset, nbytes, dtype, shape in rows:
            lines.append(
                f"{path:<{widths[0]}}  {offset:>{widths[1]}}  {nbytes:>{widths[2]}}  {dtype:<{widths[3]}}  "
                f"{shape}".rstrip()
            )
        slots = f"{len(self.slots)} {'slot' if len(self.slots) == 1 else 'slots'}"
        lines.append(f"{slots}, {self.nbytes} bytes, {self.nbytes - self._table.payload_bytes} of them padding")
        return "\n".join(lines)


def cut(layout: Layout, slab: torch.Tensor, passthrough: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors of a batch, in its order, from a slab and tensors that are known to be right."""
    with step("views"):
        return layout._table.views(slab, passthrough)


def put_together(layout: Layout, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a batch together from all its tensors, in its order."""
    with step("unflatten"):
        return together(layout._treespec, layout._order, tensors, layout._rest)


def _restore(
    _nodes: tuple[NodeType, ...],
    treespec: optree.PyTreeSpec,
    columns: Columns,
    order: tuple[int, ...] | None,
    rest: Sequence[Any],
    passthrough: Sequence[torch.Tensor],
) -> Layout:
    return Layout(TABLES.table_of(columns), treespec, order, rest, passthrough)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
