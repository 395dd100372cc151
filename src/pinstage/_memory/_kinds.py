"""The kinds of memory: pageable, page-locked by the driver, registered, and shared."""

import contextlib
import logging
import os
from functools import partial
from typing import Literal

from .._compat.probes import warn_once
from .._sizes import round_up
from ..errors import PinningError, StagingWarning
from . import _cuda, _numa, _pages
from ._pages import HUGE_PAGE_BYTES, PAGE_BYTES
from ._resource import Block, Resource

_log = logging.getLogger("pinstage")


class PageableMemory(Resource):
    """Plain private memory: no CUDA, no page lock, nothing rounded.

    The whole package runs on it without a GPU. Copies from it to a device make the host wait, and
    reach only a part of the bus's speed. Pages get their memory when they are first written.
    """

    def __init__(self) -> None:
        super().__init__(pinned=False)

    @property
    def granularity(self) -> int:
        """The allocation unit: single bytes. ``Block.nbytes`` is exactly the requested size."""
        return 1

    def _take(self, nbytes: int, device: int) -> Block:
        return Block(_pages.map_pages(nbytes), nbytes, _device=device)


class _PlacedMemory(Resource):
    """The base of the kinds whose pages are put on a NUMA node; see `RegisteredMemory`."""

    def __init__(self, *, pinned: bool, device: _cuda.Device, numa_node: _numa.Asked) -> None:
        super().__init__(pinned=pinned, device=device)
        self._numa_node = _numa.check(numa_node)
        self._placements: dict[int, _numa.Placement] = {}

    @property
    def numa(self) -> str:
        """The placement of pages, in words: ``"node 1, the device's"``, or why there is none."""
        return self._placement(_cuda.device_index(self._device) if self._pinned else -1).reason

    def _placement(self, device: int) -> _numa.Placement:
        if self._numa_node is None or device < 0:
            return _numa.ANYWHERE
        if device not in self._placements:
            find_node = partial(_numa.device_node, device)
            self._placements[device] = made = _numa.placement(self._numa_node, find_node)
            _log.info("%s for cuda:%d: %s", type(self).__name__, device, made.reason)
        return self._placements[device]


class HostAllocMemory(Resource):
    """Page-locked memory from ``cudaHostAlloc``, usable from all devices ("portable").

    Works wherever CUDA does, and is slow to start: `RegisteredMemory` is ready in a quarter of the
    time.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each
            allocation. Only that device gets a context.

    Raises:
        CudaUnavailableError: CUDA cannot be used here; the message says why, and what to use
            instead.
        ValueError: ``device`` is not a CUDA device.
    """

    def __init__(self, device: _cuda.Device = None) -> None:
        super().__init__(pinned=True, device=device)
        _cuda.require(type(self).__name__)

    def _take(self, nbytes: int, device: int) -> Block:
        # The driver may serve a small request from a chunk of its own, at any multiple of 512
        # bytes. One more page makes room for a page-aligned address. Like the rest of the driver's
        # chunk, it isn't counted.
        slack = PAGE_BYTES if nbytes < HUGE_PAGE_BYTES else 0
        raw = _cuda.host_alloc(nbytes + slack, device)
        address = round_up(raw, PAGE_BYTES)
        if address > raw + slack:
            _cuda.free_host(raw, device)
            raise RuntimeError(
                f"cudaHostAlloc returned {raw:#x} for {nbytes} bytes, which is not page-aligned"
            )
        return Block(address, nbytes, _raw=raw, _device=device)

    def _give(self, block: Block) -> None:
        _cuda.free_host(block._raw, block._device)


class RegisteredMemory(_PlacedMemory):
    """Anonymous pages, huge where the system has them, touched by several threads, then
    ``cudaHostRegister``.

    Ready in a quarter of the time of ``cudaHostAlloc``, because huge pages are touched in parallel
    and registered as few large pieces. Copies are equally fast.

    **Fork.** The pages are not inherited (``MADV_DONTFORK``): the kernel ends a forked child that
    follows a pointer into them. Otherwise Linux 5.9 and later would copy the pages in every fork:
    1.4 s and 1 GiB for each GiB and each forked DataLoader worker. If forked children must read the
    bytes, use ``SharedMemory``.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each
            allocation. Only that device gets a context.
        huge_pages: ask for transparent huge pages for blocks of 2 MiB or more, and align them to 2
            MiB. The system may decline (``/sys/kernel/mm/transparent_hugepage/enabled``); then only
            start-up is slower.
        threads: the number of threads that touch pages; by default 8, or the number of usable CPUs
            if that is less.
        numa_node: put pages, and the threads that touch them, on this NUMA node; ``"auto"`` is the
            device's. When the node is full, pages come from the next one. Nothing is done on a host
            with one node that has CPUs, and in a process that has a memory policy, for example by
            ``numactl``; ``numa`` says which node was chosen. None leaves it to the kernel.

    Raises:
        CudaUnavailableError: CUDA cannot be used here; the message says why, and what to use
            instead.
        ValueError: ``device`` is not a CUDA device, ``threads`` is less than 1, or ``numa_node`` is
            not a node. Whether this host has that node is checked at the first allocation, or by
            ``numa``.
    """

    def __init__(
        self,
        device: _cuda.Device = None,
        *,
        huge_pages: bool = True,
        threads: int | None = None,
        numa_node: int | Literal["auto"] | None = "auto",
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be 1 or more: {threads}")
        super().__init__(pinned=True, device=device, numa_node=numa_node)
        self._huge_pages = huge_pages
        self._threads = threads
        _cuda.require(type(self).__name__)

    def _take(self, nbytes: int, device: int) -> Block:
        node, cpus, _ = self._placement(device)
        with _pages.mapped(nbytes, huge=self._huge_pages, node=node) as address:
            _pages.populate(address, nbytes, threads=self._threads, cpus=cpus)
            _cuda.register(address, nbytes, device)
        return Block(address, nbytes, _device=device)


class SharedMapping:
    """The bytes of a ``SharedMemory`` block, seen from another process (or again from the same
    one).

    They are pageable here: a process that only writes needs no CUDA. The owner's GPU sees writes at
    once; the two processes have to coordinate their writes. The mapping lives until ``close``. If
    it is dropped before, it stays mapped, since views of it may be alive.
    """

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr = ptr
        """Address of the first byte in this process; a multiple of the page size."""
        self.nbytes = nbytes
        """Bytes mapped."""
        self._is_open = True

    def close(self) -> None:
        """Unmap; a second call does nothing. No view of the bytes may be used afterwards."""
        if self._is_open:
            self._is_open = False
            _pages.unmap(self.ptr, self.nbytes)


class SharedMemory(_PlacedMemory):
    """Pages of a ``memfd``, mapped shared and registered. Another process maps the same bytes by
    ``Block.fd``.

    For DataLoader workers: the GPU of this process reads what a worker writes, without a copy in
    between. A forked child sees the bytes too. A memfd has no name to unlink, and does not count
    against the size of ``/dev/shm``. Its size is sealed, so that no process can truncate it.

    Without CUDA, or with ``register=False``, the memory is shared but pageable, and ``is_pinned``
    is False. Where the platform registers no memory, such as GB10 or confidential computing, blocks
    are pageable too, and their ``is_pinned`` says so; a ``StagingWarning`` reports it once. They
    have all their pages nevertheless, so that a lack of memory is an error here, and not the end of
    a process that writes.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each
            allocation. Only that device gets a context.
        register: page-lock the memory where CUDA is usable.
        numa_node: see ``RegisteredMemory``.

    Raises:
        ValueError: ``device`` is not a CUDA device, or ``numa_node`` is not a node.
    """

    _registers = True
    """Whether to try. Set it to False to see how pageable slabs do on a platform where registering
    succeeds and page-locks nothing (Grace, WSL2)."""

    def __init__(
        self,
        device: _cuda.Device = None,
        *,
        register: bool = True,
        numa_node: int | Literal["auto"] | None = "auto",
    ) -> None:
        is_pinned = register and _cuda.is_usable()
        super().__init__(pinned=is_pinned, device=device, numa_node=numa_node)

    @property
    def is_shared(self) -> bool:
        """Whether another process can map the same bytes: yes."""
        return True

    def _take(self, nbytes: int, device: int) -> Block:
        node, cpus, _ = self._placement(device)
        fd, is_pinned = _pages.make_shared_file(nbytes), False
        try:
            with _pages.mapped(nbytes, fd, huge=self._pinned, node=node) as address:
                if device >= 0:
                    _pages.populate(address, nbytes, cpus=cpus)
                    is_pinned = self._register(address, nbytes, device)
        except BaseException:
            os.close(fd)
            raise
        return Block(address, nbytes, fd, is_pinned, _device=device if is_pinned else -1)

    def _register(self, address: int, nbytes: int, device: int) -> bool:
        """Page-lock a block, and return True; False where the platform refuses all blocks."""
        if not self._registers:
            return False
        try:
            if _cuda.can_register(device):
                _cuda.register(address, nbytes, device)
                return True
            why = f"cuda:{device} can't register memory"
        except PinningError as error:
            if error.name not in _cuda.PLATFORM_REFUSES:
                raise
            why = str(error)
        self._registers = False
        with contextlib.suppress(StagingWarning):  # as an error, it would cost the block
            warn_once(
                f"shared memory isn't page-locked here: {why}; loaders send batches from it as it "
                "is, which is slower; see `pinstage doctor`"
            )
        return False


def attach(fd: int, nbytes: int) -> SharedMapping:
    """Map the bytes of a `SharedMemory` block into this process. Makes no CUDA calls.

    Args:
        fd: the block's ``fd``, or a duplicate sent to this process. The caller keeps it, and may
            close it at once.
        nbytes: the block's ``nbytes``, or fewer.

    Returns:
        A mapping that the caller closes.

    Raises:
        ValueError: ``nbytes`` is not positive, or more than the file has (touching the rest would
            end the process).
        OSError: ``fd`` is not an open file, or the kernel refused.
    """
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise ValueError(
            f"cannot attach {nbytes} bytes: the file has {size}; pass the block's own nbytes"
        )
    return SharedMapping(_pages.map_pages(nbytes, fd), nbytes)
