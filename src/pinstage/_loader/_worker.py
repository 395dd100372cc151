"""The worker's side: which slabs the worker may write, and how it gets more. Touches no CUDA."""

from __future__ import annotations

import ctypes
import os
import time
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from .._host import process_exists
from .._memory import SharedMapping, attach
from ._messages import Ask, Freed, Granted, Unmapped, Waiting, receive_descriptor

PARENT_CHECK_SECONDS = 1.0
"""Poll interval of a waiting worker for the main process, on kernels without pidfd."""

GROWTH = 1.25
"""A slab that replaces a smaller one is larger than needed by this factor, so that batches of
random size soon fit.
"""

ASK_AGAIN_AFTER = 32
"""Number of batches after a refusal for which a worker makes do with its slabs."""


class ShutDownError(RuntimeError):
    """The iterator is being shut down. Ends the worker's batch; never seen by users."""


class WorkerSlab:
    """A slab, mapped in the worker. `tensor` shows its bytes as uint8 ``[nbytes]``."""

    def __init__(self, number: int, mapping: SharedMapping) -> None:
        self.number = number
        self.nbytes = mapping.nbytes
        self.is_free = True
        self._mapping = mapping
        buffer = (ctypes.c_ubyte * mapping.nbytes).from_address(mapping.ptr)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap the slab. No view of `tensor` may be used afterwards."""
        del self.tensor
        self._mapping.close()


class WorkerSlabs:
    """The slabs of this worker.

    Args:
        channel: the channel to the broker in the main process.
        main_pid: the id of the main process.
        limit: the number of slabs that the worker may have.
    """

    def __init__(self, channel: Connection, main_pid: int, limit: int) -> None:
        self._channel = channel
        self._main_pid = main_pid
        self._limit = limit
        self._slabs: dict[int, WorkerSlab] = {}
        self._patience = 0
        self._largest = 0
        self._is_asking = self._was_granted = False
        self._received = 0
        self.waited_seconds = 0.0
        """Seconds that `take` waited since the caller set this to 0."""
        try:
            self._main: int | None = os.pidfd_open(main_pid)
        except ProcessLookupError:
            _exit()
        except (AttributeError, OSError):  # a kernel before 5.3, or a sandbox
            self._main = None
        util.Finalize(None, self._exit_if_orphaned, exitpriority=0)  # before queues are closed

    def take(self, nbytes: int) -> WorkerSlab | None:
        """Return a slab of at least `nbytes` to write, or None if there can be none.

        Blocks while the main process has all slabs that are large enough. The worker then asks for
        one more, but takes another that becomes free before, since page-locking takes time. Ends
        the worker if the main process ends.

        Raises:
            ShutDownError: the iterator is being shut down.
        """
        self._patience -= 1
        while self._channel.poll():
            self._receive()
        while (slab := self._smallest_free(nbytes)) is None:
            if self._has_to_wait(nbytes):
                self._send(Waiting(nbytes, self._received))
                self._wait()
            elif not self._gets_another(nbytes):
                return None
        slab.is_free = False
        return slab

    def _smallest_free(self, nbytes: int) -> WorkerSlab | None:
        fitting = [slab for slab in self._idle() if slab.nbytes >= nbytes]
        return min(fitting, key=lambda slab: slab.nbytes, default=None)

    def _idle(self) -> list[WorkerSlab]:
        return [slab for slab in self._slabs.values() if slab.is_free]

    def _will_fit(self, nbytes: int) -> bool:
        """Return whether a slab is large enough, though it may not be free yet."""
        return any(slab.nbytes >= nbytes for slab in self._slabs.values())

    def _has_to_wait(self, nbytes: int) -> bool:
        """Return whether the worker can only wait: it has asked, or has its share, or was
        refused.
        """
        if self._is_asking:
            return True
        if len(self._slabs) >= self._limit and not self._idle():
            return True
        return self._patience > 0 and self._will_fit(nbytes)

    def _gets_another(self, nbytes: int) -> bool:
        """Ask for another slab; return False if there is none.

        Waits for the answer, unless a slab that is large enough will be free anyway.
        """
        idle = self._idle()
        dropped = idle if len(self._slabs) >= self._limit else []
        self._ask(nbytes, dropped)
        if self._will_fit(nbytes) or self._wait_for_answer():
            return True
        if dropped or not idle:
            return False
        self._ask(nbytes, idle)  # there may be room if these are given up
        return self._wait_for_answer()

    def _ask(self, nbytes: int, dropped: list[WorkerSlab]) -> None:
        """Give up some slabs, and ask the main process for another slab."""
        for slab in dropped:
            del self._slabs[slab.number]
            slab.close()
        wanted = nbytes
        if self._largest:
            wanted = max(self._largest, int(nbytes * GROWTH) if nbytes > self._largest else nbytes)
        self._largest = max(self._largest, nbytes)
        self._is_asking = True
        self._send(Ask(nbytes, wanted, [slab.number for slab in dropped]))

    def _wait_for_answer(self) -> bool:
        """Wait until the main process has answered; return whether the worker has another slab."""
        while self._is_asking:
            self._wait()
        return self._was_granted

    def _wait(self) -> None:
        """Wait for one message from the broker, and receive it."""
        sources: list[Any] = [self._channel] if self._main is None else [self._channel, self._main]
        began = time.perf_counter()
        while self._channel not in wait(sources, PARENT_CHECK_SECONDS):
            self._exit_if_orphaned()
        self.waited_seconds += time.perf_counter() - began
        self._receive()

    def _exit_if_orphaned(self) -> None:
        """End this process at once if the main process has ended."""
        if wait([self._main], 0) if self._main is not None else not process_exists(self._main_pid):
            _exit()

    def _receive(self) -> None:
        try:
            message = self._channel.recv()
        except (EOFError, OSError):
            raise ShutDownError from None
        self._received += 1
        if isinstance(message, Freed):
            slab = self._slabs.get(message.number)
            if slab is not None:
                slab.is_free = True
            return
        self._is_asking = False
        self._was_granted = isinstance(message, Granted) and self._attach(message)
        if not self._was_granted:
            self._patience = ASK_AGAIN_AFTER

    def _attach(self, granted: Granted) -> bool:
        try:
            fd = receive_descriptor(self._channel)
            try:
                mapping = attach(fd, granted.nbytes)
            finally:
                os.close(fd)
        except EOFError:
            raise ShutDownError from None
        except (OSError, ValueError, MemoryError) as error:
            # Too many open files, no memory: the worker does without.
            self._send(Unmapped(granted.number, f"a worker cannot map it: {error!r}"))
            return False
        self._slabs[granted.number] = WorkerSlab(granted.number, mapping)
        return True

    def _send(self, message: Ask | Waiting | Unmapped) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise ShutDownError from None


def _exit() -> NoReturn:
    # The main process has ended. The queue has no reader, and its feeder thread could wait forever
    # at a normal exit.
    os._exit(1)
