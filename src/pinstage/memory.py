"""Memory resources: where the slabs of a pool come from.

To write your own resource, implement `MemoryResource`, and return each block as ``Block(ptr,
nbytes)``.
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
