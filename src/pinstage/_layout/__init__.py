"""Where each leaf of a nested batch lives in a slab.

A batch is taken apart into its structure and its leaves (`_tree`), and these are described: the `Table` has a row for
each, with its place in the slab, aligned, disjoint, in the order of the batch. A `Layout` is a structure and a table.
It depends on structure and shapes only, never on values, and holds nothing of a batch. Knows shapes, counts no bytes of
any pool, touches no device.
"""

from ._blocks import Blocks, OwnStorage, Sharing, check_own_storage, make_blocks, make_publicly, sharing_of
from ._describe import Described, IsContainer, Parts, contiguous_stride, dense_stride, describe, take_apart
from ._dtypes import ALIGNMENT, DTYPES, INTEGERS
from ._layout import Layout, Slot, check_content, content_of
from ._pack import HostSlab, compute_lazy_leaves, pack
from ._table import PACKED, RowKind, Table
from ._views import cut, view_of

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "INTEGERS",
    "IsContainer",
    "PACKED",
    "Blocks",
    "Described",
    "HostSlab",
    "Layout",
    "OwnStorage",
    "Parts",
    "RowKind",
    "Sharing",
    "Slot",
    "Table",
    "check_content",
    "check_own_storage",
    "compute_lazy_leaves",
    "content_of",
    "contiguous_stride",
    "cut",
    "dense_stride",
    "describe",
    "make_blocks",
    "make_publicly",
    "pack",
    "sharing_of",
    "view_of",
    "take_apart",
]
