"""The indices of batches: of torch's own samplers as arrays, without an int for each index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .._batch import Array, integers_of

_AT_ONCE = 1 << 16
"""The most indices that are made at once of those that are in order."""

Numbers: TypeAlias = Iterator[torch.Tensor]
"""The numbers that a sampler yields, in runs. Each is drawn when its first number is needed, as by
torch.
"""

IndexedBatch: TypeAlias = tuple[Any, Array | None]
"""A batch as torch yields it, None if it was not made; and its indices, int64 ``[n]``, None
if they are not a list or tuple of integers.
"""


def _in_order(sampler: Any) -> Numbers:
    length = len(sampler.data_source)
    for start in range(0, length, _AT_ONCE):
        yield torch.arange(start, min(start + _AT_ONCE, length), device="cpu")


def _random(sampler: Any) -> Numbers:
    length, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        generator = torch.Generator().manual_seed(seed)
    run = 32 if sampler.replacement else length
    for left in range(sampler.num_samples, -1, -run):  # the last one may be empty
        if sampler.replacement:
            yield torch.randint(length, (min(left, run),), generator=generator, device="cpu")
        else:
            yield torch.randperm(length, generator=generator, device="cpu")[:left]


def _permuted(sampler: Any) -> Numbers:
    yield torch.randperm(len(sampler.indices), generator=sampler.generator, device="cpu")


def _weighted(sampler: Any) -> Numbers:
    yield torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    ).cpu()


def _of_rank(sampler: Any) -> Numbers:
    length, total = len(sampler.dataset), sampler.total_size
    if total != length and (total > length) == sampler.drop_last:
        iter(sampler)  # raises its error: the dataset has another length than before
    places = torch.arange(total, device="cpu")[sampler.rank :: sampler.num_replicas]
    numbers = places % max(length, 1)
    if sampler.shuffle:
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        numbers = torch.randperm(length, generator=generator, device="cpu")[numbers]
    yield numbers


_KNOWN: dict[type, tuple[Callable[[Any], Numbers], list[tuple[Any, ...]]]] = {
    SequentialSampler: (_in_order, [(range(7),)]),
    RandomSampler: (_random, [(range(7),), (range(7), False, 17), (range(7), True, 70)]),
    SubsetRandomSampler: (_permuted, [([3, 5, 1],)]),
    WeightedRandomSampler: (_weighted, [([0.5, 0.1, 0.4], 9), ([0.5, 0.1, 0.4], 2, False)]),
    DistributedSampler: (
        _of_rank,
        [(range(7), 3, 1), (range(2), 5, 4, False), (range(7), 3, 2, True, 4, True)],
    ),
}
"""By class: the function for its numbers, and arguments of samplers that are compared."""


@cache
def _is_as_here(kind: type) -> bool:
    """Return whether the installed torch's samplers of a class agree with `_KNOWN`, also in the
    state of the generator behind them.
    """
    try:
        return all(
            _results(_as_they_are, kind(*args)) == _results(_at_once, kind(*args))
            for args in _KNOWN[kind][1]
        )
    except Exception:  # noqa: BLE001 - another class; or another torch, which may lack any attribute
        return False


def _results(read: Callable[[Any], Iterator[Any]], sampler: Any) -> tuple[Any, Any]:
    """Return the batches of a sampler with a generator of its own, and the generator's state."""
    sampler.generator = generator = torch.Generator().manual_seed(1)
    batches = [index.tolist() for _, index in read(BatchSampler(sampler, 3, False))]
    return batches, generator.get_state().tolist()


def index_batches(batches: Any) -> Iterator[IndexedBatch]:
    """Return what a batch sampler yields. Random numbers are drawn from the same generators, at the
    same time.
    """
    is_known = type(batches) is BatchSampler and _is_as_here(type(batches.sampler))
    return _at_once(batches) if is_known else _as_they_are(batches)


def _as_they_are(batches: Any) -> Iterator[IndexedBatch]:
    return (
        (batch, integers_of(batch) if type(batch) in (list, tuple) and batch else None)
        for batch in iter(batches)
    )


def _at_once(batches: Any) -> Iterator[IndexedBatch]:
    """Yield the batches of torch's batch sampler over a sampler that `_KNOWN` has."""
    sampler, size, drops_last = batches.sampler, batches.batch_size, batches.drop_last
    runs = map(torch.Tensor.numpy, _KNOWN[type(sampler)][0](sampler))
    rest: Array = next(runs, np.empty(0, np.int64))
    while True:
        size = size if drops_last else batches.batch_size  # as torch reads it
        ready, count = [rest], len(rest)
        while count < size and (run := next(runs, None)) is not None:
            ready.append(run)
            count += len(run)
        rest = np.concatenate(ready) if len(ready) > 1 else rest
        if not count or (drops_last and count < size):
            return
        numbers, rest = rest[:size], rest[size:]
        yield (
            _at(sampler.indices, numbers)
            if type(sampler) is SubsetRandomSampler
            else (None, numbers)
        )


def _at(indices: Any, numbers: Array) -> IndexedBatch:
    """Return the indices at the places that `SubsetRandomSampler` draws."""
    with suppress(IndexError, TypeError):
        return None, look_up(indices, numbers)
    return [indices[number] for number in numbers.tolist()], None  # torch's way, with its error


def yields_ints(sampler: Any) -> bool:
    """Return whether a sampler is known to yield ints. In a list, torch takes numpy's uint8 for a
    mask, and tensors for one index of each dimension.
    """
    return type(sampler) in _KNOWN and type(sampler) is not SubsetRandomSampler


def look_up(indices: Any, numbers: Array) -> Array:
    """Return ``indices[number]`` for each of some numbers, int64 ``[n]``.

    Raises:
        IndexError: a number is out of range.
        TypeError: `indices` are not of Python's or numpy's integers, a range, or an int32 or int64
            tensor on the CPU, of one dimension.
    """
    if type(indices) is torch.Tensor and indices.dtype in (torch.int32, torch.int64):
        indices = indices.numpy()
    index: Array | None = None
    if type(indices) is np.ndarray:
        index = integers_of(indices[numbers])
    elif type(indices) in (list, tuple, range):
        index = integers_of([indices[number] for number in numbers.tolist()])
    if index is None:
        raise TypeError("indices of another kind")
    return index
