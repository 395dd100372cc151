"""Layouts without leaves, as a loader's workers send them: once, and by number from then on."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ._layout import Layout
from ._nodes import node_types
from ._plan import TABLES, Plan


def structure_key(planned: Plan) -> tuple[Any, ...]:
    """Return what two batches must have in common to be put together by the same structure.

    More than equality of treespecs, which ignores the order in which a dict was filled; their pickles do not.
    """
    return pickle.dumps(planned.treespec), planned.order, planned.table.columns


def dump_structure(planned: Plan) -> bytes:
    """Pickle a plan without its leaves, for another process."""
    nodes = node_types(planned.treespec)  # unpickled first, so that the structure finds its classes registered
    columns = planned.table.columns
    columns = columns._replace(shapes=tuple(map(tuple, columns.shapes)))  # torch.Size is slow to pickle
    return pickle.dumps((nodes, planned.treespec, columns, planned.order))


def load_structure(data: bytes) -> Layout:
    """Return the layout, without leaves, of the plan that `dump_structure` pickled; see `with_leaves`."""
    _, treespec, columns, order = pickle.loads(data)
    return Layout(TABLES.table_of(columns), treespec, order, (), ())


def with_leaves(layout: Layout, rest: Sequence[Any], passthrough: Sequence[torch.Tensor]) -> Layout:
    """Return a layout with other leaves in the place of those that do not live in the slab."""
    return Layout(layout._table, layout._treespec, layout._order, rest, passthrough)
