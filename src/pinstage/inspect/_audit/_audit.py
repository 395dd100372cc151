"""`audit`: look at a batch before it is moved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..._sizes import format_bytes
from ..._torch import memory_of
from .. import _format as fmt
from .._bus import Bus
from .._report import Block, Line, Table, as_rich, as_text
from . import _costs
from ._pinning import Pinning, ask_torch, type_name
from ._walk import Place, places

_ROWS = 40
"""Leaves shown; `to_dict` has them all."""


@dataclass(frozen=True)
class LeafReport:
    """One tensor or array of the batch.

    Attributes:
        path: where it is, as one would write it after the batch's name.
        type: its class.
        dtype: its dtype, without ``torch.``.
        shape: its shape, in elements.
        nbytes: bytes of its elements.
        device: where it is.
        pinned: whether it is page-locked now.
        contiguous: ``"yes"``; ``"dense"``: in another order of dimensions, which ``.to()`` keeps; ``"no"``: with gaps
            or overlaps, so that it is copied on the host before it is copied to the device.
        alias_of: the path of the same tensor, met before; else None.
        shares_storage_with: the path of another tensor over the same storage, met before; else None.
        loader_pins: whether ``pin_memory=True`` would page-lock it.
        stopped_by: the type that stops ``pin_memory=True`` on the way to it; else None.
    """

    path: str
    type: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str
    pinned: bool
    contiguous: str
    alias_of: str | None
    shares_storage_with: str | None
    loader_pins: bool
    stopped_by: str | None


@dataclass(frozen=True)
class Audit:
    """What was found; made by `audit`. Print it, show it with rich, or take `to_dict`.

    Attributes:
        leaves: each tensor and array, in the order of the batch; one that is in two places is there twice.
        pinning: what ``DataLoader(pin_memory=True)`` would do.
        each: what ``.to()`` on each leaf would do.
        slab: what one slab would do.
        bus: what the copies were priced with; None if there is no figure.
        bus_source: where the figures are from, or why there are none.
    """

    leaves: tuple[LeafReport, ...]
    pinning: Pinning
    each: _costs.LeafCopies
    slab: _costs.SlabCopy
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
            "totals": {
                "leaves": len(self.leaves),
                "nbytes": self.nbytes,
                "pinned_leaves": sum(leaf.pinned for leaf in self.leaves),
                "pageable_leaves": sum(leaf.device == "cpu" and not leaf.pinned for leaf in self.leaves),
                "non_contiguous_leaves": sum(leaf.contiguous == "no" for leaf in self.leaves),
                "aliases": sum(leaf.alias_of is not None for leaf in self.leaves),
            },
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

    def blocks(self, rows: int | None = _ROWS) -> list[Block]:
        """Return what is printed; `rows` leaves at most, None for all."""
        if not self.leaves:
            return [Line("there is no tensor and no array in this batch", "warning")]
        shown = self.leaves[:rows]
        blocks: list[Block] = [_table(shown)]
        if len(shown) < len(self.leaves):
            rest = self.leaves[len(shown) :]
            nbytes = format_bytes(sum(leaf.nbytes for leaf in rest))
            blocks.append(Line(f"... and {fmt.count(len(rest), 'more leaf', 'more leaves')}, {nbytes}\n", "info"))
        return [*blocks, *self._totals(), *self._pinning_lines(), *self._cost_lines()]

    def _by_stop(self) -> dict[str, list[LeafReport]]:
        grouped: dict[str, list[LeafReport]] = {}
        for leaf in self.left_pageable:
            grouped.setdefault(leaf.stopped_by or "?", []).append(leaf)
        return grouped

    def _totals(self) -> list[Block]:
        pinned = sum(leaf.pinned for leaf in self.leaves)
        on_host = sum(leaf.device == "cpu" for leaf in self.leaves)
        parts = [
            fmt.count(len(self.leaves), "leaf", "leaves"),
            format_bytes(self.nbytes),
            f"{pinned:,} pinned, {on_host - pinned:,} pageable, {len(self.leaves) - on_host:,} on a device",
        ]
        for number, what in (
            (sum(leaf.contiguous == "no" for leaf in self.leaves), "not contiguous"),
            (sum(leaf.alias_of is not None for leaf in self.leaves), "met before"),
        ):
            if number:
                parts.append(f"{number:,} {what}")
        return [Line("total: " + "; ".join(parts))]

    def _pinning_lines(self) -> list[Block]:
        if self.pinning.unknown is not None:
            return [Line(f"what pin_memory=True would pin is not known: {self.pinning.unknown}", "info")]
        if self.pinning.error is not None:
            return [Line(f"pin_memory=True would fail: {self.pinning.error}", "problem")]
        pinned = sum(leaf.loader_pins for leaf in self.leaves)
        of = f"{pinned:,} of {fmt.count(len(self.leaves), 'leaf', 'leaves')}"
        left = self.left_pageable
        if not left:
            return [Line(f"pin_memory=True would pin {of} and leave none pageable", "ok")]
        size = format_bytes(sum(leaf.nbytes for leaf in left))
        lines: list[Block] = [
            Line(f"pin_memory=True would pin {of}, and silently leave {len(left):,} pageable ({size}):", "warning")
        ]
        for name, leaves in self._by_stop().items():
            size = format_bytes(sum(leaf.nbytes for leaf in leaves))
            example = leaves[0].path or "the batch itself"
            lines.append(
                Line(f"  {name} stops it: {fmt.count(len(leaves), 'leaf', 'leaves')}, {size}, such as {example}")
            )
        return lines

    def _cost_lines(self) -> list[Block]:
        each, slab = self.each, self.slab
        one_by_one = f".to() on each leaf: {fmt.count(each.copies, 'copy', 'copies')}, {format_bytes(each.nbytes)}"
        if each.seconds is not None and each.seconds_pinned is not None:
            one_by_one += f", {fmt.duration(each.seconds)} as it is; {fmt.duration(each.seconds_pinned)} if every leaf "
            one_by_one += "were pinned, not counting the pinning"
        padding = f"{format_bytes(slab.nbytes)}, {fmt.share(slab.padding_bytes, slab.nbytes)} of it padding"
        as_slab = f"one slab: {fmt.count(slab.copies, 'copy', 'copies')}, {padding}"
        if slab.pack_seconds is not None:
            as_slab += f"; packing takes {fmt.duration(slab.pack_seconds)} here, by one thread"
        if slab.seconds is not None:
            as_slab += f"; with the copy {fmt.duration(slab.seconds)}"
        lines: list[Block] = [Line(one_by_one), Line(as_slab)]
        if slab.unpackable:
            what = fmt.count(slab.unpackable, "leaf", "leaves")
            lines.append(Line(f"  {what} cannot be packed and travel by their own .to()", "info"))
        if slab.error is not None:
            lines.append(Line(f"  to stage it as it is: {slab.error}", "warning"))
        return [*lines, Line(f"bus: {self.bus_source}", "info")]

    def __str__(self) -> str:
        return as_text(self.blocks())

    def __rich__(self) -> Any:
        return as_rich(self.blocks())

    def __repr__(self) -> str:
        return f"<Audit leaves={len(self.leaves)} nbytes={self.nbytes} left_pageable={len(self.left_pageable)}>"


def audit(batch: Any, *, bus: Bus | None = None, device: torch.device | str | None = None) -> Audit:
    """Say what a batch is made of, what ``pin_memory=True`` would really pin of it, and what moving it costs.

    Looks into any object, known to pinstage or not. Moves, pins and changes nothing; packs the batch three times into
    pageable memory to see how long that takes. Where there is a GPU, the first call measures the bus, which takes about
    half a second and synchronises the device.

    Args:
        batch: what a loader yields, however nested.
        bus: prices the copies, for a machine that is not this one: ``Bus.of_figures(pageable=8, pinned=55)``, in GB/s,
            from ``pinstage.inspect``. None: this machine's, measured once a process; without a GPU nothing is priced.
        device: the CUDA device whose bus is measured; None: the current one.

    Returns:
        The findings. ``print`` shows them as text, rich as a table, `Audit.to_dict` gives them to programs.

    Raises:
        TypeError: `batch` is a DataLoader.
        ValueError: `device` is no CUDA device.
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
        (place.leaf, leaf)
        for place, leaf in zip(found, leaves, strict=True)
        if leaf.device == "cpu" and _costs.becomes_tensor(place.leaf)
    ]
    each = _costs.of_leaves([(leaf.nbytes, leaf.pinned) for _, leaf in moved], bus)
    slab = _costs.of_slab(batch, [leaf for leaf, _ in moved], bus)
    return Audit(leaves, pinning, each, slab, bus, bus_source)


def _price(bus: Bus | None, device: torch.device | str | None) -> tuple[Bus | None, str]:
    if bus is None:
        try:
            bus = Bus.measured(device)
        except RuntimeError as error:
            return None, f"not measured: {error}"
    if bus is None:
        return None, "not measured: no CUDA device here; figures can be given (bus=, --bus)"
    return bus, bus.source


def _reports(found: Sequence[Place], pinning: Pinning) -> list[LeafReport]:
    first_by_id: dict[int, str] = {}
    first_by_storage: dict[int, tuple[str, int]] = {}
    reports = []
    for place, loader_pins, stopped_by in zip(found, pinning.pinned, pinning.stopped_by, strict=True):
        leaf = place.leaf
        alias_of = first_by_id.setdefault(id(leaf), place.path) if id(leaf) in first_by_id else None
        first_by_id.setdefault(id(leaf), place.path)
        storage = _storage(leaf)
        shares, owner = first_by_storage.setdefault(storage, (place.path, id(leaf))) if storage else (None, id(leaf))
        pinned = _is_pinned(leaf)
        reports.append(
            LeafReport(
                path=place.path,
                type=type_name(leaf),
                dtype=str(leaf.dtype).removeprefix("torch."),
                shape=_shape(leaf),
                nbytes=_nbytes(leaf),
                device=str(leaf.device) if isinstance(leaf, torch.Tensor) else "cpu",
                pinned=pinned,
                contiguous=_contiguity(leaf),
                alias_of=alias_of,
                shares_storage_with=None if owner == id(leaf) else shares,
                loader_pins=loader_pins,
                stopped_by=None if pinned else stopped_by,
            )
        )
    return reports


def _table(leaves: Sequence[LeafReport]) -> Table:
    rows = [
        (
            leaf.path or "(batch)",
            f"{leaf.dtype} {list(leaf.shape)}",
            format_bytes(leaf.nbytes),
            "pinned" if leaf.pinned else "pageable" if leaf.device == "cpu" else leaf.device,
            leaf.contiguous,
            "pins" if leaf.loader_pins else f"no: {leaf.stopped_by.rpartition('.')[2]}" if leaf.stopped_by else "-",
            _relation(leaf),
        )
        for leaf in leaves
    ]
    styles = ["warning" if leaf.stopped_by and leaf.device == "cpu" else "" for leaf in leaves]
    columns = ["leaf", "dtype and shape", ">bytes", "memory", "contiguous", "pin_memory", "same as"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]  # type: ignore[misc]
    return Table(columns, rows, styles=styles)


def _relation(leaf: LeafReport) -> str:
    if leaf.alias_of is not None:
        return leaf.alias_of or "(batch)"
    return f"storage of {leaf.shares_storage_with}" if leaf.shares_storage_with is not None else ""


def _is_pinned(leaf: _costs.Leaf) -> bool:
    try:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_pinned()
    except (RuntimeError, NotImplementedError):  # some layouts have no answer
        return False


def _shape(leaf: _costs.Leaf) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return (leaf.size(0),)  # the others differ from part to part
    return tuple(leaf.shape)


def _nbytes(leaf: _costs.Leaf) -> int:
    if not isinstance(leaf, torch.Tensor):
        return leaf.nbytes
    return sum(part.numel() * part.element_size() for part in _parts(leaf))


def _parts(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a tensor consists of."""
    if leaf.is_nested:
        return list(leaf.unbind())
    return memory_of(leaf) or [leaf]


def _contiguity(leaf: _costs.Leaf) -> str:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided:
            return "-"
        contiguous, strides = leaf.is_contiguous(), leaf.stride()
    else:
        contiguous, strides = leaf.flags.c_contiguous, tuple(step // max(leaf.itemsize, 1) for step in leaf.strides)
    if contiguous:
        return "yes"
    return "dense" if _is_dense(leaf.shape, strides) else "no"


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps or overlaps, in some order of the dimensions."""
    steps = sorted((step, size) for step, size in zip(strides, shape, strict=True) if size != 1)
    return all(step == math.prod(size for _, size in steps[:index]) for index, (step, _) in enumerate(steps))


def _storage(leaf: _costs.Leaf) -> int:
    """Return the address of the memory that a leaf is a part of; 0 if there is none to name."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.device.type == "meta":
            return 0
        try:
            return leaf.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a subclass without storage
            return 0
    while isinstance(leaf.base, np.ndarray):
        leaf = leaf.base
    return int(leaf.__array_interface__["data"][0]) if leaf.nbytes else 0
