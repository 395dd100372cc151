"""What the loader uses of torch that torch does not promise to keep: all of it is here, but for queues (`_queues`).

``tests/test_loader_torch.py`` fails, with the name, when torch changes any of it.
"""

from __future__ import annotations

import multiprocessing.queues
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader
from torch.utils.data._utils import collate as torch_collate

from ._queues import IndexQueue, SendingQueue
from ._sending import Sender

WorkersIterator: Any = dataloader._MultiProcessingDataLoaderIter
MAP = dataloader._DatasetKind.Map
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

default_collate: Callable[[Any], Any] = torch_collate.default_collate
"""What a loader has for its `collate_fn` if the user gave none."""

stack_tensors: Callable[..., torch.Tensor] = torch_collate.collate_tensor_fn
"""How that stacks tensors. In a worker it does so in shared memory of torch's own kind."""


def stacking() -> Callable[..., Any] | None:
    """Return what default collation does with tensors now; None if the user took it out."""
    return torch_collate.default_collate_fn_map.get(torch.Tensor)


def set_stacking(function: Callable[..., Any]) -> None:
    """Change, in this process, what default collation does with tensors."""
    torch_collate.default_collate_fn_map[torch.Tensor] = function


def collates_as_shipped() -> bool:
    """Return whether what default collation does with all but tensors is torch's own, or known to ask for no value."""
    found = {
        getattr(function, "__module__", None)
        for kind, function in torch_collate.default_collate_fn_map.items()
        if kind is not torch.Tensor
    }
    return found <= {torch_collate.__name__, "tensordict.tensorclass"}  # which stacks TensorDicts, as torch does


def collate_with(samples: Any, stack: Callable[..., Any]) -> Any:
    """Do what default collation does, but for tensors."""
    functions = torch_collate.default_collate_fn_map | {torch.Tensor: stack}
    return torch_collate.collate(samples, collate_fn_map=functions)


def workers_of(batches: Any) -> list[Any]:
    """Return the worker processes of torch's iterator."""
    return list(batches._workers)


def are_persistent(batches: Any) -> bool:
    """Return whether the workers stay for another pass."""
    return bool(batches._persistent_workers)


def end_workers(batches: Any) -> None:
    """Ask the workers to end, wait for them up to five seconds each, and send SIGTERM to those that did not."""
    batches._shutdown_workers()


def what_ends_workers(batches: Any) -> list[Any]:
    """Return what torch's iterator tells its workers through that they shall end."""
    return [*batches._index_queues, batches._worker_result_queue, batches._workers_done_event]


def begin_again(batches: Any, loader: Any, first_iter: bool) -> None:
    """Begin another pass with the same workers."""
    sending: SendingQueue = batches._data_queue
    sending.drop_until_resumed(len(batches._workers))
    batches._reset(loader, first_iter)
    sending.begin()


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)``.

    Without the range that torch marks there for profilers, while none runs: its end lets go of the interpreter lock,
    and any other thread that wants it takes it.
    """
    if type(batches) is not WorkersIterator or batches._dataset_kind != MAP or is_profiling():
        return next(batches)
    batch = batches._next_data()
    batches._num_yielded += 1
    return batch


def take_queues(batches: Any, sender: Sender, depth: int, wake: Callable[[], None]) -> SendingQueue:
    """Put `SendingQueue` and `IndexQueue` in the place of the queues of torch's iterator, which has workers."""
    batches._data_queue = sending = SendingQueue(batches._data_queue, batches, sender, depth, wake)
    batches._index_queues = [
        IndexQueue(behind, sending.outbox) if type(behind) is multiprocessing.queues.Queue else behind
        for behind in batches._index_queues
    ]
    return sending
