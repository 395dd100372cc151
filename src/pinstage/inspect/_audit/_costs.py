"""What moving a batch costs: leaf by leaf, and as one slab."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import pinstage as ps

from .._bus import Bus

_PACK_LIMIT_BYTES = 1 << 30
"""A larger batch is not packed just to see how long it takes: it would need its size in memory once more."""

Leaf = torch.Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class LeafCopies:
    """What ``.to(device)`` on each leaf would do.

    Attributes:
        copies: host-to-device copies it would issue; a leaf in two places is copied twice, an empty one not at all.
        nbytes: bytes that they carry.
        seconds: what they take on the bus with the leaves as they are; None without a bus.
        seconds_pinned: the same if every leaf were page-locked first, pinning itself not counted.
    """

    copies: int
    nbytes: int
    seconds: float | None
    seconds_pinned: float | None


@dataclass(frozen=True)
class SlabCopy:
    """What one slab would do.

    Attributes:
        copies: host-to-device copies: one, and one for each leaf that cannot be packed.
        nbytes: bytes of the slab, padding included.
        padding_bytes: of them, between the leaves.
        unpackable: leaves that travel by their own ``.to()``.
        pack_seconds: measured: gathering this batch into a slab, by one thread; None if it is too large to try.
        seconds: packing, and the copy on the bus; None without a bus or without a measurement.
        error: why `pinstage` would not take the batch as it is; None if it would.
    """

    copies: int
    nbytes: int
    padding_bytes: int
    unpackable: int
    pack_seconds: float | None
    seconds: float | None
    error: str | None


def of_leaves(sizes: Sequence[tuple[int, bool]], bus: Bus | None) -> LeafCopies:
    """Add up the copies of leaves, given as bytes and whether they are page-locked."""
    moved = [(nbytes, pinned) for nbytes, pinned in sizes if nbytes]
    seconds = pinned_seconds = None
    if bus is not None:
        seconds = sum(bus.seconds(nbytes, pinned=pinned) for nbytes, pinned in moved)
        pinned_seconds = sum(bus.seconds(nbytes, pinned=True) for nbytes, _ in moved)
    return LeafCopies(len(moved), sum(nbytes for nbytes, _ in moved), seconds, pinned_seconds)


def of_slab(batch: Any, leaves: Sequence[Leaf], bus: Bus | None) -> SlabCopy:
    """Find what staging a batch as one slab would cost.

    Args:
        batch: the batch; whether it can be staged as it is.
        leaves: its tensors and numeric arrays on the host: what a slab would hold once all classes are registered.
        bus: prices the copy.
    """
    error = None
    try:
        ps.Layout.of(batch)
    except ps.LayoutError as reason:
        error = str(reason)
    staged = {id(leaf): leaf for leaf in leaves}.values()
    packed = [leaf for leaf in staged if _is_packable(leaf)]
    layout = ps.Layout.of(packed)
    payload = sum(leaf.nbytes for leaf in packed)
    unpackable = len(staged) - len(packed)
    pack_seconds = _pack_seconds(layout, packed) if layout.nbytes <= _PACK_LIMIT_BYTES else None
    seconds = None
    if bus is not None and pack_seconds is not None:
        seconds = pack_seconds + bus.seconds(layout.nbytes, pinned=True)
    copies = bool(layout.nbytes) + unpackable
    return SlabCopy(copies, layout.nbytes, layout.nbytes - payload, unpackable, pack_seconds, seconds, error)


def becomes_tensor(leaf: Leaf) -> bool:
    """Whether it is a tensor, or an array that can become one; strings, dates and records are not moved."""
    return isinstance(leaf, torch.Tensor) or leaf.dtype.kind in "biufc"


def _is_packable(leaf: Leaf) -> bool:
    try:
        return bool(ps.Layout.of([leaf]).slots)
    except ps.LayoutError:  # a numeric array that torch has no dtype for: named by the error of the whole batch
        return False


def _pack_seconds(layout: ps.Layout, leaves: list[Leaf]) -> float:
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    took = []
    for _ in range(3):  # the first one meets the slab's pages
        began = time.perf_counter()
        layout.pack(leaves, slab)
        took.append(time.perf_counter() - began)
    return min(took)
