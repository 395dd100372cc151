"""A staged state dict: its slab, tensors over it, and the transfer to another process.

It has one slab, or several where page-locking a large one was refused. Each tensor has a storage of
its own that ends where the tensor ends, or torch's writer would copy it once more. A slab returns
to the pool when the last of these storages is freed, and the `StagedState` no longer keeps it::

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
from collections.abc import Sequence
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
    """Everything in a staged state dict except the bytes in its slabs."""

    message: bytes
    groups: list[list[Place | torch.Tensor]]
    """Where the bytes of each slab's tensors are in it; or tensors that could not be packed."""
    kept: list[Any]

    def over(self, memories: Sequence[Any]) -> dict[str, Any]:
        """Return the state dict, with tensors over memory that shows the bytes of each slab; they
        keep it alive.
        """
        tensors = [
            tensor_over(memory, one.dtype, one.shape, one.stride, one.offset)
            if isinstance(one, Place)
            else one
            for group, memory in zip(self.groups, memories, strict=True)
            for one in group
        ]
        state: dict[str, Any] = rebuild(self.message, tensors, self.kept)
        return state


class StagedBytes(NamedTuple):
    """The bytes of a staged state dict in one slab."""

    memory: Bytes
    """A view of the lease; it keeps the slab out of the pool."""
    fd: int | None
    """The descriptor by which another process can map the bytes; None if it cannot."""


Slabs = list[StagedBytes | None]
"""The slab of each group of tensors; None if the group has no bytes."""


class StagedState(dict[str, Any]):
    """A state dict whose tensors are on the host; the result of `CheckpointStager.stage`.

    An ordinary dict, except that ``multiprocessing`` sends descriptors of the slabs to another
    process, not their bytes. Afterwards it is empty in this process, and keeps the slabs until it
    is freed.
    """

    def __init__(self, content: Content, slabs: Slabs) -> None:
        state = content.over([slab and slab.memory for slab in slabs])
        super().__init__(state)
        # The `_metadata` of a module's state dict.
        self.__dict__.update(getattr(state, "__dict__", {}))
        self._content: Content | None = content
        self._slabs = slabs

    def let_go(self) -> None:
        """Stop keeping the slabs: the writer is done. Tensors that are still alive in this process
        keep theirs.
        """
        self._content, self._slabs = None, []


def _reduce(staged: StagedState) -> tuple[Any, ...]:
    content, slabs = staged._content, staged._slabs
    if content is None:
        raise PinstageError(
            "a staged state dict can be sent to a writer only while it is being saved; stage it "
            "again"
        )
    staged.clear()
    return _arrive, (content, [slab and _handle_of(slab) for slab in slabs])


def _handle_of(slab: StagedBytes) -> tuple[Any, int]:
    """Return what another process maps a slab with."""
    if slab.fd is None:
        raise PinstageError(
            f"a writer in another process cannot map the pool's memory: {slab.memory.nbytes} "
            "bytes; make the pool of SlabPool(memory=SharedMemory()), or save in a thread"
        )
    return DupFd(slab.fd), slab.memory.nbytes


def _arrive(content: Content, handles: list[tuple[Any, int] | None]) -> dict[str, Any]:
    """Map the slabs in the writer's process; each is unmapped when its last tensor is freed.
    Touches no CUDA.
    """
    return content.over([handle and _mapped(*handle) for handle in handles])


def _mapped(handle: Any, nbytes: int) -> mmap.mmap:
    fd = handle.detach()
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


ForkingPickler.register(StagedState, _reduce)


class Save:
    """Watches a staged state dict while a writer reads it, without keeping it alive."""

    def __init__(self, slabs: Slabs) -> None:
        self._memories = [weakref.ref(slab.memory) for slab in slabs if slab is not None]
        self._writers: list[threading.Thread] = []
        self._staged: weakref.ref[StagedState] | None = None

    def is_over(self) -> bool:
        return not any(memory() is not None for memory in self._memories)

    def is_taken(self, staged: StagedState, thread: threading.Thread) -> None:
        self._staged = weakref.ref(staged)
        self._writers.append(thread)

    def wait(self, timeout: float | None) -> bool:
        """Wait until no slab is in use, or its writer has ended; return whether it was in time."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_over():
            if self._writers and not any(thread.is_alive() for thread in self._writers):
                # Take the slabs from a save that has ended: an error may keep its frames, and these
                # the state that was sent to another process. Tensors that are still referred to in
                # this process keep their slabs.
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
        self, transfers: list[HostTransfer], snapshot: Snapshot, slabs: Slabs
    ) -> threading.Thread:
        """Start a thread that waits for the bytes and makes the state dict; return the thread."""
        self._bringer = threading.Thread(
            target=self._bring,
            args=(transfers, snapshot, slabs),
            name="pinstage-checkpoint",
            daemon=True,
        )
        self._bringer.start()
        return self._bringer

    def _bring(self, transfers: list[HostTransfer], snapshot: Snapshot, slabs: Slabs) -> None:
        try:
            disregard_captures()  # or the wait would invalidate a capture in another thread
            groups = [landings(transfer) for transfer in transfers]
            content = Content(snapshot.message, groups, snapshot.kept)
            for transfer in transfers:
                # Until then, the snapshot keeps the tensors that copies read.
                transfer.synchronize()
            staged = StagedState(content, slabs)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            clear_own_frames(error)
            slabs.clear()
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
