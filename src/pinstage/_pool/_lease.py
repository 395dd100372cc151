"""The lease: the right to use one slab once, and the views through which it is used.

A slab must not be handed out again while somebody can still read or write it through a view. All views of a lease
(tensor, array, memoryview) share one *exporter*: an object without copies of its own that exposes the slab's bytes.
Views keep the exporter alive, the exporter's end says that the last of them has died. Finalisers run at any point of
any thread, so they take no lock: they leave the slab in a queue that the pool reads at its next step.
"""

from __future__ import annotations

import builtins
import ctypes
import math
import sys
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from .._errors import LeaseError, UnreleasedLeaseWarning

if TYPE_CHECKING:
    from collections import deque
    from types import TracebackType

    from .._memory import Block
    from ._pool import SlabPool


class Event(Protocol):
    """Work that will be done at some time: all that the pool needs to know of CUDA. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Say whether the work is done, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait until the work is done."""
        ...


class Slab:
    """One contiguous host allocation of the pool."""

    __slots__ = ("block", "capacity", "event", "ptr", "requested")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.ptr = block.ptr
        self.capacity = block.nbytes
        self.requested = 0
        self.event: Event | None = None


class _Exporter:
    """Mixin of the ctypes arrays below: reports its own end."""

    slab: Slab
    returns: deque[Slab]

    def __del__(self) -> None:
        self.returns.append(self.slab)


@lru_cache(maxsize=256)
def _exporter_type(capacity: int) -> type[Any]:
    array = ctypes.c_ubyte * capacity
    return type("SlabBytes", (_Exporter, array), {})


class Lease:
    """The right to use one slab once. Made by `SlabPool.acquire`; a context manager that releases at its end.

    Views (`tensor`, `view`, `numpy`, `memoryview`) show the slab itself, without a copy; its content is whatever the
    last user left. A view that outlives the release keeps the slab out of the pool until it dies.

    A lease belongs to whoever holds it; it may be passed to, and released by, another thread, but two threads should
    not use one lease at the same time. In a forked child it gives no views (`ForkedPoolError`).
    """

    __slots__ = ("__weakref__", "_capacity", "_exporter", "_nbytes", "_pool", "_slab")

    def __init__(self, pool: SlabPool, slab: Slab, nbytes: int) -> None:
        self._pool = pool
        self._slab: Slab | None = slab
        self._nbytes = nbytes
        self._capacity = slab.capacity
        self._exporter: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """Bytes of the slab: at least `nbytes`."""
        return self._capacity

    @property
    def released(self) -> bool:
        """Whether the lease has been given back."""
        return self._slab is None

    @property
    def fd(self) -> int | None:
        """File descriptor of the slab's bytes where the pool's memory is shared, else None. Never close it."""
        return self._held("fd").block.fd

    def data_ptr(self) -> int:
        """Return the slab's address. The address keeps nothing alive: it is yours until the release and not longer."""
        return self._held("data_ptr()").ptr

    def tensor(self) -> torch.Tensor:
        """Return the leased bytes as a tensor.

        Returns:
            uint8 tensor of shape ``[nbytes]`` on the CPU. It is page-locked if the pool's memory is.

        Raises:
            LeaseError: the lease was released.
        """
        return torch.frombuffer(self._export("tensor()"), dtype=torch.uint8, count=self._nbytes)

    def view(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
        """Return the start of the leased bytes as a tensor of the given shape and dtype.

        Raises:
            LeaseError: the lease was released.
            ValueError: the shape needs more than `nbytes` bytes, or has a negative size.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(sizes)
        if any(size < 0 for size in sizes) or count * dtype.itemsize > self._nbytes:
            raise ValueError(
                f"view does not fit the lease: shape {sizes} of {dtype} needs {count * dtype.itemsize} bytes, leased "
                f"{self._nbytes}; acquire more, or ask for a smaller view"
            )
        exporter = self._export("view()")
        if count == 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")  # whatever the default device
        return torch.frombuffer(exporter, dtype=dtype, count=count).view(sizes)

    def numpy(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the leased bytes as a uint8 array of shape ``[nbytes]``.

        Raises:
            LeaseError: the lease was released.
        """
        return np.frombuffer(self._export("numpy()"), dtype=np.uint8, count=self._nbytes)

    def memoryview(self) -> builtins.memoryview:
        """Return the leased bytes as a writable memoryview of format ``B`` and length `nbytes`.

        Raises:
            LeaseError: the lease was released.
        """
        return builtins.memoryview(self._export("memoryview()")).cast("B")[: self._nbytes]

    def __buffer__(self, flags: int, /) -> builtins.memoryview:
        """Serve ``memoryview(lease)`` on Python 3.12 and later (PEP 688)."""
        return self.memoryview()

    def guard(self, event: Event | None) -> None:
        """Name what the slab has to wait for if the lease is never released.

        A release says by itself what may still read or write the slab. It may not come about, because of an interrupt
        between a copy and the release, say. Then the slab comes back behind this event, instead of at once.

        Args:
            event: for example the stream of the copies, which is done when all its work is.

        Raises:
            LeaseError: the lease was released.
        """
        self._held("guard()").event = event

    def release(self, *, after: Event | None = None) -> None:
        """Give the slab back.

        Does not block. The slab is handed out again when `after` is done and the last view of it has died.

        Args:
            after: the work that still reads or writes the slab, for example the event behind an asynchronous copy. The
                pool keeps it until it is done.

        Raises:
            LeaseError: the lease was released before.
            ForkedPoolError: called in a forked child.
        """
        self._pool._release(self, after)

    def _take_slab(self) -> Slab:
        """Part from the slab; the pool's lock is held, so of two releases one fails."""
        slab = self._held("release()")
        self._slab = None
        return slab

    def _held(self, what: str) -> Slab:
        slab = self._slab
        if slab is None:
            raise LeaseError(
                f"lease is already released: {what} on a lease of {self._nbytes} bytes; acquire a new one, and release "
                "each lease once"
            )
        return slab

    def _export(self, what: str) -> Any:
        self._pool._check_process()  # page-locked pages may be missing in a child: reading them would end it
        slab = self._held(what)
        exporter = self._exporter
        if exporter is None:
            exporter = _exporter_type(slab.capacity).from_address(slab.ptr)
            exporter.slab = slab
            exporter.returns = self._pool._returns
            self._exporter = exporter
        return exporter

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._slab is not None:
            self.release()

    def __del__(self) -> None:
        slab = self._slab
        if slab is None or self._pool._forked() or sys.is_finalizing():
            return
        self._slab = None
        if self._exporter is None:
            self._pool._returns.append(slab)
        else:
            self._exporter = None
        warnings.warn(
            f"lease was never released: {self._nbytes} bytes of {slab.capacity} came back by garbage collection; use "
            "`with pool.acquire(...)` or call release()",
            UnreleasedLeaseWarning,
            stacklevel=2,
            source=self,
        )

    def __repr__(self) -> str:
        state = "released" if self._slab is None else "held"
        return f"<Lease nbytes={self._nbytes} capacity={self._capacity} {state}>"
