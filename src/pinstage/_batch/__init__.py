"""What a batch is made of, and where each leaf is stored.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). `walk` takes it apart into its leaves and its
`Structure`, which puts others together again; classes of other libraries are looked up in `_libraries`. The leaves are
described: the `Table` has a row for each, with its place in the slab, aligned and disjoint. A `Layout` is a structure
and a table; it depends on structure and shapes only, never on values, and holds nothing of a batch. `_packing` fills a
slab by several threads, in chunks that travel meanwhile; `_blocks` makes the tensors that leaves become; `_gather`
collects leaves on a device.

Knows shapes, counts no bytes of any pool.
"""

from ._attributes import has_attributes_only, stored_attributes
from ._blocks import Blocks, OwnStorage, Sharing, check_own_storage, make_blocks, make_publicly, sharing_of
from ._borrowing import Borrowed, borrow
from ._describe import Described, IsContainer, Parts, contiguous_stride, dense_stride, describe, take_apart
from ._dtypes import ALIGNMENT, DTYPES, INTEGERS
from ._gather import DIRECT_BYTES, Gathering, arrange, duplicate, flat, gather
from ._keeping import Keeping
from ._layout import Layout, Slot, check_content, content_of
from ._leaves import ATOM_TYPES, from_array, holds_tensor, is_atom, tensors_in
from ._nodes import StagingNode, is_container, moves_as_a_whole, moves_in_silence, register_node, register_tensor
from ._on_host import WRAPPERS, OnHost, Whole, on_host
from ._pack import HostSlab, compute_lazy_leaves, pack
from ._packing import most_threads, reuses_places, start_packing
from ._structure import Structure, walk
from ._table import PACKED, RowKind, Table
from ._views import cut, view_of
from ._windows import windows

__all__ = [
    "ALIGNMENT",
    "ATOM_TYPES",
    "Blocks",
    "Borrowed",
    "DIRECT_BYTES",
    "DTYPES",
    "Described",
    "Gathering",
    "HostSlab",
    "INTEGERS",
    "IsContainer",
    "Keeping",
    "Layout",
    "OwnStorage",
    "OnHost",
    "PACKED",
    "Parts",
    "RowKind",
    "Sharing",
    "Slot",
    "StagingNode",
    "Structure",
    "Table",
    "WRAPPERS",
    "Whole",
    "arrange",
    "borrow",
    "check_content",
    "check_own_storage",
    "compute_lazy_leaves",
    "content_of",
    "contiguous_stride",
    "cut",
    "dense_stride",
    "describe",
    "duplicate",
    "flat",
    "from_array",
    "gather",
    "has_attributes_only",
    "holds_tensor",
    "is_atom",
    "is_container",
    "make_blocks",
    "make_publicly",
    "most_threads",
    "moves_as_a_whole",
    "moves_in_silence",
    "on_host",
    "pack",
    "register_node",
    "register_tensor",
    "reuses_places",
    "sharing_of",
    "start_packing",
    "stored_attributes",
    "take_apart",
    "tensors_in",
    "view_of",
    "walk",
    "windows",
]
