"""Existing tensors that a batch is copied into (`out=`): their checks, and torch's copy.

::

    batch --staged--> new tensors --one copy on the current stream--> out

So a batch crosses the bus while `out` is still in use, for example by a CUDA graph that reads the
batch before it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from .._batch import (
    COPIED_AS_THEY_ARE,
    DTYPES,
    Parts,
    RowKind,
    Structure,
    as_integers,
    as_tensor,
    describe,
    match,
    unwrapped,
    walk,
)
from .._compat.calls import copy_each
from .._compat.views import range_of
from ..errors import LayoutError


class Destinations:
    """Existing tensors, checked against a batch. Nothing is written before `fill`.

    Args:
        parts: the batch's parts, as `detached` returns them.
        existing: a destination for each tensor and array of the batch; other leaves are ignored.
        device: where the destinations have to be.

    Raises:
        LayoutError: a destination isn't a tensor, has another shape, is on another device, or has
            no memory; or the leaf is an object that moves by its own ``.to()``.
    """

    def __init__(self, parts: Parts, existing: list[Any], device: torch.device) -> None:
        self._parts, self._existing = parts, existing
        self._alike, self._others = match(parts.table, existing, device)
        for index in self._others:
            why = _why_not(as_tensor(unwrapped(parts.leaves[index])), existing[index], device)
            if why is not None:
                path = parts.structure.path(index)
                raise LayoutError(f"out{path} {why}", path)

    def fill(self, leaves: list[Any], besides: Collection[int] = ()) -> None:
        """Copy leaves into their destinations, on the current stream.

        Args:
            leaves: the batch's leaves, on the device.
            besides: numbers of leaves that are in place already.
        """
        for (code, its), group in self._alike.items():
            rows = [index for index in group if index not in besides] if besides else group
            if not rows:
                continue
            places = [self._existing[index] for index in rows]
            sources = [leaves[index] for index in rows]
            # Bits that torch would not copy as they are.
            if code == its and DTYPES[code] not in COPIED_AS_THEY_ARE:
                places, sources = [*map(as_integers, places)], [*map(as_integers, sources)]
            copy_each(places, sources)
        for index in self._others:
            self._existing[index].copy_(leaves[index])

    def result(self) -> Any:
        """Return the batch, with the destinations in the places of its tensors."""
        parts, leaves = self._parts, self._existing
        if parts.table.others:
            leaves = list(leaves)
            for index in parts.table.positions(RowKind.OTHER):
                leaves[index] = unwrapped(parts.leaves[index])
        return parts.structure.rebuild(leaves)


def in_order(structure: Structure, out: Any) -> list[Any]:
    """Return the leaves of `out`, in the batch's order.

    Raises:
        LayoutError: `out` has another structure.
    """
    leaves, its_own = walk(out)
    if its_own.matches(structure):  # leaves are in the order of sorted keys
        return leaves
    paths, theirs = structure.paths(), its_own.paths()
    missing = [path for path in paths if path not in theirs]
    unknown = [path for path in theirs if path not in paths]
    which = ""
    if missing:
        which = f"; batch{missing[0]} is not in out"
    elif unknown:
        which = f"; out{unknown[0]} is not in the batch"
    elif str(its_own) == str(structure):
        which = "; the keys of a container are in another order, or its context differs"
    raise LayoutError(
        f"out's structure differs from the batch's: {its_own} instead of {structure}{which}; "
        "pass a nest of the same containers and keys, such as an earlier result of to_device",
        (missing + unknown + [""])[0],
    )


def _why_not(source: Any, destination: Any, device: torch.device) -> str | None:
    """Return why torch can't copy a leaf to a destination, and what to do; None if it may try."""
    if not isinstance(destination, torch.Tensor):
        return f"is a {type(destination).__name__}, but the batch has a tensor there; pass a tensor"
    if not isinstance(source, torch.Tensor):
        return (
            f"cannot take a {type(source).__name__}, which moves by its own .to(); register_node() "
            "its class, or leave it out of both"
        )
    if source.is_nested or destination.is_nested:
        return "is, or would take, a nested tensor; pass its values and offsets"
    if destination.shape != source.shape:
        return (
            f"has shape {list(destination.shape)}, but the batch has {list(source.shape)} there; "
            "pass that shape"
        )
    if destination.device != device:
        return (
            f"is on {destination.device}, but the call writes to {device}; pass a tensor on that "
            "device"
        )
    for whose, tensor in (("", destination), ("cannot take a tensor that ", source)):
        needed = range_of(tensor)[1] if tensor.layout is torch.strided else 0
        # Torch's copy would crash.
        if needed and (nbytes := tensor.untyped_storage().nbytes()) < needed:
            return (
                f"{whose}lacks the memory for its shape: {needed} bytes of {list(tensor.shape)} in "
                f"a storage of {nbytes}; resize its storage"
            )
    return None


def detached(parts: Parts, device: torch.device, *, arrays: bool = True) -> Parts:
    """Detach the tensors of a batch that require grad, and describe it again if there are some.

    Args:
        parts: the batch's parts.
        device: see `describe`.
        arrays: see `describe`.
    """
    if not parts.table.moved:
        return parts
    leaves, has_changed = list(parts.leaves), False
    for index in parts.table.positions(RowKind.MOVED):
        tensor = unwrapped(leaves[index])
        if isinstance(tensor, torch.Tensor) and (
            tensor.requires_grad or type(tensor) is torch.nn.Parameter
        ):
            leaves[index], has_changed = tensor.detach(), True
    return describe(leaves, parts.structure, device, arrays=arrays) if has_changed else parts


def with_own_copies(parts: Parts, device: torch.device) -> Parts:
    """Copy the tensors of a batch that are on the device already, on the current stream.

    So all sources have been read before the first destination is written, which may be one of them.
    """
    if not parts.table.moved:
        return parts
    leaves = list(parts.leaves)
    for index in parts.table.positions(RowKind.MOVED):
        tensor = unwrapped(leaves[index])
        if isinstance(tensor, torch.Tensor) and tensor.device == device:
            leaves[index] = tensor.clone()
    return parts._replace(leaves=leaves)
