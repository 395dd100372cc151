"""`audit`: what a batch is made of, what ``pin_memory=True`` would do with it, and what moving it costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import pinstage as ps

from .._layout import Sharing, dense_stride, sharing_of
from .._sizes import count, format_bytes
from .._torch import memory_of
from ._bus import GIB, Bus
from ._cost import cost_of
from ._pinning import Pinning, ask_torch, type_name
from ._report import Line, Section, TextTable, as_rich, as_text, duration, share, table_of
from ._walk import FoundLeaf, Leaf, places

_PACK_LIMIT_BYTES = GIB
"""A larger batch is not packed just to see how long it takes: it would need its size in memory once more."""
_ROWS = 40
"""Leaves shown; `to_dict` has them all."""


@dataclass(frozen=True)
class LeafReport:
    """One tensor or array of the batch."""

    path: str  # as one would write it after the batch's name
    type: str
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    nbytes: int
    device: str
    pinned: bool  # whether it is page-locked now
    # "yes"; "dense": in another order of dimensions, which .to() keeps; "no": with gaps or overlaps, so that it is
    # copied on the host before it is copied to the device; "-": sparse and nested tensors
    contiguous: str
    alias_of: str | None  # the path of the same tensor, met before
    shares_storage_with: str | None  # the path of another tensor over the same storage, met before
    loader_pins: bool  # whether pin_memory=True would page-lock it
    stopped_by: str | None  # the type that stops pin_memory=True on the way to it


@dataclass(frozen=True)
class LeafCopies:
    """What ``.to(device)`` on each leaf would do."""

    copies: int  # a leaf in two places is copied twice, an empty one not at all
    nbytes: int
    seconds: float | None  # of these copies, with the leaves as they are; None without a bus
    seconds_pinned: float | None  # the same if every leaf were page-locked first, pinning itself not counted


@dataclass(frozen=True)
class SlabCopy:
    """What one slab would do."""

    copies: int  # one, and one for each leaf that cannot be packed
    nbytes: int  # of the slab, padding included
    padding_bytes: int
    unpackable: int  # leaves that travel by their own .to()
    smallest_bytes: int  # of the smallest packed leaf; 0 if there is none
    kept_bytes: int  # of device memory that this leaf keeps, with own_storage="auto"
    pack_seconds: float | None  # measured, by one thread; None if the batch is too large to try
    seconds: float | None  # describing, packing, copying and views; None without a bus or without a measurement
    error: str | None  # why pinstage would not take the batch as it is


@dataclass(frozen=True)
class Audit:
    """The findings of `audit`. Print them, show them with rich, or use `to_dict`.

    Attributes:
        leaves: each tensor and array, in the order of the batch; one that appears twice is listed twice.
        pinning: what ``DataLoader(pin_memory=True)`` would do.
        each: what ``.to()`` on each leaf would do.
        slab: what one slab would do.
        bus: what the copies were priced with; None if there is no figure.
        bus_source: where the figures come from, or why there are none.
    """

    leaves: tuple[LeafReport, ...]
    pinning: Pinning
    each: LeafCopies
    slab: SlabCopy
    bus: Bus | None
    bus_source: str

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves, each counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.alias_of is None)

    @property
    def left_pageable(self) -> tuple[LeafReport, ...]:
        """Leaves on the host that ``pin_memory=True`` leaves pageable without a word; none where that is unknown."""
        if self.pinning.unknown is not None:
            return ()
        return tuple(leaf for leaf in self.leaves if leaf.device == "cpu" and not (leaf.loader_pins or leaf.pinned))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists and numbers, ready for JSON. Seconds and bytes."""
        left = self.left_pageable
        return {
            "leaves": [dataclasses.asdict(leaf) | {"shape": list(leaf.shape)} for leaf in self.leaves],
            "totals": self._counts(),
            "pin_memory": {
                "pinned_leaves": sum(leaf.loader_pins for leaf in self.leaves),
                "left_leaves": len(left),
                "left_bytes": sum(leaf.nbytes for leaf in left),
                "stopped_by": {name: len(leaves) for name, leaves in self._by_stop().items()},
                "error": self.pinning.error,
                "unknown": self.pinning.unknown,
            },
            "to_each": dataclasses.asdict(self.each),
            "slab": dataclasses.asdict(self.slab),
            "bus": self.bus_source,
        }

    def _sections(self, *, every_leaf: bool = False) -> list[Section]:
        """Return what is printed."""
        if not self.leaves:
            return [Line("there is no tensor and no array in this batch", "warning")]
        shown = self.leaves if every_leaf else self.leaves[:_ROWS]
        sections: list[Section] = [_table(shown)]
        if len(shown) < len(self.leaves):
            rest = self.leaves[len(shown) :]
            nbytes = format_bytes(sum(leaf.nbytes for leaf in rest))
            sections.append(Line(f"... and {count(len(rest), 'more leaf', 'more leaves')}, {nbytes}\n", "info"))
        return [*sections, self._totals(), *self._pinning_lines(), *self._cost_lines()]

    def _counts(self) -> dict[str, int]:
        return {
            "leaves": len(self.leaves),
            "nbytes": self.nbytes,
            "pinned_leaves": sum(leaf.pinned for leaf in self.leaves),
            "pageable_leaves": sum(leaf.device == "cpu" and not leaf.pinned for leaf in self.leaves),
            "non_contiguous_leaves": sum(leaf.contiguous == "no" for leaf in self.leaves),
            "aliases": sum(leaf.alias_of is not None for leaf in self.leaves),
        }

    def _by_stop(self) -> dict[str, list[LeafReport]]:
        grouped: dict[str, list[LeafReport]] = {}
        for leaf in self.left_pageable:
            grouped.setdefault(leaf.stopped_by or "?", []).append(leaf)
        return grouped

    def _totals(self) -> Line:
        totals = self._counts()
        on_device = sum(leaf.device != "cpu" for leaf in self.leaves)
        text = f"total: {count(totals['leaves'], 'leaf', 'leaves')}; {format_bytes(self.nbytes)}; "
        text += f"{totals['pinned_leaves']:,} pinned, {totals['pageable_leaves']:,} pageable, {on_device:,} on a device"
        for name, what in (("non_contiguous_leaves", "not contiguous"), ("aliases", "met before")):
            text += f"; {totals[name]:,} {what}" if totals[name] else ""
        return Line(text)

    def _pinning_lines(self) -> list[Section]:
        if self.pinning.unknown is not None:
            return [Line(f"what pin_memory=True would pin is not known: {self.pinning.unknown}", "info")]
        if self.pinning.error is not None:
            return [Line(f"pin_memory=True would fail: {self.pinning.error}", "problem")]
        pinned = sum(leaf.loader_pins for leaf in self.leaves)
        of = f"{pinned:,} of {count(len(self.leaves), 'leaf', 'leaves')}"
        left = self.left_pageable
        if not left:
            return [Line(f"pin_memory=True would pin {of} and leave none pageable", "ok")]
        size = format_bytes(sum(leaf.nbytes for leaf in left))
        lines: list[Section] = [
            Line(f"pin_memory=True would pin {of}, and silently leave {len(left):,} pageable ({size}):", "warning")
        ]
        for name, leaves in self._by_stop().items():
            size = format_bytes(sum(leaf.nbytes for leaf in leaves))
            example = leaves[0].path or "the batch itself"
            lines.append(Line(f"  {name} stops it: {count(len(leaves), 'leaf', 'leaves')}, {size}, such as {example}"))
        return lines

    def _cost_lines(self) -> list[Section]:
        each, slab = self.each, self.slab
        one_by_one = f".to() on each leaf: {count(each.copies, 'copy', 'copies')}, {format_bytes(each.nbytes)}"
        if each.seconds is not None and each.seconds_pinned is not None:
            one_by_one += f", {duration(each.seconds)} as it is; {duration(each.seconds_pinned)} if every leaf "
            one_by_one += "were pinned, not counting the pinning"
        padding = f"{format_bytes(slab.nbytes)}, {share(slab.padding_bytes, slab.nbytes)} of it padding"
        as_slab = f"one slab: {count(slab.copies, 'copy', 'copies')}, {padding}"
        if slab.pack_seconds is not None:
            as_slab += f"; packing takes {duration(slab.pack_seconds)} here, by one thread"
        if slab.seconds is not None:
            as_slab += f"; to stage it takes about {duration(slab.seconds)} in all"
        lines: list[Section] = [Line(one_by_one), Line(as_slab)]
        if slab.smallest_bytes:
            kept = f"{format_bytes(slab.smallest_bytes)}) keeps {format_bytes(slab.kept_bytes)} on the device"
            lines.append(Line(f"  keeping the smallest leaf ({kept}; with own_storage=False it keeps the whole slab"))
        if slab.unpackable:
            what = count(slab.unpackable, "leaf", "leaves")
            lines.append(Line(f"  {what} cannot be packed and travel by their own .to()", "info"))
        if slab.error is not None:
            lines.append(Line(f"  to stage it as it is: {slab.error}", "warning"))
        return [*lines, Line(f"bus: {self.bus_source}", "info")]

    def __str__(self) -> str:
        return as_text(self._sections())

    def __rich__(self) -> Any:
        return as_rich(self._sections())

    def __repr__(self) -> str:
        return f"<Audit leaves={len(self.leaves)} nbytes={self.nbytes} left_pageable={len(self.left_pageable)}>"


def audit(batch: Any, *, bus: Bus | None = None, device: torch.device | str | int | None = None) -> Audit:
    """Say what a batch is made of, what ``pin_memory=True`` would really pin of it, and what moving it costs.

    Looks into any object, known to pinstage or not. Moves, pins and changes nothing. Packs the batch three times into
    pageable memory to time it. With a GPU, the first call measures the bus, which takes about half a second and
    synchronises the device.

    Args:
        batch: what a loader yields, however nested.
        bus: prices the copies, for a machine that is not this one: ``Bus.of_figures(pageable=8, pinned=55)``, in GB/s,
            from ``pinstage.inspect``. None: this machine's, measured once a process; without a GPU nothing is priced.
        device: the CUDA device whose bus is measured; None: the current one.

    Returns:
        The findings. ``print`` shows them as text, rich as a table, `Audit.to_dict` gives them to programs.

    Raises:
        TypeError: `batch` is a DataLoader.
        ValueError: `device` is not a CUDA device.
    """
    if isinstance(batch, DataLoader):
        raise TypeError("audit looks at a batch, and this is a DataLoader: pass next(iter(loader))")
    if device is not None and torch.device(device).type != "cuda":
        raise ValueError(f"there is no bus to {device}: name a CUDA device, or none")
    bus, bus_source = _price(bus, device)
    found = list(places(batch))
    pinning = ask_torch(batch, found)
    leaves = tuple(_reports(found, pinning))
    moved = [
        (place.leaf, leaf.nbytes, leaf.pinned)
        for place, leaf in zip(found, leaves, strict=True)
        if leaf.device == "cpu" and leaf.nbytes and _becomes_tensor(place.leaf)
    ]
    seconds = seconds_pinned = None
    if bus is not None:
        seconds = sum(bus.seconds(nbytes, pinned=pinned) for _, nbytes, pinned in moved)
        seconds_pinned = sum(bus.seconds(nbytes, pinned=True) for _, nbytes, _ in moved)
    each = LeafCopies(len(moved), sum(nbytes for _, nbytes, _ in moved), seconds, seconds_pinned)
    return Audit(leaves, pinning, each, _slab_copy(batch, found, bus), bus, bus_source)


def _price(bus: Bus | None, device: torch.device | str | int | None) -> tuple[Bus | None, str]:
    if bus is None:
        try:
            bus = Bus.measured(device)
        except RuntimeError as error:
            return None, f"not measured: {error}"
    if bus is None:
        return None, "not measured: no CUDA device here; figures can be given (bus=, --bus)"
    return bus, bus.source


def _becomes_tensor(leaf: Leaf) -> bool:
    """Whether it is a tensor, or an array that can become one; strings, dates and records are not moved."""
    return isinstance(leaf, torch.Tensor) or leaf.dtype.kind in "biufc"


def _slab_copy(batch: Any, found: Sequence[FoundLeaf], bus: Bus | None) -> SlabCopy:
    """Find what a slab would hold once all classes are registered, and whether the batch can be staged as it is."""
    error = None
    try:
        ps.Layout.of(batch)
    except ps.errors.LayoutError as reason:
        error = str(reason)
    on_host = {id(place.leaf): place.leaf for place in found if str(place.leaf.device) == "cpu"}  # an alias once
    staged = [leaf for leaf in on_host.values() if _becomes_tensor(leaf)]
    packed = [leaf for leaf in staged if _is_packable(leaf)]
    layout = ps.Layout.of(packed)
    unpackable = len(staged) - len(packed)
    pack_seconds = seconds = None
    if layout.nbytes <= _PACK_LIMIT_BYTES:
        pack_seconds = _pack_seconds(layout, packed)
        if bus is not None:  # what is measured here leaves describing and views out: the larger figure counts
            known = cost_of(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
            whole = known.seconds(len(packed), layout.nbytes, bus.pinned_bytes_per_second)
            seconds = max(pack_seconds + bus.seconds(layout.nbytes, pinned=True), whole)
    padding = layout.nbytes - sum(leaf.nbytes for leaf in packed)
    copies = bool(layout.nbytes) + unpackable
    return SlabCopy(copies, layout.nbytes, padding, unpackable, *_kept(layout), pack_seconds, seconds, error)


def _kept(layout: ps.Layout) -> tuple[int, int]:
    """Return the bytes of the smallest leaf of a layout, and of the device tensor that it is a part of."""
    slots = layout.slots
    smallest = min((slot for slot in slots if slot.nbytes), key=lambda slot: slot.nbytes, default=None)
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
    except ps.errors.LayoutError:  # a numeric array that torch has no dtype for: named by the error of the whole batch
        return False


def _pack_seconds(layout: ps.Layout, leaves: list[Leaf]) -> float:
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    took = []
    for _ in range(3):  # the first one meets the slab's pages
        began = time.perf_counter()
        layout.pack(leaves, slab)
        took.append(time.perf_counter() - began)
    return min(took)


# -- one leaf ----------------------------------------------------------------------------------------------------------


def _reports(found: Sequence[FoundLeaf], pinning: Pinning) -> list[LeafReport]:
    path_by_id: dict[int, str] = {}
    first_by_storage: dict[int, tuple[str, int]] = {}  # path and id of the leaf over a storage that was met first
    reports = []
    for place, loader_pins, stopped_by in zip(found, pinning.pinned, pinning.stopped_by, strict=True):
        leaf = place.leaf
        storage = _storage(leaf)
        first = first_by_storage.setdefault(storage, (place.path, id(leaf))) if storage else ("", id(leaf))
        pinned = _is_pinned(leaf)
        reports.append(
            LeafReport(
                path=place.path,
                type=type_name(leaf),
                dtype=str(leaf.dtype).removeprefix("torch."),
                shape=_shape(leaf),
                nbytes=_nbytes(leaf),
                device=str(leaf.device),  # an array has one, too
                pinned=pinned,
                contiguous=_contiguity(leaf),
                alias_of=path_by_id.get(id(leaf)),
                shares_storage_with=None if first[1] == id(leaf) else first[0],
                loader_pins=loader_pins,
                stopped_by=None if pinned else stopped_by,
            )
        )
        path_by_id.setdefault(id(leaf), place.path)
    return reports


def _is_pinned(leaf: Leaf) -> bool:
    try:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_pinned()
    except RuntimeError:  # some layouts have no answer
        return False


def _shape(leaf: Leaf) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return (leaf.size(0),)  # the others differ from part to part
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
        contiguous, stride = leaf.flags.c_contiguous, tuple(step // max(leaf.itemsize, 1) for step in leaf.strides)
    return "yes" if contiguous else "dense" if dense_stride(tuple(leaf.shape), stride) else "no"


def _storage(leaf: Leaf) -> int:
    """Return the address of the memory that a leaf is a part of; 0 if there is none to name."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.device.type == "meta":
            return 0
        try:
            return leaf.untyped_storage().data_ptr()
        except RuntimeError:  # a subclass without storage
            return 0
    while isinstance(leaf.base, np.ndarray):
        leaf = leaf.base
    return int(leaf.__array_interface__["data"][0]) if leaf.nbytes else 0


# -- what is printed ---------------------------------------------------------------------------------------------------


def _table(leaves: Sequence[LeafReport]) -> TextTable:
    columns: dict[str, Callable[[LeafReport], str]] = {
        "leaf": lambda leaf: leaf.path or "(batch)",
        "dtype and shape": lambda leaf: f"{leaf.dtype} {list(leaf.shape)}",
        ">bytes": lambda leaf: format_bytes(leaf.nbytes),
        "memory": lambda leaf: "pinned" if leaf.pinned else "pageable" if leaf.device == "cpu" else leaf.device,
        "contiguous": lambda leaf: leaf.contiguous,
        "pin_memory": _would_pin,
        "same as": _relation,
    }
    if not any(map(_relation, leaves)):
        del columns["same as"]
    return table_of(leaves, columns, style=lambda leaf: "warning" if leaf.stopped_by and leaf.device == "cpu" else "")


def _would_pin(leaf: LeafReport) -> str:
    if leaf.loader_pins:
        return "pins"
    return f"no: {leaf.stopped_by.rpartition('.')[2]}" if leaf.stopped_by else "-"


def _relation(leaf: LeafReport) -> str:
    if leaf.alias_of is not None:
        return leaf.alias_of or "(batch)"
    return f"storage of {leaf.shares_storage_with}" if leaf.shares_storage_with is not None else ""
