"""One pass over the data: what workers packed, on the device."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from .._errors import BudgetExceededError
from .._layout import Layout, Moves, plan
from .._staging import RunAhead, Stager, Target, Transfer, send_packed
from .._steps import step
from . import _torch
from ._arrivals import Arrival, Failed
from ._keeper import SlotKeeper
from ._sending import Sender
from ._stats import Counters
from ._worker import process_exists

_KILL_SECONDS = 5.0
"""How long a killed worker may take to end."""


class LoaderIterator:
    """Yields batches on the device. Other attributes are those of torch's iterator behind it.

    Args:
        batches: torch's iterator.
        target: where to.
        counters: of the loader.
    """

    def __init__(self, batches: Any, target: Target, counters: Counters) -> None:
        self._batches = batches
        self._counters = counters
        self._run_ahead = RunAhead(target)
        self._since: float | None = None

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        """Return the next batch, safe to use on the current stream.

        Blocks until it is there. Waits for the device only where that has more to do than the work of three batches.
        """
        began = time.perf_counter()
        try:
            self._run_ahead.bound()
            return self._next_batch()
        except StopIteration:
            self._end()
            raise
        finally:
            now = time.perf_counter()
            self._counters.seconds += now - (began if self._since is None else self._since)
            self._since = now

    def _next_batch(self) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        """Torch's iterator is exhausted."""

    def _fetch(self) -> Any:
        began = time.perf_counter()
        try:
            with step("loader.wait"):
                return _torch.next_batch(self._batches)
        finally:
            self._counters.wait_seconds += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not made yet: no recursion
            raise AttributeError(name)
        return getattr(self._batches, name)


class InlineIterator(LoaderIterator):
    """Without workers: loads, packs and sends in the calling thread.

    Nothing is loaded ahead: the dataset and the loop share the random generators, and torch's loader would not.

    Args:
        batches: torch's iterator.
        stager: packs and sends.
        target: where to, for batches that do not fit into the stager's pool.
        counters: of the loader.
        owner: keeps the stager open.
    """

    def __init__(self, batches: Any, stager: Stager, target: Target, counters: Counters, owner: object) -> None:
        super().__init__(batches, target, counters)
        self._target = target
        self._owner = owner
        self._stager = stager

    def _next_batch(self) -> Any:
        batch = self._fetch()
        try:
            transfer, fallback = self._stager.stage(batch), False
        except BudgetExceededError:
            planned = plan(batch)
            host = torch.empty(planned.table.nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device
            Moves(planned.table, planned.tensors, host).everything()
            transfer, fallback = send_packed(self._target, Layout.of_plan(planned), host, planned.passthrough()), True
        self._counters.count(transfer, fallback=fallback)
        return transfer.get()


class WorkersIterator(LoaderIterator):
    """With workers: yields what the keeper's thread sends of what they packed.

    Args:
        batches: torch's iterator, whose workers run a `SlabCollate`.
        keeper: of their slots; started.
        target: where to.
        depth: batches sent ahead.
        counters: of the loader.
    """

    def __init__(self, batches: Any, keeper: SlotKeeper, target: Target, depth: int, counters: Counters) -> None:
        super().__init__(batches, target, counters)
        self._keeper = keeper
        self._sender = Sender(target, counters)
        self._sending = _torch.take_queues(batches, self._sender, depth, keeper.wake)
        keeper.keep(_torch.what_ends_workers(batches))
        keeper.serve(self._sending)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the workers were ended and the slabs given back."""
        return self._closed

    def close_if_a_worker_is_lost(self) -> None:
        """Give everything back if a worker was killed, or ended when it should not: torch cannot go on without it."""
        codes = [worker.exitcode for worker in _torch.workers_of(self._batches)]
        if any(codes) or (_torch.are_persistent(self._batches) and 0 in codes):
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            shut_down(self._batches, self._keeper)

    def __del__(self) -> None:
        # No weakref.finalize: that would keep torch's iterator, and so a collate function whose object has the loader.
        # At exit the workers are ended anyway, and the memory goes.
        if "_closed" in vars(self) and not sys.is_finalizing():
            self._close()

    def _next_batch(self) -> Any:
        try:
            transfer = self._fetch()
            if isinstance(transfer, Failed):
                transfer.reraise()
            if isinstance(transfer, Arrival):  # torchdata's iterator read it while it was made
                transfer = self._sender.send(transfer)
            assert isinstance(transfer, Transfer)
            return transfer.get()
        finally:
            self._sending.advance()  # last: the thread that it wakes wants the interpreter lock, too

    def _fetch(self) -> Any:
        if self.closed:
            raise StopIteration
        try:
            return super()._fetch()
        except StopIteration:
            raise
        except Exception as error:
            text = self._keeper.waiting() if isinstance(error, RuntimeError) and "timed out" in str(error) else ""
            self.close_if_a_worker_is_lost()
            if text:
                raise RuntimeError(f"{error}; {text}") from error
            raise

    def _end(self) -> None:
        if not _torch.are_persistent(self._batches):
            self._close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin again with the same workers (``persistent_workers``); torch's loader calls it."""
        self._run_ahead.forget()
        self._since = None
        try:
            _torch.begin_again(self._batches, loader, first_iter)
        except BaseException:
            self._close()  # an interrupt, say: the workers' answers would come in the middle of a later pass
            raise


def shut_down(batches: Any, keeper: SlotKeeper) -> None:
    """End the workers, then give all slots back. Runs once, however the iterator ends."""
    if os.getpid() != keeper.pid:  # a forked child's copy
        return
    try:  # an interrupt may come anywhere
        try:
            keeper.close()
        finally:
            _torch.end_workers(batches)
    finally:
        keeper.finish(leak=not all(_ended(worker) for worker in _torch.workers_of(batches)))


def _ended(worker: Any) -> bool:
    if worker.is_alive():  # torch has asked it, and sent it SIGTERM
        worker.kill()
        worker.join(_KILL_SECONDS)
    # One that another thread has just waited for, by starting a process say, counts as alive until that thread goes on.
    return not worker.is_alive() or not process_exists(worker.pid)
