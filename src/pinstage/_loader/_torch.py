"""What the loader uses of torch that torch does not promise to keep: all of it is here.

``tests/test_loader_torch.py`` fails, with the name, when torch changes any of it.
"""

from __future__ import annotations

import io
import math
import multiprocessing.queues
import queue
import select
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import dataloader
from torch.utils.data._utils import collate as torch_collate

from ._arrivals import Arrival, Unreadable

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
    peeked: PeekedQueue = batches._data_queue
    peeked.drops = True
    try:
        batches._reset(loader, first_iter)
    finally:
        peeked.drops = False


_LONGEST_POLL = 2**31 - 1
"""Milliseconds; a C int."""

_AT_ONCE = select.PIPE_BUF - 4
"""Bytes that a pipe takes as a whole, or not at all; without the length that `multiprocessing` puts before them."""


class PeekedQueue:
    """The queue of torch's iterator, in which one may look for a batch without waiting for it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: deque[Any] = deque()
        self.drops = False
        """Whether the batches of a pass that was left are read, which torch drops. Each gives its slot back at once:
        torch holds it until it has the next one, for which the worker may need just that slot."""
        self._poll = select.poll()
        self._poll.register(source._reader, select.POLLIN)

    def get(self, timeout: float) -> Any:
        """Return the next message; as the source's own method, which makes a poll object for each.

        Raises:
            queue.Empty: none came in `timeout` seconds.
        """
        if not self._items and not self._poll.poll(min(math.ceil(timeout * 1e3), _LONGEST_POLL)):
            raise queue.Empty
        item = self._items.popleft() if self._items else self._source.get()
        if isinstance(item, Exception):
            raise item
        if self.drops and isinstance(batch := _batch_in(item[1]), Arrival):
            batch.drop()
        return item

    def holds_batch(self, number: int | None) -> bool:
        """Return whether a batch, or any for None, has arrived."""
        if self._has(number):
            return True
        try:
            while self._poll.poll(0):  # one that finds nothing costs a tenth of a `get` that does
                self._items.append(self._source.get())  # not `block=False`: that would poll again, in a slow way
        except Exception as error:  # noqa: BLE001 - a message that cannot be unpickled: raised when its turn comes
            self._items.append(error)
        return self._has(number)

    def _has(self, number: int | None) -> bool:
        return bool(self._items) and any(
            not isinstance(item, Exception) and number in (None, item[0]) and _is_batch(item[1]) for item in self._items
        )


class IndexQueue:
    """A queue to a worker of torch's iterator that small messages are written to at once.

    `multiprocessing.Queue` leaves that to a thread: waking it, and the interpreter lock that it takes, were a quarter
    of the main thread's time for a batch of ten leaves. Messages keep their order: one is written here only while the
    thread has nothing to write, and waits. Other attributes are the queue's.

    Args:
        behind: a `multiprocessing.Queue`.
    """

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self._poll = select.poll()
        self._poll.register(behind._writer, select.POLLOUT)
        self._encoded = io.BytesIO()
        self._pickler = ForkingPickler(self._encoded)  # made once: it copies a table of what it knows to pickle

    def put(self, message: Any) -> None:
        """Send a message. Does not block."""
        if not self._write(self._encode(message)):
            self._behind.put(message)

    def _encode(self, message: Any) -> bytes:
        self._encoded.seek(0)
        self._encoded.truncate()
        try:
            self._pickler.dump(message)
        finally:
            self._pickler.clear_memo()
        return self._encoded.getvalue()

    def _write(self, encoded: bytes) -> bool:
        behind = self._behind
        if len(encoded) > _AT_ONCE or behind._closed:
            return False
        with behind._notempty:  # the thread's condition: who waits for it has written all that it took
            if behind._buffer or not behind._notempty._waiters or not self._poll.poll(0):
                return False
            if not behind._sem.acquire(False):
                return False
            behind._writer.send_bytes(encoded)
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "_behind":  # not made yet: no recursion
            raise AttributeError(name)
        return getattr(self._behind, name)


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


def take_queues(batches: Any) -> None:
    """Put `PeekedQueue` and `IndexQueue` in the place of the queues of torch's iterator, which has workers."""
    batches._data_queue = PeekedQueue(batches._data_queue)
    batches._index_queues = [
        IndexQueue(behind) if type(behind) is multiprocessing.queues.Queue else behind
        for behind in batches._index_queues
    ]


def next_is_here(batches: Any) -> bool:
    """Return whether ``next(batches)`` would return without waiting for a worker."""
    number = batches._rcvd_idx
    early = batches._task_info.get(number)  # (worker,) or, if it came before its turn, (worker, batch)
    if early is not None and len(early) == 2:
        return _is_batch(early[1])
    return bool(batches._data_queue.holds_batch(number if batches._in_order else None))


def _is_batch(payload: Any) -> bool:
    """Tell a batch, or an error in its place, from the news that a worker has no more."""
    return isinstance(_batch_in(payload), Arrival | Unreadable | ExceptionWrapper)


def _batch_in(payload: Any) -> Any:
    return payload[0] if isinstance(payload, tuple) else payload  # a tuple of torchdata's: (batch, worker, state)
