"""What the author of a memory resource needs: a `MemoryResource` makes each `Block` by ``Block(ptr, nbytes)``."""

from ._memory import Block, MemoryResource

__all__ = ["Block", "MemoryResource"]
