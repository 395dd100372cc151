"""The worker's side: which slabs it may write, and how it gets more. Touches no CUDA."""

from __future__ import annotations

import ctypes
import os
import time
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

import torch

from .._host import process_exists
from .._memory import SharedMapping, SharedMemory
from ._descriptors import receive_descriptor

PARENT_CHECK_SECONDS = 1.0
"""How often a waiting worker looks whether the main process is alive, where the kernel cannot tell it by itself."""

GROWTH = 1.25
"""A slab that replaces one that was too small has so much more than is needed: batches of random size settle soon."""

ASK_AGAIN_AFTER = 32
"""Batches after a refusal during which a worker makes do with what it has."""


class Terms(NamedTuple):
    """What a worker has to know; travels with the process object."""

    main_pid: int
    limit: int
    """Slabs that one worker may have."""


_CLOSED = "the iterator of this worker was shut down"


class ClosedError(RuntimeError):
    """The iterator is shutting down; nobody will see this."""


class WorkerSlab:
    """A slab as the worker sees it."""

    def __init__(self, number: int, mapping: SharedMapping) -> None:
        self.number = number
        self.nbytes = mapping.nbytes
        self.is_free = True
        self._mapping = mapping
        buffer = (ctypes.c_ubyte * mapping.nbytes).from_address(mapping.ptr)
        self.tensor: torch.Tensor | None = torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap it. A view that somebody kept keeps the pages mapped instead (nobody should have any)."""
        self.tensor = None
        self._mapping.close()


class WorkerSlabs:
    """The slabs of this worker.

    Args:
        channel: to the main process.
        terms: what the main process said at the start.
    """

    def __init__(self, channel: Connection, terms: Terms) -> None:
        self._channel = channel
        self._terms = terms
        self._slabs: dict[int, WorkerSlab] = {}
        self._patience = 0
        self._largest = 0
        self._reply = ""
        self.waited_seconds = 0.0
        """Time spent waiting for slabs since the caller set it to 0."""
        try:
            self._main: int | None = os.pidfd_open(terms.main_pid)
        except ProcessLookupError:
            _exit()
        except (AttributeError, OSError):  # a kernel before 5.3, or a sandbox
            self._main = None

    def take(self, nbytes: int) -> WorkerSlab | None:
        """Return a slab to write, at least so large, or None if there can be none.

        Blocks while all slabs that are large enough are in the main process's hands; ends with the iterator, or the
        main process.
        """
        self._patience -= 1
        while self._channel.poll():
            self._receive()
        while True:
            slab = self._smallest_free(nbytes)
            if slab is not None:
                slab.is_free = False
                return slab
            fits_later = any(slab.nbytes >= nbytes for slab in self._slabs.values())
            if fits_later and self._patience > 0:
                self._wait_for_slab(nbytes)
                continue
            idle = [slab for slab in self._slabs.values() if slab.is_free]
            if len(self._slabs) >= self._terms.limit and not idle:
                self._wait_for_slab(nbytes)
                continue
            dropped = idle if len(self._slabs) >= self._terms.limit else []
            if self._ask(nbytes, dropped):
                continue
            if not fits_later and idle and not dropped and self._ask(nbytes, idle):
                continue
            if not fits_later:
                return None
            self._patience = ASK_AGAIN_AFTER

    def give_back(self, slab: WorkerSlab) -> None:
        """Take back a slab that was not sent after all."""
        slab.is_free = True

    def _smallest_free(self, nbytes: int) -> WorkerSlab | None:
        fitting = [slab for slab in self._slabs.values() if slab.is_free and slab.nbytes >= nbytes]
        return min(fitting, key=lambda slab: slab.nbytes, default=None)

    def _ask(self, nbytes: int, dropped: list[WorkerSlab]) -> bool:
        """Ask the main process for one more slab; give up others for it. Says whether there is one."""
        for slab in dropped:
            del self._slabs[slab.number]
            slab.close()
        wanted = nbytes
        if self._largest:
            wanted = max(self._largest, int(nbytes * GROWTH) if nbytes > self._largest else nbytes)
        self._largest = max(self._largest, nbytes)
        self._reply = ""
        began = time.perf_counter()
        self._send(("ask", nbytes, wanted, [slab.number for slab in dropped]))
        while not self._reply:
            self._wait()
        self.waited_seconds += time.perf_counter() - began
        return self._reply == "granted"

    def _wait_for_slab(self, nbytes: int) -> None:
        began = time.perf_counter()
        self._send(("starved", nbytes))
        self._wait()
        self.waited_seconds += time.perf_counter() - began

    def _wait(self) -> None:
        """Wait for one message and take it in."""
        sources: list[Any] = [self._channel] if self._main is None else [self._channel, self._main]
        while True:
            ready = wait(sources, PARENT_CHECK_SECONDS)
            if self._channel in ready:
                self._receive()
                return
            if ready or not process_exists(self._terms.main_pid):
                _exit()

    def _receive(self) -> None:
        try:
            kind, *details = self._channel.recv()
        except (EOFError, OSError):
            kind, details = "closed", []
        if kind == "closed":
            raise ClosedError(_CLOSED)
        if kind == "free":
            slab = self._slabs.get(details[0])
            if slab is not None:
                slab.is_free = True
        else:
            self._reply = "granted" if kind == "granted" and self._attach(*details) else "refused"

    def _attach(self, number: int, nbytes: int) -> bool:
        try:
            fd = receive_descriptor(self._channel)
            try:
                mapping = SharedMemory.attach(fd, nbytes)
            finally:
                os.close(fd)
        except EOFError:
            raise ClosedError(_CLOSED) from None
        except (OSError, ValueError, MemoryError) as error:  # too many open files, no memory: the slow way remains
            self._send(("unmapped", number, f"a worker cannot map it: {error!r}"))
            return False
        self._slabs[number] = WorkerSlab(number, mapping)
        return True

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise ClosedError(_CLOSED) from None


def _exit() -> NoReturn:
    # The main process is gone: nobody reads the queue any more, and waiting for its feeder could take forever.
    os._exit(1)
