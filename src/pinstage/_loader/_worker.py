"""The worker's side: which slots it may write, and how it gets more. Touches no CUDA."""

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
"""A slot that replaces one that was too small has so much more than is needed: batches of random size settle soon."""

ASK_AGAIN_AFTER = 32
"""Batches after a refusal during which a worker makes do with what it has."""


class Terms(NamedTuple):
    """What a worker has to know; travels with the process object."""

    main_pid: int
    limit: int
    """Slots that one worker may have."""


_CLOSED = "the iterator of this worker was shut down"


class ClosedError(RuntimeError):
    """The iterator is shutting down; nobody will see this."""


class WorkerSlot:
    """A slot as the worker sees it."""

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


class WorkerSlots:
    """The slots of this worker.

    Args:
        channel: to the main process.
        terms: what the main process said at the start.
    """

    def __init__(self, channel: Connection, terms: Terms) -> None:
        self._channel = channel
        self._terms = terms
        self._slots: dict[int, WorkerSlot] = {}
        self._patience = 0
        self._largest = 0
        self._reply = ""
        self.waited_seconds = 0.0
        """Time spent waiting for slots since the caller set it to 0."""
        try:
            self._main: int | None = os.pidfd_open(terms.main_pid)
        except ProcessLookupError:
            _exit()
        except (AttributeError, OSError):  # a kernel before 5.3, or a sandbox
            self._main = None

    def take(self, nbytes: int) -> WorkerSlot | None:
        """Return a slot to write, at least so large, or None if there can be none.

        Blocks while all slots that are large enough are in the main process's hands; ends with the iterator, or the
        main process.
        """
        self._patience -= 1
        while self._channel.poll():
            self._receive()
        while True:
            slot = self._smallest_free(nbytes)
            if slot is not None:
                slot.is_free = False
                return slot
            fits_later = any(slot.nbytes >= nbytes for slot in self._slots.values())
            if fits_later and self._patience > 0:
                self._wait_for_slot(nbytes)
                continue
            idle = [slot for slot in self._slots.values() if slot.is_free]
            if len(self._slots) >= self._terms.limit and not idle:
                self._wait_for_slot(nbytes)
                continue
            dropped = idle if len(self._slots) >= self._terms.limit else []
            if self._ask(nbytes, dropped):
                continue
            if not fits_later and idle and not dropped and self._ask(nbytes, idle):
                continue
            if not fits_later:
                return None
            self._patience = ASK_AGAIN_AFTER

    def give_back(self, slot: WorkerSlot) -> None:
        """Take back a slot that was not sent after all."""
        slot.is_free = True

    def _smallest_free(self, nbytes: int) -> WorkerSlot | None:
        fitting = [slot for slot in self._slots.values() if slot.is_free and slot.nbytes >= nbytes]
        return min(fitting, key=lambda slot: slot.nbytes, default=None)

    def _ask(self, nbytes: int, dropped: list[WorkerSlot]) -> bool:
        """Ask the main process for one more slot; give up others for it. Says whether there is one."""
        for slot in dropped:
            del self._slots[slot.number]
            slot.close()
        wanted = nbytes
        if self._largest:
            wanted = max(self._largest, int(nbytes * GROWTH) if nbytes > self._largest else nbytes)
        self._largest = max(self._largest, nbytes)
        self._reply = ""
        began = time.perf_counter()
        self._send(("ask", nbytes, wanted, [slot.number for slot in dropped]))
        while not self._reply:
            self._wait()
        self.waited_seconds += time.perf_counter() - began
        return self._reply == "granted"

    def _wait_for_slot(self, nbytes: int) -> None:
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
            slot = self._slots.get(details[0])
            if slot is not None:
                slot.is_free = True
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
        self._slots[number] = WorkerSlot(number, mapping)
        return True

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise ClosedError(_CLOSED) from None


def _exit() -> NoReturn:
    # The main process is gone: nobody reads the queue any more, and waiting for its feeder could take forever.
    os._exit(1)
