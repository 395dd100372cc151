"""Where each leaf of a nested batch lives in a slab.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). A `Layout` is its offset table: a `Slot` for each
leaf, aligned, disjoint, leaves of one kind side by side. It depends on the structure and the shapes only, never on
values, so it is computed once for batches that look alike. Knows shapes, counts no bytes of any pool, touches no
device.
"""

from ._cache import put_bounded
from ._fragments import Chunk, Piece
from ._gather import duplicate, flat, gather
from ._layout import Layout, Slot, cut, put_together
from ._leaves import ALIGNMENT, packable
from ._moves import Moves
from ._nodes import StagingNode, register_node
from ._parts import Parts
from ._plan import Plan, plan, table_of, take_apart
from ._recall import Recall, guards_of
from ._structures import dump_structure, load_structure, structure_key, with_leaves
from ._table import Table

__all__ = [
    "ALIGNMENT",
    "Chunk",
    "Layout",
    "Moves",
    "Parts",
    "Piece",
    "Plan",
    "Recall",
    "Slot",
    "StagingNode",
    "Table",
    "cut",
    "dump_structure",
    "duplicate",
    "flat",
    "gather",
    "guards_of",
    "load_structure",
    "packable",
    "plan",
    "put_bounded",
    "put_together",
    "register_node",
    "structure_key",
    "table_of",
    "take_apart",
    "with_leaves",
]
