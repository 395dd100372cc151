"""What a batch is made of: containers and leaves, the classes that are known, the walk.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). Classes become known by `_registry`; those of other
libraries are looked up in `_libraries`. `walk` takes it apart into its leaves and its
`Structure`, which puts others together again. Knows no slab.
"""

from ._attributes import has_attributes_only, stored_attributes
from ._keep import WRAPPERS, Keep, Whole
from ._keeping import Keeping
from ._leaves import ATOM_TYPES, from_array, holds_tensor, is_atom, tensors_in
from ._nodes import (
    StagingNode,
    is_container,
    moves_as_a_whole,
    moves_in_silence,
    register_node,
    register_tensor,
)
from ._structure import Structure, walk

__all__ = [
    "ATOM_TYPES",
    "WRAPPERS",
    "Keep",
    "Keeping",
    "StagingNode",
    "Structure",
    "Whole",
    "from_array",
    "has_attributes_only",
    "holds_tensor",
    "is_atom",
    "is_container",
    "moves_as_a_whole",
    "moves_in_silence",
    "register_node",
    "register_tensor",
    "stored_attributes",
    "tensors_in",
    "walk",
]
