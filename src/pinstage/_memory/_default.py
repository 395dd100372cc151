"""Which memory to use when nobody says."""

from .. import _host
from . import _cuda
from ._host_alloc import HostAllocMemory
from ._pageable import PageableMemory
from ._registered import RegisteredMemory
from ._resource import MemoryResource


def default_memory(device: _cuda.Device = None) -> MemoryResource:
    """Pick the memory resource for staging to a device.

    ``RegisteredMemory`` where CUDA is usable: all page-locked kinds copy alike (55 GB/s on the reference machine), and
    this one is ready four times sooner. ``HostAllocMemory`` where registering does not page-lock as well: under
    WSL2, where the device uses the host's page tables (Grace Hopper), or cannot register. ``PageableMemory`` where
    there is no CUDA, or ``device`` is the CPU.

    Pins nothing and makes no context. Warns (``RuntimeWarning``) where PyTorch has a GPU but memory cannot be
    page-locked, since staging is slow then.

    Args:
        device: the device staged to; None is torch's current device at the time of each allocation.

    Returns:
        A new resource.
    """
    if _cuda.is_not_cuda(device) or not _cuda.is_usable():
        return PageableMemory()
    if _host.is_wsl() or not _cuda.registers_well(_cuda.device_index(device)):
        return HostAllocMemory(device)
    return RegisteredMemory(device)
