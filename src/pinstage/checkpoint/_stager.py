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
from .._sizes import Size, format_bytes
from .._stage import (
    Fetcher,
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
from ._staged import Save, StagedBytes, StagedSave

_CPU = torch.device("cpu")
_OWNER = "checkpoint"


class CheckpointStager(AsyncStager):
    """Stages state dicts for ``torch.distributed.checkpoint.async_save`` in a slab of a pool.

    ```python
    stager = CheckpointStager(pool=pool)
    response = async_save(state_dict, checkpoint_id=path, async_stager=stager)
    ...  # training goes on; parameters may be changed at once
    response.upload_completion.result()
    ```

    `stage` starts the copies of tensors on a GPU, behind the earlier work of the current stream,
    and returns. Tensors on the CPU are copied before it returns. Later saves of the same state use
    the same slab, and page-lock nothing.

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
            BudgetExceededError: the state is larger than the pool's cap; nothing was copied.
            AcquireTimeoutError: the previous save is still being written after `timeout` seconds,
                or no slab became free.
            PoolClosedError, PoolFrozenError, ForkedPoolError: as `SlabPool.acquire`.
            PinstageError: the current stream captures a CUDA graph.
        """
        refuse_capture()
        timeout = self._wait_for_last()
        with step("describe"):
            snapshot = take(state_dict)
        transfer, slab = self._fetch(snapshot, timeout)
        self._save = Save(None if slab is None else slab.memory)
        staging = StagedSave(self._save)
        if self._hold == "step":
            self._copies = event_of(transfer)
        self._thread = staging.bring(transfer, snapshot, slab)
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

    def _fetch(
        self, snapshot: Snapshot, timeout: float | None
    ) -> tuple[HostTransfer, StagedBytes | None]:
        slab: StagedBytes | None = None

        def acquire(nbytes: int) -> Lease:
            nonlocal slab
            lease = self._acquire(nbytes, len(snapshot.tensors), timeout)
            slab = StagedBytes(lease.numpy(), descriptor_of(lease))
            return lease

        try:
            fetcher = Fetcher(_CPU, acquire, self._targets, hold=self._hold == "stream")
            transfer = fetcher.fetch(snapshot.tensors, copy=False)
            duplicate_rest(transfer, snapshot.tensors)
            return transfer, slab
        except BaseException as error:
            slab = None
            clear_own_frames(error)
            raise

    def _acquire(self, nbytes: int, tensors: int, timeout: float | None) -> Lease:
        try:
            return self._pool.acquire(nbytes, timeout=timeout, owner=_OWNER)
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


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        if (alive := reference()) is not None:
            alive()

    return hook
