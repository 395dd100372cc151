"""`Stager`: moves a batch to the device in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import (
    Any,
    Literal,
    NoReturn,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    overload,
)

import numpy as np
import torch

from .._batch import Keeping, Layout, OwnStorage, Rows, check_own_storage, content_of, most_threads
from .._memory import default_memory
from .._pool import (
    HostBudget,
    Lease,
    SlabPool,
    check_owner,
    check_pool,
    check_timeout,
    close_for,
    guard_until_release,
    is_page_locked,
)
from .._sizes import Size
from .._steps import step
from ._host_slabs import HostSlabs
from ._prefetch import InBackground, Prefetcher, T, page_locks_each_batch, prefetcher_of
from ._run_ahead import RUN_AHEAD, RunAhead, check_depth
from ._sender import Sender
from ._stats import StagerCounters, StagerStats
from ._target import HostBytes
from ._targets import Targets, target_for
from ._to_host import Fetcher, HostTransfer
from ._transfer import Packed, Transfer, send_packed
from ._weights import IncompatibleKeys, load_weights

B = TypeVar("B")
K = TypeVar("K")
Array: TypeAlias = "np.ndarray[Any, Any] | Rows"
Leaf: TypeAlias = "torch.Tensor | Array"
Alike = TypeVar("Alike", bound="torch.Tensor | Array")
Tensors = TypeVar("Tensors", bound=Mapping[Any, torch.Tensor] | tuple[torch.Tensor, ...])


class Stager:
    """Moves nested batches to a device.

    A batch is packed into one page-locked slab and copied asynchronously. On the device, large
    leaves and the leaves of small batches have memory of their own. Other leaves share blocks; see
    `own_storage`. A batch of at most 64 KiB, padding included, is copied from ordinary memory:
    copies of that size return at once (CUDA Programming Guide, Asynchronous Concurrent Execution).
    Tensors that can't be packed are moved by their own ``.to()``: those that require grad, sparse
    ones, and subclasses. ``.to()`` returns a tensor that is on the device already, so a stager for
    the CPU returns such a tensor itself, where the others are copied.

    Args:
        device: the device to stage to: ``"cuda"``, ``"cuda:0"``, ``torch.device(...)``, or
            ``"cpu"``, which runs the same code on pageable memory. None is ``"cuda"`` if it is
            available, else ``"cpu"``.
        pool: the pool to take slabs from, which other stagers may share. None makes a pool, which
            `close` closes.
        max_bytes: cap of the pool that the stager makes; see `SlabPool`.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        owner: the name under which the stager takes slabs. `PoolStats.owners` counts by this name,
            and `SlabPool.set_quota` can limit it.
        pack_threads: number of threads that may pack a batch of 1 MiB or more, including the
            calling thread. "auto" is the number of CPUs that the process may use, at most 12.
        borrow_pinned: whether page-locked leaves may be read after the call, as with torch's own
            ``non_blocking=True``. Dense leaves of 32 KiB and more, or 16 KiB in a batch of up to
            eight leaves, that are page-locked already are always sent from where they are, without
            packing: pinned tensors, views of a lease or a `HostRegion`. False: only if one of the
            first three such leaves is page-locked, and the call waits until all have been read.
            True: each leaf is checked, and the call doesn't wait. Don't change these leaves until
            `Transfer.query` is true. The stager keeps them alive until then.
        own_storage: which leaves have device memory of their own, as ``.to()`` gives it.
            ``"auto"``: all leaves of a batch of up to eight leaves, and leaves of 4 MiB and more in
            any batch. Other leaves share blocks with leaves of the same dtype: blocks of at most 1
            MiB for leaves below 64 KiB, of at most 4 MiB otherwise. A leaf that you keep, save or
            pickle keeps its block. True: all leaves, for programs that pickle or save what they
            stage, or compile functions that change many inputs in place. False: none. The batch has
            one slab on the device, and each leaf is a view of it.
        run_ahead: number of batches whose work may be queued on the device. `stage` and `to_device`
            wait for earlier batches, so that a loop that never waits for the device can't take more
            and more of its memory. Batches without a slab don't count. None sets no bound.
        keep_on_host: leaves that stay on the host, unchanged: paths of leaves or of containers, as
            errors and `Layout.slots` write them (``["['lengths']"]``), or a function of path and
            leaf that returns true for such leaves. They are neither searched for tensors nor
            compared. `on_host` does the same in the batch itself.
        timeout: the most seconds that a call waits for a host slab while the pool is at its cap.
            None waits forever, even if results of `fetch` in the calling thread hold the slabs.

    Raises:
        TypeError: `keep_on_host`, `pool`, `pack_threads`, `run_ahead` or `timeout` has a wrong
            type.
        ValueError: the device isn't supported; both `pool` and a cap are given; `timeout` is
            negative; `run_ahead` or `pack_threads` is below 1; or `own_storage` is another value.
        CudaUnavailableError: `device` is a CUDA device, and CUDA is not available.

    If the platform refuses to page-lock as much as a batch needs, the batch is sent in parts
    through a smaller slab, and `stage` waits for its copies. If nothing can be page-locked, the
    batch is copied from pageable memory. A `StagingWarning` reports this once, with the reason and
    the remedy, and `StagerStats.fallback_batches` counts these batches.

    All methods may be called from any thread. Staging waits for the device only beyond `run_ahead`
    batches, and for the pool only at its cap. A forked child cannot stage.

    Nothing is staged in a thread whose current stream, of the stager's device or of the current
    one, captures a CUDA graph: calls, transfers and passes of `prefetch` raise `PinstageError`, and
    the capture stays valid. Stage before the capture, and pass `out` before each replay.
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
        threads = most_threads(pack_threads)
        check_own_storage(own_storage)
        bound = None if run_ahead is None else RunAhead(run_ahead)
        self._owns_pool = pool is None
        if pool is None:
            pool = SlabPool(max_bytes, budget=budget, memory=default_memory(self._target.device))
        self._slabs = HostSlabs(pool, owner, timeout)
        self._sender = Sender(
            target=self._target,
            slabs=self._slabs,
            counters=StagerCounters(),
            keeping=None if keep_on_host is None else Keeping(keep_on_host),
            own_storage=own_storage,
            threads=threads,
            borrows=borrow_pinned,
            run_ahead=bound,
        )
        self._fetcher = Fetcher(self.device, self._slabs, Targets(self._target), threads)

    @property
    def device(self) -> torch.device:
        """The device that batches are copied to."""
        return self._target.device

    @property
    def pool(self) -> SlabPool:
        """The pool that host slabs are taken from."""
        return self._slabs.pool

    @overload
    def stage(self, batch: Array) -> Transfer[torch.Tensor]: ...
    @overload
    def stage(self, batch: dict[K, Alike] | dict[K, Leaf]) -> Transfer[dict[K, torch.Tensor]]: ...
    @overload
    def stage(self, batch: list[Alike] | list[Leaf]) -> Transfer[list[torch.Tensor]]: ...
    @overload
    def stage(self, batch: Tensors) -> Transfer[Tensors]: ...  # type: ignore[overload-overlap]
    @overload
    def stage(self, batch: tuple[Leaf, ...]) -> Transfer[tuple[torch.Tensor, ...]]: ...
    @overload
    def stage(self, batch: Mapping[K, Leaf]) -> Transfer[Mapping[K, torch.Tensor]]: ...
    @overload
    def stage(self, batch: B) -> Transfer[B]: ...
    def stage(self, batch: Any) -> Transfer[Any]:
        """Pack a batch and start its copy.

        Blocks while it packs, and while the pool is at its cap. It doesn't wait for copies, but,
        without `borrow_pinned`, for those of leaves that are page-locked already. When the call
        returns, everything that was packed or is page-locked has been read.

        Copies run on the stager's own stream; `Transfer.wait` makes the consumer's stream wait for
        them. The host slab returns to the pool when the copy is done. A batch below 1 MiB is copied
        on the current stream, behind earlier work there. It takes no slab if it has at most 64 KiB,
        or eight plain leaves, unless its copies would wait for the device.

        A tensor that cannot be packed is moved by its own ``.to(device, non_blocking=True)`` on the
        current stream, and is counted. These are sparse, quantised and nested tensors, unregistered
        subclasses, tensors that require grad, and tensors that aren't on the CPU. An unknown object
        that holds tensors and has a ``to(device)`` method is moved by that method, after a warning.

        Args:
            batch: containers that `Layout` knows, with tensors, numpy arrays and anything else in
                them.

        Raises:
            LayoutError: something in the batch cannot be staged; a path of `keep_on_host` leads to
                nothing in the first batch. The error's ``path`` says where.
            PinstageError: the current stream captures a CUDA graph.
            BudgetExceededError: the batch is larger than the pool's cap.
            AcquireTimeoutError: no host slab became free within the stager's `timeout`.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        self._target.refuse_capture()
        return self._sender.begin(batch)

    def stage_lease(
        self, lease: Lease, layout: Layout, others: Sequence[Any] = ()
    ) -> Transfer[Any]:
        """Start the copy of a batch that a lease holds already, written there by hand or by
        `Layout.pack`.

        Does not block. The lease is released behind the copy, even if the copy fails. After one of
        the errors below, you still have to release it. Don't write to its views until
        `Transfer.query` is true.

        Args:
            lease: a lease of any pool, which holds the batch in this layout.
            layout: where each leaf is stored.
            others: the leaves that are not in the slab, in the order of the batch, as
                `Layout.others` returns them.

        Raises:
            TypeError: `layout` isn't a `Layout`.
            ValueError: the lease is smaller than the layout, or `others` has the wrong length.
            LeaseError: the lease was released.
            PinstageError: the current stream captures a CUDA graph.
        """
        self._target.refuse_capture()
        with step("stage"):
            structure, table = content_of(layout)
            if lease.nbytes < table.nbytes:
                raise ValueError(
                    f"lease is too small: {lease.nbytes} bytes for a layout of {table.nbytes}; "
                    "acquire(layout.nbytes)"
                )
            if len(others) != table.others + table.moved:
                raise ValueError(
                    f"others has the wrong length: {len(others)} for {table.others + table.moved} "
                    "leaves that are not in the slab; pass layout.others(batch)"
                )
            host, target = HostBytes(lease.data_ptr(), is_page_locked(lease)), self._target
            guard_until_release(lease, target.stream)  # an interrupt may come before the release
            transfer = send_packed(
                target,
                Packed(structure, table, list(others)),
                host,
                self._sender.own_storage,
                release=lambda event: lease.release(after=event),
            )
            self._sender.count(transfer)
            return transfer

    @overload
    def to_device(self, batch: Array, *, out: torch.Tensor | None = None) -> torch.Tensor: ...
    @overload
    def to_device(
        self, batch: dict[K, Alike] | dict[K, Leaf], *, out: dict[K, torch.Tensor] | None = None
    ) -> dict[K, torch.Tensor]: ...
    @overload
    def to_device(
        self, batch: list[Alike] | list[Leaf], *, out: list[torch.Tensor] | None = None
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

        With `out`, the batch is staged in the same way, and then copied into `out` by torch, on the
        current stream, behind that stream's earlier work. So a large batch crosses the bus while
        `out` is in use, for example by a CUDA graph that reads the batch before it. `out` is
        checked before anything is written. Tensors that require grad are read detached. Memory that
        isn't torch's own, as of a tensor from another library, has to outlive the copy.

        Args:
            batch: see `stage`.
            out: tensors on the stager's device, with the structure and shapes of the batch, such as
                an earlier result. Dtypes and strides may differ: values are cast as by
                ``Tensor.copy_``. Leaves that aren't tensors are neither compared nor changed. The
                result has these tensors and the batch's other leaves.

        Raises:
            LayoutError: as `stage`; or `out` has another structure or shape, or tensors that are on
                another device or have no memory. The error's ``path`` says where.
            PinstageError: the current stream captures a CUDA graph.
            BudgetExceededError, AcquireTimeoutError: as `stage`.
            Exception: torch can't copy the batch into `out`, which may be written in part.
        """
        self._target.refuse_capture()
        if out is None:
            return self._sender.move(batch)
        return self._sender.move_into(batch, out)

    def load_weights(
        self,
        module_or_dict: torch.nn.Module | dict[str, torch.Tensor],
        tensors: Any,
        *,
        strict: bool = True,
    ) -> IncompatibleKeys:
        """Copy a checkpoint into the parameters and buffers of a module, or into the tensors of a
        dict.

        ```python
        with safetensors.safe_open("model.safetensors", framework="pt") as file:
            stager.load_weights(model, file)
        ```

        The pool bounds the host memory, whatever the size of the checkpoint. Dtypes may differ:
        tensors are cast on the device. Tensors on ``"meta"`` that the checkpoint names are made on
        the stager's device, once for all names that share a tensor. A DTensor (plain Shard or
        Replicate) takes this rank's part of a tensor of global shape. A name whose tensor is loaded
        under another name isn't missing (tied weights). The module's ``state_dict`` isn't called.

        The copies are operations on the current stream, as with ``to_device(out=)``: later work on
        that stream sees the weights. When the call has returned, you may change the source tensors,
        except page-locked ones with ``borrow_pinned``. Until then they have to stay unchanged,
        those of an iterable too: a reader must not use the memory of a tensor again for the next.

        Args:
            module_or_dict: a module or a dict of tensors, on the stager's device or on meta.
            tensors: host tensors by name: a mapping (``state_dict``, ``torch.load(path,
                mmap=True)``), an iterable of (name, tensor) pairs (for example of all shards), or
                safetensors' ``safe_open``. They are read in groups of at most 64 MiB.
            strict: whether missing and unexpected names are errors.

        Returns:
            Missing and unexpected names, as from ``load_state_dict``.

        Raises:
            RuntimeError: names are missing or unexpected, or shapes differ, as in
                ``load_state_dict``; a tensor is on another device; a tensor of an iterable was
                overwritten before it was packed (its first, middle and last 64 bytes are compared);
                or a tensor would stay on meta. Names of a mapping or ``safe_open``, and shapes of a
                dict or ``safe_open``, are checked before anything is written, the rest as it is
                read.
            ValueError: the pool's cap is below 64 KiB.
            TypeError: a module takes part in its loading (a ``_load_from_state_dict`` of its own, a
                hook, extra state), or `tensors` is something else, such as a path.
            PinstageError: the current stream captures a CUDA graph.
        """
        self._target.refuse_capture()
        return load_weights(self._sender, module_or_dict, tensors, strict=strict)

    def fetch(self, tree: B, *, copy: bool = True) -> HostTransfer[B]:
        """Start copying a nested tree of tensors to the host.

        Does not block for the copies, only for a host slab while the pool is at its cap. The slab
        holds the whole tree. Small tensors are gathered on their device and sent in one copy. Dense
        tensors of 1 MiB and more are copied from where they are. The call acts like an operation on
        the current stream: it sees the results of earlier work on that stream, and you may change
        or free the tensors right afterwards. That stream waits while large tensors are read; to
        avoid that, call `fetch` on another stream.

        CPU tensors, numpy arrays and everything that isn't a tensor are returned unchanged (a
        stager for the CPU copies CPU tensors). The tree may hold tensors of several devices. A
        tensor that cannot be packed (it is sparse, a subclass, or requires grad) is moved by its
        own ``.to("cpu")``, which blocks. If it requires grad, ``detach()`` avoids that.

        Args:
            tree: containers that `Layout` knows, with anything in them.
            copy: True: `HostTransfer.result` copies once more, into ordinary tensors, each with its
                own memory, and returns the slab. False: the tensors are views of the slab, which
                stays leased until the last view is freed.

        Returns:
            The transfer. Its `HostTransfer.result` waits for the copies, and returns the tensors.

        Raises:
            LayoutError: an object in the tree holds tensors and is not a known container.
            PinstageError: the current stream captures a CUDA graph.
            AcquireTimeoutError: no slab became free within the stager's `timeout`, for example
                because earlier results are still alive.
            BudgetExceededError: the tensors that go through a slab are larger than the pool's cap.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
        """
        self._target.refuse_capture()
        # `selected`, since a pool that belongs to no device page-locks on the current one.
        with step("fetch"), self._target.selected():
            transfer = self._fetcher.fetch(tree, copy=copy)
        self._sender.counters.add_fetch(transfer.copies, transfer.nbytes)
        return transfer

    def to_host(self, tree: B, *, out: B | None = None) -> B:
        """Copy a nested tree of tensors to the host: ``fetch(tree).result()``.

        Blocks until the bytes are there, as ``.cpu()`` does. Each tensor has memory of its own,
        outside of the pool, or is one of `out`. A large tree goes in chunks through a slab of at
        most 64 MiB, or half of the pool's cap: threads copy earlier chunks out while later ones
        cross the bus. So it may be larger than the cap. Everything else is as in `fetch`.

        Args:
            tree: containers that `Layout` knows, with anything in them.
            out: host tensors, with the structure and shapes of the tree, to use instead of new
                tensors; see also `to_device`. The device writes page-locked ones of 64 KiB and more
                with the same dtype and strides. The others are copied from a slab; together, they
                have to fit the pool's cap.

        Returns:
            A tree of the same types.

        Raises:
            LayoutError: as `fetch`; or `out` doesn't fit, as for `to_device`.
            PinstageError: the current stream captures a CUDA graph.
            AcquireTimeoutError: as `fetch`.
            BudgetExceededError: bytes for `out` that need a slab are more than the pool's cap.
            Exception: torch can't copy a tensor into `out`, which may be written in part.
        """
        self._target.refuse_capture()
        with step("fetch"), self._target.selected():
            result: B
            if out is None:
                result, copies, nbytes = self._fetcher.to_host(tree)
            else:
                result, copies, nbytes = self._fetcher.fetch_into(tree, out)
        self._sender.counters.add_fetch(copies, nbytes)
        return result

    @overload
    def prefetch(
        self,
        source: torch.utils.data.DataLoader[T],
        *,
        depth: int = 2,
        background: InBackground = "auto",
    ) -> Prefetcher[T]: ...
    @overload
    def prefetch(
        self, source: Iterable[Array], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[torch.Tensor]: ...
    @overload
    def prefetch(
        self,
        source: Iterable[dict[K, Alike] | dict[K, Leaf]],
        *,
        depth: int = 2,
        background: InBackground = "auto",
    ) -> Prefetcher[dict[K, torch.Tensor]]: ...
    @overload
    def prefetch(
        self,
        source: Iterable[list[Alike] | list[Leaf]],
        *,
        depth: int = 2,
        background: InBackground = "auto",
    ) -> Prefetcher[list[torch.Tensor]]: ...
    @overload
    def prefetch(  # type: ignore[overload-overlap]
        self, source: Iterable[Tensors], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[Tensors]: ...
    @overload
    def prefetch(
        self,
        source: Iterable[tuple[Leaf, ...]],
        *,
        depth: int = 2,
        background: InBackground = "auto",
    ) -> Prefetcher[tuple[torch.Tensor, ...]]: ...
    @overload
    def prefetch(
        self,
        source: Iterable[Mapping[K, Leaf]],
        *,
        depth: int = 2,
        background: InBackground = "auto",
    ) -> Prefetcher[Mapping[K, torch.Tensor]]: ...
    @overload
    def prefetch(
        self, source: Iterable[T], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[T]: ...
    def prefetch(
        self, source: Iterable[Any], *, depth: int = 2, background: InBackground = "auto"
    ) -> Prefetcher[Any]:
        """Iterate over the batches of a source on the device, staged ahead.

        ```python
        for batch in stager.prefetch(source):
            train_step(batch)
        ```

        When a batch is yielded, the next `depth` batches are packed and being copied, or, with a
        thread, soon will be. The loop waits for the device only if the work of more than three
        batches is queued there.

        A thread may read the source, pack, and start copies while the loop is busy.
        ``iter(source)`` and the first ``next()`` still run in the loop's thread. Later calls run in
        a thread with the loop's CUDA device, grad and inference mode, autocast, default device and
        context variables, as they were when the pass began.

        Without a thread, the loop's thread reads the source `depth` batches ahead. If samples are
        made in that thread too (``num_workers=0``), the source draws random numbers that the loop
        would have drawn first.

        For a torch `DataLoader` with workers, use `wrap_loader` instead: its workers pack. Here,
        the main process does. If reading and packing took more than a fifth of a finished pass, in
        CPU time of the reading thread, a `StagingWarning` says so once.

        Leaves that torch's loader has page-locked already (``pin_memory=True``) are sent as with
        `borrow_pinned`: those of a loader with workers, or that collates by torch's
        ``default_collate``.

        Args:
            source: yields batches, for example a generator, or a loader that isn't torch's.
            depth: number of batches staged ahead; 0 for none. The device holds up to ``depth + 2``
                batches.
            background: whether a thread reads the source. "auto" uses a thread for torch's
                `DataLoader`, and for subclasses that get their batches the same way, with workers
                and with samplers of torch's own classes. True uses a thread for any source. Then
                the source's ``next()`` must be safe in another thread. It must not draw from the
                global random generators (``random``, ``numpy.random``, ``torch``) if the loop does:
                the numbers of both would differ from run to run.

        Returns:
            The prefetcher. Each pass over it is a pass over the source. Batches are as `to_device`
            returns them, for the stream that is current when each is requested. An error of the
            source or of staging is raised after the batches before it, as in a plain loop.

        Raises:
            TypeError: `source` is a mapping, a list or tuple of loaders, or a loader that
                Accelerate prepared; or `depth` is not an int.
            ValueError: `depth` is negative, or 0 with ``background=True``.
        """
        check_depth(depth)
        # New buffers each time, never written again.
        borrows = self._sender.borrows or page_locks_each_batch(source)
        sender = replace(self._sender, borrows=borrows, run_ahead=None)
        return prefetcher_of(sender, source, depth, background)

    def stats(self) -> StagerStats:
        """Return a snapshot of the counters."""
        totals = self._sender.counters.totals()
        totals["fallback_batches"] = self._slabs.refusals
        counters = {name: totals[name] for name in StagerStats.__slots__ if name != "pool"}
        return StagerStats(**counters, pool=self.pool.stats())

    def close(self) -> None:
        """Close the pool if the stager made it. Staged batches stay valid."""
        if self._owns_pool:
            close_for(self.pool, "Stager")
        self._slabs.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a stager cannot be copied or pickled: {self!r}; make another Stager, or pass this "
            "one on"
        )

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stager {self.device} batches={self._sender.counters.batches} {self.pool!r}>"


def sender_of(stager: Stager) -> Sender:
    """Return the sender of a stager, which also takes batches whose samples aren't stacked yet."""
    return stager._sender
