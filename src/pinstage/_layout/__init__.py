"""Where each leaf of a nested batch lives in a slab.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). A `Layout` is its offset table: a `Slot` for each
leaf, aligned, disjoint, leaves of one kind side by side. It depends on the structure and the shapes only, never on
values, so it is computed once for batches that look alike. Knows shapes, counts no bytes of any pool, touches no
device.
"""

from ._fragments import Piece
from ._layout import Layout, Plan, Slot, plan
from ._leaves import ALIGNMENT
from ._moves import Moves
from ._nodes import StagingNode, register_node
from ._table import Table

__all__ = [
    "ALIGNMENT",
    "Layout",
    "Moves",
    "Piece",
    "Plan",
    "Slot",
    "StagingNode",
    "Table",
    "plan",
    "register_node",
]
