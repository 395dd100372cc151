"""`save_on_cpu`: activations go to the host while forward goes on, and come back ahead of backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._compat.storages import base_of, check_changes_are_seen
from .._pool import SlabPool, check_pool
from .._sizes import parse_bytes
from .._stage import shuttle_for
from .._steps import step
from ..errors import StagingError
from ._away import lease_now, range_of
from ._trail import Load, OffloadStats, Saved, Stayed, Trail


class Saving:
    """What the hooks call. Autograd's graphs keep it alive, so it keeps none of them."""

    def __init__(
        self, pool: SlabPool, min_bytes: int, device_bytes: int, keep: Callable[[torch.Tensor], bool] | None
    ) -> None:
        self.counters = OffloadStats()
        self._pool = pool
        self._min_bytes = min_bytes
        self._device_bytes = device_bytes
        self._keep = keep
        self._devices = {"cuda"} if pool.memory.is_pinned else {"cuda", "cpu"}
        self._trails: dict[torch.device, Trail] = {}

    def pack(self, tensor: torch.Tensor) -> Saved | Stayed:
        if self._stays(tensor):
            self.counters.stayed += 1
            return Stayed(tensor)
        with step("offload"):
            trail = self._trail(tensor.device)
            if trail.shuttle.is_capturing():
                self.counters.stayed += 1
                return Stayed(tensor)
            found = trail.find(tensor)
            if found is not None:
                return found
            load = Load.of(tensor)
            nbytes = load.source.numel()
            leased = lease_now(self._pool, nbytes)
            if leased is None:
                self.counters.stayed_at_cap += 1
                self.counters.stayed_at_cap_bytes += nbytes
                return Stayed(tensor)
            return trail.send(tensor, load, *leased)

    def unpack(self, packed: Saved | Stayed) -> torch.Tensor:
        with step("offload"):
            return packed.unpack()

    def begin_pass(self) -> None:
        """Forget which memory was saved before: it may have other content, which no counter tells."""
        for trail in list(self._trails.values()):
            trail.forget_storages()

    def _stays(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.device.type not in self._devices:
            return True  # a parameter, a subclass, or where there is no bus to the pool
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return True
        if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < self._min_bytes:
            return True
        begin, end = range_of(tensor)
        if end - begin < self._min_bytes or isinstance(base_of(tensor), torch.nn.Parameter):
            return True
        return self._keep is not None and bool(self._keep(tensor))

    def _trail(self, device: torch.device) -> Trail:
        trail = self._trails.get(device)
        if trail is None:  # no lock: if two threads make one, one of them is used
            trail = self._trails.setdefault(device, Trail(shuttle_for(device), self._device_bytes, self.counters))
        return trail


class save_on_cpu:  # noqa: N801 - torch's name
    """Save activations on the host, in slabs of a pool. Replaces ``torch.autograd.graph.save_on_cpu``.

    ::

        offload = ps.offload.save_on_cpu(pool)
        for batch in loader:
            with offload:
                loss = model(batch)
            loss.backward()

    What operations in the block save for backward leaves on a stream of its own, while forward goes on. Tensors come
    back ahead of backward. Streams wait for events; the host waits only while the pool allocates. Gradients are
    bit-equal to those of a run without offloading.

    These stay on the device: parameters and views of them, tensors of less than `min_bytes`, those that `keep` names,
    sparse tensors and other subclasses. What the pool has no room for stays too, and is counted. Tensors that share
    memory are copied once. If a tensor was changed in place after it had been saved, backward raises the
    ``RuntimeError`` that autograd raises without hooks; torch's class returns the old content.

    The object may be used again, in any thread, and nested. Of nested blocks of saved-tensor hooks the innermost
    counts, as always with torch. A function that `torch.compile` made may be called in the block; a block inside such a
    function breaks its graph.

    Args:
        pool: where the slabs come from. A pool over page-locked memory takes CUDA tensors. One over pageable memory
            also takes CPU tensors, by plain copies: for machines without a GPU.
        min_bytes: smaller tensors stay: an int, or text such as ``"1MiB"``.
        keep: is called with each tensor, and returns true for those that stay. It must not change them.
        device_bytes: device memory that copies may hold: that much may be leaving, after which forward's stream waits,
            and that much may have come back before it is needed. Four times the largest tensor keeps the bus busy.

    Raises:
        TypeError: `pool` is not a `SlabPool`, or `keep` not a function.
        ValueError: a negative size.
        StagingError: this torch does not report in-place changes.
    """

    def __init__(
        self,
        pool: SlabPool,
        *,
        min_bytes: int | str = "1MiB",
        keep: Callable[[torch.Tensor], bool] | None = None,
        device_bytes: int | str = "1GiB",
    ) -> None:
        check_changes_are_seen()
        if keep is not None and not callable(keep):
            raise TypeError(f"keep must be a function: {keep!r}; it takes a tensor, and returns whether it stays")
        check_pool(pool)
        self._saving = Saving(pool, parse_bytes(min_bytes), parse_bytes(device_bytes), keep)
        self._hooks = saved_tensors_hooks(self._saving.pack, self._saving.unpack)
        self._is_hidden = False  # from the compiler

    def stats(self) -> OffloadStats:
        """Return a snapshot of the counters."""
        return replace(self._saving.counters)

    def __enter__(self) -> save_on_cpu:
        if torch.compiler.is_compiling():
            raise StagingError(
                "save_on_cpu cannot be entered in a function that torch.compile compiles: call the compiled function "
                "inside the block"
            )
        if not self._is_hidden and "torch._dynamo" in sys.modules:  # else `disable` would import it: a second
            hide: Callable[[Any], Any] = torch.compiler.disable
            self._hooks = saved_tensors_hooks(hide(self._saving.pack), hide(self._saving.unpack))
            self._is_hidden = True
        self._saving.begin_pass()
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
