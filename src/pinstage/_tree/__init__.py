"""What a batch is made of: containers and leaves, the classes that are known, the walk.

A batch is a tree of containers (`_nodes`) with leaves (`_leaves`). `walk` takes it apart into its leaves and its
`Structure`, which puts others together again. Knows no slab.
"""

from ._leaves import ATOM_TYPES, KINDS, Kind, from_array, holds_tensor
from ._nodes import StagingNode, is_container_by_now, learn_containers, register_node, stored_attributes
from ._structure import Structure, walk

__all__ = [
    "ATOM_TYPES",
    "KINDS",
    "Kind",
    "StagingNode",
    "Structure",
    "from_array",
    "holds_tensor",
    "is_container_by_now",
    "learn_containers",
    "register_node",
    "stored_attributes",
    "walk",
]
