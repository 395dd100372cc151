"""Existing tensors that a batch is copied into (`out=`): their checks, and torch's copy.

::

    batch --staged--> new tensors --one copy on the current stream--> out

So a batch crosses the bus while `out` is still in use, for example by a CUDA graph that reads the
batch before it.
"""

from __future__ import annotations

from typing import Any

import torch

from .._batch import (
    COPIED_AS_THEY_ARE,
    DTYPES,
    Matched,
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

_EXACT = COPIED_AS_THEY_ARE - {torch.float16, torch.bfloat16}
"""Dtypes whose bits torch copies as they are, also in few kernels on a GPU: these compute with half
precision in float32, which changes NaNs. Others are copied as integers."""


def prepare(parts: Parts, existing: list[Any], device: torch.device) -> Matched:
    """Check that torch can copy a batch into existing tensors. Nothing is written before `fill`.

    The leaves that are on the device already are replaced by copies, made on the current stream: so
    all sources have been read before the first destination is written, which may be one of them.

    Args:
        parts: the batch's parts, detached.
        existing: see `match`.
        device: where the existing tensors have to be.

    Returns:
        What `match` returns, for `fill`.

    Raises:
        LayoutError: a destination isn't a tensor, has another shape, is on another device, or has
            no memory; or the leaf is an object that moves by its own ``.to()``.
    """
    matched = match(parts.leaves, existing, parts.table, device)
    for index in matched[1]:
        why = _why_not(as_tensor(unwrapped(parts.leaves[index])), existing[index], device)
        if why is not None:
            path = parts.structure.path(index)
            raise LayoutError(f"out{path} {why}", path)
    for index, tensor in _moved(parts).items():
        if tensor.device == device:
            parts.leaves[index] = tensor.clone()
    return matched


def fill(existing: list[Any], leaves: list[Any], matched: Matched) -> None:
    """Copy leaves into existing tensors, on the current stream.

    Args:
        existing: the tensors, in the places of the leaves.
        leaves: the batch's leaves, on the device.
        matched: what `match` returned for them.
    """
    alike, others = matched
    for (code, its), rows in alike.items():
        places, sources = existing, leaves
        if len(rows) < len(leaves):  # else they are all leaves
            places, sources = ([some[index] for index in rows] for some in (existing, leaves))
        if code == its and DTYPES[code] not in _EXACT:
            places, sources = [*map(as_integers, places)], [*map(as_integers, sources)]
        if rows:
            copy_each(places, sources)
    for index in others:
        existing[index].copy_(leaves[index])


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
    attached = {
        index: tensor
        for index, tensor in _moved(parts).items()
        if tensor.requires_grad or type(tensor) is torch.nn.Parameter
    }
    if not attached:
        return parts
    for index, tensor in attached.items():
        parts.leaves[index] = tensor.detach()
    return describe(parts.leaves, parts.structure, device, arrays=arrays)


def _moved(parts: Parts) -> dict[int, torch.Tensor]:
    """Return the tensors that move by their own ``.to()``."""
    if not parts.table.moved:
        return {}
    moved = {i: unwrapped(parts.leaves[i]) for i in parts.table.positions(RowKind.MOVED)}
    return {i: leaf for i, leaf in moved.items() if isinstance(leaf, torch.Tensor)}
