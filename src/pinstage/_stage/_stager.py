"""`Stager`: one line moves a batch."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
import torch

from .._batch import (
    ALIGNMENT,
    Blocks,
    IsContainer,
    Keeping,
    Layout,
    OwnStorage,
    Parts,
    Sharing,
    borrow,
    check_own_storage,
    content_of,
    most_threads,
    reuses_places,
    sharing_of,
    start_packing,
    take_apart,
    walk,
    windows,
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
from .._sizes import Size, count, format_bytes, table_text
from .._steps import step
from ..errors import AcquireTimeoutError, BudgetExceededError, PinstageError, PoolError, StagingWarning
from ._device import AT_ONCE_BYTES, Targets, target_for
from ._out import NOTHING, Direct, OutPlan, copy_through, note_written, plan_for, writing
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
"""Below this size `Stager.to_device` copies on the caller's current stream: nothing would overlap with so short a copy,
and a second stream's memory has to be recorded there (5 us for each tensor)."""

_FEW_LEAVES = 16
"""Batches of more leaves, whatever these are, aren't tried as one of a few tensors; see ``move_few`` in
``_native/blocks.c``."""

_PARTS = 2
"""Where a slab is smaller than its batch: one part of it is packed while the other is copied. A batch of 64 MiB takes
1.8 ms through one of 2 MiB, 2.1 in three parts, 2.4 in four, 4.0 in eight."""

_LEAST_SLAB_BYTES = 1 << 20
"""Below this size to start a copy of each part takes longer than its bytes do."""


_LEAST_OF_CAP_BYTES = 4096
"""A cap below this size is too small for any batch."""


def _same(blocks: Blocks) -> Blocks:
    return blocks


class Kept:
    """Objects to keep alive until an event is done; a task for the reaper."""

    def __init__(self, event: Fence, things: list[Any]) -> None:
        self._event = event
        self._things = things

    def reap(self) -> bool:
        """Say whether the event is done."""
        return self._event.query()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StagerStats:
    """Counters of a stager, and its pool's statistics."""

    batches: int
    """Batches staged."""
    copies: int
    """Host-to-device copies of packed leaves: one for each block, and a large block may take several."""
    blocks: int
    """Device tensors made for packed leaves: leaves with tensors of their own, and blocks that leaves share."""
    packed_leaves: int
    """Tensors and arrays that were packed; repeated ones of a batch count once."""
    packed_bytes: int
    """Their bytes."""
    padding_bytes: int
    """Bytes of alignment that were sent with them."""
    passthrough_leaves: int
    """Tensors, and objects with a ``to()`` method, that were moved by their own ``.to()``."""
    fallback_batches: int
    """Batches and fetches that used a smaller slab, or pageable memory, because page-locking was refused."""
    fetches: int
    """Calls of `fetch` and `to_host`."""
    fetch_copies: int
    """Device-to-host copies issued by them."""
    fetched_bytes: int
    """Bytes of these copies, padding included."""
    pool: PoolStats
    """The pool's counters."""

    def __str__(self) -> str:
        """Return one line for a log; ``repr`` is a table."""
        sent = f"{format_bytes(self.packed_bytes)} in {count(self.copies, 'copy', 'copies')}"
        fetched = f"{format_bytes(self.fetched_bytes)} in {count(self.fetch_copies, 'copy', 'copies')}"
        return (
            f"{count(self.batches, 'batch', 'batches')}, {sent}; {count(self.fetches, 'fetch', 'fetches')}, {fetched}; "
            f"pool {format_bytes(self.pool.held_bytes)} of {format_bytes(self.pool.max_bytes)}, "
            f"waited {self.pool.wait_seconds:.3f} s"
        )

    def __repr__(self) -> str:
        fetches, fetch_copies = count(self.fetches, "call"), count(self.fetch_copies, "copy", "copies")
        text = table_text(
            "StagerStats",
            [
                ("batches", f"{self.batches:,}, in {count(self.copies, 'copy', 'copies')}"),
                ("blocks", f"{self.blocks:,}"),
                ("packed", f"{count(self.packed_leaves, 'leaf', 'leaves')}, {format_bytes(self.packed_bytes)}"),
                ("padding", format_bytes(self.padding_bytes)),
                ("passthrough_leaves", f"{self.passthrough_leaves:,}"),
                ("fetched", f"{fetches}, {fetch_copies}, {format_bytes(self.fetched_bytes)}"),
            ],
        )
        return f"{text}\n{self.pool!r}"


class Stager:
    """Moves nested batches to a device.

    A batch is packed into one page-locked slab and copied asynchronously. On the device, leaves of small batches and
    large leaves have memory of their own, and others share blocks; see `own_storage`. A batch of at most 64 KiB,
    padding included, is packed into ordinary memory: copies of that size return at once (CUDA Programming Guide,
    Asynchronous Concurrent Execution).

    Args:
        device: where to: ``"cuda"``, ``"cuda:0"``, ``torch.device(...)``, or ``"cpu"``, which runs the same code on
            pageable memory. None is ``"cuda"`` where it is available, else ``"cpu"``.
        pool: a pool to take slabs from, perhaps shared with other stagers; None makes one, which `close` closes.
        max_bytes: cap of the pool that is made; see `SlabPool`.
        budget: a second cap, which pools of several processes share; see `HostBudget`.
        owner: the name under which slabs are taken: it is counted in `PoolStats.owners`, and `SlabPool.set_quota`
            can limit it.
        pack_threads: number of threads that may pack a batch of 1 MiB or more, including the calling one; "auto" takes
            the CPUs that the process may use, at most 12.
        borrow_pinned: do not pack leaves of 256 KiB and more that are page-locked already (torch's ``is_pinned()``, or
            views of a lease or a `HostRegion`). They are copied from where they are, each by its own copy, in a region
            cut where its chunks end. They must not be changed until
            `Transfer.query` is true, as with torch's own ``non_blocking=True``. They are kept alive until then.
        own_storage: which leaves have device memory of their own, as ``.to()`` gives it. ``"auto"``: all leaves of a
            batch of up to eight, and leaves of 4 MiB and more in any batch. The others share blocks with leaves of
            their own dtype: at most 1 MiB for leaves below 64 KiB, at most 4 MiB otherwise. A leaf that you keep, save
            or pickle keeps its block. True: all leaves, for programs that pickle or save what they stage, or compile
            functions that change many inputs in place. False: none. The device has one slab, and each leaf is a view
            of it.
        run_ahead: batches whose work the device may have before it. `stage` and `to_device` wait for earlier ones, so
            that a loop that never waits takes no device memory without end. Batches without a slab are not counted.
            None sets no bound.
        keep_on_host: leaves that stay on the host, unchanged: paths of leaves or of containers, as errors and
            `Layout.slots` write them (``["['lengths']"]``), or a function of path and leaf that returns true for such
            leaves. They are
            neither searched for tensors nor compared. `on_host` does the same in the batch itself.
        timeout: seconds that a call waits at most for a host slab, while the pool is at its cap. None waits forever,
            even if results of `fetch` in the calling thread hold the slabs.

    Raises:
        TypeError: `keep_on_host` is neither of these, or `pool`, `pack_threads`, `run_ahead` or `timeout` is of another
            type.
        ValueError: an unsupported device, both `pool` and a cap, a negative `timeout`, a `run_ahead` or
            `pack_threads` below 1, or another `own_storage`.
        CudaUnavailableError: a CUDA device, but no CUDA.

    If the platform refuses to page-lock as much as a batch needs, the batch is sent in parts through a smaller slab,
    and `stage` waits for its copies. If nothing can be page-locked, it is copied from pageable memory. A
    `StagingWarning` says so once, with the reason and what to do, and `StagerStats.fallback_batches` counts these
    batches.

    All methods may be called from any thread. They wait for the device only beyond `run_ahead` batches, and for the
    pool when it is at its cap. In a forked child nothing can be staged.
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
        self._batches = self._copies = self._blocks = self._passthrough_leaves = 0
        self._is_pinned = self._pool.memory.is_pinned
        self._pool_state = state_of(self._pool)
        self._moves_few = keep_on_host is None and own_storage is not False
        self._packed_leaves = self._packed_bytes = self._padding_bytes = 0
        self._targets = Targets(self._target)
        self._fetches = self._fetch_copies = self._fetched_bytes = self._fallback_batches = 0
        self._pageable: SlabPool | None = None  # made where nothing can be page-locked

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._target.device

    @property
    def pool(self) -> SlabPool:
        """Where host slabs come from."""
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
        stream; `Transfer.wait` makes the consumer's stream wait for it. The host slab goes back to the pool behind the
        copy's event. When the call returns, everything that was packed has been read.

        A batch of at most 64 KiB takes no slab, waits for none, and is copied on the current stream, behind its work;
        while a CUDA graph is captured there, it is staged like a larger one.

        A tensor that cannot be packed moves by its own ``.to(device, non_blocking=True)`` on the current stream, and is
        counted: a sparse, quantised or nested one, an unregistered subclass, a tensor that requires grad, or a tensor
        that isn't on the CPU. An unknown object that holds tensors and has a ``to(device)`` method moves by that, after
        a warning.

        With `out` the batch is written into existing tensors. The copies start behind the work that the current
        stream has been given, and `out` must not be used before `Transfer.wait`. Its tensors are kept until the copies
        are done. Everything is checked before anything is written. A call that fails later, by a time-out or an
        interrupt, may leave some tensors written in part, which a note of the error names. A batch larger than the
        pool's cap goes in parts, and the call waits for them.

        Args:
            batch: containers as `Layout` knows them, with tensors, numpy arrays and anything else in them.
            out: tensors on the stager's device, with the structure and shapes of the batch, such as a result
                of `to_device`. Dtypes and strides may differ: values are cast as by ``Tensor.copy_``. Leaves
                that aren't tensors are neither compared nor changed. The result has these tensors and the
                batch's other leaves.

        Raises:
            LayoutError: something in the batch cannot be staged, or a path of `keep_on_host` leads to nothing in the
                first batch; or `out` has another structure or shape, tensors on another device, expanded or overlapping
                ones, or some that require grad while grad mode is on. See its ``path``.
            PinstageError: `out` is given while a CUDA graph is captured.
            BudgetExceededError: the batch is larger than the pool's cap, and `out` isn't given.
            AcquireTimeoutError: no host slab came free within the stager's `timeout`.
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
        """Do what `stage` does.

        Args:
            batch: the batch.
            is_bounded: whether the host waits while the device is too far behind; else the caller sees to that.
            borrows: whether its page-locked leaves won't be written, whatever `borrow_pinned` says.
        """
        with step("stage"):
            parts = take_apart(batch, keeping=self._keeping)
            return self._transfer(parts, is_watched=True, is_bounded=is_bounded, borrows=borrows)

    def _transfer(
        self, parts: Parts, *, is_watched: bool, is_bounded: bool = True, borrows: bool = False
    ) -> Transfer[Any]:
        """Send a batch.

        Args:
            parts: of the batch.
            is_watched: whether anybody can ask when the bytes are there, or get them on another stream.
            is_bounded: see `_stage`.
            borrows: see `_stage`.
        """
        table = parts.table
        sent = self._send(parts, is_watched, is_bounded, borrows)
        others, moved, moved_event = move_others(self._target, parts.structure, table, parts.others())
        self._count(sent.copies, len(sent.blocks), *table[1:5])
        return Transfer(self._target, parts.structure, table, sent, others, moved, moved_event)

    def stage_lease(self, lease: Lease, layout: Layout, others: Sequence[Any] = ()) -> Transfer[Any]:
        """Start the copy of a batch that is packed in a lease already, written there by hand or by `Layout.pack`.

        Does not block. The lease is released behind the copy, even if the copy fails. Only after the errors below it is
        still the caller's. Its views must not be written until `Transfer.query` is true.

        Args:
            lease: holds the batch in this layout; of any pool.
            layout: where each leaf is stored.
            others: the leaves that are not in the slab, in the order of the batch, as `Layout.others` returns them.

        Raises:
            ValueError: the lease is smaller than the layout, or `others` are too few or too many.
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
                    f"others has the wrong length: {len(others)} for {table.others + table.moved} leaves that do not "
                    "live in the slab; pass layout.others(batch)"
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

        With `out` it is an operation of the current stream: it writes behind earlier work there, and later work sees
        the new values.

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
                    self._count(copies, count, nbytes, nbytes, count)
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

        Host memory is bounded by the pool, whatever the size of the checkpoint. Dtypes may differ: the tensors are cast
        on the device. Tensors on ``"meta"`` that the checkpoint names are made on the stager's device, once for all
        names that share them. DTensors (plain Shard and Replicate) take this rank's part of a tensor of global shape.
        A name whose tensor is loaded under another name isn't missing (tied weights).

        The copies are operations of the current stream, as with ``to_device(out=)``: later work on that stream sees the
        weights. Tensors of `tensors` may be changed when the call has returned, but for page-locked ones with
        ``borrow_pinned``.

        Args:
            module_or_dict: on the stager's device, or on meta.
            tensors: host tensors by name: a mapping (``state_dict``, ``torch.load(path, mmap=True)``), an iterable of
                (name, tensor), read in waves of 256 MiB (for example of all shards), or safetensors' ``safe_open``.
            strict: missing and unexpected names are errors.

        Returns:
            Missing and unexpected names, as from ``load_state_dict``.

        Raises:
            RuntimeError: the error of ``load_state_dict`` for missing, unexpected and misshapen names, also for tensors
                on another device and for tensors that stay on meta. With a mapping or ``safe_open``, nothing was
                written then; an iterable is checked by name as it comes.
            TypeError: a module takes part in its loading (a ``_load_from_state_dict`` of its own, a hook, extra state).
        """
        return load_weights(self.to_device, self.device, module_or_dict, tensors, strict=strict)

    def fetch(self, tree: B, *, out: B | None = None, copy: bool = True) -> HostTransfer[B]:
        """Start to bring a nested tree of tensors to the host.

        Does not block for the copies, only for a host slab while the pool is at its cap. Small tensors are gathered on
        their device and are sent in one copy; dense ones of 1 MiB and more are copied from where they are. The call
        acts like an operation on the current stream: it sees the results of earlier work on that stream, and the
        tensors may be changed or freed right afterwards. That stream waits while large tensors are read; if it must
        not, call on another stream.

        CPU tensors, numpy arrays and everything that isn't a tensor are returned unchanged (a stager for the CPU
        copies CPU tensors). The tree may hold tensors of several devices. A tensor that cannot be packed (sparse, a
        subclass, or one with grad) is moved by its own ``.to("cpu")``, which blocks; ``detach()`` avoids that.

        Args:
            tree: containers as `Layout` knows them, with anything in them.
            out: host tensors, with the structure and shapes of the tree, to use instead of new ones.
                Page-locked ones of 64 KiB and more with the same dtype and strides are written by the device.
                `HostTransfer.wait` fills the others, from a slab. None of them may be used before that. See also
                `stage`.
            copy: `HostTransfer.wait` copies once more, into ordinary tensors, each with its own memory, and returns the
                slab. False: the tensors are views of the slab, which stays leased until the last view is freed.

        Returns:
            The transfer; its `HostTransfer.wait` waits for the copies, and is the only way to their bytes.

        Raises:
            ValueError: `out` is given with ``copy=False``.
            LayoutError: an object in the tree holds tensors and is not a known container; or a tensor of `out` can't be
                written, as for `stage`.
            PinstageError: `out` is given while a CUDA graph is captured.
            AcquireTimeoutError: no slab came free within the stager's `timeout`, for example because earlier results
                are still alive.
            BudgetExceededError: the tensors are larger than the pool's cap.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        # A pool of no device in particular pins on the current one.
        if out is not None and not copy:
            raise ValueError("copy=False returns views of a slab, and out= names tensors that exist; pass one of them")
        acquire, keep = partial(self._acquire, is_whole=True), self._keep_until
        with step("fetch"), self._target.selected():
            if out is not None:
                self._refuse_capture()
            transfer = fetch(tree, self.device, acquire, self._targets, copy=copy, out=out, keep=keep)
        with self._lock:
            self._fetches += 1
            self._fetch_copies += transfer.copies
            self._fetched_bytes += transfer.nbytes
        return transfer

    def to_host(self, tree: B, *, out: B | None = None) -> B:
        """Bring a nested tree of tensors to the host: ``fetch(tree).wait()``.

        Blocks until the bytes are there, as ``.cpu()`` does. Each tensor has memory of its own, outside of the pool, or
        is one of `out`. Otherwise as `fetch`.

        Args:
            tree: containers as `Layout` knows them, with anything in them.
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

        When a batch is yielded, the next `depth` are packed and being copied, or, with a thread, will soon be. Waits
        for the device only if it still has the work of more than three batches to do.

        A thread reads the source, packs and starts copies while the loop is busy. ``iter(source)`` and the first
        ``next()`` run in the loop's thread all the same. The others run in a thread that has the loop's CUDA device,
        grad and inference mode, autocast, default device and context variables, as they were when the pass began.

        Without a thread the source is read in the loop's, `depth` batches ahead. If its samples are made there too
        (``num_workers=0``), it draws random numbers that the loop would have drawn first.

        Large leaves that torch's loader with workers has page-locked already (``pin_memory=True``) are not packed.

        Args:
            source: yields batches, for example a DataLoader.
            depth: batches ahead; 0 for none. The device holds up to ``depth + 2`` batches.
            background: whether a thread reads the source. "auto" uses one for torch's `DataLoader`, and for subclasses
                that get their batches as it does, with workers and with samplers of torch's own classes. True uses one
                for any source. Then its ``next()`` must be safe in another thread, and must not draw from the global
                random generators (``random``, ``numpy.random``, ``torch``) if the loop does: its numbers and the loop's
                would differ from run to run.

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
        pool = self._pool.stats()  # not with the lock: it may free slabs
        with self._lock:
            counters = {name: getattr(self, f"_{name}") for name in StagerStats.__slots__ if name != "pool"}
            return StagerStats(**counters, pool=pool)

    def close(self) -> None:
        """Close the pool if the stager made it. Batches that were yielded stay valid."""
        if self._owns_pool:
            close_for(self._pool, "Stager")
        if self._pageable is not None:
            self._pageable.close()

    def _count(self, copies: int, blocks: int, nbytes: int, payload: int, packed: int, passthrough: int = 0) -> None:
        """Count a batch. The last four are in its `Table`, in this order."""
        with self._lock:
            self._batches += 1
            self._copies += copies
            self._blocks += blocks
            self._packed_leaves += packed
            self._packed_bytes += payload
            self._padding_bytes += nbytes - payload
            self._passthrough_leaves += passthrough

    def _send(
        self,
        parts: Parts,
        is_watched: bool,
        is_bounded: bool = True,
        borrows: bool = False,
    ) -> Sent:
        """Send what can be packed.

        The cases: a batch of at most 64 KiB is sent at once from ordinary memory, on the caller's current stream; a
        slab, and a stream to wait for, would take longer than packing and copying it. A batch below `SMALL_BYTES` that
        isn't watched goes through a slab on that stream. Any other one goes through a slab, or a smaller one in parts,
        on the stream for copies. While the current stream is captured, all do. (`to_device` has sent a few small leaves
        before it comes here.)

        Args:
            parts: of the batch.
            is_watched: whether the caller can ask when the bytes are there, or get them on another stream. Else copies
                on the current stream need no event, which takes some microseconds.
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
        """Send at most `AT_ONCE_BYTES` from ordinary memory; None if that would wait for the device."""
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
            parts: of the batch.
            make: returns the tensors that it goes to.
            stream: that copies.
            borrows: see `_stage`.
            into: whether these tensors exist; see `_acquire`.
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
            elif borrowed is None and rest.table.nbytes < SMALL_BYTES and not rest.has_lazy:
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
            if borrowed is not None and event is not None:
                reaper.tasks.put(Kept(event, borrowed.lenders))
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
        """Write a few small leaves, each by a copy on the current stream; None if they aren't few, small and plain."""
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
            self._keep_until(target.record(target.consumer(None)), tensors)
            self._count(copies, 0, nbytes, nbytes, count)
            return structure.rebuild(made)

    def _keep_until(self, event: Fence | None, things: list[Any]) -> None:
        if event is not None and things:
            reaper.start()
            reaper.tasks.put(Kept(event, things))

    def _write(self, plan: OutPlan) -> Sent:
        """Write a batch into existing tensors, behind all that the current stream has been given.

        What torch has to copy, and what goes by way of scratch, is work of the current stream. Large leaves follow on
        the stream for copies. Nothing is counted for `run_ahead`: no memory is taken for a batch.

        Returns:
            The copies; the event is behind all of them.
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
        with suppress(Exception):  # of a device that has failed
            for stream in (target.consumer(None), target.stream):
                if (event := target.record(stream)) is not None:
                    event.synchronize()
        note_written(error, plan.parts.structure, begun)

    def _copy_in_parts(self, parts: Parts, lease: Lease, blocks: Blocks, stream: Any) -> int:
        """Do what `_pack_and_copy` does through a slab that is smaller than the batch.

        Each part of the slab is written again when the copy from it is done: the host waits for that.
        """
        size = lease.nbytes // _PARTS // ALIGNMENT * ALIGNMENT
        host, slab = lease.data_ptr(), lease.tensor()
        events: list[Fence | None] = [None] * _PARTS
        copies = 0
        for number, (start, run) in enumerate(windows(parts, size)):
            part = number % _PARTS
            event = events[part]
            if event is not None:
                with step("wait"):
                    event.synchronize()
            with step("pack"):
                job = start_packing(run, slab[part * size : (part + 1) * size], self._threads)
                if job is not None:
                    with job:
                        for chunk in range(len(job.ends)):
                            job.wait(chunk)
            end = start + run.table.nbytes
            copies += self._copy(blocks, host + part * size - start, start, end, stream)
            events[part] = self._target.record(stream)
        return copies

    def _pack_and_copy(self, parts: Parts, lease: Lease, make: Callable[[], Blocks], stream: Any) -> tuple[Blocks, int]:
        """Pack, and send each chunk as soon as it is complete.

        Args:
            parts: the jobs of packing.
            lease: the host slab.
            make: makes the tensors that it goes to, which is done while threads pack.
            stream: that copies.

        Returns:
            These tensors, and the number of copies.
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
        """Lease a slab for a batch, or a smaller one, through which the batch goes in parts.

        The cases: the platform refuses to page-lock that much: half of it, and so on, and at last a pageable slab; or
        that at once, for what has to be whole. The cap is smaller than a batch that goes into existing tensors: half of
        the cap, so that others have some.
        """
        size = nbytes
        while True:
            try:
                return self._pool.acquire(size, timeout=self._timeout, owner=self._owner)
            except BudgetExceededError:
                if not into or size < 2 * _LEAST_OF_CAP_BYTES:
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
            "a stager goes on with pageable memory, which is slow: nothing can be page-locked; see `pinstage doctor`"
        )
        return self._pageable.acquire(nbytes, timeout=self._timeout, owner=self._owner)

    def _count_refusal(self, nbytes: int, is_whole: bool, error: Exception) -> None:
        with self._lock:
            self._fallback_batches += 1
            is_first = self._fallback_batches == 1
        if is_first:
            way = "the batch goes in parts through a smaller slab"
            if is_whole:
                way = "tensors come to the host in pageable memory"
            warnings.warn(
                f"page-locking of {format_bytes(nbytes)} was refused, {way}: {error}; {remedy(nbytes)}; this is said "
                "once",
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
        return f"<Stager {self.device} batches={self._batches} {self._pool!r}>"
