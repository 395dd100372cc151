"""What the leaves of a tree are: tensors, each once, and the rest. Told by type, in a few passes over all leaves."""

from __future__ import annotations

from itertools import compress, count
from operator import not_
from typing import Any

import numpy as np
import optree
import torch

from .._errors import LayoutError
from ._leaves import KINDS, Kind, from_array, holds_tensor, tensors_over
from ._nodes import path_text
from ._parts import Parts

_ONLY_TENSORS = {torch.Tensor}


def sort_out(leaves: list[Any], treespec: optree.PyTreeSpec, types: set[type], *, arrays: bool) -> Parts:
    """Tell tensors and arrays, each once, from the rest; refuse what hides tensors.

    Args:
        leaves: of a tree.
        treespec: its structure.
        types: of the leaves; there may be more.
        arrays: whether numpy arrays count as tensors; else they are part of the rest.

    Raises:
        LayoutError: an object that holds tensors is no known container, or an array cannot become a tensor.
    """
    if types == _ONLY_TENSORS:
        tensors, places = _without_repeats(leaves, leaves)
        return Parts(treespec, tensors, [], None if places is None else tuple(places))
    values, unsure = leaves, None
    if arrays and _of(types, Kind.ARRAY):
        values, unsure = _with_tensors_for_arrays(leaves, treespec, types)
        types = set(map(type, values))
    is_tensor = list(map(_of(types, Kind.TENSOR).__contains__, map(type, values)))
    if all(is_tensor):
        tensors, places = _without_repeats(values, leaves)
        return Parts(treespec, tensors, [], None if places is None else tuple(places), unsure)
    suspects = _of(types, Kind.ARRAY, Kind.OPAQUE)
    if suspects:
        _refuse_hidden(values, treespec, suspects)
    rest = list(compress(values, map(not_, is_tensor)))
    tensors, places = _without_repeats(list(compress(values, is_tensor)), list(compress(leaves, is_tensor)))
    of_tensors, of_rest = iter(places or range(len(tensors))), count(len(tensors))
    order = tuple([next(of_tensors) if tensor else next(of_rest) for tensor in is_tensor])
    return Parts(treespec, tensors, rest, order, unsure)


def _of(types: set[type], *kinds: Kind) -> set[type]:
    """Return those types that are of some kinds."""
    return {cls for cls in types if KINDS[cls] in kinds}


def _without_repeats(tensors: list[torch.Tensor], leaves: list[Any]) -> tuple[list[torch.Tensor], list[int] | None]:
    """Keep each tensor once, by the identity of the leaf that it was; return where each leaf's tensor stands then."""
    identities = list(map(id, leaves))
    if len(set(identities)) == len(identities):
        return tensors, None
    first: dict[int, int] = {}
    kept: list[torch.Tensor] = []
    places = []
    for identity, tensor in zip(identities, tensors, strict=True):
        place = first.setdefault(identity, len(kept))
        if place == len(kept):
            kept.append(tensor)
        places.append(place)
    return kept, places


def _with_tensors_for_arrays(
    leaves: list[Any], treespec: optree.PyTreeSpec, types: set[type]
) -> tuple[list[Any], list[torch.Tensor] | None]:
    """Put tensors in the place of arrays that are numeric.

    Returns:
        What there is then, and which of the tensors may be of any kind, as `Parts.unsure` has it.
    """
    is_array = list(map(_of(types, Kind.ARRAY).__contains__, map(type, leaves)))
    tensors = tensors_over(list(compress(leaves, is_array)))
    if tensors is not None:
        each = iter(tensors)
        values = [next(each) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)]
        return values, list(compress(leaves, map(_of(types, Kind.TENSOR).__contains__, map(type, leaves))))
    values = leaves.copy()
    for position in compress(range(len(leaves)), is_array):
        tensor = _tensor_of(leaves[position], treespec, position)
        if tensor is not None:
            values[position] = tensor
    return values, None


def _refuse_hidden(leaves: list[Any], treespec: optree.PyTreeSpec, types: set[type]) -> None:
    """Search leaves of some types for tensors."""
    for position, leaf in enumerate(leaves):
        if type(leaf) in types and _hides_tensor(leaf, treespec, position):
            raise _opaque(leaf, treespec, position)


def _tensor_of(array: np.ndarray[Any, Any], treespec: optree.PyTreeSpec, position: int) -> torch.Tensor | None:
    try:
        return from_array(array)
    except TypeError as error:
        path = path_text(treespec, position)
        raise LayoutError(
            f"batch{path} cannot be staged: numpy {type(array).__name__} {array.dtype} {list(array.shape)}: {error}; "
            "convert it to a dtype that torch has",
            path,
        ) from error


def _hides_tensor(leaf: Any, treespec: optree.PyTreeSpec, position: int) -> bool:
    try:
        return holds_tensor(leaf)
    except OverflowError as error:
        path, name = path_text(treespec, position), type(leaf).__qualname__
        raise LayoutError(
            f"batch{path} is no known container and too large to be searched for tensors: {name}, {error}; make it "
            f"known with pinstage.register_node({name})",
            path,
        ) from error


def _opaque(leaf: Any, treespec: optree.PyTreeSpec, position: int) -> LayoutError:
    path, name = path_text(treespec, position), type(leaf).__qualname__
    if isinstance(leaf, np.ndarray | set | frozenset):
        return LayoutError(f"batch{path} holds tensors in {name}, which cannot be staged; use a list", path)
    return LayoutError(
        f"batch{path} holds tensors and is no known container: {type(leaf).__module__}.{name}; make it known with "
        f"pinstage.register_node({name}), or register_node({name}, flatten, unflatten), or give it tree_flatten and "
        "tree_unflatten",
        path,
    )
