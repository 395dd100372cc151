"""The pool's public verbs: who waits, and for what. What is decided, and counted, is the `Ledger`'s affair."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

from .._memory import REFUSALS, MemoryResource, cap_bytes, default_memory, record_current_streams
from .._sizes import format_bytes, parse_bytes
from .._steps import step
from ..errors import UnreleasedLeaseWarning
from . import _refusals
from ._accounts import Account, Waiter
from ._host_budget import LEND_SECONDS, HostBudget, HostIsFull, LimitedMemory
from ._lease import Keeper, Lease
from ._ledger import Ledger
from ._resize import Resize
from ._slab import Fence
from ._stats import PoolStats
from ._waiting import Line, check_timeout

_PAUSE_SECONDS = 0.02
"""How often a reservation that waits for other processes looks again."""


def check_pool(pool: object) -> None:
    """See that a pool is one.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(pool, SlabPool):
        cap = repr(pool) if isinstance(pool, int | str | HostBudget) else "..."
        raise TypeError(f"pool must be a SlabPool: {pool!r}; pass SlabPool(max_bytes={cap})")


def check_open(pool: SlabPool) -> None:
    """Refuse a batch that needs no slab as `SlabPool.acquire` would refuse one that does.

    Raises:
        PoolClosedError, ForkedPoolError, StagingError: as `SlabPool.acquire`, whatever the size.
    """
    pool._check_entry()
    pool._check_open()


def close_for(pool: SlabPool, user: str) -> None:
    """Close the pool of a user of its own, such as a ``Stager``, which errors name from then on."""
    pool._user = user
    pool.close()


def keeper_of(pool: SlabPool) -> Keeper:
    """Return what says, by plain attributes, whether a pool is closed, or a forked child's copy."""
    return pool._ledger


class SlabPool:
    """A thread-safe pool of host slabs in size classes, under a hard cap.

    Args:
        memory: where slabs come from; `default_memory()` if None: page-locked where CUDA is usable, else pageable.
        max_bytes: cap on the bytes held, idle slabs included. An int; text such as ``"2GiB"``; ``"8GiB/host"``, which
            torchrun's local ranks divide equally; a `HostBudget`, which pools of several processes share; or
            ``"auto"``, a quarter of the memory that is available. `PoolStats.max_bytes_reason` says where the number
            comes from.

    Raises:
        TypeError: `memory` is not a memory resource, but for example a class or a size.
        ValueError: `max_bytes` is not a positive size, the number of ranks on this host is unknown, or another pool of
            this host has a `HostBudget` of this name with another cap.
        HostBudgetError: the folder of host budgets cannot be used.

    Requests are rounded up to size classes, eight for each doubling, so by at most 12.5% (and to whole pages where
    memory is page-locked). A request is served in this order: by an idle slab of which at most 12.5% is waste, or, from
    1 MiB on, by one of at most twice its class; by growing; at the cap, by any larger idle slab; by freeing idle slabs,
    least recently used first; by waiting, first come, first served.

    All methods may be called from any thread. After ``fork`` the child's copy refuses to work.
    """

    def __init__(
        self, memory: MemoryResource | None = None, *, max_bytes: int | str | HostBudget | None = "auto"
    ) -> None:
        if isinstance(max_bytes, HostBudget):
            cap, reason = max_bytes.max_bytes, f"given: {max_bytes!r}"
        else:
            cap, reason = cap_bytes(max_bytes)
        if cap <= 0:
            raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
        if memory is not None and (isinstance(memory, type) or not hasattr(memory, "allocate")):
            raise TypeError(f"memory must be a MemoryResource: {memory!r}; the cap is an option, max_bytes=...")
        self._memory: MemoryResource = default_memory() if memory is None else memory
        # A copy from pageable memory has read it when the call returns.
        record = record_current_streams if self._memory.is_pinned else None
        self._host = LimitedMemory(self._memory, max_bytes) if isinstance(max_bytes, HostBudget) else None
        self._ledger = Ledger(self._host or self._memory, cap, reason, self._host, record)
        self._has_told = False
        self._user: str | None = None
        self._line = Line(self._ledger.inbox, self._ledger.accounts)
        if self._host is not None:
            self._host.serve(self._ledger, self._line)

    # -- the public verbs

    @property
    def memory(self) -> MemoryResource:
        """The memory resource that slabs come from."""
        return self._memory

    @property
    def max_bytes(self) -> int:
        """The cap in bytes."""
        return self._ledger.max_bytes

    @property
    def frozen(self) -> bool:
        """Whether the pool refuses to allocate."""
        return self._ledger.frozen

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._ledger.closed

    def acquire(self, nbytes: int | str, *, timeout: float | None = None, owner: str = "unnamed") -> Lease:
        """Lease a slab of at least `nbytes`.

        Blocks only at the cap, or at the limit of the owner's share, until another lease is released or an event is
        done. The order is first come, first served, except for what is guaranteed to an owner (see `share`). The call
        also takes the time to allocate when the pool grows, and to free when idle slabs have to make room (CUDA then
        waits for the device). `reserve` beforehand avoids both.

        Args:
            nbytes: bytes needed, at least 1; text such as ``"4MiB"`` is accepted.
            timeout: seconds to wait at most; 0 does not wait, None waits forever.
            owner: the name of whoever takes the slab: counted in `PoolStats.owners`, and limited by the share of that
                name.

        Raises:
            MemoryError, OSError, RuntimeError: from `memory`, if it refuses and the pool has no slab that is large
                enough. If the pool has one, the request waits for it, and a `RuntimeWarning` says so once. The pool
                tries to grow that far again after a minute, or by `reserve`.
            BudgetExceededError: more than `max_bytes`, or than shares leave to the owner; it can never fit.
            AcquireTimeoutError: nothing came free in time.
            PoolFrozenError: the pool is frozen and has no slab that is large enough.
            PoolClosedError: the pool is closed, or was closed while this call waited.
            ForkedPoolError: called in a forked child.
        """
        if type(nbytes) is not int:
            nbytes = parse_bytes(nbytes)
        if nbytes <= 0:
            raise ValueError(f"nbytes must be at least 1: {nbytes}; a batch without bytes needs no slab")
        if timeout is not None and (type(timeout) is not float or timeout < 0):
            check_timeout(timeout)
        ledger = self._ledger
        if ledger.is_forked or ledger.is_entered() or ledger.forgotten:
            self._check_entry()
        with step("acquire"):
            with ledger.lock:
                account = ledger.accounts[owner]
                if ledger.closed or nbytes > account.largest:
                    self._check_request(account, nbytes)
                ledger.begin()
                line = ledger.inbox.line
                found = ledger.serve(account, nbytes, list(line) if line else ())
                ledger.end()
            return found if isinstance(found, Lease) else self._wait_or_grow(account, nbytes, found, timeout)

    def acquire_in_flight(self, nbytes: int, *, owner: str) -> tuple[Lease, Fence] | None:
        """Lease a slab that its owner has released and that is in flight. Does not block.

        For callers whose writes are ordered by streams: let the stream that writes the slab wait for the event. Then
        the host need not wait, and the pool need not grow.

        Args:
            nbytes: bytes needed, at least 1.
            owner: the name under which the slab was leased, and is leased again.

        Returns:
            The lease, and the event behind which the slab was released. None if no slab in flight of this owner is
            suitable, or if somebody waits for one.

        Raises:
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        self._check_entry()
        self._check_open()
        return self._ledger.decide(self._ledger.serve_in_flight, owner, nbytes)

    def share(self, owner: str, *, at_least: int | str = 0, at_most: int | str | None = None) -> None:
        """Guarantee a part of the cap to an owner, and limit what it may hold. Does not block, and allocates nothing.

        Slabs that the owner has leased or that are in flight count in full: up to 12.5% more than was requested.
        Guaranteed bytes that are not used are kept free, so that the owner gets them at once. A request that waits
        because of its own owner's limit does not hold up those behind it.

        A frozen pool shares the slabs that it has. Slabs beyond a new share stay where they are until they are
        released. A second call for the same owner replaces the first.

        Args:
            owner: the name, as given to `acquire`.
            at_least: bytes that no other owner may have; text such as ``"1GiB"`` is accepted.
            at_most: bytes that it may have; None for no limit but the cap.

        Raises:
            ValueError: `at_least` is more than `at_most`, `at_most` is 0, or more than the cap would be guaranteed.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        least, most = parse_bytes(at_least), None if at_most is None else parse_bytes(at_most)
        self._check_entry()
        with self._ledger.lock:
            self._check_open()
            self._ledger.accounts.share(owner, least, most)
        self._line.ring_all()

    def reserve(self, nbytes: int | str, *, count: int = 1) -> None:
        """Allocate now, so that `count` leases of `nbytes` at once need no allocation later.

        Idle slabs that would serve such a request count. Takes the time of the allocations.

        Raises:
            BudgetExceededError: the missing slabs do not fit under the cap beside what is held, or beside what other
                processes hold of a `HostBudget` and did not give back within 2.5 seconds; nothing was allocated.
            PoolFrozenError: slabs are missing and the pool is frozen.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        nbytes = parse_bytes(nbytes)
        if nbytes <= 0 or count < 0:
            raise ValueError(f"reserve needs sizes: nbytes={nbytes}, count={count}; pass nbytes >= 1 and count >= 0")
        ledger = self._ledger
        self._check_entry()
        error, is_asked_for = self._reserve(nbytes, count)
        deadline = time.monotonic() + LEND_SECONDS
        while is_asked_for and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            error, is_asked_for = self._reserve(nbytes, count)
        if error is not None:
            raise error
        if ledger.closed:
            self.trim()

    def _reserve(self, nbytes: int, count: int) -> tuple[Exception | None, bool]:
        """Return what is in the way, if anything, and whether it may be gone in a moment, as what others give back."""
        ledger = self._ledger
        with ledger.lock:
            is_full = self._host is not None and self._host.allowed < ledger.max_bytes
            self._check_open()
            if nbytes > ledger.max_bytes // self._memory.granularity * self._memory.granularity:
                raise _refusals.never_fits(ledger.decide(ledger.figures), nbytes)
            found = ledger.decide(ledger.reserve, nbytes, count)
        if not isinstance(found, Resize):
            return found, found is not None and is_full
        try:
            self._wait_for(found)
        except HostIsFull:
            return _refusals.reserve_does_not_fit(ledger.figures(), found.capacity, found.count), True
        if len(found.made) < found.count:
            return RuntimeError("reserve() made nothing: the thread that allocates never began; call it again"), True
        return None, False

    def trim(self, to_bytes: int | str = 0) -> int:
        """Give idle slabs back to the system, least recently used first, until at most `to_bytes` are held.

        Blocks: freeing page-locked memory makes CUDA wait for the device, so call it outside the hot path.

        Returns:
            Bytes given back.

        Raises:
            ForkedPoolError: called in a forked child.
        """
        target = parse_bytes(to_bytes)
        self._check_entry()
        resize = self._ledger.decide(self._ledger.trim, target)
        self._warn_of_forgotten()
        if resize is None:
            return 0
        self._wait_for(resize)
        return sum(slab.capacity for slab in resize.victims[: resize.gone])

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state allocates nothing."""
        self._check_entry()
        self._ledger.frozen = True
        self._line.ring_all()

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab that is still leased, or has a living view, is freed when its
        lease is released, or by a later `close` or `stats`. May be called again. In a forked child it does nothing.
        """
        ledger = self._ledger
        if ledger.is_forked:
            return
        ledger.closed = True
        self._line.ring_all()
        if ledger.is_entered():  # by a finaliser, in the middle of a call of this thread: somebody else has to wait
            ledger.tidy_later()
            return
        for event in ledger.decide(ledger.pending):
            event.synchronize()
        self.trim()
        if self._host is not None:
            self._host.end()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters, after a look at events. Does not block."""
        ledger = self._ledger
        self._check_entry()
        snapshot = ledger.decide(ledger.snapshot, self._line.waits, self._line.seconds)
        self._warn_of_forgotten()
        if ledger.closed and snapshot.free_slabs:
            self.trim()
        return snapshot

    # -- waiting

    def _wait_or_grow(
        self, account: Account, nbytes: int, found: Resize | Exception | None, timeout: float | None
    ) -> Lease:
        ledger = self._ledger

        def attempt(ahead: Sequence[Waiter]) -> Lease | Resize | Exception | None:
            with ledger.lock:
                self._check_request(account, nbytes)
                return ledger.decide(ledger.serve, account, nbytes, ahead)

        def timed_out(others: int) -> Exception:
            return _refusals.timed_out(ledger.figures(), nbytes, timeout, others)

        served: Lease | Resize | Exception | None = found
        while not isinstance(served, Lease):
            if isinstance(served, Exception):
                raise served
            if served is None:
                served = self._line.wait(Waiter(account, nbytes), attempt, timeout, timed_out)
            else:
                resize = served
                try:
                    served = self._wait_for(resize)
                except HostIsFull:
                    served = None  # in the line
                except REFUSALS:
                    if not resize.refusal or ledger.decide(ledger.hopeless, account, nbytes) is not None:
                        raise
                    self._tell_of_refusal(resize)
                    served = None
        if ledger.closed:
            served.release()
            self.trim()
            self._check_open()
        return served

    def _tell_of_refusal(self, resize: Resize) -> None:
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"pool cannot grow by {format_bytes(resize.capacity)}, and goes on with the slabs that it has: "
                f"{self._ledger.figures()}; {resize.refusal}; this is said once",
                RuntimeWarning,
                stacklevel=5,
            )

    def _wait_for(self, resize: Resize) -> Lease | None:
        """Wait for slow work; return the lease that it was for, unless an interrupt of another thread lost that."""
        resize.wait()
        ledger = self._ledger
        with ledger.lock:
            ledger.begin()
            ledger.end()
        return resize.outcome()

    # -- checks

    def _check_entry(self) -> None:
        """Refuse a call in a forked child, or inside another one; tell of forgotten leases."""
        ledger = self._ledger
        if ledger.is_forked:
            raise _refusals.forked()
        if ledger.is_entered():
            raise _refusals.entered_again()
        if ledger.forgotten:
            self._warn_of_forgotten(stacklevel=4)

    def _check_request(self, account: Account, nbytes: int) -> None:
        self._check_open()
        if nbytes > account.largest:
            ledger = self._ledger
            raise _refusals.never_fits(
                ledger.decide(ledger.figures), nbytes, account if ledger.accounts.are_shared else None
            )

    def _check_open(self) -> None:
        if self._ledger.closed:
            raise _refusals.closed(self._ledger.figures(), self._user)

    def _warn_of_forgotten(self, stacklevel: int = 3) -> None:
        forgotten = self._ledger.forgotten
        while forgotten:
            nbytes, capacity = forgotten.pop()
            warnings.warn(
                f"lease was never released: {nbytes} bytes of {capacity} came back by garbage collection; use `with "
                "pool.acquire(...)` or call release()",
                UnreleasedLeaseWarning,
                stacklevel=stacklevel,
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a pool cannot be copied or pickled: {self!r}; make another SlabPool, or pass this one on")

    def __enter__(self) -> SlabPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "frozen" if self.frozen else "open"
        return f"<SlabPool {state} {type(self._memory).__name__} {self._ledger.figures()}>"
