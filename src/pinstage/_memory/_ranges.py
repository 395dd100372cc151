"""A range of host memory that is mapped at once, and page-locked piece by piece."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from functools import partial

from .._sizes import format_bytes, round_up
from ..errors import PinningError
from . import _cuda, _numa, _pages
from ._kinds import HostAllocMemory
from ._limits import check_is_left
from ._resource import Block, leak

_CRAWL_BYTES_PER_SECOND = 128 << 20
"""Huge pages that come more slowly than this aren't worth the wait. On fragmented memory the kernel
makes a few GB of them per minute (TensorRT-LLM#15430); otherwise one thread gets 4 GB/s."""

_TIMED_BYTES = 64 << 20


class HostRange:
    """Host memory of an exact size, which `map` maps.

    Args:
        nbytes: the size; rounded up to whole pages.
        shared: whether other processes may map it, by `fd`. If not, forked children don't inherit
            it.
        huge_page_bytes: the size of explicit huge pages; 0 for ordinary ones, which the kernel may
            join.
        fd: a memfd to map, which `map` duplicates; None makes one if needed.
        device: the device whose context page-locks.
        numa_node: where its pages come from, as in `RegisteredMemory`.

    Attributes:
        address: the first byte's, once it is mapped.
        nbytes: bytes to map.
        fd: the memfd of shared memory, once it is mapped.
        device: the index of the device that page-locks it; -1 if it can't be page-locked.
        reason: why registering doesn't page-lock it; empty if it does.

    Raises:
        MemoryError: not enough memory is left.
    """

    def __init__(
        self,
        nbytes: int,
        device: _cuda.Device,
        numa_node: _numa.Asked,
        *,
        shared: bool,
        huge_page_bytes: int = 0,
        fd: int | None = None,
    ) -> None:
        self.nbytes = round_up(nbytes, huge_page_bytes or _pages.PAGE_BYTES)
        self.is_shared = shared
        self.device, self.reason = _cuda.who_registers(device)
        find_node = partial(_numa.device_node, self.device) if self.device >= 0 else lambda: None
        self._node, self._cpus, _ = _numa.placement(_numa.check(numa_node), find_node)
        if fd is None and not huge_page_bytes:
            check_is_left(self.nbytes)
        self.address = 0
        self.fd: int | None = None
        self._given, self._huge_page_bytes = fd, huge_page_bytes
        self._unmap: Callable[[], None] | None = None

    def map(self) -> None:
        """Map the memory. Call it in a thread that no interrupt reaches, as the methods that
        follow.

        Raises:
            MemoryError: the kernel has too little memory, or too few huge pages. Nothing is held
                then.
            OSError: it refused for another reason.
        """
        page = self._huge_page_bytes
        try:
            if self._given is not None:
                self.fd = os.dup(self._given)
            elif self.is_shared or page:
                self.fd = _pages.make_shared_file(self.nbytes, page)
            with _pages.mapped(self.nbytes, self.fd, node=self._node) as address:
                if not self.is_shared:  # explicit huge pages have a memfd, too, so `mapped` doesn't
                    _pages.advise(address, self.nbytes, mmap.MADV_DONTFORK)
                self.address, self._unmap = address, partial(_pages.unmap, address, self.nbytes)
        except (MemoryError, OSError) as error:
            self.free()
            if page:
                folder = f"/sys/kernel/mm/hugepages/hugepages-{page >> 10}kB"
                count = self.nbytes // page
                error.add_note(f"{count} pages have to be free: see {folder}/nr_hugepages")
            raise
        if not self.is_shared:
            self._close()  # a forked child would keep the memory with it

    def inode(self) -> str:
        """Return the inode of shared memory, once it exists; else an empty text."""
        fd = self._given if self.fd is None else self.fd
        return "" if fd is None else str(os.fstat(fd).st_ino)

    def touch(self, start: int, end: int) -> None:
        """Touch bytes, so that they get memory, with several threads. Blocks."""
        _pages.populate(self.address + start, end - start, cpus=self._cpus, is_fresh=False)

    def touch_first(self, end: int) -> str:
        """Touch the bytes before `end`. If huge pages crawl, take ordinary ones for the rest, and
        return a warning.
        """
        timed, began = min(end, _TIMED_BYTES), time.perf_counter()
        self.touch(0, timed)
        seconds, warning = time.perf_counter() - began, ""
        is_anonymous = not (self.is_shared or self._huge_page_bytes)
        if is_anonymous and timed == _TIMED_BYTES and seconds > timed / _CRAWL_BYTES_PER_SECOND:
            _pages.advise(self.address, self.nbytes, mmap.MADV_NOHUGEPAGE)
            warning = (
                f"{format_bytes(timed)} of huge pages took {seconds:.1f} s, so the rest of a "
                "region has ordinary pages"
            )
        if end > timed:
            self.touch(timed, end)
        return warning

    def register(self, start: int, end: int) -> None:
        """Page-lock bytes; raise a `PinningError` if the driver refuses. Blocks."""
        _cuda.register(self.address + start, end - start, self.device)

    def unregister(self, start: int, end: int) -> bool:
        """End the registration of these bytes; return whether CUDA gave them up. Waits for the
        device.
        """
        try:
            _cuda.unregister(self.address + start, self.device)
        except PinningError as error:
            leak(Block(self.address + start, end - start), error)
            return False
        return True

    def allocate(self) -> None:
        """Replace the range's memory with page-locked memory of the driver. Blocks. If it fails,
        nothing changes.
        """
        memory = HostAllocMemory(self.device)
        block = memory.allocate(self.nbytes)
        self.free()
        self.address, self._unmap = block.ptr, partial(memory.deallocate, block)

    def free(self) -> None:
        """Give the memory back; none of it may be registered."""
        if self._unmap is not None:
            self._unmap()
            self._unmap = None
        self._close()

    def _close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
