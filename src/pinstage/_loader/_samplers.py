"""torch's own samplers, whose indices come as tensors, without an int for each index."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

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

_AT_ONCE = 1 << 16
"""The most indices that are made at once of those that are in order."""

_INTEGERS = np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32

Numbers = Iterator[torch.Tensor]
"""The numbers that a sampler yields, in runs. Each is drawn when its first number is needed, as by
torch.
"""


def _in_order(sampler: Any) -> Numbers:
    length = len(sampler.data_source)
    for start in range(0, length, _AT_ONCE):
        yield torch.arange(start, min(start + _AT_ONCE, length), device="cpu")


def _random(sampler: Any) -> Numbers:
    length, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    run = 32 if sampler.replacement else length

    def draw(count: int) -> torch.Tensor:
        if sampler.replacement:
            return torch.randint(length, (count,), generator=generator, device="cpu")
        return torch.randperm(length, generator=generator, device="cpu")[:count]

    for _ in range(sampler.num_samples // run):
        yield draw(run)
    yield draw(sampler.num_samples % run)


def _permuted(sampler: Any) -> Numbers:
    yield torch.randperm(len(sampler.indices), generator=sampler.generator, device="cpu")


def _weighted(sampler: Any) -> Numbers:
    yield torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    ).cpu()


def _of_rank(sampler: Any) -> Numbers:
    length, total = len(sampler.dataset), sampler.total_size
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        numbers = torch.randperm(length, generator=generator, device="cpu")
    else:
        numbers = torch.arange(length, device="cpu")
    if total < length if not sampler.drop_last else total > length:
        iter(sampler)  # raises its error: the dataset has another length than before
    numbers = numbers.repeat(math.ceil(total / max(length, 1)))[:total]
    yield numbers[sampler.rank :: sampler.num_replicas].contiguous()


_NUMBERS: dict[type, Callable[[Any], Numbers]] = {
    SequentialSampler: _in_order,
    RandomSampler: _random,
    SubsetRandomSampler: _permuted,
    WeightedRandomSampler: _weighted,
    DistributedSampler: _of_rank,
}

_EXAMPLES: list[tuple[Any, ...]] = [
    (SequentialSampler, range(7)),
    (RandomSampler, range(7)),
    (RandomSampler, range(7), False, 17),
    (RandomSampler, range(7), True, 70),
    (SubsetRandomSampler, [3, 5, 1]),
    (WeightedRandomSampler, [0.5, 0.1, 0.4], 9),
    (WeightedRandomSampler, [0.5, 0.1, 0.4], 2, False),
    (DistributedSampler, range(7), 3, 1),
    (DistributedSampler, range(2), 5, 4, False),
    (DistributedSampler, range(7), 3, 2, True, 4, True),
]
"""Classes of samplers, and arguments."""


@cache
def _is_as_here(kind: Any) -> bool:
    """Return whether the installed torch's samplers of a class agree with `_NUMBERS`, also in the
    state of the generator behind them.
    """
    examples = [example for example in _EXAMPLES if example[0] is kind]
    try:
        return bool(examples) and all(
            _results(list, *example) == _results(_tensors, *example) for example in examples
        )
    except Exception:  # noqa: BLE001 - samplers of another torch may lack any attribute
        return False


def _results(read: Callable[[Any], Any], kind: Any, *args: Any) -> list[Any]:
    """Return the batches of a sampler with a generator of its own, and the generator's state."""
    sampler, generator = kind(*args), torch.Generator().manual_seed(1)
    sampler.generator = generator
    batches = [torch.as_tensor(batch).tolist() for batch in read(BatchSampler(sampler, 3, False))]
    return [batches, generator.get_state().tolist()]


def index_batches(batches: Any) -> Iterator[Any]:
    """Yield the batches of a batch sampler: integers as a tensor, and everything else as it is.

    Random numbers are drawn from the same generators, at the same time.
    """
    if type(batches) is BatchSampler:
        return _of_batch_sampler(batches)
    return map(as_index, iter(batches))


def _of_batch_sampler(batches: Any) -> Iterator[Any]:
    kind = type(batches.sampler)
    is_known = _is_as_here(kind)  # type: ignore[arg-type]
    yield from _tensors(batches) if is_known else map(as_index, batches)


def _tensors(batches: Any) -> Iterator[Any]:
    """Yield the batches of torch's batch sampler over a sampler that `_NUMBERS` has."""
    sampler, size, drops_last = batches.sampler, batches.batch_size, batches.drop_last
    runs, rest = _NUMBERS[type(sampler)](sampler), torch.empty(0, dtype=torch.int64, device="cpu")
    while True:
        size = size if drops_last else batches.batch_size  # as torch reads it
        ready, count = [rest], len(rest)
        while count < size and (run := next(runs, None)) is not None:
            ready.append(run)
            count += len(run)
        ready = [run for run in ready if len(run)]
        rest = torch.cat(ready) if len(ready) > 1 else ready[0] if ready else rest
        if not len(rest) or (drops_last and len(rest) < size):
            return
        batch, rest = rest[:size], rest[size:]
        yield _looked_up(sampler, batch)


def _looked_up(sampler: Any, batch: torch.Tensor) -> Any:
    """Return the indices at the places that `SubsetRandomSampler` draws."""
    if type(sampler) is not SubsetRandomSampler:
        return batch
    indices = sampler.indices
    try:
        return look_up(indices, batch)
    except (IndexError, TypeError):  # torch's way, with its error
        return [indices[number] for number in batch.tolist()]


def yields_ints(sampler: Any) -> bool:
    """Return whether a sampler is known to yield ints. In a list, torch takes numpy's uint8 for a
    mask, and tensors for one index of each dimension.
    """
    return type(sampler) in _NUMBERS and type(sampler) is not SubsetRandomSampler


def as_index(batch: Any) -> Any:
    """Return a list or tuple of integers of Python or numpy as a tensor; anything else as it is."""
    is_list = type(batch) in (list, tuple) and batch
    if not is_list or not set(map(type, batch)) <= {int, *_INTEGERS}:
        return batch
    try:
        return torch.from_numpy(np.array(batch, dtype=np.int64))
    except OverflowError:  # out of every range
        return batch


def look_up(indices: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return ``indices[number]`` for each number of a batch, int64 ``[n]``.

    Raises:
        IndexError: a number is out of range.
        TypeError: `indices` are not of Python's or numpy's integers, a range, or an int32 or int64
            tensor, of one dimension.
    """
    kind: Any = type(indices)
    found: Any = None
    if kind is torch.Tensor and indices.dtype in (torch.int32, torch.int64) and indices.ndim == 1:
        found = indices[batch].to("cpu", torch.int64)
    elif kind in (list, tuple, range, np.ndarray):
        found = as_index([indices[number] for number in batch.tolist()])
    if not isinstance(found, torch.Tensor):
        raise TypeError("indices of another kind")
    return found
