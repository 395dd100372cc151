"""Where host bytes come from: page-locked, registered, shared, pageable.

A *memory resource* allocates and takes back *blocks*: page-aligned runs of host memory. The
page-locked kinds copy at the same speed; they differ in start-up time, and in who else can map the
bytes. ``default_memory`` picks one. The rest of the package sees resources only through the
``MemoryResource`` protocol, so it runs, and is tested, without a GPU.

Two promises hold for every kind. *A failed allocation changes nothing*: mapped memory is unmapped,
registered memory is unregistered, and no CUDA error is left behind for a later, unrelated call to
trip over. *A leak before a dangling pointer*: if CUDA refuses to give up a block, the block stays
mapped, since the device may still use it.

Importing this package pins nothing, imports no CUDA bindings, and initialises no CUDA.
"""

from ..errors import PinningError
from . import _cuda
from ._cuda import (
    as_called_here,
    copy_error,
    disregard_captures,
    make_current,
    more_may_help,
    reads_pageable_memory,
    why_unusable,
)
from ._kinds import (
    HostAllocMemory,
    PageableMemory,
    RegisteredMemory,
    SharedMapping,
    SharedMemory,
    attach,
)
from ._limits import auto_max_bytes, remedy
from ._pages import PAGE_BYTES, memory_policy
from ._ranges import HostRange
from ._resource import Block, MemoryResource
from ._streams import (
    DeviceEvent,
    capturing_device,
    record_current_streams,
    refuse_capture,
)

REFUSALS = (MemoryError, OSError, PinningError)
"""The errors of a resource when the platform refuses memory. Some of pinstage's own errors have
these bases, too.
"""


def default_memory(device: _cuda.Device = None) -> MemoryResource:
    """Pick the memory resource for staging to a device.

    ``RegisteredMemory`` where CUDA is usable: all page-locked kinds copy at the same speed (55 GB/s
    on the reference machine), and this one is ready in a quarter of the time. ``HostAllocMemory``
    where registering doesn't really page-lock: under WSL2, where the device uses the host's page
    tables (Grace Hopper), or where it cannot register memory. ``PageableMemory`` where there is no
    CUDA, or ``device`` is the CPU.

    Pins nothing and makes no context. Warns (``StagingWarning``) where PyTorch has a GPU but memory
    cannot be page-locked, since staging is slow then.

    Args:
        device: the device to stage to; None is torch's current device at the time of each
            allocation.

    Returns:
        A new resource.
    """
    index, refusal = _cuda.who_registers(device)
    if index < 0:
        return PageableMemory()
    return HostAllocMemory(device) if refusal else RegisteredMemory(device)
