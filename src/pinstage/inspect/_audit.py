"""`audit`: the leaves of a batch, what ``pin_memory=True`` does to them, and the costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

import pinstage as ps

from .._batch import Sharing, dense_stride, sharing_of
from .._compat.calls import memory_of
from .._sizes import count, format_bytes
from ._bus import REFERENCE, REFERENCE_BUS, Bus
from ._pinning import FoundLeaf, Leaf, Pinning, ask_torch, places, type_name
from ._report import Line, Section, TextTable, as_rich, as_text, duration

_ROWS = 40
"""Leaves shown; `to_dict` has them all."""


class LeafReport(NamedTuple):
    """One tensor or array of the batch."""

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
    seconds_pinned: (
        float  # of these copies if every leaf were page-locked first, without the time to pin them
    )


class SlabCopy(NamedTuple):
    """Cost of one slab."""

    copies: int  # one, and one for each leaf that cannot be packed
    nbytes: int  # of the slab, padding included
    unpackable: int  # leaves that are copied by their own .to()
    smallest_bytes: int  # of the smallest packed leaf; 0 if there is none
    kept_bytes: int  # device memory that the smallest leaf keeps, with own_storage="auto"
    seconds: float  # to stage the batch in a training loop
    error: str | None  # why pinstage would refuse the batch as it is


@dataclass(frozen=True)
class Audit:
    """The findings of `audit`. Print them, show them with rich, or use `to_dict`.

    Attributes:
        leaves: each tensor and array, in the order of the batch, each as often as it appears.
        pinning: the effect of ``DataLoader(pin_memory=True)``.
        each: the cost of ``.to()`` on each leaf.
        slab: the cost of one slab.
        bus: the speeds used to estimate the cost of copies.
    """

    leaves: tuple[LeafReport, ...]
    pinning: Pinning
    each: LeafCopies
    slab: SlabCopy
    bus: Bus

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves, each counted once."""
        return _sum(leaf for leaf in self.leaves if leaf.alias_of is None)

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
            "totals": self._counts(),
            "pin_memory": {
                "pinned_leaves": sum(leaf.loader_pins for leaf in self.leaves),
                "left_leaves": len(left),
                "left_bytes": _sum(left),
                "stopped_by": {name: len(leaves) for name, leaves in self._by_stop().items()},
                "error": self.pinning.error,
            },
            "to_each": self.each._asdict(),
            "slab": self.slab._asdict(),
            "bus": dataclasses.asdict(self.bus),
        }

    def _counts(self) -> dict[str, int]:
        return {
            "leaves": len(self.leaves),
            "nbytes": self.nbytes,
            "pinned_leaves": sum(leaf.pinned for leaf in self.leaves),
            "pageable_leaves": sum(
                leaf.device == "cpu" and not leaf.pinned for leaf in self.leaves
            ),
            "device_leaves": sum(leaf.device != "cpu" for leaf in self.leaves),
            "non_contiguous_leaves": sum(leaf.contiguous == "no" for leaf in self.leaves),
            "aliases": sum(leaf.alias_of is not None for leaf in self.leaves),
        }

    def _by_stop(self) -> dict[str, list[LeafReport]]:
        grouped: dict[str, list[LeafReport]] = {}
        for leaf in self.left_pageable:
            grouped.setdefault(leaf.stopped_by or "?", []).append(leaf)
        return grouped

    def _totals(self) -> Line:
        names = ("pinned", "pageable", "on a device", "not contiguous", "repeated")
        numbers = list(self._counts().values())[2:]
        counts = [
            f"{number:,} {name}" for name, number in zip(names, numbers, strict=True) if number
        ]
        return Line(
            "; ".join([f"total: {_leaves(len(self.leaves))}", format_bytes(self.nbytes), *counts])
        )

    def _verdict(self) -> list[Section]:
        pinned, left = f"{sum(leaf.loader_pins for leaf in self.leaves):,}", self.left_pageable
        text = f"pin_memory=True would pin {pinned} of {_leaves(len(self.leaves))}"
        if self.pinning.error is not None:
            lines = [Line(f"pin_memory=True would fail: {self.pinning.error}", "problem")]
        elif not left:
            lines = [Line(f"{text} and leave none pageable", "ok")]
        else:
            text += f", and silently leave {len(left):,} pageable ({format_bytes(_sum(left))}):"
            lines = [Line(text, "warning")]
            for name, found in self._by_stop().items():
                what = f"{_leaves(len(found))}, {format_bytes(_sum(found))}"
                lines.append(
                    Line(
                        f"  {name} stops it: {what}, such as {found[0].path or 'the batch itself'}"
                    )
                )
        each, slab = self.each, self.slab
        text = (
            f".to() on each leaf: {count(each.copies, 'copy', 'copies')}, "
            f"{format_bytes(each.nbytes)}"
        )
        text += (
            f", {duration(each.seconds)} now; {duration(each.seconds_pinned)} if every leaf were "
            "pinned, "
        )
        lines.append(Line(text + "without the time to pin them"))
        text = (
            f"one slab: {count(slab.copies, 'copy', 'copies')}, {format_bytes(slab.nbytes)}; "
            "staging it takes "
        )
        lines.append(Line(f"{text}about {duration(slab.seconds)}"))
        if slab.smallest_bytes:
            kept = (
                f"{format_bytes(slab.smallest_bytes)}) keeps {format_bytes(slab.kept_bytes)} on "
                "the device"
            )
            lines.append(
                Line(
                    f"  keeping the smallest leaf ({kept}; with own_storage=False it keeps the "
                    "whole slab"
                )
            )
        if slab.unpackable:
            lines.append(
                Line(
                    f"  {_leaves(slab.unpackable)} cannot be packed: copied by their own .to()",
                    "info",
                )
            )
        if slab.error is not None:
            lines.append(Line(f"  staging it now fails: {slab.error}", "warning"))
        return [*lines, Line(f"bus: {self.bus}", "info")]

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
    """Report the leaves of a batch, which of them ``pin_memory=True`` would really pin, and the
    cost of moving them.

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
    found = list(places(batch))
    pinning = ask_torch(batch, found)
    leaves = tuple(_reports(found, pinning))
    moved = [
        leaf
        for place, leaf in zip(found, leaves, strict=True)
        if leaf.device == "cpu" and leaf.nbytes and _becomes_tensor(place.leaf)
    ]
    seconds = sum(bus.seconds(leaf.nbytes, pinned=leaf.pinned) for leaf in moved)
    seconds_pinned = sum(bus.seconds(leaf.nbytes, pinned=True) for leaf in moved)
    each = LeafCopies(len(moved), _sum(moved), seconds, seconds_pinned)
    return Audit(leaves, pinning, each, _slab_copy(batch, found, bus), bus)


def sections_of(found: Audit, *, every_leaf: bool = False) -> list[Section]:
    """Return the report: the verdict, then the table."""
    if not found.leaves:
        return [Line("there is no tensor and no array in this batch", "warning")]
    shown = found.leaves if every_leaf else found.leaves[:_ROWS]
    rest = found.leaves[len(shown) :]
    more = f"... and {count(len(rest), 'more leaf', 'more leaves')}, {format_bytes(_sum(rest))}"
    return [
        *found._verdict(),
        _table(shown),
        *([Line(more, "info")] if rest else []),
        found._totals(),
    ]


def _sum(leaves: Iterable[LeafReport]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _leaves(number: int) -> str:
    return count(number, "leaf", "leaves")


def _becomes_tensor(leaf: Leaf) -> bool:
    """Return whether a leaf is a tensor, or an array that can become one. Strings, dates and
    records are not moved.
    """
    return isinstance(leaf, torch.Tensor) or leaf.dtype.kind in "biufc"


def _slab_copy(batch: Any, found: Sequence[FoundLeaf], bus: Bus) -> SlabCopy:
    """Return the slab of the batch once all classes are registered, and the error of staging the
    batch as it is.
    """
    error = None
    try:
        ps.Layout.of(batch)
    except ps.errors.LayoutError as reason:
        error = str(reason)
    # Aliases count once.
    on_host = {id(place.leaf): place.leaf for place in found if str(place.leaf.device) == "cpu"}
    staged = [leaf for leaf in on_host.values() if _becomes_tensor(leaf)]
    packed = [leaf for leaf in staged if _is_packable(leaf)]
    layout = ps.Layout.of(packed)
    unpackable = len(staged) - len(packed)
    seconds = REFERENCE.seconds(len(packed), layout.nbytes, bus.pinned * 1e9)
    copies = bool(layout.nbytes) + unpackable
    return SlabCopy(copies, layout.nbytes, unpackable, *_kept(layout), seconds, error)


def _kept(layout: ps.Layout) -> tuple[int, int]:
    """Return the bytes of the smallest leaf of a layout, and of the device tensor that it is a part
    of.
    """
    slots = layout.slots
    smallest = min(
        (slot for slot in slots if slot.nbytes), key=lambda slot: slot.nbytes, default=None
    )
    if smallest is None:
        return 0, 0
    block = [slot for slot in slots if slot.block == smallest.block]
    if len(block) == 1 or sharing_of("auto", len(slots)) is Sharing.EACH:
        return smallest.nbytes, smallest.nbytes
    end = max(slot.offset + slot.nbytes for slot in block)
    return smallest.nbytes, end - min(slot.offset for slot in block)


def _is_packable(leaf: Leaf) -> bool:
    try:
        return bool(ps.Layout.of([leaf]).slots)
    # A numeric array without a dtype in torch: the whole batch's error names it.
    except ps.errors.LayoutError:
        return False


# -- one leaf --------------------------------------------------------------------------------------


def _reports(found: Sequence[FoundLeaf], pinning: Pinning) -> list[LeafReport]:
    path_by_id: dict[int, str] = {}
    reports = []
    for place, loader_pins, stopped_by in zip(
        found, pinning.pinned, pinning.stopped_by, strict=True
    ):
        leaf = place.leaf
        pinned = _is_pinned(leaf)
        reports.append(
            LeafReport(
                path=place.path,
                type=type_name(leaf),
                dtype=str(leaf.dtype).removeprefix("torch."),
                shape=_shape(leaf),
                nbytes=_nbytes(leaf),
                device=str(leaf.device),  # arrays have a device, too
                pinned=pinned,
                contiguous=_contiguity(leaf),
                alias_of=path_by_id.get(id(leaf)),
                loader_pins=loader_pins,
                stopped_by=None if pinned else stopped_by,
            )
        )
        path_by_id.setdefault(id(leaf), place.path)
    return reports


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
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            return "-"
        contiguous, stride = leaf.is_contiguous(), leaf.stride()
    else:
        contiguous, stride = (
            leaf.flags.c_contiguous,
            tuple(step // max(leaf.itemsize, 1) for step in leaf.strides),
        )
    return "yes" if contiguous else "dense" if dense_stride(tuple(leaf.shape), stride) else "no"


def _table(leaves: Sequence[LeafReport]) -> TextTable:
    columns = ["leaf", "dtype and shape", ">bytes", "memory", "contiguous", "pin_memory", "same as"]
    rows = [_row(leaf) for leaf in leaves]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    styles = ["warning" if leaf.stopped_by and leaf.device == "cpu" else "" for leaf in leaves]
    return TextTable(columns, rows, "", styles)


def _row(leaf: LeafReport) -> list[str]:
    shape, nbytes = f"{leaf.dtype} {list(leaf.shape)}", format_bytes(leaf.nbytes)
    same_as = "" if leaf.alias_of is None else leaf.alias_of or "(batch)"
    columns = [leaf.path or "(batch)", shape, nbytes, _memory(leaf), leaf.contiguous]
    return [*columns, _pin_memory(leaf), same_as]


def _memory(leaf: LeafReport) -> str:
    if leaf.pinned:
        return "pinned"
    return "pageable" if leaf.device == "cpu" else leaf.device


def _pin_memory(leaf: LeafReport) -> str:
    if leaf.loader_pins:
        return "pins"
    return f"no: {leaf.stopped_by.rpartition('.')[2]}" if leaf.stopped_by else "-"
