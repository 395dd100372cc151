"""Batches: their structure, and where each leaf is stored.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). `walk` takes it apart into its
leaves and its `Structure`, which rebuilds a batch from other leaves. Classes of other libraries are
looked up in `_libraries`. `describe` makes the `Table`, which has a row for each leaf, with its
place in the slab; places are aligned and disjoint. A `Layout` is a structure and a table. It
depends on structure and shapes only, never on values, and holds nothing of a batch. `_pack` fills a
slab with several threads, in chunks that are sent meanwhile; `_blocks` makes the tensors that
leaves become; `_gather` collects leaves on a device. `_rows` are leaves whose bytes are in many
places until they are packed.

This package knows shapes, and counts no bytes of any pool.
"""

from ._arrays import Array, Stack, as_tensor
from ._attributes import stored_attributes
from ._blocks import (
    Blocks,
    Matched,
    OwnStorage,
    Sharing,
    check_own_storage,
    cut,
    make_blocks,
    match,
    sharing_of,
)
from ._describe import (
    FindLocked,
    IsContainer,
    Keeping,
    Parts,
    contiguous_stride,
    dense_stride,
    describe,
    some_paths,
    take_apart,
)
from ._gather import COPIED_AS_THEY_ARE, Gathering, arrange, as_integers, flat, gather
from ._layout import Layout, Slot, check_content, content_of
from ._leaves import (
    ATOM_TYPES,
    WRAPPERS,
    Whole,
    is_atom,
    on_host,
    tensors_in,
    unwrapped,
)
from ._nodes import StagingNode, moves_in_silence, register_node, register_tensor
from ._pack import (
    most_threads,
    pack,
    pack_by_threads,
    reuses_places,
    start_packing,
    unpack,
    windows,
)
from ._refusals import SOURCES
from ._rows import Rows, integers_of, rows
from ._structure import Structure, walk
from ._table import ALIGNMENT, DTYPES, PACKED, Place, RowKind, Table
