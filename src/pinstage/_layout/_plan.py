"""A batch taken apart, and `plan`: what staging needs of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import optree
import torch

from .._errors import LayoutError
from .._steps import step
from ._cache import TableCache
from ._leaves import KINDS, Kind, from_array, holds_tensor
from ._nodes import path_text
from ._parts import Parts
from ._recall import Recall
from ._table import Place, Table, columns_of
from ._walk import walk

TABLES = TableCache()
"""The process's offset tables."""

os.register_at_fork(after_in_child=TABLES.unlock)

_PLANS = Recall[Table]()

V = TypeVar("V")

_ONLY_TENSORS = {torch.Tensor}


class Plan(NamedTuple):
    """A batch taken apart: what goes into the slab, what does not, and how it is put together again."""

    table: Table
    treespec: optree.PyTreeSpec
    tensors: list[torch.Tensor]
    """Tensors and arrays (as tensors), each once."""
    rest: list[Any]
    """Leaves that are neither."""
    order: tuple[int, ...] | None
    """Where each leaf stands in ``[*tensors, *rest]``; None if every leaf is a tensor met once."""

    def passthrough(self) -> list[torch.Tensor]:
        """Return the tensors that travel by their own ``.to()``."""
        return [self.tensors[position] for position in self.table.columns.passthrough]


def plan(batch: Any) -> Plan:
    """Take a batch apart and find its offset table, computing it if no batch like this was seen lately.

    Raises:
        LayoutError: an object that holds tensors is no known container, an array cannot become a tensor, or the batch
            refers to itself.
    """
    parts, table = take_apart(batch, _PLANS, _describe)
    return Plan(table, *parts)


def _describe(parts: Parts) -> tuple[Table, Table | None]:
    table = table_of(parts.tensors, "cpu")
    return table, None if table.columns.passthrough else table


def take_apart(
    tree: Any, recall: Recall[V], describe: Callable[[Parts], tuple[V, Table | None]], *, arrays: bool = True
) -> tuple[Parts, V]:
    """Take a tree apart into its structure, its tensors and the rest, and describe these parts.

    Args:
        tree: containers with anything in them.
        recall: of trees described before; one that looks like one of them is not described again.
        describe: returns a description that holds for all trees that look alike, and a table of the tensors, or of some
            of them, or None if trees like this are not to be recognised.
        arrays: whether numpy arrays count as tensors; else they are part of the rest.

    Returns:
        The parts and their description.

    Raises:
        LayoutError: an object that holds tensors is no known container, an array cannot become a tensor, or the tree
            refers to itself.
    """
    with step("walk"):
        leaves, treespec, leaf_types = walk(tree)
    with step("describe"):
        found = recall.find(leaves, treespec)
        if found is not None:
            return found
        if leaf_types == _ONLY_TENSORS:
            tensors, places = _without_repeats(leaves, leaves)
            parts = Parts(treespec, tensors, [], None if places is None else tuple(places))
        else:
            parts = Parts(treespec, *_sort_out(leaves, treespec, arrays=arrays))
        description, table = describe(parts)
        if table is not None:
            recall.learn(leaves, parts, table, description)
        return parts, description


def table_of(tensors: list[torch.Tensor], place: Place) -> Table:
    """Find the offset table of tensors that are on the CPU, or on one GPU."""
    return TABLES.table_of(columns_of(tensors, place))


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


def _sort_out(
    leaves: list[Any], treespec: optree.PyTreeSpec, *, arrays: bool
) -> tuple[list[torch.Tensor], list[Any], tuple[int, ...] | None]:
    """Tell tensors and arrays, each once, from the rest; refuse what hides tensors."""
    positions: list[int] = []
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    rest_positions: list[int] = []
    for position, leaf in enumerate(leaves):
        kind = KINDS[type(leaf)]
        tensor = leaf if kind is Kind.TENSOR else None
        if kind is Kind.ARRAY and arrays:
            tensor = _tensor_of(leaf, treespec, position)
        if tensor is not None:
            positions.append(position)
            tensors.append(tensor)
        elif kind is not Kind.ATOM and _hides_tensor(leaf, treespec, position):
            raise _opaque(leaf, treespec, position)
        else:
            rest_positions.append(position)
            rest.append(leaf)
    kept, places = _without_repeats(tensors, [leaves[position] for position in positions] if rest else leaves)
    if not rest:
        return kept, rest, None if places is None else tuple(places)
    order = [0] * len(leaves)
    for position, place in zip(positions, places or range(len(positions)), strict=True):
        order[position] = place
    for position, place in zip(rest_positions, range(len(kept), len(kept) + len(rest)), strict=True):
        order[position] = place
    return kept, rest, tuple(order)


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
