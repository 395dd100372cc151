"""A range of host memory that is mapped at once, and page-locked piece by piece."""

from __future__ import annotations

import os
import time

from .. import _host
from .._sizes import format_bytes, round_up
from ..errors import PinningError
from . import _cuda, _numa, _pages
from ._limits import check_is_left
from ._resource import Block, leak

_CRAWL_BYTES_PER_SECOND = 128 << 20
"""Huge pages that come more slowly than this aren't worth the wait. On fragmented memory the kernel makes them at some
GB per minute (TensorRT-LLM#15430); elsewhere at 4 GB/s by one thread."""

_TIMED_BYTES = 64 << 20


class HostRange:
    """Mapped host memory of an exact size.

    Args:
        nbytes: the size; rounded up to whole pages.
        shared: whether other processes may map it, by `fd`. Else a forked child doesn't have it.
        huge_page_bytes: the size of explicit huge pages; 0 for ordinary ones, which the kernel may join.
        fd: a memfd to be mapped, which the range owns from now on; None makes one if needed.
        device: whose context page-locks.
        numa_node: where its pages come from, as in `RegisteredMemory`.

    Attributes:
        address: of the first byte.
        nbytes: bytes mapped.
        device: the index of the device that page-locks it; -1 if it can't be page-locked.
        reason: why registering doesn't page-lock it; empty if it does.

    Raises:
        MemoryError: not enough memory is left, or there are too few huge pages. Nothing is held then.
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
        self.fd, self.is_shared, self._raw = fd, shared, 0
        try:
            self.device, self.reason = _who_registers(device)
            address = _cuda.pci_address(self.device) if numa_node == "auto" and self.device >= 0 else ""
            asked = None if numa_node == "auto" and not address else _numa.check(numa_node)
            node, self._cpus, _ = _numa.placement(asked, address)
            if fd is None and not huge_page_bytes:
                check_is_left(self.nbytes)
            if fd is None and (shared or huge_page_bytes):
                self.fd = _pages.make_shared_file(self.nbytes, huge_page_bytes)
            if self.fd is None:
                alignment = _pages.HUGE_PAGE_BYTES if self.nbytes >= _pages.HUGE_PAGE_BYTES else _pages.PAGE_BYTES
                self.address = _pages.map_anonymous(self.nbytes, alignment=alignment)
            else:
                self.address = _pages.map_shared(self.fd, self.nbytes)
        except BaseException as error:
            if self.fd is not None:
                os.close(self.fd)
            if huge_page_bytes and isinstance(error, MemoryError | OSError):
                folder = f"/sys/kernel/mm/hugepages/hugepages-{huge_page_bytes >> 10}kB"
                error.add_note(f"{self.nbytes // huge_page_bytes} pages have to be free: see {folder}/nr_hugepages")
            raise
        _pages.advise(self.address, self.nbytes, _pages.MADV_HUGEPAGE)
        if not shared:
            _pages.advise(self.address, self.nbytes, _pages.MADV_DONTFORK)
        if node is not None:
            _numa.prefer(self.address, self.nbytes, node)

    def touch(self, start: int, end: int) -> None:
        """Give bytes their memory, by several threads. Blocks."""
        _pages.populate(self.address + start, end - start, cpus=self._cpus, is_fresh=False)

    def touch_first(self, end: int) -> str:
        """Do so from the beginning; take ordinary pages for the rest if huge ones crawl, and say so."""
        timed, began = min(end, _TIMED_BYTES), time.perf_counter()
        self.touch(0, timed)
        seconds, found = time.perf_counter() - began, ""
        if self.fd is None and timed == _TIMED_BYTES and seconds > timed / _CRAWL_BYTES_PER_SECOND:
            _pages.advise(self.address, self.nbytes, _pages.MADV_NOHUGEPAGE)
            found = (
                f"{format_bytes(timed)} of huge pages took {seconds:.1f} s, so the rest of a region has ordinary pages"
            )
        if end > timed:
            self.touch(timed, end)
        return found

    def register(self, start: int, end: int) -> None:
        """Page-lock bytes; a `PinningError` if the driver refuses. Blocks."""
        _cuda.register(self.address + start, end - start, self.device)

    def unregister(self, start: int, end: int) -> bool:
        """End the registration of these bytes; say whether CUDA gave them up. Waits for the device."""
        try:
            _cuda.unregister(self.address + start, self.device)
        except PinningError as error:
            leak(Block(self.address + start, end - start), error)
            return False
        return True

    def allocate(self) -> None:
        """Take the driver's page-locked memory in place of the range's. Blocks. If it fails, nothing changed."""
        raw = _cuda.host_alloc(self.nbytes + _pages.PAGE_BYTES, self.device, write_combined=False)
        self.free()
        self._raw, self.address = raw, round_up(raw, _pages.PAGE_BYTES)

    def free(self) -> None:
        """Give the memory back; none of it is registered."""
        try:
            if self._raw:
                _cuda.free_host(self._raw, self.device)
            else:
                _pages.unmap(self.address, self.nbytes)
        except PinningError as error:
            leak(Block(self._raw, self.nbytes), error)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _who_registers(device: _cuda.Device) -> tuple[int, str]:
    """Return the device that page-locks, -1 for none; and why it doesn't register memory, if so."""
    if _cuda.is_not_cuda(device) or not _cuda.is_usable():
        return -1, f"the device is {device}" if _cuda.is_not_cuda(device) else str(_cuda.why_unusable())
    index = _cuda.device_index(device)
    if _host.is_wsl() or not _cuda.registers_well(index):
        return index, f"registering doesn't page-lock memory for cuda:{index} on this system"
    return index, ""
