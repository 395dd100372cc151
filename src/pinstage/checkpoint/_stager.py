"""`CheckpointStager`: stages state dicts for asynchronous checkpoints."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._batch import ALIGNMENT
from .._memory import SharedMemory, refuse_capture
from .._pool import (
    Fence,
    HostBudget,
    Lease,
    SlabPool,
    check_pool,
    check_timeout,
    close_for,
    descriptor_of,
)
from .._sizes import Size, format_bytes, round_up
from .._stage import (
    EventGroup,
    Fetcher,
    FetchPlan,
    HostSlabs,
    HostTransfer,
    Targets,
    clear_own_frames,
    duplicate_rest,
    event_of,
    wait_here,
)
from .._steps import step
from ..errors import AcquireTimeoutError, BudgetExceededError
from ._snapshot import Snapshot, take
from ._staged import Save, Slabs, StagedBytes, StagedSave

_CPU = torch.device("cpu")
_OWNER = "checkpoint"


class CheckpointStager(AsyncStager):
    """Stages state dicts for ``torch.distributed.checkpoint.async_save`` in slabs of a pool.

    ```python
    stager = CheckpointStager(pool=pool)
    response = async_save(state_dict, checkpoint_id=path, async_stager=stager)
    ...  # training goes on; parameters may be changed at once
    response.upload_completion.result()
    ```

    `stage` starts the copies of tensors on a GPU, behind the earlier work of the current stream,
    and returns. Tensors on the CPU are copied before it returns. Later saves of the same state use
    the same slab, and page-lock nothing.

    A state has one slab. If the platform refuses to page-lock one of that size, a `StagingWarning`
    says so once, and states have several slabs of at most 256 MiB, or of the pool's largest slab if
    that is larger; a larger tensor has a slab of its own. Slabs that are refused, too, are pageable
    memory of the same kind, which is slower. A save gets all its slabs or none.

    The result is a copy of everything, like that of torch's ``DefaultStager``: tensors on the CPU
    with a storage each (tied tensors stay tied), DTensors and ShardedTensors with this rank's
    shards, and other objects as copied by ``copy.deepcopy``.

    Works with torch's checkpointers in a thread and in a process. A checkpointer in a process maps
    the slab and copies nothing. For that, the pool's memory has to be `SharedMemory`, as in the
    pool that the stager makes.

    Args:
        pool: the pool to take the slab from, which others may share. None makes a pool over
            `SharedMemory`, which `close` closes.
        max_bytes: cap of the pool that the stager makes; see `SlabPool`.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        hold: the work that waits for copies from a GPU. ``"stream"``: all later work of the current
            stream, so you may change the tensors at once, in any way. ``"step"``: the next step of
            any optimizer of ``torch.optim``, so forward and backward go on while the copies run.
            Code that changes tensors of 1 MiB or more in another way, such as an average of
            weights, must then call `wait_before_change` first. (Smaller tensors are copied on the
            device, during the call.)
        timeout: the most seconds that a save waits for the previous save to be written, and for a
            slab. 0 does not wait; None waits forever.

    Raises:
        TypeError: `pool` is not a `SlabPool`.
        ValueError: both `pool` and a cap are given, `hold` is another value, or `timeout` is
            negative.

    Don't use a stager in several threads at once.
    """

    def __init__(
        self,
        *,
        pool: SlabPool | None = None,
        max_bytes: Size = "auto",
        budget: HostBudget | None = None,
        hold: Literal["stream", "step"] = "stream",
        timeout: float | None = None,
    ) -> None:
        if hold not in ("stream", "step"):
            raise ValueError(f"no such hold: {hold!r}; pass 'stream' or 'step'")
        if pool is not None:
            check_pool(pool, max_bytes, budget)
        if timeout is not None:
            check_timeout(timeout)
        self._owns_pool = pool is None
        self._pool = (
            SlabPool(max_bytes, budget=budget, memory=SharedMemory()) if pool is None else pool
        )
        self._timeout = timeout
        self._slabs = HostSlabs(self._pool, _OWNER, timeout, shares=True)
        self._targets = Targets()
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._hold = hold
        self._copies: Fence | None = None
        self._hook = (
            register_optimizer_step_pre_hook(_weakly(self.wait_before_change))
            if hold == "step"
            else None
        )

    @property
    def pool(self) -> SlabPool:
        """The pool that slabs are taken from."""
        return self._pool

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start to stage a state dict; ``async_save`` calls this.

        Blocks while the previous save is being written, while the pool is at its cap, and while CPU
        tensors are copied; not for copies from a GPU.

        Args:
            state_dict: tensors and other objects, in containers of any kind.

        Returns:
            A future that is done when all bytes are on the host. Its result is a dict with the same
            content, in tensors over the slab. The slab returns to the pool when they are freed.

        Raises:
            BudgetExceededError: the state is larger than the pool's cap, or than the part that
                frozen modules leave; nothing was copied.
            AcquireTimeoutError: the previous save is still being written after `timeout` seconds,
                or no slab became free.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
            PinstageError: the current stream captures a CUDA graph.
        """
        refuse_capture()
        timeout = self._wait_for_last()
        with step("describe"):
            snapshot = take(state_dict)
        transfers, slabs = self._fetch(snapshot, timeout)
        self._save = Save(slabs)
        staging = StagedSave(self._save)
        if self._hold == "step":
            events = [event_of(transfer) for transfer in transfers]
            self._copies = EventGroup([event for event in events if event is not None])
        self._thread = staging.bring(transfers, snapshot, slabs)
        return staging

    def wait_before_change(self) -> None:
        """Make the current stream of each device wait until the copies have read the tensors; the
        host does not wait.

        For ``hold="step"``, before code other than an optimizer's step changes the tensors.

        Raises:
            PinstageError: the current stream captures a CUDA graph, and a copy may be under way.
        """
        if self._copies is not None:
            refuse_capture()
        copies, self._copies = self._copies, None
        wait_here(copies)

    def synchronize_staging(self) -> None:
        """Wait until the bytes of the last state dict are on the host."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the pool if the stager made it; a save that is still being written keeps its slab
        until then.
        """
        if self._hook is not None:
            self.wait_before_change()
            self._hook.remove()
        self._slabs.close()
        if self._owns_pool:
            close_for(self._pool, "CheckpointStager")

    def _wait_for_last(self) -> float | None:
        """Wait for the previous save; return how long to wait for a slab."""
        last = self._save
        if not (last is None or last.wait(self._timeout)):
            figures = self._pool.stats()
            raise AcquireTimeoutError(
                f"the last checkpoint is still being written after {self._timeout} s: in flight "
                f"{format_bytes(figures.in_flight_bytes)} of max_bytes "
                f"{format_bytes(figures.max_bytes)}; wait for its upload_completion, save less "
                "often, or pass a longer timeout to CheckpointStager",
                held_bytes=figures.held_bytes,
                leased_bytes=figures.leased_bytes,
                in_flight_bytes=figures.in_flight_bytes,
                max_bytes=figures.max_bytes,
            )
        return self._timeout if last is None or last.is_over() else 0

    def _fetch(self, snapshot: Snapshot, timeout: float | None) -> tuple[list[HostTransfer], Slabs]:
        """Start the copies of the tensors; return the transfer and the slab of each group."""
        fetcher = Fetcher(_CPU, self._slabs, self._targets, hold=self._hold == "stream")
        transfers: list[HostTransfer] = []
        slabs: Slabs = []
        groups, plans, leases = self._plan(fetcher, snapshot.tensors, timeout)
        try:
            for lease in leases:
                slabs.append(None if lease is None else _bytes_of(lease))
            for group, plan in zip(groups, plans, strict=True):
                transfer = fetcher.begin(plan, leases.pop(0), copy=False)
                duplicate_rest(transfer, group)
                transfers.append(transfer)
        except BaseException as error:
            slabs.clear()
            clear_own_frames(error)
            raise
        finally:
            for lease in filter(None, leases):
                lease.release()
        return transfers, slabs

    def _plan(
        self, fetcher: Fetcher, tensors: list[torch.Tensor], timeout: float | None
    ) -> tuple[list[list[torch.Tensor]], list[FetchPlan], list[Lease | None]]:
        """Divide the tensors into groups, of a slab each. Return them, their plans and leases."""
        leased: list[Lease] | None = None
        while leased is None:
            groups = _groups(tensors, self._slabs.most)
            plans = [fetcher.plan(group) for group in groups]
            sizes = [plan.nbytes for plan in plans if plan.nbytes]
            leased = self._lease_all(sizes, len(tensors), timeout)
        rest = iter(leased)
        return groups, plans, [next(rest) if plan.nbytes else None for plan in plans]

    def _lease_all(
        self, sizes: list[int], tensors: int, timeout: float | None
    ) -> list[Lease] | None:
        try:
            return self._slabs.lease_all(sizes, timeout)
        except BudgetExceededError as error:
            raise BudgetExceededError(
                f"the state of this rank does not fit the pool: {tensors} tensors; {error}",
                **vars(error),
            ) from None
        except AcquireTimeoutError as error:
            if self._save is not None and not self._save.is_over():
                error.add_note(
                    "the last checkpoint's writer has ended, but its tensors are still in use: "
                    "drop the future of a save that failed, and pass a new planner to each save"
                )
            raise

    def __enter__(self) -> CheckpointStager:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointStager {self._pool!r}>"


def _bytes_of(lease: Lease) -> StagedBytes:
    return StagedBytes(lease.numpy(), descriptor_of(lease))


def _groups(tensors: list[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """Divide tensors into groups of at most `most` bytes, or of one larger tensor."""
    groups, room = [list[torch.Tensor]()], most
    for tensor in tensors:
        # Where tensors can't be packed, this may be wrong; they need no slab.
        nbytes = round_up(tensor.numel() * tensor.itemsize, ALIGNMENT)
        if nbytes > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(tensor)
        room -= nbytes
    return groups


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        if (alive := reference()) is not None:
            alive()

    return hook
