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
    """Mapped host memory of an exact size.

    Args:
        nbytes: the size; rounded up to whole pages.
        shared: whether other processes may map it, by `fd`. If not, forked children don't inherit
            it.
        huge_page_bytes: the size of explicit huge pages; 0 for ordinary ones, which the kernel may
            join.
        fd: a memfd to map, which is duplicated; None makes one if needed.
        device: the device whose context page-locks.
        numa_node: where its pages come from, as in `RegisteredMemory`.

    Attributes:
        address: the first byte's.
        nbytes: bytes mapped.
        device: the index of the device that page-locks it; -1 if it can't be page-locked.
        reason: why registering doesn't page-lock it; empty if it does.

    Raises:
        MemoryError: not enough memory is left, or there are too few huge pages. Nothing is held
            then.
        OSError: the kernel refused for another reason.
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
        pci_address = _cuda.pci_address(self.device) if self.device >= 0 else ""
        node, self._cpus, _ = _numa.placement(_numa.check(numa_node), pci_address)
        if fd is None and not huge_page_bytes:
            check_is_left(self.nbytes)
        try:
            if fd is not None:
                fd = os.dup(fd)
            elif shared or huge_page_bytes:
                fd = _pages.make_shared_file(self.nbytes, huge_page_bytes)
            with _pages.mapped(self.nbytes, fd, node=node) as address:
                self.address, self.fd = address, fd
        except (MemoryError, OSError) as error:
            if huge_page_bytes:
                folder = f"/sys/kernel/mm/hugepages/hugepages-{huge_page_bytes >> 10}kB"
                error.add_note(
                    f"{self.nbytes // huge_page_bytes} pages have to be free: see "
                    f"{folder}/nr_hugepages"
                )
            raise
        if not shared:  # explicit huge pages have a memfd, too, so `mapped` didn't
            _pages.advise(self.address, self.nbytes, mmap.MADV_DONTFORK)
        self._give: Callable[[], None] = partial(_pages.unmap, self.address, self.nbytes)

    def touch(self, start: int, end: int) -> None:
        """Touch bytes, so that they get memory, with several threads. Blocks."""
        _pages.populate(self.address + start, end - start, cpus=self._cpus, is_fresh=False)

    def touch_first(self, end: int) -> str:
        """Touch the bytes before `end`. If huge pages crawl, take ordinary ones for the rest, and
        return a warning.
        """
        timed, began = min(end, _TIMED_BYTES), time.perf_counter()
        self.touch(0, timed)
        seconds, found = time.perf_counter() - began, ""
        if self.fd is None and timed == _TIMED_BYTES and seconds > timed / _CRAWL_BYTES_PER_SECOND:
            _pages.advise(self.address, self.nbytes, mmap.MADV_NOHUGEPAGE)
            found = (
                f"{format_bytes(timed)} of huge pages took {seconds:.1f} s, so the rest of a "
                "region has ordinary pages"
            )
        if end > timed:
            self.touch(timed, end)
        return found

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
        self.address, self._give = block.ptr, partial(memory.deallocate, block)

    def free(self) -> None:
        """Give the memory back; none of it may be registered."""
        self._give()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
