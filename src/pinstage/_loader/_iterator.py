"""One pass over the data: what workers packed, on the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from .._layout import pack, take_apart
from .._reaper import reaper
from .._staging import RunAhead, Transfer, send_packed
from .._steps import step
from .._torch import next_batch
from ..errors import BudgetExceededError
from ._arrivals import Arrival, Failed
from ._ending import Ending
from ._sending import Sender, SendingQueue
from ._server import SlabServer
from ._slabs import Slabs


class LoaderIterator:
    """Yields batches on the device. Other attributes are those of torch's iterator behind it.

    Args:
        batches: torch's iterator.
        slabs: of the loader; kept, so that they stay.
    """

    def __init__(self, batches: Any, slabs: Slabs) -> None:
        self._batches = batches
        self._slabs = slabs
        self._counters = slabs.counters
        self._run_ahead = RunAhead(slabs.target)
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
                return next_batch(self._batches)
        finally:
            self._counters.wait_seconds += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not made yet: no recursion
            raise AttributeError(name)
        return getattr(self._batches, name)


class InlineIterator(LoaderIterator):
    """Without workers: loads, packs and sends in the calling thread.

    Nothing is loaded ahead: the dataset and the loop share the random generators, and torch's loader would not.
    """

    def _next_batch(self) -> Any:
        batch = self._fetch()
        try:
            transfer, fallback = self._slabs.stager().stage(batch), False
        except BudgetExceededError:
            parts = take_apart(batch)
            host = torch.empty(parts.table.nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device
            pack(parts, host)
            transfer = send_packed(self._slabs.target, parts.structure, parts.table, host.data_ptr(), parts.others())
            fallback = True
        self._counters.count(transfer, fallback=fallback)
        return transfer.get()


class WorkersIterator(LoaderIterator):
    """With workers: yields what the server's thread sends of what they packed.

    Args:
        batches: torch's iterator, whose workers run a `SlabCollate`.
        server: of their slabs; started.
        ending: of the workers.
        slabs: of the loader.
        depth: batches sent ahead.
    """

    def __init__(self, batches: Any, server: SlabServer, ending: Ending, slabs: Slabs, depth: int) -> None:
        super().__init__(batches, slabs)
        self._server = server
        self._ending = ending
        self._sender = Sender(slabs.target, slabs.counters)
        self._sending = SendingQueue(batches._data_queue, batches, self._sender, depth, server.wake)
        batches._data_queue = self._sending
        reaper.watch(self, ending.reap)
        server.serve(self._sending)

    @property
    def closed(self) -> bool:
        """Whether the workers were ended and the slabs given back."""
        return self._ending.begun

    def close_if_a_worker_is_lost(self) -> None:
        """Give everything back if a worker was killed, or ended when it should not: torch cannot go on without it."""
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
            text = self._server.waiting() if isinstance(error, RuntimeError) and "timed out" in str(error) else ""
            self.close_if_a_worker_is_lost()
            if text:
                raise RuntimeError(f"{error}; {text}") from error
            raise

    def _end(self) -> None:
        if not self._ending.workers.persistent:
            self._close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin again with the same workers (``persistent_workers``); torch's loader calls it."""
        self._run_ahead.forget()
        self._since = None
        try:
            self._sending.drop_until_resumed(len(self._ending.workers.processes))
            self._batches._reset(loader, first_iter)
            self._sending.begin()
        except BaseException:
            self._close()  # an interrupt, say: the workers' answers would come in the middle of a later pass
            raise
