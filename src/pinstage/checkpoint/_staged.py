"""A staged state dict: a slab, tensors over it, and the transfer to another process.

Each tensor has a storage of its own that ends where the tensor ends, or torch's writer would copy
it once more. The slab returns to the pool when the last of these storages is freed, and the
`StagedState` no longer keeps it::

    trainer's process                               writer's process (if there is one)
      slab <-- view <-- storages <-- tensors          descriptor, places, message
                 ^                                      -> mapping <-- storages <-- tensors
               StagedState, until the writer is done
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import Future
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import Place
from .._compat.views import tensor_over
from .._memory import disregard_captures
from .._stage import HostTransfer, clear_own_frames, landings
from ..errors import PinstageError
from ._snapshot import Snapshot, rebuild

LOOK_AGAIN_SECONDS = 0.01
"""Poll interval for the return of a slab and for the end of a save's thread."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A view of a lease."""


class Content(NamedTuple):
    """Everything in a staged state dict except the bytes in its slab."""

    message: bytes
    tensors: list[Place | torch.Tensor]
    """Where each tensor's bytes are in the slab; or a tensor that could not be packed."""
    kept: list[Any]

    def over(self, memory: Any) -> dict[str, Any]:
        """Return the state dict, with tensors over memory that shows the slab's bytes; they keep it
        alive.
        """
        tensors = [
            tensor_over(memory, one.dtype, one.shape, one.stride, one.offset)
            if isinstance(one, Place)
            else one
            for one in self.tensors
        ]
        state: dict[str, Any] = rebuild(self.message, tensors, self.kept)
        return state


class StagedBytes(NamedTuple):
    """The bytes of a staged state dict."""

    memory: Bytes
    """A view of the lease; it keeps the slab out of the pool."""
    fd: int | None
    """The descriptor by which another process can map the bytes; None if it cannot."""


class StagedState(dict[str, Any]):
    """A state dict whose tensors are on the host; the result of `CheckpointStager.stage`.

    An ordinary dict, except that ``multiprocessing`` sends a descriptor of the slab to another
    process, not its bytes. Afterwards it is empty in this process, and keeps the slab until it is
    freed.
    """

    def __init__(self, content: Content, slab: StagedBytes | None) -> None:
        state = content.over(None if slab is None else slab.memory)
        super().__init__(state)
        # The `_metadata` of a module's state dict.
        self.__dict__.update(getattr(state, "__dict__", {}))
        self._content: Content | None = content
        self._slab = slab

    def let_go(self) -> None:
        """Stop keeping the slab: the writer is done. Tensors that are still alive in this process
        keep it.
        """
        self._content = self._slab = None


def _reduce(staged: StagedState) -> tuple[Any, ...]:
    content, slab = staged._content, staged._slab
    if content is None:
        raise PinstageError(
            "a staged state dict can be sent to a writer only while it is being saved; stage it "
            "again"
        )
    staged.clear()
    if slab is None:
        return content.over, (None,)
    if slab.fd is None:
        raise PinstageError(
            f"a writer in another process cannot map the pool's memory: {slab.memory.nbytes} "
            "bytes; make the pool of SlabPool(memory=SharedMemory()), or save in a thread"
        )
    return _arrive, (content, DupFd(slab.fd), slab.memory.nbytes)


def _arrive(content: Content, handle: Any, nbytes: int) -> dict[str, Any]:
    """Map the slab in the writer's process; it is unmapped when the last tensor is freed. Touches
    no CUDA.
    """
    fd = handle.detach()
    try:
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    return content.over(memory)


ForkingPickler.register(StagedState, _reduce)


class Save:
    """Watches a staged state dict while a writer reads it, without keeping it alive."""

    def __init__(self, memory: Bytes | None) -> None:
        self._memory = None if memory is None else weakref.ref(memory)
        self._writers: list[threading.Thread] = []
        self._staged: weakref.ref[StagedState] | None = None

    def is_over(self) -> bool:
        return self._memory is None or self._memory() is None

    def is_taken(self, staged: StagedState, thread: threading.Thread) -> None:
        self._staged = weakref.ref(staged)
        self._writers.append(thread)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the slab is no longer in use, or its writer has ended; return whether that was
        in time.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_over():
            if self._writers and not any(thread.is_alive() for thread in self._writers):
                # Take the slab from a save that has ended: an error may keep its frames, and these
                # the state that was sent to another process. Tensors that are still referred to in
                # this process keep the slab.
                if self._staged is not None and (staged := self._staged()) is not None:
                    staged.let_go()
                    del staged
                gc.collect()  # an error and its frames may refer to each other
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(LOOK_AGAIN_SECONDS)
        return True


class StagedSave(Future[dict[str, Any]]):
    """A future of a state dict that is being copied to the host. The checkpointers wait for it."""

    def __init__(self, save: Save) -> None:
        super().__init__()
        self._save = save
        self._trainer = threading.current_thread()
        self._bringer: threading.Thread | None = None

    def bring(
        self, transfer: HostTransfer, snapshot: Snapshot, slab: StagedBytes | None
    ) -> threading.Thread:
        """Start a thread that waits for the bytes and makes the state dict; return the thread."""
        self._bringer = threading.Thread(
            target=self._bring,
            args=(transfer, snapshot, slab),
            name="pinstage-checkpoint",
            daemon=True,
        )
        self._bringer.start()
        return self._bringer

    def _bring(self, transfer: HostTransfer, snapshot: Snapshot, slab: StagedBytes | None) -> None:
        try:
            disregard_captures()  # or the wait would invalidate a capture in another thread
            content = Content(snapshot.message, landings(transfer), snapshot.kept)
            transfer.synchronize()  # until then, the snapshot keeps the tensors that copies read
            staged = StagedState(content, slab)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            clear_own_frames(error)
            slab = None
            self.set_exception(error)
        else:
            self.set_result(staged)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the state dict, and return it."""
        staged = super().result(timeout)
        thread = threading.current_thread()
        if thread not in (self._trainer, self._bringer):  # these two don't write; they only wait
            assert isinstance(staged, StagedState)
            self._save.is_taken(staged, thread)
        return staged
