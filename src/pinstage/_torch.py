"""Private names of torch, CPython and optree: all that pinstage uses, each behind a probe of what it *does*.

A probe runs when a name is first needed. Where it fails, there is a slow way, or a clear refusal; `problems` lists what
was found to fail, for ``pinstage doctor``.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import torch

from ._errors import StagingError
from ._host import process_exists


_told: set[str] = set()


def tell_once(text: str) -> None:
    """Warn of something that works in a slower way, once in a process."""
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def owns(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Say whether this thread has a lock. `threading.Condition` asks in this way; there is no public one."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]


# -- who uses a storage ------------------------------------------------------------------------------------------------


class StorageUsers:
    """Tells whether anything but one tensor shows the tensor's storage: views, arrays, what autograd saved.

    Every tensor over a storage counts as a user of it, in C++; what has the storage itself, in Python, counts as a
    reference of the one Python object that stands for it.

    Args:
        tensor: is alone now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._alone = self._count()

    def are_there(self) -> bool:
        """Say whether there is another user."""
        users, references = self._count()
        return users > self._alone[0] or references > self._alone[1]

    def _count(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


@cache
def why_storages_cannot_be_counted() -> str | None:
    """Say why it cannot be told who uses a storage; None if it can."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "without the interpreter lock counts of references cannot be trusted"
    try:
        return _probe_storage_users()
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"torch {torch.__version__} does not count a storage's users as expected ({error!r})"


def _probe_storage_users() -> str | None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.zeros(64, dtype=torch.uint8, device="cpu")
        users = StorageUsers(slab)
        weight = torch.ones(4, requires_grad=True, device="cpu")

        def leaf() -> torch.Tensor:
            return slab.view(torch.float32)[:4]

        holders: dict[str, Callable[[], Any]] = {
            "a view": leaf,
            "what autograd saved": lambda: (leaf() * weight).sum(),
            "an array": lambda: leaf().numpy(),
            "the storage": lambda: leaf().untyped_storage(),
            "a capsule": lambda: torch.utils.dlpack.to_dlpack(leaf()),
        }
        if users.are_there():
            return f"torch {torch.__version__} counts a user of a storage that has none"
        for name, make in holders.items():
            holder = make()
            if not users.are_there():
                return f"torch {torch.__version__} does not count {name} as a user of a storage"
            del holder
            if users.are_there():
                return f"torch {torch.__version__} counts {name} as a user of a storage after its end"
    return None


def check_storages_can_be_counted() -> None:
    """Refuse a ring where it cannot be told who still uses a batch.

    Raises:
        StagingError: it cannot.
    """
    reason = why_storages_cannot_be_counted()
    if reason is not None:
        raise StagingError(f"ring= is not possible here: {reason}; leave it out, and each batch gets a fresh device slab")


# -- profiling ---------------------------------------------------------------------------------------------------------

is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Says whether a profiler of torch's runs. Where it cannot be told, steps are not marked in profiles."""


# -- default collation -------------------------------------------------------------------------------------------------

Collate = Callable[..., Any]


@cache
def _collation() -> Any:
    """Return torch's room for collation; None if it is not as it was."""
    try:
        from torch.utils.data._utils import collate

        stacked = collate.collate(
            [(torch.ones(2), 1), (torch.ones(2), 2)],
            collate_fn_map=collate.default_collate_fn_map | {torch.Tensor: lambda batch, **_: len(batch)},
        )
        works = stacked[0] == 2 and callable(collate.collate_tensor_fn) and callable(collate.default_collate)
    except (AttributeError, ImportError, TypeError, IndexError):
        return None
    return collate if works else None


def is_default_collate(function: Collate) -> bool:
    """Say whether a function is what a loader has for its `collate_fn` if the user gave none, and can be taken apart."""
    found = _collation()
    return found is not None and function is found.default_collate


def stacking() -> Collate | None:
    """Return what default collation does with tensors now; None if the user took it out."""
    found = _collation()
    return None if found is None else found.default_collate_fn_map.get(torch.Tensor)


def shipped_stacking() -> Collate | None:
    """Return what torch ships for that. In a worker it stacks in shared memory of torch's own kind."""
    found = _collation()
    return None if found is None else found.collate_tensor_fn


def set_stacking(function: Collate) -> None:
    """Change, in this process, what default collation does with tensors."""
    _collation().default_collate_fn_map[torch.Tensor] = function


def collates_as_shipped() -> bool:
    """Return whether what default collation does with all but tensors is torch's own, or known to ask for no value."""
    collate = _collation()
    found = {
        getattr(function, "__module__", None)
        for kind, function in collate.default_collate_fn_map.items()
        if kind is not torch.Tensor
    }
    return found <= {collate.__name__, "tensordict.tensorclass"}  # which stacks TensorDicts, as torch does


def collate_with(samples: Any, stack: Collate) -> Any:
    """Do what default collation does, but for tensors."""
    collate = _collation()
    return collate.collate(samples, collate_fn_map=collate.default_collate_fn_map | {torch.Tensor: stack})


# -- torch's loader ----------------------------------------------------------------------------------------------------

_ITERATOR_HAS = (
    "_data_queue", "_in_order", "_index_queues", "_next_data", "_num_yielded", "_persistent_workers", "_rcvd_idx",
    "_reset", "_shutdown_workers", "_worker_pids_set", "_worker_result_queue", "_workers", "_workers_done_event",
)  # fmt: skip
"""What the loader uses of torch's iterator."""

_END_SECONDS = 5.0
"""How long workers may take to end when they are asked, when they get SIGTERM, and when they are killed. torch's loader
gives each of them as long."""


def why_loader_cannot_be_taken_over(batches: Any) -> str | None:
    """Say why batches of torch's iterator cannot be sent by us; None if they can.

    Args:
        batches: torch's iterator, with workers, just made.
    """
    missing = [name for name in _ITERATOR_HAS if not hasattr(batches, name)]
    if missing:
        return f"torch {torch.__version__}: its loader's iterator has no {', '.join(missing)} any more"
    source = batches._data_queue
    if source is not batches._worker_result_queue:
        return f"torch {torch.__version__}: its loader reads another queue than its workers write"
    if not (callable(getattr(source, "get", None)) and hasattr(getattr(source, "_reader", None), "fileno")):
        return f"the queue of {type(batches).__name__} has no file that can be waited for"
    if not (isinstance(batches._rcvd_idx, int) and all(callable(queue.put) for queue in batches._index_queues)):
        return f"torch {torch.__version__}: its loader counts batches, or tells workers what to load, in another way"
    return None


def queue_file(source: Any) -> int:
    """Return the file of a `multiprocessing.Queue` that can be read when there is a message."""
    return int(source._reader.fileno())


def close_writing_end(source: Any) -> None:
    """Close this process's writing end of a `multiprocessing.Queue`: half a message of a killed process ends then."""
    source._writer.close()


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)`` of torch's iterator.

    Without the range that torch marks there for profilers, while none runs: its end lets go of the interpreter lock,
    and any other thread that wants it takes it.
    """
    from torch.utils.data import dataloader

    if (
        type(batches) is not dataloader._MultiProcessingDataLoaderIter
        or batches._dataset_kind != dataloader._DatasetKind.Map
        or is_profiling()
    ):
        return next(batches)
    batch = batches._next_data()
    batches._num_yielded += 1
    return batch


def is_resumption(mark: Any) -> bool:
    """Say whether what came out of the queue means that a persistent worker begins again."""
    from torch.utils.data._utils.worker import _ResumeIteration

    return isinstance(mark, _ResumeIteration)


class Workers:
    """The workers of torch's iterator, apart from it: they can be ended when it is gone, and in another thread.

    From then on the iterator does not end them by itself, which its finaliser would do, for up to five seconds each.

    Args:
        batches: torch's iterator.
        instead: is called where the iterator would end them.
    """

    def __init__(self, batches: Any, instead: Callable[[], object]) -> None:
        from torch.utils.data._utils import signal_handling

        self.processes: list[Any] = list(batches._workers)
        self.persistent = bool(batches._persistent_workers)
        self._index_queues = list(batches._index_queues)
        self._done = batches._workers_done_event
        self._results = batches._worker_result_queue  # kept: a worker that writes must not find it closed
        self._signals = signal_handling
        # torch raises an error from its handler of SIGCHLD if one of these fails; it knows them by the iterator's id,
        # which another one may have when the workers have ended.
        if batches._worker_pids_set:
            signal_handling._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        signal_handling._set_worker_pids(id(self), tuple(worker.pid for worker in self.processes))
        batches._shutdown_workers = instead

    def end(self) -> bool:
        """Ask the workers to end, and make them; say whether all did. Blocks for three times `_END_SECONDS` at most."""
        if self._set_done():
            for queue in self._index_queues:
                try:
                    queue.put(None)
                except (OSError, ValueError):
                    pass  # closed
            left = self._wait(self.processes)
        else:
            left = self.processes
        for stop in ("terminate", "kill"):
            for worker in left:
                getattr(worker, stop)()
            left = self._wait(left)
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()
        self._signals._remove_worker_pids(id(self))
        return not left

    def _set_done(self) -> bool:
        """Set the event that workers look at; say whether that came to an end: a killed worker may have its lock."""
        is_set = _thread.allocate_lock()
        is_set.acquire()

        def set_it() -> None:
            self._done.set()
            is_set.release()

        _thread.start_new_thread(set_it, ())
        return is_set.acquire(timeout=_END_SECONDS)

    def _wait(self, workers: list[Any]) -> list[Any]:
        """Return those of some workers that have not ended in time."""
        deadline = time.monotonic() + _END_SECONDS
        left = list(workers)
        while left and (seconds := deadline - time.monotonic()) > 0:
            wait([worker.sentinel for worker in left], seconds)
            left = [worker for worker in left if not _has_ended(worker)]
        return left


def _has_ended(worker: Any) -> bool:
    worker.join(0)
    # One that another thread has just waited for, by starting a process say, counts as alive until that thread goes on.
    return not worker.is_alive() or not process_exists(worker.pid)
