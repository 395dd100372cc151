"""A state larger than the cap, saved in waves: each tensor is copied when the writer comes to it.

::

    stage: tensors that are not there yet --plan--> parts of the plan that fit, one after the other (`WaveWriter`)
      the user's writer asks for a tensor --> it is copied to the slab of this part
      part written: its tensors die, its slab is free for the next
    async_save returns when the last tensor has been copied; with hold="step" at once, and the next step waits for that
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from .._layout import ALIGNMENT
from .._sizes import round_up
from .._staging import Landing
from .._torch import shell_of
from ..errors import StagingError
from ._staged import LOOK_AGAIN_SECONDS, Bytes, over


class Wave:
    """A save in waves, as the trainer's thread and the writer's see it. Made in the trainer's.

    Args:
        lease: returns the bytes of a slab of so many; it is free when all views of them have died.
        most: bytes of a part.
        tensors: of the state.
        stream: returns the one that copies from a device.
    """

    def __init__(
        self,
        lease: Callable[[int], Bytes],
        most: int,
        tensors: list[torch.Tensor],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> None:
        self.is_open = False
        """Whether the writer may ask for tensors now."""
        self.is_read = threading.Event()
        self._lease = lease
        self._most = most
        self._slab: Bytes | None = None
        self._part_bytes = self._end = 0
        self._lock = threading.Lock()  # a writer may have several threads
        self._trainer = threading.current_thread()
        self._writer: threading.Thread | None = None
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._ready = {device: (torch.cuda.current_stream(device).record_event(), stream(device)) for device in devices}

    def parts(self, items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
        """Yield what is written together, and be open for it meanwhile."""
        self.is_open = True
        try:
            for part, nbytes in _divided(items, self._most):
                self._part_bytes = nbytes
                yield part
                self._slab = None
        finally:
            self.is_open, self._slab = False, None
            self.is_read.set()

    def fetch(self, source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the slab of this part; blocks until it is there."""
        nbytes = round_up(source.nbytes, ALIGNMENT)
        with self._lock:
            if self._slab is None or self._end + nbytes > len(self._slab):
                self._slab, self._end = self._lease(max(self._most, self._part_bytes, nbytes)), 0
            place = Landing(self._end, source.dtype, tuple(like.shape), like.stride())
            self._end += nbytes
            there = over(self._slab, place)
        if source.device not in self._ready:
            return there.copy_(source)
        ready, stream = self._ready[source.device]
        with torch.cuda.stream(stream):  # training goes on in others
            stream.wait_event(ready)
            return there.copy_(source)

    def note_thread(self) -> None:
        """Take note of who writes: the first thread but the trainer's that has anything to do with it."""
        thread = threading.current_thread()
        if self._writer is None and thread is not self._trainer:
            self._writer = thread

    def wait(self, timeout: float | None) -> bool:
        """Wait until all tensors were copied, or the writer has ended without; return whether that came in time."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_read.wait(max(0, min(LOOK_AGAIN_SECONDS, end - time.monotonic()))):
            if self._writer is not None and not self._writer.is_alive():
                return True
            if time.monotonic() >= end:
                return False
        return True


class Late(torch.Tensor):
    """A tensor on the CPU that is copied there when a writer asks for its elements."""

    _source: torch.Tensor
    _wave: Wave

    @staticmethod
    def of(source: torch.Tensor, wave: Wave) -> Late:
        late: Late = shell_of(Late, source)  # type: ignore[assignment]
        late._source, late._wave = source, wave
        return late

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what a planner asks; copy for what a writer does."""
        late: Late = args[0]
        late._wave.note_thread()
        ops = torch.ops.aten
        if func is ops.is_pinned.default:
            return False
        same_view = func is ops.view.default and tuple(args[1]) == tuple(late.shape)
        if same_view or func is ops.alias.default or (func is ops.detach.default and not late._wave.is_open):
            return Late.of(late._source, late._wave)
        if not late._wave.is_open:
            raise _not_there(late)
        there = late._wave.fetch(late._source, late)
        return there if func in (ops.detach.default, ops.clone.default) else func(there, *args[1:], **(kwargs or {}))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self._wave.note_thread()
        raise _not_there(self)


def _not_there(late: Late) -> StagingError:
    return StagingError(
        f"a tensor of a state larger than the pool was read too early: {late.nbytes} bytes; save in a thread, with "
        "storage_writer=stager.in_waves(writer), and let the planner read no elements; or raise max_bytes"
    )


class WaveWriter(StorageWriter):
    """Lets another writer, one that writes files of its own for each part, write a plan in parts that fit the pool."""

    def __init__(self, writer: StorageWriter, wave: Callable[[], Wave | None]) -> None:
        self._writer = writer
        self._find_wave = wave
        self._wave: Wave | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._begin()
        self._writer.reset(checkpoint_id)

    def storage_meta(self) -> Any:
        self._begin()
        return self._writer.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        wave = self._wave
        if wave is None:
            return self._writer.write_data(plan, planner)
        if not isinstance(prefix := getattr(plan.storage_data, "prefix", None), str):
            raise StagingError(
                f"a {type(self._writer).__name__} cannot write in waves: its plan names no files by a prefix; use a "
                "FileSystemWriter, or raise max_bytes"
            )
        results: list[WriteResult] = []
        for number, items in enumerate(wave.parts(plan.items)):
            of_part = replace(plan.storage_data, prefix=f"{prefix}{number}_")
            written = self._writer.write_data(replace(plan, items=items, storage_data=of_part), planner)
            written.wait()
            results += written.value()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._writer.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - the writer was made for it
        return True

    def _begin(self) -> None:
        self._wave = self._find_wave()
        if self._wave is not None:
            self._wave.note_thread()


def _divided(items: Sequence[WriteItem], most: int) -> Iterator[tuple[list[WriteItem], int]]:
    """Yield parts of at most so many bytes, or of one larger item, and their bytes."""
    part: list[WriteItem] = []
    total = 0
    for item in items:
        nbytes = 0
        if item.tensor_data is not None:
            data = item.tensor_data
            nbytes = round_up(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize, ALIGNMENT)
        if part and total + nbytes > most:
            yield part, total
            part, total = [], 0
        part.append(item)
        total += nbytes
    yield part, total
