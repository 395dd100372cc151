"""Datasets of tensors in memory: a batch is rows of them, which are gathered right into the slab.

torch's iterator asks a sampler for the indices of a batch, fetches samples, and collates them. Here
the sampler is an `InMemory`, which finds the rows of a batch, tells the collate function, and gives
torch no indices, so that it fetches no samples. If they can't be found, torch gets the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, StackDataset, Subset, TensorDataset

from .._batch import RowStacks
from .._compat.loader import begins_as_shipped, collation, is_as_shipped
from ._collate import Collated, InlineCollate, SlabCollate, Stacks, collates_as_shipped
from ._samplers import index_batches, look_up, yields_ints


def index_sampler(loader: Any, begin: Any, collate: Any) -> dict[str, Any]:
    """Return the attribute of a loader that makes torch's iterator read rows; none if it can't.

    Args:
        loader: the loader.
        begin: the method that makes its iterator.
        collate: collates for that iterator.
    """
    dataset = loader.dataset
    if (
        isinstance(dataset, torch.Tensor)
        or not _is_of_rows(dataset)
        or not isinstance(collate, InlineCollate | SlabCollate)
        or (collate.keeping is not None and collate.keeping.says is not None)
        or not begins_as_shipped(loader, begin)
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


def _is_of_rows(source: Any) -> bool:
    """Return whether a dataset consists of tensors and torch's own datasets. Any other would see
    indices of another type than its sampler yields.
    """
    if isinstance(source, torch.Tensor) or is_as_shipped(source, TensorDataset):
        return True
    if is_as_shipped(source, Subset):
        return _is_of_rows(source.dataset)
    if not is_as_shipped(source, StackDataset):
        return False
    parts = source.datasets
    return all(map(_is_of_rows, parts.values() if isinstance(parts, dict) else parts))


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
        return map(self._hand_over, index_batches(self._batches))

    def _hand_over(self, index: Any) -> Any:
        collate = self._collate
        if isinstance(collate, SlabCollate):
            return ToWorker(index) if isinstance(index, torch.Tensor) else index
        collate.tell(None)  # an interrupt may have left the last batch
        if not isinstance(index, torch.Tensor):
            return index
        return _tell(collate.tell, self._dataset, index) if collate.is_unseen else index.tolist()


class ToWorker:
    """The indices of a batch on their way to a worker, which unpickles what torch fetches.

    A tensor would go through shared memory, with all of the permutation that it is a part of.
    """

    __slots__ = ("_data",)

    def __init__(self, index: torch.Tensor) -> None:
        self._data = index.numpy().tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_worker, (self._data,)


def _in_worker(data: bytes) -> list[int]:
    info: Any = torch.utils.data.get_worker_info()
    index = torch.frombuffer(bytearray(data), dtype=torch.int64)
    return _tell(SlabCollate.tell, info.dataset, index)


def _tell(tell: Callable[[Collated | None], None], dataset: Any, index: torch.Tensor) -> list[int]:
    """Tell a collate function of the rows of a batch; return the indices that torch fetches."""
    rows = rows_of(dataset, index)
    tell(rows)
    return index.tolist() if rows is None else []


def rows_of(dataset: Any, index: torch.Tensor) -> Collated | None:
    """Return what default collation makes of the samples at an index, to be gathered; None if torch
    has to do it.
    """
    stacks: Stacks = {}
    try:
        is_usual = collates_as_shipped(collation())
        return Collated(_rows(dataset, index, stacks, RowStacks()), stacks) if is_usual else None
    except Exception:  # noqa: BLE001 - torch raises its own error, or finds none
        return None


def _rows(source: Any, index: torch.Tensor, stacks: Stacks, row_stacks: RowStacks) -> Any:
    """Return stand-ins for the rows of a source, and add their stacks. Raise any error if there is
    something else in it.
    """
    if isinstance(source, torch.Tensor):
        stack = row_stacks.stack(source, index)
        if stack is None:
            raise TypeError("not a plain tensor")
        stacks[id(stack.stand_in)] = stack
        return stack.stand_in
    if is_as_shipped(source, Subset):
        index = look_up(source.indices, index)
        return _rows(source.dataset, index, stacks, row_stacks)
    if is_as_shipped(source, StackDataset):
        parts = source.datasets
        if type(parts) is dict:
            return {key: _rows(part, index, stacks, row_stacks) for key, part in parts.items()}
    elif is_as_shipped(source, TensorDataset):
        parts = source.tensors
    else:
        raise TypeError("not a source of rows")
    return [_rows(part, index, stacks, row_stacks) for part in parts]
