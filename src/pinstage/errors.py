"""What can go wrong, as types that carry the numbers.

The errors here derive from `StagingError` and also from the built-in that a caller would catch anyway. A message reads
``<what>: <numbers>; <what to do>``. Wrong arguments are `ValueError` and `TypeError`. Errors of CUDA and torch pass
through unchanged.
"""

from __future__ import annotations


class StagingError(Exception):
    """Base of the errors in this module."""


class _PoolStateError(StagingError):
    """A request the pool cannot serve, with the pool's counters at that moment.

    Attributes:
        requested_bytes: what was requested.
        held_bytes: bytes that the pool held, idle ones included.
        leased_bytes: bytes of slabs in use.
        in_flight_bytes: bytes of released slabs whose copy was not done or of which a view was alive.
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


class BudgetExceededError(_PoolStateError, MemoryError):
    """The request can never fit under ``max_bytes``; waiting would not help. A `MemoryError`."""


class AcquireTimeoutError(_PoolStateError, TimeoutError):
    """No slab came free in time; the same request might fit later. A `TimeoutError`."""


class PoolFrozenError(_PoolStateError, RuntimeError):
    """Serving the request would need an allocation, and the pool is frozen. A `RuntimeError`."""


class PoolClosedError(StagingError, RuntimeError):
    """The pool was closed. A `RuntimeError`."""


class ForkedPoolError(StagingError, RuntimeError):
    """The pool belongs to the parent of this forked process. A `RuntimeError`."""


class HostBudgetError(StagingError, RuntimeError):
    """The folder of a `HostBudget` cannot be used, or isn't the user's alone. A `RuntimeError`."""


class PinningError(StagingError, RuntimeError):
    """Memory of a `HostRegion` couldn't be page-locked, or it is closed, or another process's. A `RuntimeError`."""


class LeaseError(StagingError, RuntimeError):
    """A lease was used after its release, released twice, or its block left while a graph is captured.

    A `RuntimeError`.
    """


class LayoutError(StagingError, TypeError):
    """A leaf or object that cannot be staged, or a batch that does not match a layout. A `TypeError`.

    Attributes:
        path: where it is, as you would write it after the batch's name, for example ``['obs'][3].raw``. Empty for the
            batch itself.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class UnreleasedLeaseWarning(ResourceWarning):
    """A lease was garbage-collected without a release; its slab went back to the pool."""
