"""A batch taken apart, and `plan`: what staging needs of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import optree
import torch

from .._steps import step
from ._cache import TableCache
from ._parts import Parts
from ._ragged import Ragged
from ._recall import Recall
from ._sorting import sort_out
from ._table import Place, Table, columns_of
from ._walk import walk

TABLES = TableCache()
"""The process's offset tables."""

os.register_at_fork(after_in_child=TABLES.unlock)


class _Plans(Recall[Table]):
    """Of batches, those that look alike, and those that look alike but for the length of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._ragged = Ragged(TABLES)

    def find(self, leaves: list[Any], treespec: optree.PyTreeSpec) -> tuple[Parts, Table] | None:
        found = super().find(leaves, treespec)
        if found is None:
            found = self._ragged.find(leaves, treespec)
            if found is not None:
                super().learn(leaves, *found, found[1])
        return found

    def learn(self, leaves: list[Any], parts: Parts, table: Table, value: Table) -> None:
        super().learn(leaves, parts, table, value)
        self._ragged.learn(leaves, parts, table)


_PLANS = _Plans()

V = TypeVar("V")


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
    return Plan(table, parts.treespec, parts.tensors, parts.rest, parts.order)


def _describe(parts: Parts) -> tuple[Table, Table | None]:
    table = table_of(parts.tensors, "cpu", parts.unsure)
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
        parts = sort_out(leaves, treespec, leaf_types, arrays=arrays)
        description, table = describe(parts)
        if table is not None:
            recall.learn(leaves, parts, table, description)
        return parts, description


def table_of(tensors: list[torch.Tensor], place: Place, unsure: list[torch.Tensor] | None = None) -> Table:
    """Find the offset table of tensors that are on the CPU, or on one GPU; for `unsure` see `Parts`."""
    return TABLES.table_of(columns_of(tensors, place, unsure))
