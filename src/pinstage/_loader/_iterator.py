"""One pass over the data, and the start and end of its workers."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from .._batch import Keeping, Structure, pack, some_paths, take_apart
from .._compat.loader import Workers, awaited_workers, end_workers, is_timeout, next_batch, was_last
from .._reaper import reaper, running
from .._sizes import format_bytes, size_to_paste
from .._stage import RunAhead, Transfer, structure_of
from .._steps import step
from ..errors import BudgetExceededError, ClosedError, StagingWarning
from ._broker import SlabBroker
from ._messages import BEGIN_AGAIN, Failed, PackedBatch
from ._sending import SendingQueue, send
from ._slabs import Slabs

T = TypeVar("T")

_ENOUGH_FALLBACKS = 8
"""Number of batches without a slab from which on the warning doesn't wait for the end of the
pass.
"""


class LoaderIterator:
    """Yields batches on the device: loads, packs and sends in the calling thread.

    Like torch's, it loads nothing ahead, since the dataset and the loop share the random
    generators. Its other attributes are those of torch's iterator.

    Args:
        batches: torch's iterator.
        slabs: the loader's slabs, which the iterator keeps.
        most_slabs: the number of slabs that it may use at once.
    """

    closed = False
    """Whether the workers were asked to end."""
    _is_closed_by_loader = False

    def __init__(self, batches: Any, slabs: Slabs, most_slabs: int = 1) -> None:
        self._batches = batches
        self._slabs = slabs
        self._most_slabs = most_slabs
        slabs.iterators.add(self)
        self._counters = slabs.counters
        self._run_ahead = RunAhead()
        self._keeping = slabs.settings.keeping() or Keeping(())
        self._begin()

    def _begin(self) -> None:
        self._run_ahead.forget()
        self._since: float | None = None
        """When the latest batch of this pass was returned, by `time.perf_counter`; None before the
        first batch, which isn't timed.
        """
        self._missing = set(self._keeping.paths) - self._slabs.reported
        """The paths of `keep_on_host` that led to nothing in all batches of this pass."""
        self._latest: Structure | None = None
        """The structure of the latest batch that was searched for them."""

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        """Return the next batch, ordered before the current stream's later work.

        Blocks until the batch is there. Waits for the device only if the work of more than three
        batches is queued there.

        Raises:
            ClosedError: the loader was closed during this pass.
            PinstageError: the current stream captures a CUDA graph. No batch is lost then.
        """
        target = self._slabs.target
        target.refuse_capture()
        self._check_open()
        try:
            self._run_ahead.bound(target.record(target.consumer(None)))
            batch = self._next_batch()
            if self._missing and was_last(self._batches):  # a loop may stop here
                self._warn_of_missing()
            if self._since is not None:
                self._counters.elapsed_seconds += time.perf_counter() - self._since
            if self._counters.fallback_batches >= _ENOUGH_FALLBACKS:
                self._warn_if_all_fell_back()
            return batch
        except Exception as error:
            self._check_open()  # another thread may have closed the loader meanwhile
            if isinstance(error, StopIteration):
                self._end()
                self._warn_of_missing()
                self._warn_if_all_fell_back()
            raise
        finally:
            self._since = time.perf_counter()

    def _check_open(self) -> None:
        if self._is_closed_by_loader:
            raise ClosedError(
                "cannot go on with this pass: its loader was closed; begin another one"
            ) from None

    def _next_batch(self) -> Any:
        batch = self._fetch()
        try:
            transfer = self._slabs.sender().begin(batch)
            self._counters.count(transfer, fallback=False)
        except BudgetExceededError:
            parts = take_apart(batch, keeping=self._keeping)
            raw = bytearray(parts.table.nbytes)
            pack(parts, torch.frombuffer(raw, dtype=torch.uint8))
            transfer = send(
                self._slabs,
                PackedBatch(
                    None, parts.structure, parts.table, None, raw, parts.others(), waited=0.0
                ),
            )
        return self._batch_of(transfer)

    def _batch_of(self, transfer: Transfer) -> Any:
        if self._missing and self._latest is not (structure := structure_of(transfer)):
            self._latest = structure
            self._missing.intersection_update(self._keeping.missing_in(structure))
        return transfer.wait()

    def _end(self) -> None:
        pass

    def close(self) -> None:
        """End the pass and its workers, for `DataLoader.close`. Blocks until all slabs are given
        back.
        """
        if not self.closed:
            self._is_closed_by_loader = True
        self._close()

    def _close(self) -> None:
        self.closed = True
        end_workers(self._batches)  # of a loader whose workers cannot be taken over

    def _warn_if_all_fell_back(self) -> None:
        """Warn, once for a loader, if the cap left no slab to any batch so far."""
        counters, pool = self._counters, self._slabs.pool
        if (
            counters.has_warned
            or pool is None
            or not 0 < counters.batches == counters.fallback_batches
        ):
            return
        stats, nbytes = pool.stats(), counters.largest_fallback
        mine = stats.owners.get(self._slabs.settings.owner)
        if (stats.max_bytes if mine is None else mine.available_bytes) >= nbytes:
            return  # the system refused, which causes a warning elsewhere
        counters.has_warned = True
        enough = size_to_paste(self._most_slabs * nbytes * 9 // 8)
        warnings.warn(
            f"no batch of a DataLoader found a slab, and all {counters.batches} were sent from "
            f"pageable memory, which is slow: the largest has {format_bytes(nbytes)}, max_bytes is "
            f"{format_bytes(stats.max_bytes)} ({stats.max_bytes_reason}); "
            f'pass max_bytes="{enough}"',
            StagingWarning,
            stacklevel=3,
        )

    def _warn_of_missing(self) -> None:
        """Warn, once for a loader, of paths of `keep_on_host` that led to nothing in this pass."""
        if self._missing and self._latest is not None:
            paths = ", ".join(map(repr, sorted(self._missing)))
            self._slabs.reported |= self._missing
            self._missing.clear()
            warnings.warn(
                f"keep_on_host={paths} led to nothing in all batches of this pass: the leaves of "
                f"the last one are at {some_paths(self._latest)}. Correct the path, or leave it "
                "out.",
                StagingWarning,
                stacklevel=3,
            )

    def _fetch(self) -> Any:
        began = time.perf_counter()
        with step("loader.wait"):
            batch = next_batch(self._batches)
        if self._since is not None:
            self._counters.batch_wait_seconds += time.perf_counter() - began
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # __init__ has not set it yet: avoid a recursion
            raise AttributeError(name)
        return getattr(self._batches, name)


class Ending:
    """Ends the workers of an iterator once, in a thread of its own if possible, and then gives all
    slabs back.

    It does not refer to the iterator, which may be gone. A collate function may refer to the
    loader, so a reference to the iterator would keep all of these objects forever.

    Args:
        batches: torch's iterator, which no longer ends its workers itself.
        broker: the workers' broker.
    """

    def __init__(self, batches: Any, broker: SlabBroker) -> None:
        self._pid = os.getpid()
        self._broker = broker
        self.begun = False
        """Whether the workers were asked to end."""
        self._claimed = threading.Lock()  # by the thread that ends the workers; never released
        self._done = threading.Lock()
        self._done.acquire()
        self.workers = Workers(batches)
        # Last: from then on `reap` may be called.
        self.workers.take_over(batches, partial(reaper.tasks.put, self))

    def reap(self) -> bool:
        """Begin to end the workers. The reaper calls this when the iterator is gone."""
        if not self._claimed.locked() and os.getpid() == self._pid:  # not in a forked child
            self.begun = True
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # no thread could be started
                self._run()
        return True

    def wait(self) -> None:
        """End the workers, and block until all slabs are given back."""
        self.reap()
        if os.getpid() == self._pid:
            with self._done:
                pass

    def _run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        running[self] = None
        ended = False
        try:
            self._broker.close()
            ended = self.workers.end()
        finally:
            self._broker.finish(leak=not ended)
            del running[self]
            self._done.release()


class WorkersIterator(LoaderIterator):
    """An iterator with workers: yields the batches that they packed and that the broker's thread
    sends.

    Args:
        batches: torch's iterator, whose workers run a `SlabCollate`.
        broker: the workers' broker.
        ending: ends the workers.
        slabs: the loader's slabs.
        most_slabs: the number of slabs that all workers together may have.
    """

    def __init__(
        self,
        batches: Any,
        broker: SlabBroker,
        ending: Ending,
        slabs: Slabs,
        most_slabs: int,
    ) -> None:
        super().__init__(batches, slabs, most_slabs)
        self._broker = broker
        self._ending = ending
        self._sending = SendingQueue(
            batches._data_queue, batches, partial(send, slabs), slabs.settings.depth, broker.wake
        )
        batches._data_queue = self._sending
        # A loop that knows the length, such as Lightning's, may stop at the last batch. Its slabs
        # may be needed.
        self._ends_early = not (ending.workers.persistent or hasattr(batches, "state_dict"))
        reaper.watch(self, ending.reap)
        broker.start(self._sending)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the workers were asked to end."""
        return self._ending.begun

    def close_if_it_cannot_begin_again(self) -> None:
        """End the workers if the thread that sends has ended, or if a worker is lost."""
        if self._broker.closing:
            self._close()
        self._close_if_a_worker_is_lost()

    def _close_if_a_worker_is_lost(self) -> None:
        """End the pass if a worker was killed or ended too early: torch cannot go on without it."""
        codes = [worker.exitcode for worker in self._ending.workers.processes]
        if any(codes) or (self._ending.workers.persistent and 0 in codes):
            self._close()

    def _close(self) -> None:
        self._ending.wait()

    def _next_batch(self) -> Any:
        try:
            transfer = self._fetch()
            if isinstance(transfer, Failed):
                transfer.reraise()
            if isinstance(transfer, PackedBatch):  # torchdata's iterator read it in its constructor
                transfer = send(self._slabs, transfer)
            if not isinstance(transfer, Transfer):
                raise RuntimeError(
                    f"a worker sent a {type(transfer).__name__} in place of a batch; {BEGIN_AGAIN}"
                )
            batches = self._batches
            if self._ends_early and batches._rcvd_idx == batches._send_idx:  # that was the last one
                self._ending.reap()
            return self._batch_of(transfer)
        finally:
            # Last, since the thread that it wakes needs the interpreter lock, too.
            self._sending.advance()

    def _fetch(self) -> Any:
        # If not, torch itself finds the end.
        if self.closed and self._batches._rcvd_idx != self._batches._send_idx:
            raise StopIteration
        try:
            return super()._fetch()
        except StopIteration:
            raise
        except Exception as error:
            late = awaited_workers(self._batches) if is_timeout(error) else []
            text = self._broker.loans.waiting(late)
            self._close_if_a_worker_is_lost()
            if text:
                raise RuntimeError(f"{error}; {text}") from error
            raise

    def _end(self) -> None:
        if not self._ending.workers.persistent:
            self._close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin again with the same workers (``persistent_workers``). torch's loader calls this."""
        self._begin()
        try:
            self._sending.drop_until_resumed(len(self._ending.workers.processes))
            self._batches._reset(loader, first_iter)
            self._sending.begin()
        except BaseException:
            # After an interrupt, the workers' answers would arrive in the middle of a later pass.
            self._close()
            raise


# -- the start of workers --------------------------------------------------------------------------

INSISTED_SECONDS = 1.0
"""Interrupts wait until the workers are started. An interrupt this long after the first one doesn't
wait: something hangs, and the user insists."""


class _Starting(threading.local):
    workers = False
    handler: Any = None


_here = _Starting()
"""Whether this thread is starting workers, and the previous handler of interrupts."""


def start_workers(start: Callable[[], T]) -> T:
    """Call a function that starts workers, and return its result.

    An interrupt (SIGINT) during the call is handled afterwards. In the middle of a fork, it would
    leave a worker that nothing ends, and torch's half-made iterator would print an error.

    The garbage collector of a forked worker ignores the main process's objects. Freeing a CUDA
    tensor that another stream had used would abort the worker (rwth-i6/returnn#1494).
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
    came: list[float] = []

    def remember(number: int, frame: FrameType | None) -> Any:
        came.append(time.monotonic())
        # Or an exception left this handler installed.
        if not _here.workers or came[-1] - came[0] > INSISTED_SECONDS:
            return handler(number, frame)
        return None

    try:
        _here.workers = True
        if callable(handler):
            _here.handler = handler
            signal.signal(signal.SIGINT, remember)
        started = start()
    finally:
        _here.workers = False
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            _here.handler = None
    if came:
        handler(signal.SIGINT, sys._getframe())
    return started


def _in_child() -> None:
    if _here.workers:
        gc.freeze()
    if _here.handler is not None:
        signal.signal(signal.SIGINT, _here.handler)


os.register_at_fork(after_in_child=_in_child)
