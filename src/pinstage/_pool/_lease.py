"""The lease: the right to use one slab once, and the views through which it is used.

A slab must not be handed out again while it can still be read or written through a view. All views
of a lease (tensor, array, memoryview) share one *exporter*: a ctypes array over the slab, which
every view references. When it is gone, so is the last view.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from .._compat.views import checked_sizes, tensor_over
from ..errors import LeaseError
from . import _refusals
from ._slab import Fence, Holdings, Slab, add_guard, check_fence, guard_numbers
from ._waiting import Account

_BYTE, _tensor_of = torch.uint8, torch.frombuffer  # faster to look up than torch's attributes


@lru_cache(maxsize=256)
def _exporter_type(capacity: int) -> type[Any]:
    return type("SlabBytes", (ctypes.c_ubyte * capacity,), {"__slots__": ("life", "state")})


class Lease:
    """The right to use one slab once. Made by `SlabPool.acquire`; a context manager that releases
    at its end.

    If the memory is page-locked, leaving the ``with`` block without a `release` records an event on
    the calling thread's current stream of each device that this process uses, and the slab is free
    when these events are done. So a ``copy_(..., non_blocking=True)`` from a view needs nothing
    else. Pass the event of work on any other stream to `guard`. While one of these streams captures
    a graph, leaving the block raises `LeaseError`, and the lease stays held: call `release` behind
    the last replay.

    Views (`tensor`, `numpy`, ``memoryview(lease)``) show the slab itself, without a copy. Its
    content is whatever the last user left. A view that outlives the release keeps the slab out of
    the pool until the view is freed.

    Another thread may use and release a lease, but two threads should not use one at the same time.
    In a forked child, making a view raises `ForkedPoolError`.
    """

    __slots__ = ("__weakref__", "_capacity", "_exporter", "_nbytes", "_ref", "_slab", "_state")

    def __init__(self, state: Holdings, slab: Slab, nbytes: int, account: Account) -> None:
        # Called under the pool's lock. The last line makes the slab leased.
        self._state = state
        self._slab: Slab | None = slab
        self._nbytes = nbytes
        self._capacity = slab.capacity
        self._exporter: Any = None
        slab.views = None
        slab.for_good = False
        slab.account = account
        slab.requested = nbytes
        slab.used_at = next(state.clock)
        # `slab.lease` is this reference as long as the slab is this lease's. In a garbage cycle,
        # the collector clears the slab's reference before finalisers use the lease for the last
        # time; by then the slab may be another lease's.
        self._ref = slab.lease = weakref.ref(self)

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

    def data_ptr(self) -> int:
        """Return the slab's address. It keeps nothing alive, and is valid only until the
        release.
        """
        return self._held("data_ptr()").ptr

    def tensor(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | np.typing.DTypeLike = torch.uint8,
        *,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return leased bytes as a tensor, without a copy.

        Args:
            shape: the tensor's. None is one dimension with as many elements as fit.
            dtype: torch's, or numpy's, by type or name (``np.float32``, ``"float32"``).
            offset: byte at which the tensor starts, a multiple of the size of an element.

        Returns:
            Contiguous tensor on the CPU. It is page-locked if the pool's memory is.

        Raises:
            LeaseError: the lease was released.
            TypeError: torch has no such dtype, it is quantised, or `dtype` is None.
            ValueError: the tensor needs more than the leased bytes, or a size or `offset` is wrong.
        """
        if shape is None and dtype is _BYTE and not offset:
            return _tensor_of(self._export("tensor()"), dtype=_BYTE, count=self._nbytes)
        if dtype is None:  # numpy would take it for float64
            raise TypeError("no dtype: None; pass torch's or numpy's, such as torch.float32")
        if not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        sizes = checked_sizes(shape, dtype, offset, self._nbytes)
        return tensor_over(self._export("tensor()"), dtype, sizes, offset=offset)

    def numpy(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: np.typing.DTypeLike | torch.dtype = np.uint8,
        *,
        offset: int = 0,
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Return leased bytes as an array, without a copy: ``tensor(...).numpy()``.

        Args:
            shape: as for `tensor`.
            dtype: as for `tensor`, if numpy has it.
            offset: as for `tensor`.

        Raises:
            LeaseError, TypeError, ValueError: as `tensor`.
        """
        self._held("numpy()")
        return self.tensor(shape, dtype, offset=offset).numpy()

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return the leased bytes as a writable memoryview, for ``memoryview(lease)`` (Python 3.12
        and later).
        """
        return memoryview(self._export("memoryview()")).cast("B")[: self._nbytes]

    def guard(self, event: Fence | None) -> None:
        """Add an event that the slab has to wait for, however the lease ends.

        Does not block. The slab is handed out again when all guards and the `after` of `release`
        are done. A guard that is done is dropped when another one is added.

        Args:
            event: recorded behind work that reads or writes the slab. A stream works, too: it is
                done when all its work is. None adds nothing.

        Raises:
            LeaseError: the lease was released.
            TypeError: `event` has no ``query()`` or no ``synchronize()``.
        """
        slab = self._held("guard()")
        if event is not None:
            add_guard(slab.guards, event)

    def release(self, *, after: Fence | None = None) -> None:
        """Give the slab back.

        Does not block. The slab is handed out again when `after` and all guards are done and the
        last view of it is gone.

        Args:
            after: the work that still reads or writes the slab, for example the event behind an
                asynchronous copy. The pool keeps it until it is done.

        Raises:
            LeaseError: the lease was released before.
            TypeError: `after` has no ``query()`` or no ``synchronize()``; the lease is still held.
            ForkedPoolError: called in a forked child.
        """
        state = self._state
        if state.is_forked:
            raise _refusals.forked()
        if after is not None and not hasattr(after, "query"):
            check_fence(after)
        # No call is made until the slab has no lease, so neither another thread nor an interrupt
        # comes between. Of two releases at once, one finds no slab, and the event is set before the
        # slab can be found free.
        slab, self._slab = self._slab, None
        if slab is None:
            self._refuse("release()")
        if slab.lease is self._ref:
            slab.event = after
            slab.lease = None
        self._exporter = None
        slab.put(None)
        if state.unrecorded:
            state.unrecorded.pop(self, None)
        if state.waiters:
            state.wake_first()
        if state.closed:
            state.tidy_later()

    def _held(self, what: str) -> Slab:
        slab = self._slab
        if slab is None or slab.lease is not self._ref:
            self._refuse(what)
        return slab

    def _refuse(self, what: str) -> NoReturn:
        raise LeaseError(
            f"lease is already released: {what} on a lease of {self._nbytes} bytes; acquire a new "
            "one, and release each lease once"
        )

    def _export(self, what: str) -> Any:
        state = self._state
        # Page-locked pages may be missing in a child: reading them would end it.
        if state.is_forked:
            raise _refusals.forked()
        slab = self._held(what)
        if self._exporter is None:
            exporter = _exporter_type(slab.capacity).from_address(slab.ptr)
            exporter.state = state
            # Not the exporter: if a memoryview is part of a garbage cycle, the collector calls back
            # before finalisers use the exporter for the last time. The collector doesn't track
            # arrays.
            exporter.life = np.empty(0)
            views = weakref.ref(exporter.life, slab.put)
            # Again: another thread may have made it; no call comes between.
            if self._exporter is None:
                self._exporter, slab.views = exporter, views
        return self._exporter

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        slab = self._slab
        if slab is None:
            return
        state = self._state
        try:
            if state.record is not None:
                events = state.record()
                if slab.lease is self._ref:  # as in `release`
                    slab.guards.update(zip(guard_numbers, events, strict=False))
        except BaseException as failure:
            state.unrecorded[self] = None
            if error is None or not isinstance(failure, Exception):
                raise
            error.add_note(
                f"a lease of {self._nbytes} bytes stays held: {failure!r}; call its "
                "release(after=event)"
            )
        else:
            self.release()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a lease cannot be copied or pickled: {self!r} is the right to use one slab once; "
            "acquire another, or copy its bytes with lease.tensor().clone()"
        )

    def __repr__(self) -> str:
        state = "released" if self._slab is None else "held"
        return f"<Lease nbytes={self._nbytes} capacity={self._capacity} {state}>"


def guard_until_release(lease: Lease, event: Fence | None) -> int:
    """Set the event that the slab waits for if an interrupt prevents the release; return the slab's
    address.

    `Lease.release` replaces the event.

    Raises:
        LeaseError: the lease was released.
    """
    slab = lease._held("guard()")
    slab.event = event
    return slab.ptr


def hold_for_good(lease: Lease) -> None:
    """Expect no release of a lease and its views: let requests for its bytes fail at once.

    Raises:
        LeaseError: the lease was released.
    """
    lease._held("hold_for_good()").for_good = True


def event_of(lease: Lease) -> Fence:
    """Return the event behind which the slab of a lease was released before."""
    event = lease._held("event_of()").event
    assert event is not None
    return event


def is_page_locked(lease: Lease) -> bool:
    """Return whether a slab is page-locked for CUDA.

    Raises:
        LeaseError: the lease was released.
    """
    return lease._state.is_pinned(lease._held("is_page_locked()"))


def descriptor_of(lease: Lease) -> int | None:
    """Return the file descriptor of a slab's bytes where the pool's memory is shared, else None.
    Never close it.

    Raises:
        LeaseError: the lease was released.
    """
    return lease._held("descriptor_of()").block.fd
