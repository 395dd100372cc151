"""A staged state dict: one slab of the host, tensors over it, and its way to a writer in another process.

Each tensor has a storage of its own that ends where it ends, or torch's writer would copy it once more. The slab goes
back to the pool when the last of these storages is gone, and what stands for it here::

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

from .._stage import HostTransfer, Landing, clear_own_frames, landings
from ..errors import PinstageError
from ._snapshot import Snapshot, rebuild

LOOK_AGAIN_SECONDS = 0.1
"""Poll interval for the end of a save's thread. The return of the slab is noticed at once."""

Place = Landing | torch.Tensor
"""Where a tensor's bytes are in the slab; or a tensor that could not be packed."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A view of a lease."""


class Content(NamedTuple):
    """All of a staged state dict but the bytes in its slab."""

    message: bytes
    places: list[Place]
    kept: list[Any]

    def over(self, memory: Any) -> dict[str, Any]:
        """Return the state dict, with tensors over memory that shows the slab's bytes; they keep it alive."""
        tensors = [place if isinstance(place, torch.Tensor) else over(memory, place) for place in self.places]
        state: dict[str, Any] = rebuild(self.message, tensors, self.kept)
        return state


def over(memory: Any, place: Landing) -> torch.Tensor:
    """Return a tensor over memory, whose storage ends where it ends."""
    count = math.prod(place.shape)
    if not count:
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)


class StagedBytes(NamedTuple):
    """The bytes of a staged state dict."""

    memory: Bytes
    """A view of the lease; it keeps the slab out of the pool."""
    fd: int | None
    """By which another process can map them; None if it cannot."""


class StagedState(dict[str, Any]):
    """A state dict whose tensors are on the host; what `CheckpointStager.stage` promises.

    An ordinary dict, but for one thing: sent to another process by ``multiprocessing``, it is a descriptor of the slab,
    not its bytes. It is empty here afterwards, and keeps the slab until it is freed.
    """

    def __init__(self, content: Content, slab: StagedBytes | None) -> None:
        state = content.over(None if slab is None else slab.memory)
        super().__init__(state)
        self.__dict__.update(getattr(state, "__dict__", {}))  # the `_metadata` of a module's state dict
        self._content: Content | None = content
        self._slab = slab

    def let_go(self) -> None:
        """Keep the slab no longer: the writer is done. Tensors that are still here do."""
        self._content = self._slab = None


def _reduce(staged: StagedState) -> tuple[Any, ...]:
    content, slab = staged._content, staged._slab
    if content is None:
        raise PinstageError("a staged state dict can be sent to a writer as long as it is being saved; stage it again")
    staged.clear()
    if slab is None:
        return _arrive, (content, None, 0)
    if slab.fd is None:
        raise PinstageError(
            f"a writer in another process cannot map the pool's memory: {slab.memory.nbytes} bytes; make the pool of "
            "SlabPool(memory=SharedMemory()), or save in a thread"
        )
    return _arrive, (content, DupFd(slab.fd), slab.memory.nbytes)


def _arrive(content: Content, handle: Any, nbytes: int) -> dict[str, Any]:
    """Map the slab in the writer's process; it is unmapped when the last tensor is freed. Touches no CUDA."""
    if handle is None:
        return content.over(None)
    fd = handle.detach()
    try:
        memory = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    return content.over(memory)


ForkingPickler.register(StagedState, _reduce)


class Save:
    """Watches over a staged state dict while it is read; doesn't keep it."""

    def __init__(self, memory: Bytes | None) -> None:
        self._bell = threading.Lock()  # a plain lock: the collector may ring anywhere, in the middle of a wait, too
        self._bell.acquire()
        bell = self._bell
        self._memory = None if memory is None else weakref.ref(memory, lambda _: bell.release())
        self._writers: list[threading.Thread] = []
        self._staged: weakref.ref[StagedState] | None = None

    def is_over(self) -> bool:
        return self._memory is None or self._memory() is None

    def is_taken(self, staged: StagedState, thread: threading.Thread) -> None:
        self._staged = weakref.ref(staged)
        self._writers.append(thread)

    def wait(self, timeout: float | None) -> bool:
        """Wait until the slab is out of use, or its writer has ended; say whether that was in time."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_over():
            if self._writers and not any(thread.is_alive() for thread in self._writers):
                # The slab is taken from a save that has ended: an error may keep its frames, and these what another
                # process read. Tensors that are referred to here remain; the slab waits for them.
                if self._staged is not None and (staged := self._staged()) is not None:
                    staged.let_go()
                    del staged
                gc.collect()  # an error and its frames, which refer to one another
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._bell.acquire(timeout=min(left, LOOK_AGAIN_SECONDS))
        return True


class StagedSave(Future[dict[str, Any]]):
    """A state dict on its way to the host, as the checkpointers wait for it."""

    def __init__(self, save: Save) -> None:
        super().__init__()
        self._save = save
        self._trainer = threading.current_thread()
        self._bringer: threading.Thread | None = None

    def bring(self, transfer: HostTransfer, snapshot: Snapshot, slab: StagedBytes | None) -> threading.Thread:
        """Wait for the bytes, and make the state dict, in a thread of its own; return that."""
        self._bringer = threading.Thread(
            target=self._bring, args=(transfer, snapshot, slab), name="pinstage-checkpoint", daemon=True
        )
        self._bringer.start()
        return self._bringer

    def _bring(self, transfer: HostTransfer, snapshot: Snapshot, slab: StagedBytes | None) -> None:
        try:
            content = Content(snapshot.message, landings(transfer), snapshot.kept)
            transfer.synchronize()  # until then the snapshot keeps the tensors, which copies may be reading
            staged = StagedState(content, slab)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            clear_own_frames(error)
            slab = None
            self.set_exception(error)
        else:
            self.set_result(staged)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for it, and return it."""
        staged = super().result(timeout)
        thread = threading.current_thread()
        if thread not in (self._trainer, self._bringer):  # these do not write: they pass on that it is there
            assert isinstance(staged, StagedState)
            self._save.is_taken(staged, thread)
        return staged
