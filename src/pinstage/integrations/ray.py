"""Ray: stages the batches of a dataset's shard in the threads that collate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from ray.data import DataIterator
from ray.data.collate_fn import (
    ArrowBatchCollateFn,
    CollateFn,
    NumpyBatchCollateFn,
    PandasBatchCollateFn,
)

import pinstage as ps


class StageBatches:
    """Stages the batches of Ray Data where they are consumed, such as in the workers of a
    `TorchTrainer`.

    Can be pickled, so the driver may make it; each process then makes its own stager. The batch
    that `collate_fn` returns may have any structure.

    Args:
        device: as for `Stager`; None is the current CUDA device of the thread that iterates, else
            the CPU.
        max_bytes: cap on the page-locked memory of each process; see `SlabPool`.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        pool: a pool to take slabs from, for use in this process only, since it can't be pickled.
        depth: number of batches that Ray's threads stage ahead; Ray's `prefetch_batches`, unless
            you pass that.
        keep_on_host: leaves that stay on the host, as for `Stager`. A function must be picklable.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        max_bytes: ps.Size = "auto",
        budget: ps.HostBudget | None = None,
        pool: ps.SlabPool | None = None,
        depth: int = 2,
        keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "device": device,
            "max_bytes": max_bytes,
            "budget": budget,
            "pool": pool,
            "keep_on_host": keep_on_host,
        }
        self._depth = depth
        self._stager: ps.Stager | None = None

    @property
    def stager(self) -> ps.Stager:
        """The stager of this process."""
        if self._stager is None:
            self._stager = ps.Stager(**self._options)
        return self._stager

    def stats(self) -> ps.StagerStats:
        """Return the stager's counters in this process."""
        return self.stager.stats()

    def iter_torch_batches(
        self, shard: DataIterator, *, collate_fn: CollateFn[Any] | None = None, **options: Any
    ) -> Iterator[Any]:
        """Yield the batches of a dataset or of its shard on the device.

        Ray's threads pack them and start their copies.

        Args:
            shard: the result of `ray.train.get_dataset_shard` or `Dataset.streaming_split`, or a
                dataset.
            collate_fn: an object of one of Ray's collate classes; None yields a tensor for each
                column.
            **options: other options of Ray's `iter_torch_batches`, except `device`, `dtypes` and
                `pin_memory`.

        Yields:
            Batches as `Stager.to_device` returns them, for the stream that is current when each is
            requested.
        """
        collate = _staging(collate_fn, self.stager)
        options = {"prefetch_batches": self._depth, **options}
        for transfer in shard.iter_torch_batches(collate_fn=collate, device="cpu", **options):
            yield transfer.wait()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stager": None}


def _staging(collate_fn: CollateFn[Any] | None, stager: ps.Stager) -> CollateFn[Any]:
    """Return a function that collates and starts the copy. Ray doesn't move its result, which isn't
    a batch of tensors.

    Its base shows Ray the format of the batches.
    """
    formats = NumpyBatchCollateFn, ArrowBatchCollateFn, PandasBatchCollateFn
    base: Any = NumpyBatchCollateFn
    if collate_fn is not None:
        base = next((known for known in formats if isinstance(collate_fn, known)), None)
    if base is None:
        raise TypeError(
            f"collate_fn isn't of one of Ray's classes: {collate_fn!r}; make it a "
            "NumpyBatchCollateFn, ArrowBatchCollateFn or PandasBatchCollateFn of "
            "ray.data.collate_fn"
        )

    class StagingCollate(base):
        def __call__(self, batch: Any) -> ps.Transfer:
            return stager.stage(batch if collate_fn is None else collate_fn(batch))

    return StagingCollate()
