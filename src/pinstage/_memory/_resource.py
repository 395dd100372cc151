"""The contract of memory resources, and the base class of all kinds."""

import os
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .._sizes import format_bytes, parse_bytes, round_up
from ..errors import PinningError, StagingWarning
from . import _cuda
from ._pages import PAGE_BYTES, unmap

LEAKED: "list[Block]" = []
"""Blocks that CUDA refused to give up. They stay mapped, on purpose, until the process ends."""

_CUDA_IS_GONE = {"cudaErrorCudartUnloading", "CUDA_ERROR_DEINITIALIZED"}


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A page-aligned run of host memory, held until its resource takes it back.

    A block is a handle, not an owner: dropping the last reference frees nothing. Two blocks are
    equal only when they are the same object.
    """

    ptr: int
    """Address of the first byte; a multiple of the page size."""
    nbytes: int
    """Bytes held, all usable: a multiple of the resource's granularity, at least the requested
    size.
    """
    fd: int | None = None
    """File descriptor of the same bytes, when the resource is shared. Owned by the block: never
    close it.
    """
    is_pinned: bool | None = None
    """Whether it is page-locked for CUDA; None: as its resource is."""

    _raw: int = 0  # what cudaHostAlloc returned; at most one page before ptr
    _device: int = -1  # whose context pinned it; -1 for pageable


@runtime_checkable
class MemoryResource(Protocol):
    """Where slabs come from. Anything with these five members can serve a ``SlabPool``.

    The pool counts ``Block.nbytes`` against its cap. It calls both methods from any thread, outside
    its own lock, so they must be thread-safe, and may be slow.
    """

    @property
    def is_pinned(self) -> bool:
        """Whether blocks are page-locked for CUDA, so that copies from them are asynchronous.

        `Block.is_pinned` may differ for one block.
        """

    @property
    def is_shared(self) -> bool:
        """Whether another process can map the same bytes."""

    @property
    def granularity(self) -> int:
        """The allocation unit in bytes."""

    def allocate(self, nbytes: int) -> Block:
        """Allocate at least ``nbytes``; the caller owns the block. A failed call changes
        nothing.
        """

    def deallocate(self, block: Block) -> None:
        """Take a block back; no pointer into it may be used afterwards."""


class Resource(ABC):
    """The base of all kinds: checks sizes, tracks blocks, and avoids CUDA in forked children and at
    exit.
    """

    def __init__(self, *, pinned: bool, device: _cuda.Device = None) -> None:
        if _cuda.is_not_cuda(device):
            raise ValueError(
                f"page-locked memory belongs to a CUDA device, not {str(device)!r}; use "
                "PageableMemory()"
            )
        self._pinned = pinned
        self._device = device
        self._pid = os.getpid()
        # One add and one remove for each block, each of them atomic: no lock that a fork could
        # leave locked.
        self._live: set[Block] = set()

    @property
    def is_pinned(self) -> bool:
        """Whether blocks are page-locked for CUDA."""
        return self._pinned

    @property
    def is_shared(self) -> bool:
        """Whether another process can map the same bytes."""
        return False

    @property
    def granularity(self) -> int:
        """The allocation unit in bytes."""
        return PAGE_BYTES

    def allocate(self, nbytes: int) -> Block:
        """Allocate at least ``nbytes`` bytes of host memory.

        Blocks while the kernel and the driver find the pages: milliseconds for each 10 MiB, with
        the interpreter lock released. Never waits for the device. Any thread may call. The caller
        owns the block and gives it back with ``deallocate``; a block that is dropped instead stays
        held.

        Args:
            nbytes: bytes wanted, rounded up to ``granularity``.

        Returns:
            A new block.

        Raises:
            ValueError: ``nbytes`` is zero or negative.
            MemoryError: there is too little memory. From CUDA it is also a ``RuntimeError``.
            RuntimeError: CUDA refused for another reason, or this is a forked child of the process
                that made the resource. A failed call holds nothing, and leaves no CUDA error
                behind.
        """
        size = parse_bytes(nbytes)
        if size == 0:
            raise ValueError("a block cannot be empty: 0 bytes asked; ask for 1 or more")
        if self._is_inherited():
            raise RuntimeError(
                f"{type(self).__name__} belongs to process {self._pid}, and this is {os.getpid()}, "
                "forked from it: CUDA cannot pin here; allocate before the fork, or use "
                "PageableMemory()"
            )
        device = _cuda.device_index(self._device) if self._pinned else -1
        block = self._take(round_up(size, self.granularity), device)
        self._live.add(block)
        return block

    def deallocate(self, block: Block) -> None:
        """Take a block back, and free its memory.

        Freeing a page-locked block makes CUDA wait until the device is idle (200 ms behind a 200 ms
        kernel), with the interpreter lock released. Any thread may call.

        Where CUDA may not be called, page-locked blocks stay as they are: in a forked child, whose
        parent owns them, and while the interpreter shuts down. When CUDA refuses to give a block
        up, its memory is leaked on purpose, and a ``StagingWarning`` says so once: unmapping memory
        that is still registered would make later, unrelated pinning fail, and leave the device with
        a dangling pointer.

        Args:
            block: from this resource's ``allocate``. No pointer into it may be used afterwards.

        Raises:
            ValueError: the block is not this resource's, or was taken back before. Nothing is
                freed.
        """
        if sys.is_finalizing() or self._is_inherited():
            return
        try:
            self._live.remove(block)
        except KeyError:
            raise ValueError(
                f"not a block that {self!r} holds: it came from another resource, or was "
                "deallocated before"
            ) from None
        try:
            self._give(block)
        except PinningError as error:
            leak(block, error)

    def __repr__(self) -> str:
        live = list(self._live)
        return (
            f"<{type(self).__name__}: {len(live)} blocks, "
            f"{format_bytes(sum(block.nbytes for block in live))}>"
        )

    @abstractmethod
    def _take(self, nbytes: int, device: int) -> Block:
        """Make a block of exactly ``nbytes``, page-locked for a device unless it is -1; leave
        nothing if that fails.
        """

    def _give(self, block: Block) -> None:
        """Undo ``_take``; a ``PinningError`` is raised before anything is unmapped."""
        if block._device >= 0:
            _cuda.unregister(block.ptr, block._device)
        unmap(block.ptr, block.nbytes)
        if block.fd is not None:
            os.close(block.fd)

    def _is_inherited(self) -> bool:
        """Return whether the blocks are page-locked by the process that this one was forked
        from.
        """
        return self._pinned and os.getpid() != self._pid


def leak(block: Block, error: PinningError) -> None:
    """Keep a block forever because CUDA refused to give it up, and warn the first time."""
    LEAKED.append(block)
    if len(LEAKED) == 1 and error.name not in _CUDA_IS_GONE:
        warnings.warn(
            f"page-locked memory is leaked: {format_bytes(block.nbytes)} stay mapped until the "
            f"process ends, because {error}; this warning is shown once",
            StagingWarning,
            stacklevel=3,
        )
