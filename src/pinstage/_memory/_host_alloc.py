"""Page-locked memory from the CUDA driver."""

from .._sizes import round_up
from . import _cuda
from ._pages import HUGE_PAGE_BYTES, PAGE_BYTES
from ._resource import Block, Resource


class HostAllocMemory(Resource):
    """Page-locked memory from ``cudaHostAlloc``, usable from all devices ("portable").

    Works wherever CUDA does, and is slow to start: `RegisteredMemory` is ready in a quarter of the time.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each allocation. Only that
            device gets a context.
        write_combined: bypass the CPU's caches. Only for slabs that are copied one way, to the device: the CPU reads
            such memory very slowly.

    Raises:
        CudaUnavailableError: CUDA cannot be used here; the message says why, and what to use instead.
        ValueError: ``device`` is not a CUDA device.
    """

    def __init__(self, device: _cuda.Device = None, *, write_combined: bool = False) -> None:
        super().__init__(pinned=True, device=device)
        self._write_combined = write_combined
        _cuda.require(type(self).__name__)

    def _take(self, nbytes: int, device: int) -> Block:
        # The driver may serve a small request from a chunk of its own, at any multiple of 512 bytes. One more page
        # makes room for a page-aligned address. Like the rest of the driver's chunk, it isn't counted.
        slack = PAGE_BYTES if nbytes < HUGE_PAGE_BYTES else 0
        raw = _cuda.host_alloc(nbytes + slack, device, write_combined=self._write_combined)
        address = round_up(raw, PAGE_BYTES)
        if address > raw + slack:
            _cuda.free_host(raw, device)
            raise RuntimeError(f"cudaHostAlloc returned {raw:#x} for {nbytes} bytes, which is not page-aligned")
        return Block(address, nbytes, _raw=raw, _device=device)

    def _give(self, block: Block) -> None:
        _cuda.free_host(block._raw, block._device)
