"""Memory that is mapped first, and page-locked afterwards."""

import logging
from typing import Literal

from . import _cuda, _numa, _pages
from ._resource import Block, Resource

_log = logging.getLogger("pinstage")


class RegisteredMemory(Resource):
    """Anonymous pages, huge where the system has them, touched by several threads, then ``cudaHostRegister``.

    Ready in a quarter of the time of ``cudaHostAlloc``, because huge pages are touched in parallel and registered as
    few large pieces. Copies are equally fast.

    **Fork.** The pages are not inherited (``MADV_DONTFORK``): the kernel ends a forked child that follows a pointer
    into them. Otherwise Linux 5.9 and later would copy the pages in every fork: 1.4 s and 1 GiB for each GiB and each
    forked DataLoader worker. If forked children must read the bytes, use ``SharedMemory``.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each allocation. Only that
            device gets a context.
        huge_pages: ask for transparent huge pages for blocks of 2 MiB or more, and align them to 2 MiB. The system
            may decline (``/sys/kernel/mm/transparent_hugepage/enabled``); then only start-up is slower.
        threads: the number of threads that touch pages; by default 8, or the number of usable CPUs if that is less.
        numa_node: put pages, and the threads that touch them, on this NUMA node; ``"auto"`` is the device's, from
            sysfs. When the node is full, pages come from the next one. On a host with one node nothing is done;
            ``numa`` says which node was chosen. None leaves it to the kernel.

    Raises:
        CudaUnavailableError: CUDA cannot be used here; the message says why, and what to use instead.
        ValueError: ``device`` is not a CUDA device, ``threads`` is less than 1, or ``numa_node`` is not a node. Whether
            this host has that node is checked at the first allocation, or by ``numa``.
    """

    def __init__(
        self,
        device: _cuda.Device = None,
        *,
        huge_pages: bool = True,
        threads: int | None = None,
        numa_node: int | Literal["auto"] | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be 1 or more: {threads}")
        super().__init__(pinned=True, device=device)
        self._huge_pages = huge_pages
        self._threads = threads
        self._numa_node = _numa.check(numa_node)
        self._placements: dict[int, _numa.Placement] = {}
        _cuda.require(type(self).__name__)

    @property
    def numa(self) -> str:
        """The placement of pages, in words: ``"node 1, that of 0000:1b:00.0"``, or why there is none."""
        return self._placement(_cuda.device_index(self._device)).reason

    def _placement(self, device: int) -> _numa.Placement:
        if self._numa_node is None:
            return _numa.ANYWHERE
        if device not in self._placements:
            self._placements[device] = _numa.placement(self._numa_node, _cuda.pci_address(device))
            _log.info("RegisteredMemory for cuda:%d: %s", device, self._placements[device].reason)
        return self._placements[device]

    def _take(self, nbytes: int, device: int) -> Block:
        node, cpus, _ = self._placement(device)
        with _pages.mapped(nbytes, huge=self._huge_pages, node=node) as address:
            _pages.populate(address, nbytes, threads=self._threads, cpus=cpus)
            _cuda.register(address, nbytes, device)
        return Block(address, nbytes, _device=device)
