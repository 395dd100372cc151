"""torch's loader: its collation, its iterator, and its workers.

Its private names are those of the versions that are tested. If one of them is gone,
`why_loader_is_unknown` says so, and batches are staged in the main process.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from operator import attrgetter
from typing import Any

import torch
import torch.utils.data

from .._host import process_exists
from .calls import is_profiling
from .probes import in_this_torch

_data: Any = torch.utils.data

_LOADER_HAS = (
    "_utils.collate.collate", "_utils.collate.collate_tensor_fn",
    "_utils.collate.default_collate_fn_map", "_utils.signal_handling._remove_worker_pids",
    "_utils.signal_handling._set_worker_pids", "_utils.worker._ResumeIteration",
    "dataloader._BaseDataLoaderIter", "dataloader._DatasetKind.Map",
    "dataloader._MultiProcessingDataLoaderIter", "dataloader._SingleProcessDataLoaderIter",
)  # fmt: skip
"""Names of `torch.utils.data` that are used here."""

_ITERATOR_HAS = (
    "_data_queue", "_in_order", "_index_queues", "_next_data", "_num_yielded",
    "_persistent_workers", "_rcvd_idx", "_reset", "_send_idx", "_shutdown_workers",
    "_task_info", "_worker_pids_set", "_worker_result_queue", "_workers", "_workers_done_event",
    "_workers_status",
)  # fmt: skip
"""Names of the loader's iterator that are used here and in `_loader`."""

_INLINE_ITERATORS = {
    ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "_StatefulSingleProcessDataLoaderIter"),
}
"""Modules and names of iterators without workers that return what the collate function returned,
and don't look at it."""

_DATASETS = "torch.utils.data.dataset"

_END_SECONDS = 5.0
"""Seconds for workers to end: when asked, after SIGTERM, and after a kill. torch's loader
uses the same limits."""


@cache
def why_loader_is_unknown() -> str | None:
    """Return why torch's loader cannot be taken over; None if it can."""
    try:
        attrgetter(*_LOADER_HAS)(_data)
    except AttributeError as error:
        return in_this_torch(f"has another loader ({error})")
    return None


def why_loader_cannot_be_taken_over(batches: Any) -> str | None:
    """Return why pinstage can't take over the batches of torch's iterator; None if it can.

    Args:
        batches: torch's iterator, with workers, just made.
    """
    missing = [name for name in _ITERATOR_HAS if not hasattr(batches, name)]
    if {"_data_queue", "_workers"} <= set(missing):
        kind = f"{type(batches).__module__}.{type(batches).__qualname__}"
        return (
            f"its iterator is a {kind}, which has work to do here; with filter_per_worker=True, "
            "PyG's has none"
        )
    if missing:
        return in_this_torch(f"has no {', '.join(missing)} any more in its loader's iterator")
    source = batches._data_queue
    if source is not batches._worker_result_queue or not hasattr(source, "_reader"):
        return in_this_torch("reads its workers' results in another way")
    return why_loader_is_unknown()


def has_begun(loader: Any) -> bool:
    """Return whether a loader keeps an iterator of torch's: its own attribute for persistent
    workers, or one of a class that begins in its constructor and never ends.
    """
    if loader._iterator is not None:
        return True
    return why_loader_is_unknown() is None and any(
        isinstance(value, _data.dataloader._BaseDataLoaderIter) for value in vars(loader).values()
    )


def returns_unseen(batches: Any) -> bool:
    """Return whether an iterator without workers only passes on what the collate function returns.

    Args:
        batches: torch's iterator.
    """
    kind = type(batches)
    is_known = (kind.__module__, kind.__qualname__) in _INLINE_ITERATORS
    return is_known and why_loader_is_unknown() is None


def begins_as_shipped(loader: Any, begin: Any) -> bool:
    """Return whether a loader makes its iterator, and chooses its sampler, as torch's own does.

    Args:
        loader: of torch's class or of a derived one.
        begin: its method that makes an iterator.
    """
    torchs: Any = _data.DataLoader
    names = "_index_sampler", "_auto_collation"
    return getattr(begin, "__func__", None) is torchs._get_iterator and all(
        hasattr(torchs, name) and getattr(type(loader), name) is getattr(torchs, name)
        for name in names
    )


def is_as_shipped(dataset: Any, kind: type) -> bool:
    """Return whether a dataset is of one of torch's classes, and reads samples as torch does."""
    names = "__getitem__", "__getitems__"
    return (
        type(dataset) is kind
        and vars(dataset).keys().isdisjoint(names)
        and all(
            getattr(getattr(kind, name), "__module__", "") == _DATASETS
            for name in names
            if hasattr(kind, name)
        )
    )


# -- collation -------------------------------------------------------------------------------------


def pin_as_loader(batch: Any) -> Any:
    """Do what ``DataLoader(pin_memory=True)`` does with a batch."""
    return _data._utils.pin_memory.pin_memory(batch)


def collation() -> Any:
    """Return torch's module for collation."""
    return _data._utils.collate


# -- the iterator ----------------------------------------------------------------------------------


def queue_file(source: Any) -> int:
    """Return the descriptor of a `multiprocessing.Queue` that is readable when there is a
    message.
    """
    return int(source._reader.fileno())


def close_writing_end(source: Any) -> None:
    """Close this process's writing end of a `multiprocessing.Queue`: then reading half a message
    ends.
    """
    source._writer.close()


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)`` of torch's iterator.

    While no profiler runs, this leaves out the range that torch marks for profilers: its end
    releases the interpreter lock, which another thread may then take.
    """
    if (
        is_profiling()
        or why_loader_is_unknown()
        or type(batches)
        not in (
            _data.dataloader._MultiProcessingDataLoaderIter,
            _data.dataloader._SingleProcessDataLoaderIter,
        )
        or batches._dataset_kind != _data.dataloader._DatasetKind.Map
    ):
        return next(batches)
    batch: object = batches._next_data()
    batches._num_yielded += 1
    return batch


def is_timeout(error: Exception) -> bool:
    """Return whether an error says that no batch arrived within the loader's `timeout`. Errors of
    workers begin differently.
    """
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out after")


def awaited_workers(batches: Any) -> list[int]:
    """Return the worker whose batch torch's iterator returns next; without order, all that have not
    returned theirs.
    """
    tasks = batches._task_info
    awaited = [tasks.get(batches._rcvd_idx, ())] if batches._in_order else tasks.values()
    return sorted({worker for worker, *_ in filter(None, awaited)})


def was_last(batches: Any) -> bool:
    """Return whether the batch that torch's iterator has just returned is known to be the last of
    its pass.
    """
    if hasattr(batches, "_send_idx"):
        return bool(batches._rcvd_idx == batches._send_idx)
    try:
        return bool(batches._num_yielded == len(batches))
    except (AttributeError, TypeError, NotImplementedError):  # only the end shows
        return False


def has_lost_a_worker(batches: Any) -> bool:
    """Return whether a worker that torch's iterator still counts on has ended."""
    workers = zip(batches._workers_status, batches._workers, strict=True)
    return any(is_needed and not worker.is_alive() for is_needed, worker in workers)


def is_resumption(mark: Any) -> bool:
    """Return whether a message of the queue means that a persistent worker begins again."""
    return isinstance(mark, _data._utils.worker._ResumeIteration)


def end_workers(batches: Any) -> None:
    """End the workers of torch's iterator, if it has any, by its own method."""
    getattr(batches, "_shutdown_workers", lambda: None)()


class Workers:
    """The workers of torch's iterator, which can be ended in another thread, even when the iterator
    is gone.

    Args:
        batches: torch's iterator.
    """

    def __init__(self, batches: Any) -> None:
        self.processes: list[Any] = list(batches._workers)
        self.persistent = bool(batches._persistent_workers)
        self._index_queues = list(batches._index_queues)
        self._done = batches._workers_done_event
        # Kept: a worker that writes must not find it closed.
        self._results = batches._worker_result_queue
        self._forget_pids = _data._utils.signal_handling._remove_worker_pids

    def take_over(self, batches: Any, instead: Callable[[], object]) -> None:
        """Make the iterator call `instead` of ending workers: its finaliser would wait five seconds
        for each.
        """
        # torch's handler of SIGCHLD raises an error if one of these workers fails. It finds them by
        # the iterator's id, which another iterator may have by the time the workers have ended.
        if batches._worker_pids_set:
            self._forget_pids(id(batches))
            batches._worker_pids_set = False
        _data._utils.signal_handling._set_worker_pids(
            id(self), tuple(worker.pid for worker in self.processes)
        )
        batches._shutdown_workers = instead

    def end(self) -> bool:
        """Ask the workers to end, then kill the rest; return whether all ended. Blocks for 3
        `_END_SECONDS` at most.
        """
        # First, because torch would raise an error anywhere in the main thread when a worker is
        # killed.
        self._forget_pids(id(self))
        left = self.processes
        if self._set_done():
            for queue in self._index_queues:
                with contextlib.suppress(OSError, ValueError):  # closed
                    queue.put(None)
            left = self._wait(left)
        for stop in ("terminate", "kill"):
            for worker in left:
                getattr(worker, stop)()
            left = self._wait(left)
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()
        return not left

    def _set_done(self) -> bool:
        """Set the event that workers check; return whether that worked: a killed worker may hold
        its lock.
        """
        is_set = _thread.allocate_lock()
        is_set.acquire()

        def set_it() -> None:
            self._done.set()
            is_set.release()

        try:
            _thread.start_new_thread(set_it, ())
        except RuntimeError:  # no thread can be started
            return False
        return is_set.acquire(timeout=_END_SECONDS)

    def _wait(self, workers: list[Any]) -> list[Any]:
        """Return the workers that have not ended in time."""
        deadline = time.monotonic() + _END_SECONDS
        while workers and (seconds := deadline - time.monotonic()) > 0:
            wait([worker.sentinel for worker in workers], seconds)
            workers = [worker for worker in workers if not _has_ended(worker)]
        return workers


def _has_ended(worker: Any) -> bool:
    worker.join(0)
    # A worker that another thread has just waited for, for example when it started a process,
    # counts as alive until that thread goes on.
    return not worker.is_alive() or not process_exists(worker.pid)
