"""The pool's public verbs: who waits, and for what. What is decided, and counted, is the `Ledger`'s affair."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from .._memory import REFUSALS, MemoryResource, cap_bytes, default_memory
from .._sizes import format_bytes, parse_bytes
from .._steps import step
from ..errors import UnreleasedLeaseWarning
from . import _refusals
from ._accounts import Account
from ._jobs import Job
from ._lease import Lease
from ._ledger import Ledger
from ._slab import Event, Waiter
from ._stats import PoolStats
from ._waiting import Line

if TYPE_CHECKING:
    from types import TracebackType


class SlabPool:
    """A thread-safe pool of host slabs in size classes, under a hard cap.

    Args:
        memory: where slabs come from; `default_memory()` if None: page-locked where CUDA is usable, else pageable.
        max_bytes: cap on the bytes held, idle slabs included: an int; text such as ``"2GiB"``; ``"8GiB/host"``, a cap
            for this host, of which each of torchrun's local ranks takes an equal part; or ``"auto"`` for a share of
            what this process may pin. `PoolStats.max_bytes_reason` says how the number came about.

    Raises:
        ValueError: `max_bytes` is not a positive size, or there is no telling how many ranks this host has.

    Requests are rounded to size classes with eight steps to a doubling, at most 12.5% (and to whole pages where memory
    is page-locked). A request is served, in this order: by an idle slab of which at most 12.5% is waste, or, from 1 MiB
    on, of at most twice its class; by growing; at the cap by any larger idle slab; by trimming idle slabs, least
    recently used first; by waiting, first come first served.

    All methods may be called from any thread. After ``fork`` the child's copy refuses to work.
    """

    def __init__(self, memory: MemoryResource | None = None, *, max_bytes: int | str = "auto") -> None:
        cap, reason = cap_bytes(max_bytes)
        if cap <= 0:
            raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
        self._memory: MemoryResource = default_memory() if memory is None else memory
        self._ledger = Ledger(self._memory, cap, reason)
        self._has_told = False
        self._line = Line(self._ledger.inbox, self._ledger.accounts)

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

        Blocks only at the cap, or at the bound of the owner's share, until another lease is released or an event is
        done; first come first served, but for what is guaranteed to an owner (see `share`). It may also take the time
        of an allocation when the pool grows, and of freeing when idle slabs have to make room (CUDA waits for the
        device then); `reserve` beforehand avoids both.

        Args:
            nbytes: bytes needed, at least 1; text such as ``"4MiB"`` is accepted.
            timeout: seconds to wait at the most; 0 does not wait, None waits for ever.
            owner: for whom, in one word: counted in `PoolStats.owners`, and bound by the share of that name.

        Raises:
            MemoryError, OSError, RuntimeError: of `memory`, where it refuses and the pool has no slab as large. Where
                the pool has one, the request waits for that, and a `RuntimeWarning` says so once. The same total is
                asked for again after a minute, or by `reserve`.
            BudgetExceededError: more than `max_bytes`, or than shares leave to the owner; it can never fit.
            AcquireTimeoutError: nothing came free in time.
            PoolFrozenError: the pool is frozen and has no slab as large.
            PoolClosedError: the pool is closed, or was closed while this call waited.
            ForkedPoolError: called in a forked child.
        """
        if type(nbytes) is not int:
            nbytes = parse_bytes(nbytes)
        if nbytes <= 0:
            raise ValueError(f"nbytes must be at least 1: {nbytes}; a batch without bytes needs no slab")
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must not be negative: {timeout}; 0 does not wait, None waits for ever")
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

    def acquire_in_flight(self, nbytes: int, *, owner: str) -> tuple[Lease, Event] | None:
        """Lease a slab that its owner has released and that is in flight. Does not block.

        For one whose work is ordered by streams, and runs ahead of them: the slab may be written when the event is
        done, so let the stream that writes it wait for that. The host need not wait, and the pool need not grow.

        Args:
            nbytes: bytes needed, at least 1.
            owner: whose slab, and whose lease.

        Returns:
            The lease, and the event that its last one was released after; None where no slab of the owner's that is in
            flight would do, or somebody waits for one.

        Raises:
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        ledger = self._ledger
        self._check_entry()
        with ledger.lock:
            self._check_open()
            ledger.begin()
            found = ledger.serve_in_flight(ledger.accounts[owner], nbytes)
            ledger.end()
        return found

    def share(self, owner: str, *, at_least: int | str = 0, at_most: int | str | None = None) -> None:
        """Guarantee a part of the cap to an owner, and bound what it may hold. Does not block, and allocates nothing.

        Counted are the sizes of slabs that the owner has leased or that are in flight: up to 12.5% more than was asked
        for. What is guaranteed and not used is kept free of others, so that the owner gets it at once, whoever else
        waits. A request behind one that waits because of its own owner's bound is served before it.

        A frozen pool shares what it holds, in slabs of the sizes that it has. Slabs beyond a new share stay with whom
        they are until they are released. A second call for the same owner takes the place of the first.

        Args:
            owner: the name, as given to `acquire`.
            at_least: bytes that no other owner may have; text such as ``"1GiB"`` is accepted.
            at_most: bytes that it may have; None for no bound but the cap.

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
            BudgetExceededError: the missing slabs do not fit under the cap beside what is held; nothing was allocated.
            PoolFrozenError: slabs are missing and the pool is frozen.
            PoolClosedError: the pool is closed.
            ForkedPoolError: called in a forked child.
        """
        nbytes = parse_bytes(nbytes)
        if nbytes <= 0 or count < 0:
            raise ValueError(f"reserve needs sizes: nbytes={nbytes}, count={count}; pass nbytes >= 1 and count >= 0")
        ledger = self._ledger
        self._check_entry()
        with ledger.lock:
            self._check_open()
            if nbytes > ledger.max_bytes // self._memory.granularity * self._memory.granularity:
                raise _refusals.never_fits(ledger.figures(), nbytes)
            ledger.begin()
            found = ledger.reserve(nbytes, count)
            ledger.end()
        if isinstance(found, Exception):
            raise found
        if found is not None:
            self._wait_for(found)
        if ledger.closed:
            self.trim()

    def trim(self, to_bytes: int | str = 0) -> int:
        """Give idle slabs back to the system, least recently used first, until at most `to_bytes` are held.

        Blocks: freeing page-locked memory makes CUDA wait for the device, so call it outside the hot path.

        Returns:
            Bytes given back.

        Raises:
            ForkedPoolError: called in a forked child.
        """
        target = parse_bytes(to_bytes)
        ledger = self._ledger
        self._check_entry()
        with ledger.lock:
            ledger.begin()
            job = ledger.trim(target)
            ledger.end()
        self._warn_of_forgotten()
        if job is None:
            return 0
        self._wait_for(job)
        return sum(slab.capacity for slab in job.victims)

    def freeze(self) -> None:
        """Make any later allocation an error, so that a run can prove that its steady state allocates nothing."""
        self._check_entry()
        self._ledger.frozen = True
        self._line.ring_all()

    def close(self) -> None:
        """Refuse new leases, wait for slabs in flight, and free all slabs that are idle then.

        Waiting callers get `PoolClosedError`. A slab still leased, or with a living view, is freed when its lease is
        released, or by a later `close` or `stats`: a leak before a dangling pointer. May be called again. In a forked
        child it does nothing.
        """
        ledger = self._ledger
        if ledger.is_forked:
            return
        ledger.closed = True
        self._line.ring_all()
        if ledger.is_entered():  # by a finaliser, in the middle of a call of this thread: somebody else has to wait
            ledger.tidy_later()
            return
        with ledger.lock:
            ledger.begin()
            pending = ledger.pending()
            ledger.end()
        for event in pending:
            event.synchronize()
        self.trim()

    def stats(self) -> PoolStats:
        """Return a consistent snapshot of all counters. Does not block; looks at events first."""
        ledger = self._ledger
        self._check_entry()
        with ledger.lock:
            ledger.begin()
            ledger.ask_events()
            snapshot = ledger.snapshot(self._line.waits, self._line.seconds)
            ledger.end()
        self._warn_of_forgotten()
        if ledger.closed and snapshot.free_slabs:
            self.trim()
        return snapshot

    # -- waiting

    def _wait_or_grow(
        self, account: Account, nbytes: int, found: Job | Exception | None, timeout: float | None
    ) -> Lease:
        ledger = self._ledger

        def attempt(ahead: Sequence[Waiter]) -> Lease | Job | Exception | None:
            with ledger.lock:
                self._check_request(account, nbytes)
                ledger.begin()
                found = ledger.serve(account, nbytes, ahead)
                ledger.end()
            return found

        def timed_out(others: int) -> Exception:
            return _refusals.timed_out(ledger.figures(), nbytes, timeout, others)

        served: Lease | Job | Exception | None = found
        while not isinstance(served, Lease):
            if isinstance(served, Exception):
                raise served
            if served is None:
                served = self._line.wait(Waiter(account, nbytes), attempt, timeout, timed_out)
            else:
                job = served
                try:
                    served = self._wait_for(job)
                except REFUSALS:
                    if not job.refusal or self._is_hopeless(account, nbytes):
                        raise
                    self._tell_of_refusal(job)
                    served = None
        if ledger.closed:
            served.release()
            self.trim()
            self._check_open()
        return served

    def _is_hopeless(self, account: Account, nbytes: int) -> bool:
        ledger = self._ledger
        with ledger.lock:
            ledger.begin()
            found = ledger.hopeless(account, nbytes)
            ledger.end()
        return found is not None

    def _tell_of_refusal(self, job: Job) -> None:
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"pool cannot grow by {format_bytes(job.capacity)}, and goes on with the slabs that it has: "
                f"{self._ledger.figures()}; {job.refusal}; this is said once",
                RuntimeWarning,
                stacklevel=5,
            )

    def _wait_for(self, job: Job) -> Lease | None:
        """Wait for slow work; return the lease that it was for, unless an interrupt of another thread lost that."""
        job.wait()
        ledger = self._ledger
        with ledger.lock:
            ledger.begin()
            ledger.end()
        return job.outcome()

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
            raise _refusals.never_fits(
                self._ledger.figures(), nbytes, account if self._ledger.accounts.are_shared else None
            )

    def _check_open(self) -> None:
        if self._ledger.closed:
            raise _refusals.closed(self._ledger.figures())

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "frozen" if self.frozen else "open"
        return f"<SlabPool {state} {type(self._memory).__name__} {self._ledger.figures()}>"
