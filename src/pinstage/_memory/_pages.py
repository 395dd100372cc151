"""Pages from the kernel: map, advise, touch, unmap, through libc.

``mmap.mmap`` objects are not used: such an object refuses to close while a buffer over it is
exported, and unmaps itself when it is collected. A block must do neither; its address is all that
the rest of the package holds.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from .._host import usable_cpus
from .._sizes import format_bytes, round_up
from ._limits import most_bytes

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
"""Size and alignment of a transparent huge page on x86-64, and on arm64 with 4 KiB pages."""

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module

POPULATE_PIECE_BYTES = 16 << 20
"""Bytes that one thread touches at a time: a multiple of a huge page, small enough to spread
evenly, and large enough (a millisecond or more) that handing it out costs nothing."""

POPULATE_THREADS = 8
"""Default number of touching threads: 1 GiB took 59 ms with 8 on the reference machine; with more
threads, memory bandwidth limits the kernel's zeroing."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MPOL_PREFERRED = 1  # linux/mempolicy.h
# Numbers of the system calls; glibc has no functions for them.
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MASK_BITS = 1024


@functools.cache
def libc() -> Any:
    """Return libc's functions for memory. Calls of them release the interpreter lock."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    library.syscall.restype = ctypes.c_long
    # Those of mbind; get_mempolicy has one less.
    library.syscall.argtypes = [
        ctypes.c_long,
        address,
        size,
        number,
        address,
        ctypes.c_ulong,
        ctypes.c_uint,
    ]
    return library


def _error(call: str, nbytes: int, number: int) -> OSError | MemoryError:
    text = f"{call} of {format_bytes(nbytes)} failed: {os.strerror(number)}"
    if number == errno.ENOMEM:
        return MemoryError(f"{text}; ask for less, or free memory first")
    return OSError(number, text)


def map_pages(nbytes: int, fd: int | None = None, *, alignment: int = PAGE_BYTES) -> int:
    """Map pages without touching them, and return the address; `unmap` gives all of them back.

    They are private and zeroed. With ``fd`` they are the first pages of a file, shared with every
    other mapping of it. ``alignment`` is a multiple of the page size, for private pages only. If it
    is more than a page, more pages are mapped, and those at the ends are unmapped.

    Raises:
        MemoryError: the kernel refused to map that much.
        OSError: it refused for another reason.
    """
    flags, fd = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1) if fd is None else (mmap.MAP_SHARED, fd)
    slack = alignment - PAGE_BYTES
    start = libc().mmap(None, nbytes + slack, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if start == _MAP_FAILED:
        raise _error("mmap", nbytes, ctypes.get_errno())
    address = round_up(start, alignment)
    for end_address, end_nbytes in (
        (start, address - start),
        (address + nbytes, start + slack - address),
    ):
        if end_nbytes:
            unmap(end_address, end_nbytes)
    return address


def make_shared_file(nbytes: int, huge_page_bytes: int = 0) -> int:
    """Make a memfd, of huge pages if their size is given; return its descriptor, which the caller
    closes.

    It has no name to unlink, doesn't count against the size of ``/dev/shm``, and its size is
    sealed, so that no process can truncate it.

    Raises:
        OSError: the kernel refused, for example because it has no huge pages of that size.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | (huge_page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create("pinstage", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def mapped(
    nbytes: int, fd: int | None = None, *, huge: bool = True, node: int | None = None
) -> Iterator[int]:
    """Map pages that are to be page-locked; if the block raises, unmap them.

    Private pages aren't inherited by forked children: Linux 5.9 and later would copy them in every
    fork.

    Args:
        nbytes: whole pages.
        fd: a memfd to map; None for private pages.
        huge: advise the kernel to use huge pages, if there is room for one. For a memfd, the advice
            has an effect only if ``shmem_enabled`` is "advise"; otherwise its pages are small.
        node: the NUMA node that the pages come from; None for the kernel's choice.

    Yields:
        The address of the first byte.
    """
    with ExitStack() as undo:
        huge = huge and nbytes >= HUGE_PAGE_BYTES
        address = map_pages(
            nbytes, fd, alignment=HUGE_PAGE_BYTES if huge and fd is None else PAGE_BYTES
        )
        undo.callback(unmap, address, nbytes)
        if huge:
            advise(address, nbytes, mmap.MADV_HUGEPAGE)
        if fd is None:
            advise(address, nbytes, mmap.MADV_DONTFORK)
        if node is not None:
            prefer(address, nbytes, node)  # if this is forbidden, the threads' first touch does it
        yield address
        undo.pop_all()


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Let untouched pages of a mapping come from a NUMA node; return whether the system accepted
    that.

    The policy is "preferred", not "bind": when the node is full, pages come from the next one, and
    nothing is killed.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (1 << node).to_bytes(_MASK_BITS // 8, "little")  # as both architectures of `_MBIND` are
    done: int = libc().syscall(number, address, nbytes, _MPOL_PREFERRED, mask, _MASK_BITS, 0)
    return done == 0


def memory_policy() -> int | None:
    """Return the memory policy of this thread, 0 for the default; None if the system doesn't tell,
    as in most containers.
    """
    number = _GET_MEMPOLICY.get(platform.machine())
    mode = ctypes.c_int()
    if number is None or libc().syscall(number, ctypes.addressof(mode), 0, 0, None, 0, 0):
        return None
    return mode.value


def unmap(address: int, nbytes: int) -> None:
    """Unmap; no CUDA registration may be left in the range. After an ``OSError`` the range stays
    mapped.
    """
    if libc().munmap(address, nbytes):
        raise _error("munmap", nbytes, ctypes.get_errno())


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Give the kernel advice; return whether it was accepted. Advice that the kernel doesn't know
    isn't an error.
    """
    return not libc().madvise(address, nbytes, advice)


def populate(
    address: int,
    nbytes: int,
    *,
    threads: int | None = None,
    cpus: frozenset[int] = frozenset(),
    is_fresh: bool = True,
) -> None:
    """Allocate every page of a mapping, by touching it with several threads, which may be bound to
    some CPUs.

    Blocks until all pages are touched, with the interpreter lock released. The contents don't
    change. If pages may be in use already (``is_fresh=False``), kernels before 5.14 allocate them
    at their first use.

    Raises:
        MemoryError: ``nbytes`` is more than the machine, or this process's cgroup, has in all
            (touching it would end the process), or the kernel ran out.
        OSError: the kernel refused for another reason.
    """
    most, whose = most_bytes()
    if nbytes > most:
        raise MemoryError(
            f"{format_bytes(nbytes)} asked, {format_bytes(most)} exist ({whose}); ask for less "
            "than the limit"
        )
    end = address + nbytes
    starts = range(address, end, POPULATE_PIECE_BYTES)

    def touch(start: int) -> None:
        _populate_piece(start, min(POPULATE_PIECE_BYTES, end - start), is_fresh)

    workers = min(threads or min(POPULATE_THREADS, usable_cpus()), len(starts))
    if workers == 1 and not cpus:
        for start in starts:
            touch(start)
        return
    # Leaving the block waits for every thread, even after an exception: none may touch pages that
    # the caller unmaps.
    keep_on_cpus = partial(os.sched_setaffinity, 0, cpus) if cpus else None
    with ThreadPoolExecutor(workers, "pinstage-populate", keep_on_cpus) as pool:
        list(pool.map(touch, starts))  # raises the first error, after which no piece is begun


def _populate_piece(address: int, nbytes: int, is_fresh: bool) -> None:
    if advise(address, nbytes, MADV_POPULATE_WRITE):
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:  # EINVAL: a kernel before 5.14 does not know it
        raise _error("madvise(MADV_POPULATE_WRITE)", nbytes, number)
    if is_fresh:
        ctypes.memset(address, 0, nbytes)
