"""`Stager`: one line moves a batch."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._layout import Layout, Plan, plan
from .._memory import default_memory
from .._packing import Packer
from .._pool import Event, Lease, PoolStats, SlabPool
from ._targets import target_for
from ._transfer import Transfer

if TYPE_CHECKING:
    from types import TracebackType

_NO_MORE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerStats:
    """What a stager has done so far."""

    batches: int
    """Batches staged."""
    copies: int
    """Host-to-device copies issued for packed leaves: one a batch, but for very large batches."""
    packed_leaves: int
    """Tensors and arrays that travelled in a slab; one that appears several times in a batch counts once."""
    packed_bytes: int
    """Their bytes."""
    padding_bytes: int
    """Bytes of alignment that travelled with them."""
    passthrough_leaves: int
    """Tensors that travelled by their own ``.to()``."""
    pool: PoolStats
    """The pool's counters."""


class Stager:
    """Moves nested batches to a device.

    A batch is packed into one page-locked slab, travels in one asynchronous copy, and comes back as views of one device
    slab.

    Args:
        device: where to: ``"cuda"``, ``"cuda:0"``, ``torch.device(...)``, or ``"cpu"``, which runs the same code on
            pageable memory.
        pool: a pool to take slabs from, perhaps shared with other stagers; None makes one, which `close` closes.
        max_bytes: cap of the pool that is made; see `SlabPool`.
        threads: how many pack a batch of 4 MiB or more, the calling one included; None takes the cpus that the process
            may use, and leaves large tensors to torch's own threads where these are four or more.

    Raises:
        ValueError: another kind of device, or both `pool` and `max_bytes`.
        StagingError: a CUDA device without CUDA.

    All methods may be called from any thread. No method waits for the device, but for the pool when it is at its cap.
    In a forked child nothing can be staged.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        *,
        pool: SlabPool | None = None,
        max_bytes: int | str = "auto",
        threads: int | None = None,
    ) -> None:
        if pool is not None and max_bytes != "auto":
            raise ValueError(
                f"pool and max_bytes exclude each other: max_bytes={max_bytes!r}; give the cap to the pool"
            )
        self._target = target_for(torch.device(device))
        self._packer = Packer(threads)
        self._owns_pool = pool is None
        self._pool = SlabPool(default_memory(self._target.device), max_bytes=max_bytes) if pool is None else pool
        self._lock = threading.Lock()
        self._batches = self._copies = self._passthrough_leaves = 0
        self._packed_leaves = self._packed_bytes = self._padding_bytes = 0

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._target.device

    @property
    def pool(self) -> SlabPool:
        """Where host slabs come from."""
        return self._pool

    def stage(self, batch: Any) -> Transfer:
        """Pack a batch and start its copy.

        Blocks while it packs, and while the pool is at its cap; never for the copy. Copies run on a stream of the
        stager's own; `Transfer.get` orders the consumer's stream behind it. The host slab goes back to the pool by the
        copy's own event. When the call returns, all that was packed has been read.

        A tensor that cannot be packed (sparse, quantised, nested, a subclass, one that requires grad, or not on the
        CPU) is moved by its own ``.to(device, non_blocking=True)`` on the caller's current stream, and counted.

        Args:
            batch: containers as `Layout` knows them, with tensors, numpy arrays and anything else in them.

        Raises:
            LayoutError: something in the batch cannot be staged; see its ``path``.
            BudgetExceededError: the batch is larger than the pool's cap.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        planned = plan(batch)
        slab, event, copies = self._copy_packed(planned) if planned.table.nbytes else (None, None, 0)
        # To the CPU a copy from a device has to be waited for: no stream orders the host behind it.
        asynchronous = self.device.type != "cpu"
        moved = [tensor.to(self.device, non_blocking=asynchronous) for tensor in planned.passthrough()]
        moved_event = self._target.record_current() if moved else None
        self._count(planned, copies)
        return Transfer(self._target, Layout.of_plan(planned), slab, event, copies, moved, moved_event)

    def to_device(self, batch: Any) -> Any:
        """Stage a batch and return it, safe to use on the current stream: ``stage(batch).get()``."""
        return self.stage(batch).get()

    def prefetch(self, iterable: Iterable[Any], *, depth: int = 2) -> Iterator[Any]:
        """Yield the batches of an iterable on the device, staged ahead.

        When a batch is yielded, the next `depth` are packed and travelling, while the device works on it.

        Args:
            iterable: yields batches, for example a DataLoader. It is read `depth` batches ahead.
            depth: batches ahead, at least 1. The device holds up to ``depth + 2`` batches.

        Yields:
            Batches as `to_device` returns them, for the stream that is current when each is asked for.

        Raises:
            Exception: what the iterable or staging raised, after the batches before it, as in a plain loop.
        """
        if depth < 1:
            raise ValueError(f"depth must be at least 1: {depth}; to stage without prefetching use to_device()")
        return self._prefetch(iterable, depth)

    def stats(self) -> StagerStats:
        """Return a snapshot of the counters."""
        with self._lock:
            return StagerStats(
                batches=self._batches,
                copies=self._copies,
                packed_leaves=self._packed_leaves,
                packed_bytes=self._packed_bytes,
                padding_bytes=self._padding_bytes,
                passthrough_leaves=self._passthrough_leaves,
                pool=self._pool.stats(),
            )

    def close(self) -> None:
        """End the packing threads, and close the pool if the stager made it. Batches that were yielded stay valid."""
        self._packer.close()
        if self._owns_pool:
            self._pool.close()

    def _copy_packed(self, planned: Plan) -> tuple[torch.Tensor, Event | None, int]:
        """Send what can be packed; return the device slab, the event behind the last copy, and the number of copies."""
        with self._target.copying():
            lease = self._pool.acquire(planned.table.nbytes)
            try:
                device, copies = self._pack_and_copy(planned, lease)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # who keeps the error must not keep views of the slab
                raise
            finally:
                event = self._target.record_copies()
                lease.release(after=event)
        return device, event, copies

    def _pack_and_copy(self, planned: Plan, lease: Lease) -> tuple[torch.Tensor, int]:
        # The host view must not outlive this call, so that the event alone decides when the slab is free.
        host = lease.tensor()
        device = torch.empty(planned.table.nbytes, dtype=torch.uint8, device=self._target.device)
        copies = start = 0
        for stop in self._packer.pack(planned.table, planned.tensors, host):
            self._target.copy(device, host, start, stop)
            start = stop
            copies += 1
        return device, copies

    def _prefetch(self, iterable: Iterable[Any], depth: int) -> Iterator[Any]:
        ahead: deque[Transfer] = deque()
        batches = iter(iterable)
        failure: Exception | None = None
        while failure is None:
            try:
                batch = next(batches, _NO_MORE)
                if batch is _NO_MORE:
                    break
                ahead.append(self.stage(batch))
                del batch  # the next one may take its memory
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                failure = error
            if len(ahead) > depth:
                yield ahead.popleft().get()
        while ahead:
            yield ahead.popleft().get()
        if failure is not None:
            raise failure

    def _count(self, planned: Plan, copies: int) -> None:
        table = planned.table
        with self._lock:
            self._batches += 1
            self._copies += copies
            self._packed_leaves += len(planned.tensors) - len(table.columns.passthrough)
            self._packed_bytes += table.payload_bytes
            self._padding_bytes += table.nbytes - table.payload_bytes
            self._passthrough_leaves += len(table.columns.passthrough)

    def __enter__(self) -> Stager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stager {self.device} batches={self._batches} {self._pool!r}>"
