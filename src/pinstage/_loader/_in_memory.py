"""Datasets of tensors in memory: a batch is rows of them, which are gathered right into the slab.

torch's iterator asks a sampler for the indices of a batch, fetches samples, and collates them. Here
the sampler is an `InMemory`, which finds the rows of a batch, tells the collate function, and gives
torch no indices, so that it fetches no samples. If they can't be found, torch gets the indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, StackDataset, Subset, TensorDataset

from .. import _native
from .._batch import Array, Stack
from .._compat.loader import begins_as_shipped, collation, is_as_shipped
from ._collate import InlineCollate, SlabCollate, collates_as_shipped
from ._samplers import index_batches, look_up, yields_ints

_SOURCES = Subset, TensorDataset, StackDataset

_NO_INDEX: Array = np.empty(0, np.int64)


def index_sampler(loader: Any, begin: Any, collate: Any) -> dict[str, Any]:
    """Return the attribute of a loader that makes torch's iterator read rows; none if it can't.

    Datasets that aren't torch's own are never read so: they would see indices of another type than
    the sampler yields.

    Args:
        loader: the loader.
        begin: the method that makes its iterator.
        collate: collates for that iterator.
    """
    dataset = loader.dataset
    if (
        isinstance(dataset, torch.Tensor)
        or not isinstance(collate, InlineCollate | SlabCollate)
        or (collate.keeping is not None and collate.keeping.says is not None)
        or not begins_as_shipped(loader, begin)
        or rows_of(dataset, _NO_INDEX) is None
    ):
        return {}
    name, collates, is_read = "batch_sampler", collation().default_collate, True
    if loader.batch_sampler is None:
        name, collates = "sampler", collation().default_convert
        is_read = (
            type(dataset) is TensorDataset
            and type(loader.sampler) is BatchSampler
            and yields_ints(loader.sampler.sampler)
        )
    if collate.collate is not collates or not is_read:
        return {}
    return {name: InMemory(getattr(loader, name), dataset, collate)}


class InMemory:
    """A batch sampler that hands the rows of each batch to the collate function.

    Args:
        batches: the loader's batch sampler.
        dataset: the loader's dataset.
        collate: collates for torch's iterator.
    """

    def __init__(self, batches: Any, dataset: Any, collate: InlineCollate | SlabCollate) -> None:
        self._batches = batches
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return starmap(self._hand_over, index_batches(self._batches))

    def _hand_over(self, batch: Any, index: Array | None) -> Any:
        collate, rows = self._collate, None
        if isinstance(collate, SlabCollate):
            return batch if index is None else ToWorker(index)
        if index is not None and collate.is_unseen:
            rows = rows_of(self._dataset, index)
        collate.tell(rows)  # also if there are none: an interrupt may have left the last batch
        if rows is not None:
            return []
        return index.tolist() if batch is None and index is not None else batch


class ToWorker:
    """The indices of a batch on their way to a worker, which unpickles what torch fetches.

    A tensor would go through shared memory, with all of the permutation that it is a part of.
    """

    __slots__ = ("_index",)

    def __init__(self, index: Array) -> None:
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_worker, (self._index,)


def _in_worker(index: Array) -> list[int]:
    info: Any = torch.utils.data.get_worker_info()
    rows = rows_of(info.dataset, index)
    SlabCollate.tell(rows)
    return index.tolist() if rows is None else []


def rows_of(dataset: Any, index: Array) -> Any:
    """Return what default collation makes of the samples at an index, with stacks; None if torch
    has to do it.
    """
    try:
        return _read(dataset, index, {}) if collates_as_shipped(collation()) else None
    except Exception:  # noqa: BLE001 - torch raises its own error, or finds none
        return None


def _read(source: Any, index: Array, copies: dict[Any, Any]) -> Any:
    if isinstance(source, torch.Tensor):
        stack = _native.core.stack_rows(source, index, copies)
        if isinstance(stack, Stack):
            return stack
        raise TypeError("not a plain tensor")
    kind = type(source)
    if kind not in _SOURCES or not is_as_shipped(source, kind):
        raise TypeError("not a source of rows")
    if kind is Subset:
        return _read(source.dataset, look_up(source.indices, index), copies)
    parts = [*source.tensors] if kind is TensorDataset else source.datasets
    if isinstance(parts, dict):
        return {key: _read(part, index, copies) for key, part in parts.items()}
    return [_read(part, index, copies) for part in parts]
