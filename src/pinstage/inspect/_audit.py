"""`audit`: the leaves of a batch, what ``pin_memory=True`` does to them, and the costs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

import pinstage as ps

from .._batch import Sharing, dense_stride, sharing_of
from .._compat.calls import memory_of
from .._sizes import count, format_bytes
from ._bus import REFERENCE_BUS, Bus, staging_seconds
from ._narrow import NarrowLeaf, lines_of, narrow_leaves
from ._pinning import Leaf, LocatedLeaf, Pinning, ask_torch, find_leaves, type_name
from ._report import Line, Section, TextTable, about, as_rich, as_text, duration

_ROWS = 40
"""Leaves shown; `to_dict` has them all."""


class LeafReport(NamedTuple):
    """One tensor or numeric array of the batch."""

    path: str  # as you would write it after the batch's name
    type: str
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    nbytes: int
    device: str
    pinned: bool  # whether it is page-locked now
    # "yes"; "dense": in another order of dimensions, which .to() keeps; "no": with gaps or
    # overlaps, so that it is copied on the host before it is copied to the device; "-": sparse and
    # nested tensors
    contiguous: str
    alias_of: str | None  # the path at which the same tensor appeared before
    loader_pins: bool  # whether pin_memory=True would page-lock it
    stopped_by: str | None  # the type that stops pin_memory=True on the way to it


class LeafCopies(NamedTuple):
    """Cost of ``.to(device)`` on each leaf."""

    copies: int  # a leaf in two places is copied twice, an empty leaf not at all
    nbytes: int
    seconds: float  # of these copies, with the leaves as they are
    # Of these copies if every leaf were page-locked first, without the time to pin them.
    seconds_pinned: float


class SlabCopy(NamedTuple):
    """Cost of one slab."""

    copies: int  # one, and one for each leaf that cannot be packed
    nbytes: int  # of the slab, padding included
    unpackable: int  # leaves that are copied by their own .to()
    smallest_bytes: int  # of the smallest packed leaf; 0 if there is none
    kept_bytes: int  # device memory that the smallest leaf keeps, with own_storage="auto"
    seconds: float  # to stage the batch, as measured beside an H200: see docs/audit.md
    error: str | None  # why pinstage would refuse the batch as it is


@dataclass(frozen=True)
class Audit:
    """The findings of `audit`. Print them, show them with rich, or use `to_dict`.

    Attributes:
        leaves: each tensor and numeric array, in order, each as often as it appears.
        pinning: the effect of ``DataLoader(pin_memory=True)``.
        each: the cost of ``.to()`` on each leaf.
        slab: the cost of one slab.
        narrow: the leaves whose values in this batch fit a narrower type.
        not_looked_at: the paths of leaves that are too large to look for one, above 256 MiB.
        bus: the speeds used to estimate the cost of copies.
    """

    leaves: tuple[LeafReport, ...]
    pinning: Pinning
    each: LeafCopies
    slab: SlabCopy
    narrow: tuple[NarrowLeaf, ...]
    not_looked_at: tuple[str, ...]
    bus: Bus

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves, each counted once."""
        return _nbytes_of(leaf for leaf in self.leaves if leaf.alias_of is None)

    @property
    def left_pageable(self) -> tuple[LeafReport, ...]:
        """Leaves on the host that ``pin_memory=True`` silently leaves pageable."""
        return tuple(
            leaf
            for leaf in self.leaves
            if leaf.device == "cpu" and not (leaf.loader_pins or leaf.pinned)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists and numbers, ready for JSON, in seconds and
        bytes.
        """
        left = self.left_pageable
        return {
            "leaves": [leaf._asdict() | {"shape": list(leaf.shape)} for leaf in self.leaves],
            "totals": self._totals(),
            "pin_memory": {
                "pinned_leaves": sum(self.pinning.pinned),
                "left_leaves": len(left),
                "left_bytes": _nbytes_of(left),
                "stopped_by": {name: len(leaves) for name, leaves in self._by_stop().items()},
                "error": self.pinning.error,
            },
            "to_each": self.each._asdict(),
            "slab": self.slab._asdict(),
            "narrow": [leaf._asdict() for leaf in self.narrow],
            "not_looked_at": list(self.not_looked_at),
            "bus": dataclasses.asdict(self.bus),
        }

    def _totals(self) -> dict[str, int]:
        memory = Counter(_memory(leaf) for leaf in self.leaves)
        pinned, pageable = memory["pinned"], memory["pageable"]
        return {
            "leaves": len(self.leaves),
            "nbytes": self.nbytes,
            "pinned_leaves": pinned,
            "pageable_leaves": pageable,
            "device_leaves": memory.total() - pinned - pageable,
            "non_contiguous_leaves": sum(leaf.contiguous == "no" for leaf in self.leaves),
            "aliases": sum(leaf.alias_of is not None for leaf in self.leaves),
        }

    def _by_stop(self) -> dict[str, list[LeafReport]]:
        """Return the leaves that are left pageable, by the type that stops torch."""
        leaves_by_type: dict[str, list[LeafReport]] = {}
        for leaf in self.left_pageable:
            leaves_by_type.setdefault(leaf.stopped_by or "?", []).append(leaf)
        return leaves_by_type

    def _pinning_lines(self) -> list[Line]:
        if self.pinning.error is not None:
            return [Line(f"pin_memory=True would fail: {self.pinning.error}", "problem")]
        text = f"pin_memory=True would pin {sum(self.pinning.pinned):,} of {_count(self.leaves)}"
        left = self.left_pageable
        if not left:
            return [Line(f"{text} and leave none pageable", "ok")]
        text += f", and silently leave {len(left):,} pageable ({format_bytes(_nbytes_of(left))}):"
        lines = [Line(text, "warning")]
        for name, leaves in self._by_stop().items():
            size, first = format_bytes(_nbytes_of(leaves)), leaves[0].path or "the batch itself"
            lines.append(Line(f"  {name} stops it: {_count(leaves)}, {size}, such as {first}"))
        return lines

    def _cost_lines(self) -> list[Line]:
        each, slab = self.each, self.slab
        pinned = f"{duration(each.seconds_pinned)} if every leaf were pinned"
        lines = [
            Line(
                f".to() on each leaf: {_copies(each)}, {duration(each.seconds)} now; {pinned}, "
                "without the time to pin them"
            ),
            Line(f"one slab: {_copies(slab)}; staging it takes {about(slab.seconds)}"),
        ]
        if slab.smallest_bytes:
            smallest, kept = format_bytes(slab.smallest_bytes), format_bytes(slab.kept_bytes)
            text = f"  keeping the smallest leaf ({smallest}) keeps {kept} on the device; "
            lines.append(Line(text + "with own_storage=False it keeps the whole slab"))
        if slab.unpackable:
            unpackable = count(slab.unpackable, "leaf", "leaves")
            lines.append(
                Line(f"  {unpackable} cannot be packed: copied by their own .to()", "info")
            )
        if slab.error is not None:
            lines.append(Line(f"  staging it now fails: {slab.error}", "warning"))
        return lines

    def __str__(self) -> str:
        return as_text(sections_of(self))

    def __rich__(self) -> Any:
        return as_rich(sections_of(self))

    def __repr__(self) -> str:
        return (
            f"<Audit leaves={len(self.leaves)} nbytes={self.nbytes} "
            f"left_pageable={len(self.left_pageable)}>"
        )


def audit(batch: Any, *, bus: Bus | None = None) -> Audit:
    """Report the leaves of a batch, which of them ``pin_memory=True`` would really pin, the cost of
    moving them, and which of them fit a narrower type.

    Looks into any object, known to pinstage or not. Moves, pins and changes nothing. Needs no GPU,
    and uses none.

    Args:
        batch: a batch of a loader, with any nesting.
        bus: the speeds of copies: ``Bus(pageable=8, pinned=55)``, in GB/s, from
            ``pinstage.inspect``. None: an H200's.

    Returns:
        The findings. ``print`` shows them as text, rich as a table; `Audit.to_dict` returns them
        for programs.

    Raises:
        TypeError: `batch` is a DataLoader.
    """
    if isinstance(batch, DataLoader):
        raise TypeError("audit looks at a batch, but this is a DataLoader: pass next(iter(loader))")
    bus = REFERENCE_BUS if bus is None else bus
    located_leaves = list(find_leaves(batch))
    pinning = ask_torch(batch, located_leaves)
    leaves = tuple(_reports(located_leaves, pinning))
    moved = [
        (report, located.leaf)
        for report, located in zip(leaves, located_leaves, strict=True)
        if report.device == "cpu" and report.nbytes
    ]
    each = LeafCopies(
        len(moved),
        sum(report.nbytes for report, _ in moved),
        sum(bus.seconds(report.nbytes, pinned=report.pinned) for report, _ in moved),
        sum(bus.seconds(report.nbytes, pinned=True) for report, _ in moved),
    )
    slab = _slab_copy(batch, located_leaves, bus)
    return Audit(leaves, pinning, each, slab, *narrow_leaves(moved, bus), bus)


def sections_of(findings: Audit, *, every_leaf: bool = False) -> list[Section]:
    """Return the report: the verdict, then the table."""
    leaves = findings.leaves
    if not leaves:
        return [Line("there is no tensor and no numeric array in this batch", "warning")]
    shown = leaves if every_leaf else leaves[:_ROWS]
    sections: list[Section] = [
        *findings._pinning_lines(),
        *findings._cost_lines(),
        *lines_of(findings.narrow, findings.not_looked_at),
        Line(f"bus: {findings.bus}", "info"),
        _table(shown),
    ]
    if rest := leaves[len(shown) :]:
        more = count(len(rest), "more leaf", "more leaves")
        sections.append(Line(f"... and {more}, {format_bytes(_nbytes_of(rest))}", "info"))
    names = "pinned", "pageable", "on a device", "not contiguous", "repeated"
    numbers = list(findings._totals().values())[2:]
    totals = [f"{number:,} {name}" for name, number in zip(names, numbers, strict=True) if number]
    total = "; ".join([f"total: {_count(leaves)}", format_bytes(findings.nbytes), *totals])
    return [*sections, Line(total)]


def _nbytes_of(leaves: Iterable[LeafReport]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _count(leaves: Sequence[LeafReport]) -> str:
    return count(len(leaves), "leaf", "leaves")


def _copies(cost: LeafCopies | SlabCopy) -> str:
    return f"{count(cost.copies, 'copy', 'copies')}, {format_bytes(cost.nbytes)}"


def _slab_copy(batch: Any, located_leaves: Sequence[LocatedLeaf], bus: Bus) -> SlabCopy:
    """Return the slab of the batch once all classes are registered, and the error of staging the
    batch as it is.
    """
    error = None
    try:
        ps.Layout.of(batch)
    except ps.errors.LayoutError as reason:
        error = str(reason)
    # By id, so that an alias counts once.
    on_host = {id(leaf): leaf for _, leaf, *_ in located_leaves if str(leaf.device) == "cpu"}
    staged = list(on_host.values())
    packed = list(filter(_is_packable, staged))
    layout = ps.Layout.of(packed)
    unpackable = len(staged) - len(packed)
    seconds = staging_seconds(len(packed), layout.nbytes, bus)
    copies = bool(layout.nbytes) + unpackable
    return SlabCopy(copies, layout.nbytes, unpackable, *_kept(layout), seconds, error)


def _kept(layout: ps.Layout) -> tuple[int, int]:
    """Return the bytes of the smallest leaf of a layout, and of the device tensor that it is a part
    of.
    """
    slots = [slot for slot in layout.slots if slot.nbytes]
    if not slots:
        return 0, 0
    smallest = min(slots, key=lambda slot: slot.nbytes)
    if sharing_of("auto", len(layout.slots)) is Sharing.EACH:
        return smallest.nbytes, smallest.nbytes
    block = [slot for slot in slots if slot.block == smallest.block]
    end = max(slot.offset + slot.nbytes for slot in block)
    return smallest.nbytes, end - min(slot.offset for slot in block)


def _is_packable(leaf: Leaf) -> bool:
    try:
        return bool(ps.Layout.of([leaf]).slots)
    # A numeric array without a dtype in torch: the whole batch's error names it.
    except ps.errors.LayoutError:
        return False


# -- one leaf --------------------------------------------------------------------------------------


def _reports(located_leaves: Sequence[LocatedLeaf], pinning: Pinning) -> Iterator[LeafReport]:
    path_by_id: dict[int, str] = {}
    for (path, leaf, *_), stopped_by in zip(located_leaves, pinning.stopped_by, strict=True):
        pinned = _is_pinned(leaf)
        yield LeafReport(
            path=path,
            type=type_name(leaf),
            dtype=str(leaf.dtype).removeprefix("torch."),
            shape=_shape(leaf),
            nbytes=_nbytes(leaf),
            device=str(leaf.device),  # arrays have a device, too
            pinned=pinned,
            contiguous=_contiguity(leaf),
            alias_of=path_by_id.get(id(leaf)),
            loader_pins=stopped_by is None,
            stopped_by=None if pinned else stopped_by,
        )
        path_by_id.setdefault(id(leaf), path)


def _is_pinned(leaf: Leaf) -> bool:
    try:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_pinned()
    except RuntimeError:  # raised for some layouts
        return False


def _shape(leaf: Leaf) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return (leaf.size(0),)  # other sizes differ from part to part
    return tuple(leaf.shape)


def _nbytes(leaf: Leaf) -> int:
    if not isinstance(leaf, torch.Tensor):
        return leaf.nbytes
    parts = leaf.unbind() if leaf.is_nested else memory_of(leaf) or [leaf]
    return sum(part.nbytes for part in parts)


def _contiguity(leaf: Leaf) -> str:
    if isinstance(leaf, np.ndarray):
        is_contiguous = leaf.flags.c_contiguous
        stride = tuple(step // max(leaf.itemsize, 1) for step in leaf.strides)
    elif leaf.is_nested or leaf.layout is not torch.strided:
        return "-"
    else:
        is_contiguous, stride = leaf.is_contiguous(), leaf.stride()
    if is_contiguous:
        return "yes"
    return "dense" if dense_stride(tuple(leaf.shape), stride) else "no"


def _table(leaves: Sequence[LeafReport]) -> TextTable:
    columns = ["leaf", "dtype and shape", ">bytes", "memory", "contiguous", "pin_memory", "same as"]
    rows = [_row(leaf) for leaf in leaves]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    styles = ["warning" if leaf.stopped_by and leaf.device == "cpu" else "" for leaf in leaves]
    return TextTable(columns, rows, "", styles)


def _row(leaf: LeafReport) -> list[str]:
    pin_memory = "pins" if leaf.loader_pins else "-"
    if leaf.stopped_by:
        pin_memory = f"no: {leaf.stopped_by.rpartition('.')[2]}"
    return [
        leaf.path or "(batch)",
        f"{leaf.dtype} {list(leaf.shape)}",
        format_bytes(leaf.nbytes),
        _memory(leaf),
        leaf.contiguous,
        pin_memory,
        leaf.alias_of or "",
    ]


def _memory(leaf: LeafReport) -> str:
    if leaf.pinned:
        return "pinned"
    return "pageable" if leaf.device == "cpu" else leaf.device
