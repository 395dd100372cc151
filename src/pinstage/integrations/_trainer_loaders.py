"""The loaders of a trainer, each staged in the fastest way that works, from one pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader

import pinstage as ps

OPTIONS = "max_bytes", "budget", "pool", "depth", "keep_on_host"
"""The options of a trainer's loaders, as for `wrap_loader`."""

_SUMS = [
    field.name for field in fields(ps.LoaderStats) if field.name not in ("num_workers", "pool")
]


class TrainerLoaders:
    """Stages the batches that the loaders of a trainer yield.

    Loaders that iterate as torch's do are wrapped by `wrap_loader`, so that their workers pack. All
    others are staged in the main process, batch by batch. All slabs come from one pool.

    Args:
        device: the trainer's device.
        options: all of `OPTIONS`.
        in_workers: whether loaders are wrapped. Otherwise the trainer calls `to_device` for each
            batch.
        stager: the stager for batches that no worker packs; None makes one.
    """

    def __init__(
        self,
        device: torch.device,
        options: dict[str, Any],
        *,
        in_workers: bool,
        stager: ps.Stager | None = None,
    ) -> None:
        self.in_workers = in_workers
        self._owns_pool = in_workers and options["pool"] is None
        if self._owns_pool:
            is_cuda = device.type == "cuda"
            memory = ps.memory.SharedMemory(device if is_cuda else None, register=is_cuda)
            pool = ps.SlabPool(options["max_bytes"], budget=options["budget"], memory=memory)
            options = {**options, "pool": pool, "max_bytes": "auto", "budget": None}
        self._wrapping = options
        if stager is None:
            stager_options = options.copy()
            del stager_options["depth"]
            stager = ps.Stager(device, **stager_options)
        # Checks the only option that a stager doesn't have.
        stager.prefetch((), depth=options["depth"])
        self.stager = stager
        self._counters: list[Any] = []
        """The counters of all wrapped loaders, including those that were freed."""
        self._num_workers = 0

    def validates_while_training(self, does: bool) -> None:
        """Reserve half of the pool each for the training loader and for the others, or remove these
        quotas.

        While a validation loop runs between two training steps, the training workers keep their
        slabs, full of batches.

        Args:
            does: whether the trainer validates while it trains.
        """
        pool = self.stager.pool
        if self._owns_pool:
            half = pool.max_bytes // 2
            half -= half % pool.memory.granularity
            for owner in ("training", "stager"):
                pool.set_quota(owner, min_bytes=half if does else 0)

    def wrap(self, loader: Any, *, is_training: bool, always: bool = False) -> Any:
        """Return a loader with the same batches on the device.

        Args:
            loader: the trainer's loader.
            is_training: whether it is the training loader.
            always: whether to wrap the loader even without `in_workers`.
        """
        stager = self.stager
        inner = getattr(loader, "base_dataloader", loader)  # if Accelerate prepared it
        stages = isinstance(inner, ps.DataLoader | ps.WrappedLoader)
        is_staged = stages and inner._staging_settings.device == stager.device
        if is_staged or not (self.in_workers or always):
            return loader
        if not stages and _iterates_as_torch_does(inner):
            owner = "training" if is_training else "stager"
            options = {**self._wrapping, "device": stager.device, "owner": owner}
            try:
                wrapped: Any = ps.wrap_loader(loader, **options)
            except TypeError:  # it has an iterator already: the options were checked
                pass
            else:
                self._counters.append(getattr(wrapped, "base_dataloader", wrapped)._slabs.counters)
                self._num_workers = max(self._num_workers, inner.num_workers)
                return wrapped
        return loader if inner is not loader else stager.prefetch(loader, depth=0, background=False)

    def to_device(self, batch: Any) -> Any:
        """Return a batch on the device: itself, if a loader has staged it."""
        device = self.stager.device
        if self.in_workers and any(tensor.device == device for tensor in _tensors(batch, set())):
            return batch
        return self.stager.to_device(batch)

    def stats(self) -> ps.LoaderStats:
        """Return the counters of all loaders and of the stager together."""
        here = self.stager.stats()
        total = {
            name: sum(getattr(counters, name) for counters in self._counters) for name in _SUMS
        }
        for name in ("batches", "copies", "packed_bytes", "passthrough_leaves"):
            total[name] += getattr(here, name)
        return ps.LoaderStats(**total, num_workers=self._num_workers, pool=here.pool)


def _iterates_as_torch_does(loader: Any) -> bool:
    """Return whether a loader is torch's or torchdata's, or a subclass without an ``__iter__`` of
    its own.
    """
    return isinstance(loader, DataLoader) and (
        type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")
    )


def _tensors(batch: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif id(batch) not in seen:
        seen.add(id(batch))
        if isinstance(batch, list | tuple):
            parts: Iterable[Any] = batch
        elif isinstance(batch, Mapping):
            parts = batch.values()
        else:
            parts = getattr(batch, "__dict__", {}).values()
        for part in parts:
            yield from _tensors(part, seen)
