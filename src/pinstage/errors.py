"""All errors and warnings of the package.

Errors derive from `PinstageError`, and also from the built-in error that you would catch anyway. A
message reads ``<what happened>: <numbers>; <what to do>``. Wrong arguments raise `ValueError` and
`TypeError`. Other errors of CUDA and torch pass through unchanged.
"""

from __future__ import annotations


class PinstageError(Exception):
    """Base of the errors in this module."""


class ClosedError(PinstageError, RuntimeError):
    """A stager, loader, `HostRegion` or `CheckpointStager` was closed. A `RuntimeError`."""


class PoolError(PinstageError):
    """The pool refuses a request. Carries the pool's counters at that moment.

    Attributes:
        requested_bytes: the size of the request.
        held_bytes: bytes that the pool held, idle ones included.
        leased_bytes: bytes of slabs in use.
        in_flight_bytes: bytes of released slabs whose copy was not done or that still had live
            views.
        max_bytes: the cap.
    """

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int = 0,
        held_bytes: int = 0,
        leased_bytes: int = 0,
        in_flight_bytes: int = 0,
        max_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.held_bytes = held_bytes
        self.leased_bytes = leased_bytes
        self.in_flight_bytes = in_flight_bytes
        self.max_bytes = max_bytes


class BudgetExceededError(PoolError, MemoryError):
    """The request can't fit under ``max_bytes``, or beside slabs held for good; waiting would not
    help. A `MemoryError`.
    """


class AcquireTimeoutError(PoolError, TimeoutError):
    """No slab came free in time; the same request might fit later. A `TimeoutError`."""


class PoolFrozenError(PoolError, RuntimeError):
    """Serving the request would need an allocation, and the pool is frozen. A `RuntimeError`."""


class PoolClosedError(PoolError, ClosedError):
    """The pool was closed, or the stager that it belongs to. A `ClosedError`."""


class ForkedPoolError(PoolError, RuntimeError):
    """The pool belongs to the parent of this forked process, so it carries no counters. A
    `RuntimeError`.
    """


class PinningError(PinstageError, RuntimeError):
    """Memory can't be page-locked or freed, or another process owns a `HostRegion`. A
    `RuntimeError`.

    Also a `MemoryError` if there is too little memory. A failed call leaves nothing behind.

    Attributes:
        call: the CUDA function.
        name: CUDA's name of the error, such as ``cudaErrorInvalidValue``.
        nbytes: bytes requested; None if the call takes no size.
    """

    def __init__(
        self, message: str, *, call: str = "", name: str = "", nbytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.call = call
        self.name = name
        self.nbytes = nbytes


class CudaUnavailableError(PinstageError, RuntimeError):
    """CUDA can't be used in this process, and was asked for. A `RuntimeError`."""


class HostBudgetError(PinstageError, RuntimeError):
    """The folder of a `HostBudget` cannot be used, or isn't the user's alone. A `RuntimeError`."""


class LeaseError(PinstageError, RuntimeError):
    """A lease was used after its release or released twice, or its block ended while a graph was
    being captured.

    A `RuntimeError`.
    """


class LayoutError(PinstageError, TypeError):
    """A leaf or object cannot be staged, or a batch does not match a layout. A `TypeError`.

    Attributes:
        path: where it is, as you would write it after the batch's name, for example
            ``['obs'][3].raw``. Empty for the batch itself.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TraceError(PinstageError, ValueError):
    """A file isn't a trace of the PyTorch profiler, is broken, or has no copies to report. A
    `ValueError`.
    """


class TargetError(PinstageError, ImportError):
    """The ``module:callable`` of ``pinstage audit`` can't be found or called, or returns no batch.
    An `ImportError`.
    """


class StagingWarning(RuntimeWarning):
    """Staging works, but more slowly or with more memory than it should. Turn it into an error in
    tests.
    """


class UnreleasedLeaseWarning(RuntimeWarning):
    """A lease was garbage-collected without a release; its slab went back to the pool."""
