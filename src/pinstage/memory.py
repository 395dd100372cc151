"""Memory resources: where the slabs of a pool come from.

For a resource of your own, implement `MemoryResource`, and make each `Block` by ``Block(ptr, nbytes)``.
"""

from ._memory import (
    Block,
    HostAllocMemory,
    MemoryResource,
    PageableMemory,
    RegisteredMemory,
    SharedMemory,
    default_memory,
)

__all__ = [
    "Block",
    "HostAllocMemory",
    "MemoryResource",
    "PageableMemory",
    "RegisteredMemory",
    "SharedMemory",
    "default_memory",
]
