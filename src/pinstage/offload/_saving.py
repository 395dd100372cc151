"""`save_on_cpu`: activations are copied to the host during forward, and back ahead of backward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._compat.storages import base_of, check_changes_are_seen
from .._compat.views import range_of
from .._memory import capturing_device
from .._pool import SlabPool, check_pool
from .._sizes import Size, parse_bytes
from .._stage import HostSlabs, shared_targets
from .._steps import step
from ..errors import PinstageError
from ._block import OWNER, Load, can_leave, lease_now
from ._scheduler import OffloadScheduler, OffloadStats, Saved, Stayed


@dataclass(eq=False)
class Saving:
    """The hooks and their state. Autograd's graphs keep this object alive, so it must not refer to
    a graph.
    """

    slabs: HostSlabs
    min_bytes: int
    max_device_bytes: int
    keep_on_device: Callable[[torch.Tensor], bool] | None
    counters: Counter[str] = field(default_factory=Counter)
    _schedulers: dict[torch.device, OffloadScheduler] = field(default_factory=dict)

    def pack(self, tensor: torch.Tensor) -> Saved | Stayed:
        if self._stays(tensor) or capturing_device(tensor.device.index) is not None:
            self.counters["stayed"] += 1
            return Stayed(tensor)
        scheduler = self._scheduler(tensor.device)
        with step("offload"):
            saved = scheduler.find(tensor)
            if saved is not None:
                return saved
            load = Load.of(tensor)
            nbytes = load.source.numel()
            leased = lease_now(self.slabs, nbytes)
            if leased is None:
                self.counters["stayed_at_cap"] += 1
                self.counters["stayed_at_cap_bytes"] += nbytes
                return Stayed(tensor)
            return scheduler.send(tensor, load, *leased)

    def unpack(self, packed: Saved | Stayed) -> torch.Tensor:
        with step("offload"):
            return packed.unpack()

    def begin_pass(self) -> None:
        """Forget which memory was saved before: its content may differ now, at the same version."""
        for scheduler in list(self._schedulers.values()):
            scheduler.forget_storages()

    def _stays(self, tensor: torch.Tensor) -> bool:
        least = max(self.min_bytes, 1)  # an empty tensor stays
        if not can_leave(tensor, self.slabs.pool) or tensor.untyped_storage().nbytes() < least:
            return True
        begin, end = range_of(tensor)
        if end - begin < least or isinstance(base_of(tensor), torch.nn.Parameter):
            return True
        return self.keep_on_device is not None and bool(self.keep_on_device(tensor))

    def _scheduler(self, device: torch.device) -> OffloadScheduler:
        if device not in self._schedulers:
            target = shared_targets.of(device)
            made = OffloadScheduler(target, self.max_device_bytes, self.counters)
            self._schedulers.setdefault(device, made)  # another thread may have made one
        return self._schedulers[device]


class save_on_cpu:  # noqa: N801 - torch's name
    """Save activations on the host, in slabs of a pool. Replaces
    ``torch.autograd.graph.save_on_cpu``.

    ```python
    offload = ps.offload.save_on_cpu(pool)
    for batch in loader:
        with offload:
            loss = model(batch)
        loss.backward()
    ```

    Tensors that operations in the block save for backward are copied to the host on a side stream
    during forward, and are copied back ahead of backward. Streams wait for events; the host waits
    only while the pool allocates. Gradients are bit-equal to those of a run without offloading.

    These stay on the device: parameters and views of them, tensors of less than `min_bytes`,
    tensors for which `keep_on_device` returns true, sparse tensors, and subclasses. A tensor for
    which the pool has no room also stays, and is counted. Tensors that share memory are copied
    once. If a tensor was changed in place after it had been saved, backward raises the
    ``RuntimeError`` that autograd raises without hooks; torch's class returns the old content.

    You can use the object again, in any thread, and nested. If blocks of saved-tensor hooks are
    nested, the innermost one applies, as always in torch. You can call functions compiled by
    `torch.compile` in the block; a block inside such a function breaks its graph.

    Args:
        pool: source of the slabs. A pool over page-locked memory takes CUDA tensors. A pool over
            pageable memory also takes CPU tensors, by plain copies: for machines without a GPU.
            Where page-locking is refused, slabs are pageable, and the host waits for copies to
            them; a `StagingWarning` says so once.
        min_bytes: smaller tensors stay: an int, or text such as ``"1MiB"``.
        keep_on_device: called with each tensor; returns true for tensors that stay. It must not
            change them.
        max_device_bytes: device memory that copies may hold, in each direction. Beyond it,
            forward's stream waits for copies to the host, and no further tensor is copied back
            before it is needed. Four times the largest tensor keeps the bus busy.

    Raises:
        TypeError: `pool` is not a `SlabPool`, or `keep_on_device` is not a function.
        ValueError: a negative size.
        PinstageError: this torch does not report in-place changes.
    """

    def __init__(
        self,
        pool: SlabPool,
        *,
        min_bytes: Size = "1MiB",
        keep_on_device: Callable[[torch.Tensor], bool] | None = None,
        max_device_bytes: Size = "1GiB",
    ) -> None:
        check_changes_are_seen()
        if keep_on_device is not None and not callable(keep_on_device):
            raise TypeError(
                f"keep_on_device must be a function: {keep_on_device!r}. Pass a function that "
                "takes a tensor and returns whether it stays on the device"
            )
        check_pool(pool)
        self._saving = Saving(
            HostSlabs(pool, OWNER, None),
            parse_bytes(min_bytes),
            parse_bytes(max_device_bytes),
            keep_on_device,
        )
        self._hooks = saved_tensors_hooks(self._saving.pack, self._saving.unpack)
        self._is_hidden = False  # from the compiler

    def stats(self) -> OffloadStats:
        """Return a snapshot of the counters."""
        return OffloadStats(**self._saving.counters)

    def __enter__(self) -> save_on_cpu:
        if torch.compiler.is_compiling():
            raise PinstageError(
                "save_on_cpu cannot be entered in a function that torch.compile compiles; call "
                "the compiled function inside the block"
            )
        # If not, `disable` would import it: 1 s.
        if not self._is_hidden and "torch._dynamo" in sys.modules:
            hide: Callable[[Any], Any] = torch.compiler.disable
            self._hooks = saved_tensors_hooks(hide(self._saving.pack), hide(self._saving.unpack))
            self._is_hidden = True
        self._saving.begin_pass()
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
