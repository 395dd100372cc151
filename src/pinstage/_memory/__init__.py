"""Where host bytes come from: page-locked, registered, shared, pageable.

A *memory resource* allocates and takes back *blocks*: page-aligned runs of host memory. Four kinds differ in what
starts them up and who else can see them, not in the speed of a copy; ``default_memory`` picks. The rest of the
package sees resources only through the ``MemoryResource`` protocol, so it runs, and is tested, without a GPU.

Two promises hold for every kind. *A failed allocation changes nothing*: what was mapped is unmapped, what was
registered is unregistered, and no CUDA error is left behind for a later, unrelated call to trip over. *A leak before a
dangling pointer*: when CUDA will not give a block up, the block is kept rather than unmapped under the device.

Importing this room pins nothing, imports no CUDA bindings, and initialises no CUDA.
"""

from ._cuda import CudaError, as_called_here, disregard_captures, start_copy, why_unusable
from ._default import default_memory
from ._host_alloc import HostAllocMemory
from ._limits import auto_max_bytes, cap_bytes, remedy
from ._pageable import PageableMemory
from ._registered import RegisteredMemory
from ._resource import Block, MemoryResource
from ._shared import SharedMapping, SharedMemory

REFUSALS = (MemoryError, OSError, CudaError)
"""What a resource raises where the platform refuses memory. Some of pinstage's own errors have these bases, too."""

__all__ = [
    "REFUSALS",
    "Block",
    "HostAllocMemory",
    "MemoryResource",
    "PageableMemory",
    "RegisteredMemory",
    "SharedMapping",
    "SharedMemory",
    "as_called_here",
    "auto_max_bytes",
    "cap_bytes",
    "default_memory",
    "remedy",
    "disregard_captures",
    "start_copy",
    "why_unusable",
]
