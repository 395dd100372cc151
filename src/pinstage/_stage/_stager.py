"""`Stager`: moves a batch to the device in one call."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
import torch

from .._batch import (
    ALIGNMENT,
    PACKED,
    Blocks,
    IsContainer,
    Keeping,
    Layout,
    OwnStorage,
    Parts,
    RowKind,
    Sharing,
    borrow,
    check_own_storage,
    content_of,
    into_tensors,
    made_dense,
    most_threads,
    reuses_places,
    sharing_of,
    start_packing,
    take_apart,
    walk,
)
from .._compat.probes import warn_once
from .._memory import REFUSALS, PageableMemory, default_memory, remedy
from .._pool import (
    Fence,
    HostBudget,
    Lease,
    PoolStats,
    SlabPool,
    check_open,
    check_owner,
    check_pool,
    check_timeout,
    close_for,
    guard_until_release,
    state_of,
)
from .._reaper import reaper
from .._region import pieces_of
from .._sizes import Size, count, format_bytes
from .._steps import step
from ..errors import AcquireTimeoutError, BudgetExceededError, PinstageError, PoolError, StagingWarning
from ._device import AT_ONCE_BYTES, Targets, target_for
from ._out import LEAST_OF_CAP_BYTES, NOTHING, Direct, OutPlan, copy_through, in_groups, note_written, plan_for, writing
from ._prefetch import InBackground, Prefetcher, T, is_read_as_torch_does, prefetcher_of
from ._run_ahead import RUN_AHEAD, RunAhead, check_depth, check_run_ahead
from ._to_host import HostTransfer, fetch
from ._transfer import Sent, Transfer, copy_event_of, move_others, send_packed, written
from ._weights import IncompatibleKeys, load_weights

if TYPE_CHECKING:
    from types import TracebackType

B = TypeVar("B")
K = TypeVar("K")
Array: TypeAlias = "np.ndarray[Any, Any]"
Leaf: TypeAlias = "torch.Tensor | Array"
Tensors = TypeVar("Tensors", bound=Mapping[Any, torch.Tensor] | tuple[torch.Tensor, ...])

SMALL_BYTES = 1024 * 1024
"""`Stager.to_device` copies smaller batches on the caller's current stream. So short a copy overlaps with nothing, and
memory of a second stream would have to be recorded on the current one (5 us per tensor)."""

_FEW_LEAVES = 16
"""Batches with more leaves skip the fast path for a few small tensors; see ``move_few`` in ``_native/blocks.c``."""

_PARTS = 2
"""Number of parts of a slab that is smaller than its batch. One part is packed while the other is copied. A batch of
64 MiB takes 1.8 ms through a slab of 2 MiB in two parts, 2.1 ms in three, 2.4 ms in four, 4.0 ms in eight."""

_LEAST_SLAB_BYTES = 1 << 20
"""Below this slab size, starting the copy of a part takes longer than copying its bytes."""

_MOST_TALLIES = 1000
"""The most batches that are counted later; see `Stager._count`."""

_NO_TALLY = (0,) * 6


def _same(blocks: Blocks) -> Blocks:
    return blocks


class Kept:
    """A task for the reaper that keeps objects alive until an event is done."""

    def __init__(self, event: Fence, things: list[Any]) -> None:
        self._event = event
        self._things = things

    def reap(self) -> bool:
        """Return whether the event is done."""
        return self._event.query()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerStats:
    """Counters of a stager, and its pool's statistics."""

    batches: int
    """Batches staged."""
    copies: int
    """Host-to-device copies of packed leaves: one per block, and several for a large block."""
    blocks: int
    """Device tensors made for packed leaves: one per leaf with its own tensor, and one per shared block."""
    packed_leaves: int
    """Tensors and arrays that were packed. A leaf that a batch repeats counts once."""
    packed_bytes: int
    """Bytes of the packed leaves."""
    padding_bytes: int
    """Alignment bytes sent with the packed leaves."""
    passthrough_leaves: int
    """Tensors, and objects with a ``to()`` method, that were moved by their own ``.to()``."""
    fallback_batches: int
    """Batches and fetches that used a smaller slab, or pageable memory, because page-locking was refused."""
    fetches: int
    """Calls of `fetch` and `to_host`."""
    fetch_copies: int
    """Device-to-host copies issued by these calls."""
    fetched_bytes: int
    """Bytes of the device-to-host copies, padding included."""
    pool: PoolStats
    """The pool's counters."""

    def __str__(self) -> str:
        """Return one line for a log."""
        sent = f"{format_bytes(self.packed_bytes)} in {count(self.copies, 'copy', 'copies')}"
        fetched = f"{format_bytes(self.fetched_bytes)} in {count(self.fetch_copies, 'copy', 'copies')}"
        return (
            f"{count(self.batches, 'batch', 'batches')}, {sent}; {count(self.fetches, 'fetch', 'fetches')}, {fetched}; "
            f"pool {format_bytes(self.pool.held_bytes)} of {format_bytes(self.pool.max_bytes)}, "
            f"waited {self.pool.wait_seconds:.3f} s"
        )


class Stager:
    """Moves nested batches to a device.

    A batch is packed into one page-locked slab and copied asynchronously. On the device, large leaves and the leaves of
    small batches have memory of their own. Other leaves share blocks; see `own_storage`. A batch of at most 64 KiB,
    padding included, is copied from ordinary memory: copies of that size return at once (CUDA Programming Guide,
    Asynchronous Concurrent Execution).

    Args:
        device: the device to stage to: ``"cuda"``, ``"cuda:0"``, ``torch.device(...)``, or ``"cpu"``, which runs the
            same code on pageable memory. None is ``"cuda"`` if it is available, else ``"cpu"``.
        pool: the pool to take slabs from, which other stagers may share. None makes a pool, which `close` closes.
        max_bytes: cap of the pool that the stager makes; see `SlabPool`.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        owner: the name under which the stager takes slabs. `PoolStats.owners` counts by this name, and
            `SlabPool.set_quota` can limit it.
        pack_threads: number of threads that may pack a batch of 1 MiB or more, including the calling thread. "auto" is
            the number of CPUs that the process may use, at most 12.
        borrow_pinned: whether leaves of 256 KiB and more that are page-locked already (torch's ``is_pinned()``, or
            views of a lease or a `HostRegion`) are copied without packing. Each has a copy of its own, or one per chunk
            of a region. Don't change these leaves until `Transfer.query` is true, as with torch's own
            ``non_blocking=True``. The stager keeps them alive until then.
        own_storage: which leaves have device memory of their own, as ``.to()`` gives it. ``"auto"``: all leaves of a
            batch of up to eight leaves, and leaves of 4 MiB and more in any batch. Other leaves share blocks with
            leaves of the same dtype: blocks of at most 1 MiB for leaves below 64 KiB, of at most 4 MiB otherwise. A
            leaf that you keep, save or pickle keeps its block. True: all leaves, for programs that pickle or save what
            they stage, or compile functions that change many inputs in place. False: none. The batch has one slab on
            the device, and each leaf is a view of it.
        run_ahead: number of batches whose work may be queued on the device. `stage` and `to_device` wait for earlier
            batches, so that a loop that never waits for the device can't take more and more of its memory. Batches
            without a slab don't count. None sets no bound.
        keep_on_host: leaves that stay on the host, unchanged: paths of leaves or of containers, as errors and
            `Layout.slots` write them (``["['lengths']"]``), or a function of path and leaf that returns true for such
            leaves. They are neither searched for tensors nor compared. `on_host` does the same in the batch itself.
        timeout: the most seconds that a call waits for a host slab while the pool is at its cap. None waits forever,
            even if results of `fetch` in the calling thread hold the slabs.

    Raises:
        TypeError: `keep_on_host`, `pool`, `pack_threads`, `run_ahead` or `timeout` has a wrong type.
        ValueError: the device isn't supported; both `pool` and a cap are given; `timeout` is negative; `run_ahead` or
            `pack_threads` is below 1; or `own_storage` is another value.
        CudaUnavailableError: `device` is a CUDA device, and CUDA is not available.

    If the platform refuses to page-lock as much as a batch needs, the batch is sent in parts through a smaller slab,
    and `stage` waits for its copies. If nothing can be page-locked, the batch is copied from pageable memory. A
    `StagingWarning` reports this once, with the reason and the remedy, and `StagerStats.fallback_batches` counts these
    batches.

    All methods may be called from any thread. Staging waits for the device only beyond `run_ahead` batches, and for the
    pool only at its cap. A forked child cannot stage.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        pool: SlabPool | None = None,
        max_bytes: Size = "auto",
        budget: HostBudget | None = None,
        keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
        own_storage: OwnStorage = "auto",
        run_ahead: int | None = RUN_AHEAD,
        borrow_pinned: bool = False,
        pack_threads: int | Literal["auto"] = "auto",
        timeout: float | None = 60.0,
        owner: str = "stager",
    ) -> None:
        check_owner(owner)
        if pool is not None:
            check_pool(pool, max_bytes, budget)
        if timeout is not None:
            check_timeout(timeout)
        self._target = target_for(device)
        self._timeout = timeout
        self._owner = owner
        self._threads = most_threads(pack_threads)
        self._borrow_pinned = borrow_pinned
        self._own_storage = check_own_storage(own_storage)
        most_ahead = check_run_ahead(run_ahead)
        self._run_ahead: dict[Any, RunAhead] | None = None  # by the consumer's stream
        if most_ahead is not None:
            self._run_ahead = defaultdict(partial(RunAhead, most_ahead))
        self._keeping = None if keep_on_host is None else Keeping(keep_on_host)
        self._owns_pool = pool is None
        if pool is None:
            pool = SlabPool(max_bytes, budget=budget, memory=default_memory(self._target.device))
        self._pool = pool
        self._lock = threading.RLock()  # a finaliser may ask for the stats in the middle of them
        self._counters: Counter[str] = Counter()  # by the names of `StagerStats`
        self._tallies: deque[tuple[int, ...]] = deque()  # of batches that aren't in the counters yet
        self._is_pinned = self._pool.memory.is_pinned
        self._pool_state = state_of(self._pool)
        self._moves_few = keep_on_host is None and own_storage is not False
        self._targets = Targets(self._target)
        self._pageable: SlabPool | None = None  # made where nothing can be page-locked

    @property
    def device(self) -> torch.device:
        """The device that batches are copied to."""
        return self._target.device

    @property
    def pool(self) -> SlabPool:
        """The pool that host slabs are taken from."""
        return self._pool

    @overload
    def stage(self, batch: Array, *, out: torch.Tensor | None = None) -> Transfer[torch.Tensor]: ...
    @overload
    def stage(
        self, batch: dict[K, Array] | dict[K, Leaf], *, out: dict[K, torch.Tensor] | None = None
    ) -> Transfer[dict[K, torch.Tensor]]: ...
    @overload
    def stage(
        self, batch: list[Array] | list[Leaf], *, out: list[torch.Tensor] | None = None
    ) -> Transfer[list[torch.Tensor]]: ...
    @overload
    def stage(self, batch: Tensors, *, out: Tensors | None = None) -> Transfer[Tensors]: ...  # type: ignore[overload-overlap]
    @overload
    def stage(
        self, batch: tuple[Leaf, ...], *, out: tuple[torch.Tensor, ...] | None = None
    ) -> Transfer[tuple[torch.Tensor, ...]]: ...
    @overload
    def stage(
        self, batch: Mapping[K, Leaf], *, out: Mapping[K, torch.Tensor] | None = None
    ) -> Transfer[Mapping[K, torch.Tensor]]: ...
    @overload
    def stage(self, batch: B, *, out: B | None = None) -> Transfer[B]: ...
    def stage(self, batch: Any, *, out: Any = None) -> Transfer[Any]:
        """Pack a batch and start its copy.

        Blocks while it packs, and while the pool is at its cap, but not for the copy. Copies run on the stager's own
        stream; `Transfer.wait` makes the consumer's stream wait for them. The host slab returns to the pool when the
        copy is done. When the call returns, everything that was packed has been read.

        A batch of at most 64 KiB takes no slab, and is copied on the current stream, behind earlier work there. While a
        CUDA graph is captured on that stream, such a batch is staged like a larger one.

        A tensor that cannot be packed is moved by its own ``.to(device, non_blocking=True)`` on the current stream, and
        is counted. These are sparse, quantised and nested tensors, unregistered subclasses, tensors that require grad,
        and tensors that aren't on the CPU. An unknown object that holds tensors and has a ``to(device)`` method is
        moved by that method, after a warning.

        With `out`, the batch is written into existing tensors. The copies start behind the work already queued on the
        current stream. Don't use `out` before `Transfer.wait`. The stager keeps its tensors alive until the copies are
        done. Everything is checked before anything is written. A call that fails later, because of a time-out or an
        interrupt, may leave some tensors written in part; a note on the error names them. A batch larger than the
        pool's cap is sent in parts, and the call waits for them.

        Args:
            batch: containers that `Layout` knows, with tensors, numpy arrays and anything else in them.
            out: tensors on the stager's device, with the structure and shapes of the batch, such as a result
                of `to_device`. Dtypes and strides may differ: values are cast as by ``Tensor.copy_``. Leaves
                that aren't tensors are neither compared nor changed. The result has these tensors and the
                batch's other leaves.

        Raises:
            LayoutError: something in the batch cannot be staged; a path of `keep_on_host` leads to nothing in the first
                batch; or `out` has another structure or shape, or tensors that are on another device, are expanded,
                overlap, or require grad while grad mode is on. The error's ``path`` says where.
            PinstageError: `out` is given while a CUDA graph is captured.
            BudgetExceededError: the batch is larger than the pool's cap, and `out` isn't given.
            AcquireTimeoutError: no host slab became free within the stager's `timeout`.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        if out is None:
            return self._stage(batch)
        with step("stage"):
            plan = self._plan(batch, out)
            return written(
                self._target, plan.parts, self._write(plan), plan.leaves, [place for _, place, _ in plan.plain]
            )

    def _stage(self, batch: Any, *, is_bounded: bool = True, borrows: bool = False) -> Transfer[Any]:
        """Stage a batch, without `out`.

        Args:
            batch: the batch.
            is_bounded: whether to wait while the device is too far behind. If not, the caller does.
            borrows: whether to copy page-locked leaves without packing, even without `borrow_pinned`.
        """
        with step("stage"):
            parts = take_apart(batch, keeping=self._keeping)
            return self._transfer(parts, is_watched=True, is_bounded=is_bounded, borrows=borrows)

    def _transfer(
        self, parts: Parts, *, is_watched: bool, is_bounded: bool = True, borrows: bool = False
    ) -> Transfer[Any]:
        """Send a batch.

        Args:
            parts: the batch's parts.
            is_watched: whether the caller can query the copy, or use the batch on another stream.
            is_bounded: see `_stage`.
            borrows: see `_stage`.
        """
        table = parts.table
        sent = self._send(parts, is_watched, is_bounded, borrows)
        others, moved, moved_event = move_others(self._target, parts.structure, table, parts.others())
        self._count(sent.copies, len(sent.blocks), *table[1:5])
        return Transfer(self._target, parts.structure, table, sent, others, moved, moved_event)

    def stage_lease(self, lease: Lease, layout: Layout, others: Sequence[Any] = ()) -> Transfer[Any]:
        """Start the copy of a batch that a lease holds already, written there by hand or by `Layout.pack`.

        Does not block. The lease is released behind the copy, even if the copy fails. After one of the errors below,
        you still have to release it. Don't write to its views until `Transfer.query` is true.

        Args:
            lease: a lease of any pool, which holds the batch in this layout.
            layout: where each leaf is stored.
            others: the leaves that are not in the slab, in the order of the batch, as `Layout.others` returns them.

        Raises:
            TypeError: `layout` isn't a `Layout`.
            ValueError: the lease is smaller than the layout, or `others` has the wrong length.
            LeaseError: the lease was released.
        """
        with step("stage"):
            structure, table = content_of(layout)
            if lease.nbytes < table.nbytes:
                raise ValueError(
                    f"lease is too small: {lease.nbytes} bytes for a layout of {table.nbytes}; acquire(layout.nbytes)"
                )
            if len(others) != table.others + table.moved:
                raise ValueError(
                    f"others has the wrong length: {len(others)} for {table.others + table.moved} leaves that are not "
                    "in the slab; pass layout.others(batch)"
                )
            host, target = lease.data_ptr(), self._target
            guard_until_release(lease, target.stream)  # an interrupt may come before the release
            event = None
            try:
                transfer = send_packed(
                    target, structure, table, host, list(others), self._own_storage, pinned=self._is_pinned
                )
                event = copy_event_of(transfer)
            except BaseException:
                event = target.record(target.stream)
                raise
            finally:
                lease.release(after=event)
            self._count(transfer.copies, transfer.blocks, *table[1:5])
            return transfer

    @overload
    def to_device(self, batch: Array, *, out: torch.Tensor | None = None) -> torch.Tensor: ...
    @overload
    def to_device(
        self, batch: dict[K, Array] | dict[K, Leaf], *, out: dict[K, torch.Tensor] | None = None
    ) -> dict[K, torch.Tensor]: ...
    @overload
    def to_device(
        self, batch: list[Array] | list[Leaf], *, out: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]: ...
    @overload
    def to_device(self, batch: Tensors, *, out: Tensors | None = None) -> Tensors: ...  # type: ignore[overload-overlap]
    @overload
    def to_device(
        self, batch: tuple[Leaf, ...], *, out: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]: ...
    @overload
    def to_device(
        self, batch: Mapping[K, Leaf], *, out: Mapping[K, torch.Tensor] | None = None
    ) -> Mapping[K, torch.Tensor]: ...
    @overload
    def to_device(self, batch: B, *, out: B | None = None) -> B: ...
    def to_device(self, batch: Any, *, out: Any = None) -> Any:
        """Stage a batch and return it, safe to use on the current stream: ``stage(batch).wait()``.

        With `out`, the call acts like an operation on the current stream: it writes behind earlier work there, and
        later work sees the new values. Memory that isn't torch's own, as of a tensor from another library, has to
        outlive the copies.

        Args:
            batch: see `stage`.
            out: see `stage`.

        Raises:
            LayoutError, BudgetExceededError, AcquireTimeoutError, PinstageError: as `stage`.
        """
        target = self._target
        if out is not None:
            written = self._write_few(batch, out)
            return self.stage(batch, out=out).wait() if written is None else written
        with step("stage"):
            with step("walk"):
                walked = leaves, structure = walk(batch)
            state = self._pool_state
            if len(leaves) <= _FEW_LEAVES and self._moves_few and not (state.closed or state.is_forked):
                moved = target.move_few(leaves)
                if moved is not None:
                    leaves, count, nbytes, copies = moved
                    self._count(copies, count, nbytes, nbytes, count, 0)
                    return structure.rebuild(leaves)
            parts = take_apart(batch, keeping=self._keeping, walked=walked)
            table = parts.table
            if table.moved:
                return self._transfer(parts, is_watched=False).wait()
            sent = self._send(parts, is_watched=False)
            self._count(sent.copies, len(sent.blocks), *table[1:5])
        blocks, event, _, stream = sent
        with step("hand_over"):
            if stream is target.stream:  # else it is the current one
                target.hand_over(event, blocks.tensors, target.consumer(None))
            with step("views"):
                leaves = blocks.leaves(parts.others() if table.others else [])
            with step("unflatten"):
                return structure.rebuild(leaves)

    def load_weights(
        self,
        module_or_dict: torch.nn.Module | dict[str, torch.Tensor],
        tensors: Any,
        *,
        strict: bool = True,
    ) -> IncompatibleKeys:
        """Copy a checkpoint into the parameters and buffers of a module, or into the tensors of a dict.

        ::

            with safetensors.safe_open("model.safetensors", framework="pt") as file:
                stager.load_weights(model, file)

        The pool bounds the host memory, whatever the size of the checkpoint. Dtypes may differ: tensors are cast on the
        device. Tensors on ``"meta"`` that the checkpoint names are made on the stager's device, once for all names that
        share a tensor. A DTensor (plain Shard or Replicate) takes this rank's part of a tensor of global shape. A name
        whose tensor is loaded under another name isn't missing (tied weights).

        The copies are operations on the current stream, as with ``to_device(out=)``: later work on that stream sees the
        weights. When the call has returned, you may change the source tensors, except page-locked ones with
        ``borrow_pinned``.

        Args:
            module_or_dict: a module or a dict of tensors, on the stager's device or on meta.
            tensors: host tensors by name: a mapping (``state_dict``, ``torch.load(path, mmap=True)``), an iterable of
                (name, tensor) pairs (for example of all shards), or safetensors' ``safe_open``. They are read in waves
                of 256 MiB.
            strict: whether missing and unexpected names are errors.

        Returns:
            Missing and unexpected names, as from ``load_state_dict``.

        Raises:
            RuntimeError: names are missing or unexpected, or shapes differ, as in ``load_state_dict``; a tensor is on
                another device; or a tensor would stay on meta. A mapping or ``safe_open`` is checked before anything is
                written. The names of an iterable are checked as they are read.
            TypeError: a module takes part in its loading (a ``_load_from_state_dict`` of its own, a hook, extra state),
                or `tensors` is something else, such as a path.
        """
        return load_weights(self.to_device, self.device, module_or_dict, tensors, strict=strict)

    def fetch(self, tree: B, *, out: B | None = None, copy: bool = True) -> HostTransfer[B]:
        """Start copying a nested tree of tensors to the host.

        Does not block for the copies, only for a host slab while the pool is at its cap. Small tensors are gathered on
        their device and sent in one copy. Dense tensors of 1 MiB and more are copied from where they are. The call
        acts like an operation on the current stream: it sees the results of earlier work on that stream, and you may
        change or free the tensors right afterwards. That stream waits while large tensors are read; to avoid that, call
        `fetch` on another stream.

        CPU tensors, numpy arrays and everything that isn't a tensor are returned unchanged (a stager for the CPU
        copies CPU tensors). The tree may hold tensors of several devices. A tensor that cannot be packed (it is sparse,
        a subclass, or requires grad) is moved by its own ``.to("cpu")``, which blocks. If it requires grad,
        ``detach()`` avoids that.

        A tree with `out` that is larger than the pool's cap is fetched in parts, and the call waits for them.

        Args:
            tree: containers that `Layout` knows, with anything in them.
            out: host tensors, with the structure and shapes of the tree, to use instead of new tensors. The device
                writes page-locked ones of 64 KiB and more with the same dtype and strides. `HostTransfer.wait` fills
                the others from a slab. Don't use any of them before that. See also `stage`.
            copy: True: `HostTransfer.wait` copies once more, into ordinary tensors, each with its own memory, and
                returns the slab. False: the tensors are views of the slab, which stays leased until the last view is
                freed.

        Returns:
            The transfer. Its `HostTransfer.wait` waits for the copies, and returns the tensors.

        Raises:
            ValueError: `out` is given with ``copy=False``.
            LayoutError: an object in the tree holds tensors and is not a known container; or a tensor of `out` can't be
                written, as for `stage`.
            PinstageError: `out` is given while a CUDA graph is captured.
            AcquireTimeoutError: no slab became free within the stager's `timeout`, for example because earlier results
                are still alive.
            BudgetExceededError: the tensors are larger than the pool's cap, and `out` isn't given.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        if out is not None and not copy:
            raise ValueError("copy=False returns views of a slab, and out= names tensors that exist; pass one of them")
        # `selected`, since a pool that belongs to no device page-locks on the current one.
        acquire, keep = partial(self._acquire, is_whole=True), self._keep_until
        with step("fetch"), self._target.selected():
            if out is not None:
                self._refuse_capture()
            transfer = fetch(tree, self.device, acquire, self._targets, copy=copy, out=out, keep=keep)
        with self._lock:
            self._counters.update(fetches=1, fetch_copies=transfer.copies, fetched_bytes=transfer.nbytes)
        return transfer

    def to_host(self, tree: B, *, out: B | None = None) -> B:
        """Copy a nested tree of tensors to the host: ``fetch(tree).wait()``.

        Blocks until the bytes are there, as ``.cpu()`` does. Each tensor has memory of its own, outside of the pool, or
        is one of `out`. Everything else is as in `fetch`.

        Args:
            tree: containers that `Layout` knows, with anything in them.
            out: see `fetch`.

        Returns:
            A tree of the same types.

        Raises:
            LayoutError, AcquireTimeoutError, BudgetExceededError: as `fetch`.
        """
        return self.fetch(tree, out=out).wait()

    @overload
    def prefetch(
        self, source: torch.utils.data.DataLoader[T], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[T]: ...
    @overload
    def prefetch(
        self, source: Iterable[Array], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[torch.Tensor]: ...
    @overload
    def prefetch(
        self, source: Iterable[dict[K, Array] | dict[K, Leaf]], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[dict[K, torch.Tensor]]: ...
    @overload
    def prefetch(
        self, source: Iterable[list[Array] | list[Leaf]], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[list[torch.Tensor]]: ...
    @overload
    def prefetch(  # type: ignore[overload-overlap]
        self, source: Iterable[Tensors], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[Tensors]: ...
    @overload
    def prefetch(
        self, source: Iterable[tuple[Leaf, ...]], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[tuple[torch.Tensor, ...]]: ...
    @overload
    def prefetch(
        self, source: Iterable[Mapping[K, Leaf]], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[Mapping[K, torch.Tensor]]: ...
    @overload
    def prefetch(self, source: Iterable[T], *, depth: int = 2, background: InBackground = "auto") -> Prefetcher[T]: ...
    def prefetch(self, source: Iterable[Any], *, depth: int = 2, background: InBackground = "auto") -> Prefetcher[Any]:
        """Iterate over the batches of a source on the device, staged ahead.

        When a batch is yielded, the next `depth` batches are packed and being copied, or, with a thread, soon will be.
        The loop waits for the device only if the work of more than three batches is queued there.

        A thread may read the source, pack, and start copies while the loop is busy. ``iter(source)`` and the first
        ``next()`` still run in the loop's thread. Later calls run in a thread with the loop's CUDA device, grad and
        inference mode, autocast, default device and context variables, as they were when the pass began.

        Without a thread, the loop's thread reads the source `depth` batches ahead. If samples are made in that thread
        too (``num_workers=0``), the source draws random numbers that the loop would have drawn first.

        Large leaves that torch's loader with workers has page-locked already (``pin_memory=True``) are not packed.

        Args:
            source: yields batches, for example a DataLoader.
            depth: number of batches staged ahead; 0 for none. The device holds up to ``depth + 2`` batches.
            background: whether a thread reads the source. "auto" uses a thread for torch's `DataLoader`, and for
                subclasses that get their batches the same way, with workers and with samplers of torch's own classes.
                True uses a thread for any source. Then the source's ``next()`` must be safe in another thread. It must
                not draw from the global random generators (``random``, ``numpy.random``, ``torch``) if the loop does:
                the numbers of both would differ from run to run.

        Returns:
            The prefetcher. Each pass over it is a pass over the source. Batches are as `to_device` returns them, for
            the stream that is current when each is requested. An error of the source or of staging is raised after
            the batches before it, as in a plain loop.

        Raises:
            TypeError, ValueError: `depth` is not an int, or is negative; or ``background=True`` with a depth of 0, or
                over a loader that Accelerate prepared.
        """
        check_depth(depth)
        pinned = is_read_as_torch_does(source) and source.pin_memory  # new buffers each time, never written again
        stage = partial(self._stage, is_bounded=False, borrows=pinned)
        return prefetcher_of(stage, self._target, source, depth, background)

    def stats(self) -> StagerStats:
        """Return a snapshot of the counters."""
        pool = self._pool.stats()  # outside of the lock: this may free slabs
        with self._lock:
            self._add_up()
            counters = {name: self._counters[name] for name in StagerStats.__slots__ if name != "pool"}
            return StagerStats(**counters, pool=pool)

    def close(self) -> None:
        """Close the pool if the stager made it. Staged batches stay valid."""
        if self._owns_pool:
            close_for(self._pool, "Stager")
        if self._pageable is not None:
            self._pageable.close()

    def _count(self, *tally: int) -> None:
        """Count a batch: its copies, its blocks, and then the fields of its `Table`, as `_add_up` reads them."""
        self._tallies.append(tally)  # unlike the counters, this needs no lock
        if len(self._tallies) >= _MOST_TALLIES:
            self._add_up()

    def _add_up(self) -> None:
        tallies = []
        with self._lock:
            while self._tallies:
                tallies.append(self._tallies.popleft())
            copies, blocks, nbytes, payload, packed, passthrough = map(sum, zip(_NO_TALLY, *tallies, strict=True))
            self._counters.update(
                batches=len(tallies),
                copies=copies,
                blocks=blocks,
                packed_leaves=packed,
                packed_bytes=payload,
                padding_bytes=nbytes - payload,
                passthrough_leaves=passthrough,
            )

    def _send(
        self,
        parts: Parts,
        is_watched: bool,
        is_bounded: bool = True,
        borrows: bool = False,
    ) -> Sent:
        """Send the leaves that can be packed.

        A batch of at most 64 KiB is sent from ordinary memory, on the caller's current stream: a slab and a second
        stream would take longer than packing and copying it. A batch below `SMALL_BYTES` that isn't watched is copied
        through a slab on that stream. Any other batch is copied through a slab, or through a smaller slab in parts, on
        the copy stream. So are all batches while the current stream is captured. (`to_device` handles batches of a few
        small leaves itself.)

        Args:
            parts: the batch's parts.
            is_watched: see `_transfer`. If not, copies on the current stream need no event, which takes some
                microseconds.
            is_bounded: see `_stage`.
            borrows: see `_stage`.
        """
        target, table = self._target, parts.table
        with target.selected():
            is_capturing, consumer = target.is_capturing(), target.consumer(None)
            is_small = table.nbytes <= (AT_ONCE_BYTES if is_watched else SMALL_BYTES - 1) and not is_capturing
            stream = consumer if is_small else target.stream
            make = partial(target.blocks, table, sharing_of(self._own_storage, table.packed), stream)
            if is_small and table.nbytes <= AT_ONCE_BYTES:
                sent = self._send_at_once(parts, make, stream, is_watched=is_watched)
                if sent is not None:
                    return sent
            run_ahead = None
            if is_bounded and not is_capturing and consumer is not None and self._run_ahead is not None:
                run_ahead = self._run_ahead[consumer]
            if run_ahead is not None and not is_small:
                run_ahead.bound(target.record(consumer))
            sent = self._send_through_slab(parts, make, stream, borrows)
            if run_ahead is not None and is_small:
                run_ahead.bound(sent.event)
            return sent

    def _send_at_once(self, parts: Parts, make: Callable[[], Blocks], stream: Any, *, is_watched: bool) -> Sent | None:
        """Send at most `AT_ONCE_BYTES` from ordinary memory; return None if that would wait for the device."""
        target, nbytes = self._target, parts.table.nbytes
        if nbytes:
            if self._pool_state.closed or self._pool_state.is_forked:
                check_open(self._pool)
            if not target.has_room():
                return None
        blocks = make()
        with step("pack"):
            copies = target.fill(blocks, parts, stream) if nbytes else 0
        return Sent(blocks, target.record(stream) if is_watched else None, copies, stream)

    def _send_through_slab(
        self, parts: Parts, make: Callable[[], Blocks], stream: Any, borrows: bool = False, *, into: bool = False
    ) -> Sent:
        """Send a batch through a host slab, each chunk while the next one is packed.

        Args:
            parts: the batch's parts.
            make: returns the destination tensors.
            stream: the stream that copies.
            borrows: see `_stage`.
            into: whether the destinations are existing tensors; see `_acquire`.
        """
        target = self._target
        borrowed = borrow(parts, pieces_of) if borrows or self._borrow_pinned else None
        rest = parts if borrowed is None else borrowed.rest
        lease = self._acquire(rest.table.nbytes, into=into) if rest.table.nbytes else None
        copies = host = 0
        if lease is not None:
            host = guard_until_release(lease, stream)  # an interrupt may come before the release
        try:
            if borrowed is not None:
                reaper.start()
                blocks = make()
                with step("copy"):
                    copies = target.copy_leaves(blocks, borrowed.leaves, stream)
                blocks.packed_as(rest.table.data)
                make = partial(_same, blocks)
            if lease is None:
                blocks = make()
            elif lease.nbytes < rest.table.nbytes:
                blocks = make()
                copies += self._copy_in_parts(rest, lease, blocks, stream)
            elif borrowed is None and rest.table.nbytes < SMALL_BYTES:
                blocks = make()
                with step("pack"):
                    copies = target.pack_and_copy(blocks, rest, host, stream, pinned=self._is_pinned)
            else:
                blocks, packed = self._pack_and_copy(rest, lease, make, stream)
                copies += packed
        finally:
            event = target.record(stream)
            if lease is not None:
                lease.release(after=event)
            if borrowed is not None:
                self._keep_until(event, borrowed.lenders)
        return Sent(blocks, event, copies, stream)

    def _refuse_capture(self) -> None:
        if self._target.is_capturing():
            raise PinstageError(
                "out= cannot be used while a CUDA graph is captured: the graph would copy the same batch each time; "
                "call it before or after graph.replay(), outside of the capture"
            )

    def _plan(self, batch: Any, out: Any) -> OutPlan:
        """Check existing tensors against a batch. Writes nothing."""
        self._refuse_capture()
        while True:
            parts = take_apart(batch, keeping=self._keeping)
            try:
                with step("check"):
                    return plan_for(parts, out, self.device)
            except IsContainer:
                continue  # see `take_apart`

    def _write_few(self, batch: Any, out: Any) -> Any:
        """Write a few small, plain leaves, each by a copy on the current stream; return None for any other batch."""
        state, target = self._pool_state, self._target
        if self._keeping is not None or state.closed or state.is_forked:
            return None
        with step("stage"):
            with step("walk"):
                leaves, structure = walk(batch)
                if len(leaves) > _FEW_LEAVES:
                    return None
                places, found = walk(out)
            moved = target.move_few(leaves, list(places)) if found == structure else None
            if moved is None:
                return None
            made, count, nbytes, copies = moved
            tensors = [new for new, leaf in zip(made, leaves, strict=True) if new is not leaf]
            torch.autograd.graph.increment_version(tensors)
            target.hand_over(None, tensors, target.consumer(None))
            self._count(copies, 0, nbytes, nbytes, count, 0)
            return structure.rebuild(made)

    def _keep_until(self, event: Fence | None, things: list[Any]) -> None:
        if event is not None and things:
            reaper.start()
            reaper.tasks.put(Kept(event, things))

    def _write(self, plan: OutPlan) -> Sent:
        """Write a batch into existing tensors, behind all work queued on the current stream.

        Copies by torch and copies through scratch run on the current stream. Copies straight to their destinations
        follow, on the copy stream if they are large. These batches don't count for `run_ahead`, since they keep no
        device memory.

        Returns:
            The copies, with an event behind all of them.
        """
        target = self._target
        if self._pool_state.closed or self._pool_state.is_forked:
            check_open(self._pool)
        begun: list[int] = []
        copies = scratches = 0
        with target.selected():
            reaper.start()
            stream = target.consumer(None)
            through_scratch, direct = plan.ways()
            try:
                for index, place, source in plan.plain:
                    begun.append(index)
                    with writing([place]):
                        place.copy_(source, non_blocking=place.is_cuda)
                for way in plan.through_scratch(through_scratch):
                    make = partial(target.blocks, way.parts.table, Sharing.ONE, stream)
                    sent = self._send_into(way.parts, make, stream)
                    begun += () if scratches else through_scratch
                    copy_through(way, sent.blocks)
                    copies, scratches = copies + sent.copies, scratches + 1
                if direct is not None:
                    parts = direct.parts
                    if parts.table.nbytes >= SMALL_BYTES and target.stream is not None:
                        target.wait(target.record(stream), target.stream)
                        stream = target.stream

                    def begin(direct: Direct) -> Blocks:
                        begun.extend(direct.leaves)
                        torch.autograd.graph.increment_version(direct.blocks.tensors)
                        return direct.blocks

                    copies += self._send_into(parts, partial(begin, direct), stream).copies
            except BaseException as error:
                self._end_writing(plan, begun, error)
                raise
            event = target.record(stream)
            self._keep_until(event, plan.leaves)
        table = plan.parts.table
        self._count(copies, scratches, table.nbytes, table.payload_bytes, table.packed, len(plan.plain))
        return Sent(target.blocks(NOTHING, Sharing.ONE, stream), event, copies, stream)

    def _send_into(self, parts: Parts, make: Callable[[], Blocks], stream: Any) -> Sent:
        sent = None
        if parts.table.nbytes <= AT_ONCE_BYTES:
            sent = self._send_at_once(parts, make, stream, is_watched=False)
        return self._send_through_slab(parts, make, stream, into=True) if sent is None else sent

    def _end_writing(self, plan: OutPlan, begun: list[int], error: BaseException) -> None:
        """Wait for the copies of a call that failed, and note what it may have written."""
        target = self._target
        with suppress(Exception):  # the device may have failed
            for stream in (target.consumer(None), target.stream):
                if (event := target.record(stream)) is not None:
                    event.synchronize()
        note_written(error, plan.parts.structure, begun)

    def _copy_in_parts(self, parts: Parts, lease: Lease, blocks: Blocks, stream: Any) -> int:
        """Pack and copy a batch through a slab that is smaller than the batch.

        The host waits for the copy from a part of the slab before it writes that part again.
        """
        size = lease.nbytes // _PARTS // ALIGNMENT * ALIGNMENT
        host, slab, table = lease.data_ptr(), lease.tensor(), parts.table
        places, strided = blocks.leaves([None] * (table.others + table.moved)), set(table.positions(RowKind.STRIDED))

        def pairs() -> Iterator[tuple[Any, torch.Tensor]]:
            for index in table.positions(*PACKED):
                leaf = parts.leaves[index]
                # A piece of a strided leaf may be dense, and would be packed in another order.
                yield made_dense(leaf) if index in strided and leaf.nbytes > size else leaf, places[index]

        events: list[Fence | None] = [None] * _PARTS
        copies = 0
        for number, (sources, there) in enumerate(in_groups(pairs(), size)):
            part = number % _PARTS
            if (event := events[part]) is not None:
                with step("wait"):
                    event.synchronize()
            run, start = take_apart(sources), part * size
            with step("pack"):
                job = start_packing(run, slab[start : start + size], self._threads)
                if job is not None:
                    with job:
                        for chunk in range(len(job.ends)):
                            job.wait(chunk)
            blocks = into_tensors(run.table, there, self.device.type == "cuda")
            copies += self._copy(blocks, host + start, 0, run.table.nbytes, stream)
            events[part] = self._target.record(stream)
        return copies

    def _pack_and_copy(self, parts: Parts, lease: Lease, make: Callable[[], Blocks], stream: Any) -> tuple[Blocks, int]:
        """Pack, and send each chunk as soon as it is complete.

        Args:
            parts: the batch's parts.
            lease: the host slab.
            make: makes the destination tensors; called while threads pack.
            stream: the stream that copies.

        Returns:
            The destination tensors, and the number of copies.
        """
        nbytes, target = parts.table.nbytes, self._target
        host = lease.data_ptr()
        reuses = reuses_places(parts) and not target.is_capturing()
        with step("pack"):
            job = start_packing(parts, lease, self._threads, reuses=reuses)
        if job is None:
            blocks = make()
            return blocks, self._copy(blocks, host, 0, nbytes, stream)
        sent: deque[tuple[int, Fence | None]] = deque()
        copies = start = 0
        with job:
            blocks = make()
            for chunk, end in enumerate(job.ends):
                with step("pack"):
                    job.wait(chunk)
                copies += self._copy(blocks, host + job.place(chunk) - start, start, end, stream)
                start = end
                if reuses:
                    sent.append((chunk, target.record(stream)))
                    while sent and ((event := sent[0][1]) is None or event.query()):
                        job.reuse(sent.popleft()[0])
        return blocks, copies

    def _copy(self, blocks: Blocks, host: int, start: int, end: int, stream: Any) -> int:
        with step("copy"):
            return self._target.copy(blocks, host, start, end, stream, pinned=self._is_pinned)

    def _acquire(self, nbytes: int, *, into: bool = False, is_whole: bool = False) -> Lease:
        """Lease a slab for a batch, or a smaller slab through which the batch is sent in parts.

        If the platform refuses to page-lock that much, it tries half of the size, and so on, and at last takes a
        pageable slab. With `is_whole`, it takes a pageable slab at once. If a batch for existing tensors (`into`) is
        larger than the cap, the slab has half of the cap, so that other users of the pool get the rest.
        """
        size = nbytes
        while True:
            try:
                return self._pool.acquire(size, timeout=self._timeout, owner=self._owner)
            except BudgetExceededError:
                if not into or size < 2 * LEAST_OF_CAP_BYTES:
                    raise
                size = min(size, self._pool.max_bytes) // 2
            except AcquireTimeoutError as error:
                error.add_note(
                    "results of Stager.fetch(copy=False) hold their slabs until their tensors are freed: drop them "
                    "sooner, or leave copy=False out"
                )
                raise
            except REFUSALS as error:
                if isinstance(error, PoolError):
                    raise
                if size == nbytes:
                    self._count_refusal(nbytes, is_whole, error)
                size //= 2
                if is_whole or size < _LEAST_SLAB_BYTES:
                    return self._acquire_pageable(nbytes)

    def _acquire_pageable(self, nbytes: int) -> Lease:
        with self._lock:
            self._is_pinned = False
            if self._pageable is None:
                self._pageable = SlabPool(self._pool.max_bytes, memory=PageableMemory())
        warn_once(
            "a stager falls back to pageable memory, which is slow: nothing can be page-locked; see `pinstage doctor`"
        )
        return self._pageable.acquire(nbytes, timeout=self._timeout, owner=self._owner)

    def _count_refusal(self, nbytes: int, is_whole: bool, error: Exception) -> None:
        with self._lock:
            self._counters["fallback_batches"] += 1
            is_first = self._counters["fallback_batches"] == 1
        if is_first:
            way = "the batch is sent in parts through a smaller slab"
            if is_whole:
                way = "tensors are fetched into pageable memory"
            warnings.warn(
                f"page-locking of {format_bytes(nbytes)} was refused, {way}: {error}; {remedy(nbytes)}; this warning "
                "is shown once",
                StagingWarning,
                stacklevel=5,
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a stager cannot be copied or pickled: {self!r}; make another Stager, or pass this one on")

    def __enter__(self) -> Stager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        batches = self._counters["batches"] + len(self._tallies)
        return f"<Stager {self.device} batches={batches} {self._pool!r}>"
