"""The table of loans: which worker has which slab, and which worker waits for one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from .._pool import Fence, Lease, size_class
from .._sizes import format_bytes
from .._stage import HostSlabs
from ..errors import BudgetExceededError, LayoutError, PoolClosedError
from ._messages import BEGIN_AGAIN


class Loan(NamedTuple):
    """A slab that one worker may write.

    First the worker has the slab. Then the batch that arrived in it has the slab, until the batch
    is sent or dropped. Then the copy has it. When the copy is done, the worker gets a message, and
    has the slab again.
    """

    number: int
    worker: int
    lease: Lease


class Loans:
    """The slabs that are lent to the workers of one iterator.

    One thread changes the table; any thread may read it, and call `give_back`.

    Args:
        slabs: where slabs are leased, without waiting.
        workers: the number of workers.
    """

    def __init__(self, slabs: HostSlabs, workers: int) -> None:
        self.copying: deque[tuple[int, Fence | None]] = deque()
        """The slabs that were given back, each with the event of its copy."""
        self.starved: dict[int, int] = {}
        """The bytes that each worker waits for."""
        self._slabs = slabs
        self._numbers = itertools.count()
        self._loans: dict[int, Loan] = {}
        self._asking: dict[int, int] = {}  # bytes
        self._sent = [0] * workers
        self._at_work = set(range(workers))

    # -- for any thread

    def of(self, worker: int | None, number: Any) -> Loan:
        """Return the loan of a slab, by the number that a worker sent.

        Args:
            worker: the worker that has to have the slab; None for any.
            number: the slab's number.

        Raises:
            LayoutError: the slab isn't lent, or is lent to another worker.
        """
        loan = self._loans.get(number)
        if loan is None or worker not in (None, loan.worker):
            whose = "any worker" if worker is None else f"worker {worker}"
            raise LayoutError(
                f"a worker's message names a slab that isn't lent to {whose}: {number!r}; "
                f"{BEGIN_AGAIN}"
            )
        return loan

    def give_back(self, number: int, event: Fence | None) -> bool:
        """Give a slab back to its worker when `event` is done (None: no copy reads it). Return
        whether a worker may wait for it. Finalisers may call this.
        """
        if number not in self._loans:  # everything has ended
            return False
        self.copying.append((number, event))
        return event is None or bool(self.starved)

    def waiting(self, workers: Collection[int]) -> str:
        """Return a text that says what each of these workers, whose batches are late, waits for."""
        return "; ".join(map(self._waiting, workers))

    def _waiting(self, worker: int) -> str:
        nbytes, asked = self.starved.get(worker), self._asking.get(worker)
        if nbytes is not None:
            copying = {number for number, _ in list(self.copying)}
            own = [loan.number for loan in self._all() if loan.worker == worker]
            busy = len(copying.intersection(own))
            stats = self._slabs.pool.stats()
            held, cap = format_bytes(stats.leased_bytes), format_bytes(stats.max_bytes)
            return (
                f"worker {worker} waits for a slab of {format_bytes(nbytes)}: of its {len(own)}, "
                f"{busy} are being copied to the device and {len(own) - busy} hold batches that "
                f"the loop has not taken; all workers hold {held} of {cap}; raise max_bytes"
            )
        if asked is not None:
            return f"worker {worker} waits until a slab of {format_bytes(asked)} is made"
        return (
            f"worker {worker} has not sent its batch, and waits for no slab: its dataset or "
            "its collate function takes longer; raise timeout, or look there"
        )

    def lease(self, worker: int, nbytes: int) -> Lease | None:
        """Lease another slab for a worker; return None if there is no room, or if a worker without
        slabs will need it. May page-lock memory, which takes time. Where registering is refused,
        the slab is pageable.
        """
        pool = self._slabs.pool
        rounded = size_class(nbytes, pool.memory.granularity)
        size = rounded if rounded <= pool.max_bytes else nbytes
        supplied = {loan.worker for loan in self._all()}
        if worker in supplied:
            room = self._slabs.room() - size
            if room < size * len(self._at_work - supplied):
                return None
        try:
            return self._slabs.lease_now(size)
        except (BudgetExceededError, PoolClosedError):
            return None  # the worker does without a slab

    def _all(self) -> list[Loan]:
        return list(self._loans.values())

    # -- for the broker's thread

    def begin_request(self, worker: int, nbytes: int) -> None:
        """Note that a worker has asked for a slab."""
        self._asking[worker] = nbytes

    def end_request(self, worker: int) -> None:
        """Note that a worker gets the slab, or a refusal."""
        self._asking.pop(worker, None)

    def lend(self, worker: int, lease: Lease) -> Loan:
        """Add a slab that was leased for a worker."""
        loan = Loan(next(self._numbers), worker, lease)
        self._loans[loan.number] = loan
        return loan

    def take_back(self, worker: int, numbers: Iterable[int]) -> None:
        """Release slabs that a worker has given up.

        Raises:
            LayoutError: one isn't lent to it.
        """
        for number in numbers:
            self.of(worker, number).lease.release()
            del self._loans[number]

    def begin_wait(self, worker: int, nbytes: int, received: int) -> None:
        """Note that a worker waits for one of its slabs.

        Args:
            worker: the worker.
            nbytes: the bytes that it needs.
            received: the number of messages that it had received. If another one is on its way, the
                worker looks again when that arrives.
        """
        if received == self._sent[worker] and any(loan.worker == worker for loan in self._all()):
            self.starved[worker] = nbytes

    def end_wait(self, worker: int) -> None:
        """Note that a message is sent to a worker, which then looks for a slab again."""
        self._sent[worker] += 1
        self.starved.pop(worker, None)

    def leave(self, worker: int) -> None:
        """Note that a worker has ended. Its slabs stay lent, since they may have batches."""
        self._at_work.discard(worker)
        self.starved.pop(worker, None)
        self._asking.pop(worker, None)

    def freed(self) -> Iterator[Loan]:
        """Yield the slabs whose copies are done, each once."""
        while self.copying and ((event := self.copying[0][1]) is None or event.query()):
            loan = self._loans.get(self.copying.popleft()[0])
            if loan is not None:
                yield loan

    def release_all(self, *, leak: bool) -> list[Lease]:
        """Release all slabs, each behind its copy. If `leak`, return their leases instead."""
        loans, self._loans = self._all(), {}
        events = dict(self.copying)
        self.copying.clear()
        self.starved.clear()
        if leak:
            return [loan.lease for loan in loans]
        for loan in loans:
            loan.lease.release(after=events.get(loan.number))
        return []
