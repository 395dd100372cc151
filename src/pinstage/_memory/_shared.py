"""Memory that other processes can map, page-locked in this one."""

import os

from . import _cuda, _pages
from ._resource import Block, Resource


class SharedMapping:
    """The bytes of a ``SharedMemory`` block, seen from another process (or again from the same one).

    They are pageable here: a process that only writes needs no CUDA. The owner's GPU sees writes at once;
    the two processes have to coordinate their writes. The mapping lives until ``close``. If it is dropped before, it
    stays mapped, since views of it may be alive.
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


class SharedMemory(Resource):
    """Pages of a ``memfd``, mapped shared and registered. Another process maps the same bytes by ``Block.fd``.

    For DataLoader workers: the GPU of this process reads what a worker writes, without a copy in between. A forked
    child sees the bytes too. A memfd has no name to unlink, and does not count against the size of ``/dev/shm``. Its
    size is sealed, so that no process can truncate it.

    Without CUDA, or with ``register=False``, the memory is shared but pageable, and ``is_pinned`` is False.

    Args:
        device: the device whose context pins; None is torch's current device at the time of each allocation. Only that
            device gets a context.
        register: page-lock the memory where CUDA is usable.

    Raises:
        ValueError: ``device`` is not a CUDA device.
    """

    def __init__(self, device: _cuda.Device = None, *, register: bool = True) -> None:
        super().__init__(pinned=register and _cuda.is_usable(), device=device)

    @property
    def is_shared(self) -> bool:
        """Whether another process can map the same bytes: yes."""
        return True

    def _take(self, nbytes: int, device: int) -> Block:
        fd = _pages.make_shared_file(nbytes)
        with _pages.mapped(nbytes, fd, huge=self._pinned) as address:
            if device >= 0:
                _pages.populate(address, nbytes)
                _cuda.register(address, nbytes, device)
        return Block(address, nbytes, fd, _device=device)


def attach(fd: int, nbytes: int) -> SharedMapping:
    """Map the bytes of a `SharedMemory` block into this process. Makes no CUDA calls.

    Args:
        fd: the block's ``fd``, or a duplicate sent to this process. The caller keeps it, and may close it at once.
        nbytes: the block's ``nbytes``, or fewer.

    Returns:
        A mapping that the caller closes.

    Raises:
        ValueError: ``nbytes`` is not positive, or more than the file has (touching the rest would end the process).
        OSError: ``fd`` is not an open file, or the kernel refused.
    """
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise ValueError(f"cannot attach {nbytes} bytes: the file has {size}; pass the block's own nbytes")
    return SharedMapping(_pages.map_pages(nbytes, fd), nbytes)
