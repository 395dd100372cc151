"""Pages from the kernel: map, advise, touch, unmap, through libc.

``mmap.mmap`` objects are not used: one refuses to close while a buffer over it is exported, and unmaps itself when it
is collected. A block must do neither; its address is all that the rest of the package holds.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .._host import usable_cpus
from .._sizes import format_bytes, round_up
from ._limits import most_bytes

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
"""Size and alignment of a transparent huge page on x86-64, and on arm64 with 4 KiB pages."""

# Not all of these are in Python's mmap module; the numbers are the same on every Linux that CUDA runs on.
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23

POPULATE_PIECE_BYTES = 16 << 20
"""Bytes that one thread touches at a time: a multiple of a huge page, small enough to spread evenly, and large enough
(a millisecond or more) that handing it out costs nothing."""

POPULATE_THREADS = 8
"""Default number of touching threads: 1 GiB took 59 ms with 8 on the reference machine; beyond, the kernel's zeroing
is limited by memory bandwidth."""

_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    # Calls through CDLL release the interpreter lock.
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def _error(call: str, nbytes: int, number: int) -> OSError | MemoryError:
    text = f"{call} of {format_bytes(nbytes)} failed: {os.strerror(number)}"
    if number == errno.ENOMEM:
        return MemoryError(f"{text}; ask for less, or free memory first")
    return OSError(number, text)


def _map(nbytes: int, flags: int, fd: int) -> int:
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise _error("mmap", nbytes, ctypes.get_errno())
    return int(address)


def map_anonymous(nbytes: int, *, alignment: int = PAGE_BYTES) -> int:
    """Map private zeroed pages, still untouched, and return the address; `unmap` gives all of it back.

    ``alignment`` is a multiple of the page size. Beyond a page, more is mapped and the ends cut off.

    Raises:
        MemoryError: the kernel refused to map that much.
        OSError: it refused for another reason.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    slack = alignment - PAGE_BYTES
    start = _map(nbytes + slack, flags, -1)
    address = round_up(start, alignment)
    for end_address, end_nbytes in ((start, address - start), (address + nbytes, start + slack - address)):
        if end_nbytes:
            unmap(end_address, end_nbytes)
    return address


def map_shared(fd: int, nbytes: int) -> int:
    """Map the first ``nbytes`` of a file, shared with every other mapping of it; raises as ``map_anonymous`` does."""
    return _map(nbytes, mmap.MAP_SHARED, fd)


def make_shared_file(nbytes: int, huge_page_bytes: int = 0) -> int:
    """Make a memfd, of huge pages if their size is given; return its descriptor, which the caller closes.

    It has no name to unlink, doesn't count against the size of ``/dev/shm``, and its size is sealed, so that no process
    can truncate it.

    Raises:
        OSError: the kernel refused, for example because it has no huge pages of that size.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | (huge_page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create("pinstage", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unmap(address: int, nbytes: int) -> None:
    """Unmap; no CUDA registration may be left in the range. After an ``OSError`` it stays mapped."""
    if _libc().munmap(address, nbytes):
        raise _error("munmap", nbytes, ctypes.get_errno())


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Give the kernel advice; returns whether it took it. A kernel that doesn't know the advice isn't an error."""
    return not _libc().madvise(address, nbytes, advice)


def populate(
    address: int,
    nbytes: int,
    *,
    threads: int | None = None,
    cpus: frozenset[int] = frozenset(),
    is_fresh: bool = True,
) -> None:
    """Give every page of a mapping its memory, by several threads, which may be bound to some CPUs.

    Blocks until all is touched, with the interpreter lock released. The contents stay as they are. Where pages may be
    in use already (``is_fresh=False``), kernels before 5.14 leave them to their first use.

    Raises:
        MemoryError: ``nbytes`` is more than the machine, or this process's cgroup, has in all (touching it would end
            the process), or the kernel ran out.
        OSError: the kernel refused for another reason.
    """
    most, whose = most_bytes()
    if nbytes > most:
        raise MemoryError(
            f"{format_bytes(nbytes)} asked, {format_bytes(most)} exist ({whose}); ask for less than the limit"
        )
    end, size = address + nbytes, POPULATE_PIECE_BYTES
    pieces = [(start, min(size, end - start), is_fresh) for start in range(address, end, size)]
    workers = min(threads or min(POPULATE_THREADS, usable_cpus()), len(pieces))
    if workers == 1 and not cpus:
        for piece in pieces:
            _populate_piece(*piece)
        return
    # Leaving the block waits for every thread, an exception or not: none may touch what the caller then unmaps.
    keep_on_cpus = partial(os.sched_setaffinity, 0, cpus) if cpus else None
    with ThreadPoolExecutor(workers, "pinstage-populate", keep_on_cpus) as pool:
        touching = [pool.submit(_populate_piece, *piece) for piece in pieces]
        try:
            for future in touching:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _populate_piece(address: int, nbytes: int, is_fresh: bool) -> None:
    if advise(address, nbytes, MADV_POPULATE_WRITE):
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:  # EINVAL: a kernel before 5.14 does not know it
        raise _error("madvise(MADV_POPULATE_WRITE)", nbytes, number)
    if is_fresh:
        ctypes.memset(address, 0, nbytes)
