"""Four ways to bring batches to the device, behind one small interface.

All take the same host batches and give the same nested batches on the device. They differ in the
number of copies, the memory that they pin, the time, and the processes that pack: `Loaded` uses
workers. Without CUDA the two rivals do the nearest comparable work, and their titles say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

import pinstage as ps
from demo.batch import Array, RaggedBatch


@dataclass(frozen=True)
class HostMemory:
    """The host memory of a way.

    Attributes:
        held_bytes: Bytes held for staging; page-locked if `pinned`.
        max_bytes: The cap on these bytes; None if there isn't one.
        pinned: Whether these bytes are page-locked.
    """

    held_bytes: int
    max_bytes: int | None = None
    pinned: bool = False


class Way(Protocol):
    """One way to stage."""

    @property
    def title(self) -> str:
        """The heading of its column."""
        ...

    @property
    def note(self) -> str:
        """A note for the comparison; may be empty."""
        ...

    @property
    def works_ahead(self) -> bool:
        """Whether the next batch is staged while this one is used."""
        ...

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Return the batch on the device, safe to use on the current stream."""
        ...

    def staged(self, batches: Sequence[RaggedBatch]) -> Iterator[RaggedBatch]:
        """Yield batches as `stage` returns them."""
        ...

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return the number of copies that staging this batch issues, and their bytes."""
        ...

    def memory(self) -> HostMemory:
        """Return the memory held now."""
        ...


class _OneByOne:
    """A way that stages a batch when it is asked for."""

    works_ahead = False

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        raise NotImplementedError

    def staged(self, batches: Sequence[RaggedBatch]) -> Iterator[RaggedBatch]:
        """Stage each batch when it is asked for."""
        return map(self.stage, batches)


class PlainTo(_OneByOne):
    """`.to(device)` on each leaf."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On the CPU `.to` would return the very same tensor: copy=True makes it move bytes, as it
        # would to a GPU.
        self.title = ".to()"
        self.note = "" if device.type == "cuda" else "copy=True"

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Copy each leaf; on CUDA each call waits for its copy."""
        return batch.map_tensors(self._move)

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return one copy for each leaf."""
        return _leaf_copies(batch)

    def memory(self) -> HostMemory:
        """Return nothing held: the batch's own memory is read, through the driver's bounce
        buffers.
        """
        return HostMemory(0)

    def _move(self, leaf: Array) -> Array:
        return torch.as_tensor(leaf).to(self._device, copy=self._device.type == "cpu")


class PinThenTo(_OneByOne):
    """`pin_memory()` on each leaf, then `.to(device, non_blocking=True)`; in memory of torch's
    pinned allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.title = "pin + .to()" if self._cuda else "clone + .to()"
        self.note = "" if self._cuda else "not pinned"

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Copy each leaf twice: into memory of its own, then to the device."""
        return batch.map_tensors(self._pin_and_move if self._cuda else self._clone_and_move)

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return one copy for each leaf."""
        return _leaf_copies(batch)

    def memory(self) -> HostMemory:
        """Return what torch's pinned allocator holds."""
        if not self._cuda:
            return HostMemory(0)
        held = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        return HostMemory(held, pinned=True)

    def _pin_and_move(self, leaf: Array) -> Array:
        return torch.as_tensor(leaf).pin_memory().to(self._device, non_blocking=True)

    def _clone_and_move(self, leaf: Array) -> Array:
        return torch.as_tensor(leaf).clone().to(self._device, copy=True)


class Staged(_OneByOne):
    """`ps.Stager`: one line, and one copy for each block."""

    title = "Stager"

    def __init__(self, device: torch.device, max_bytes: str | int) -> None:
        self._stager = ps.Stager(str(device), max_bytes=max_bytes)
        self._pinned = device.type == "cuda"
        self.note = "" if self._pinned else "not pinned"

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stager.close()

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Pack into one slab, copy it, and return the batch on the device."""
        staged: RaggedBatch = self._stager.to_device(batch)
        return staged

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Stage the batch and return what the transfer itself reports."""
        transfer = self._stager.stage(batch)
        copies, nbytes = transfer.copies, transfer.nbytes
        transfer.wait()
        return copies, nbytes

    def memory(self) -> HostMemory:
        """Return what the pool holds and its cap."""
        pool = self._stager.pool.stats()
        return HostMemory(pool.held_bytes, pool.max_bytes, pinned=self._pinned)


class Loaded:
    """`ps.DataLoader`: worker processes pack, this one starts the copies."""

    title = "DataLoader"
    works_ahead = True

    def __init__(self, device: torch.device, max_bytes: str | int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._workers = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
        self._batches: Sequence[RaggedBatch] = ()
        self._loader: ps.DataLoader[RaggedBatch] | None = None
        self.note = f"{self._workers} workers" if self._workers > 1 else "1 worker"

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Let a worker pack this one batch."""
        (staged,) = self.staged([batch])
        return staged

    def staged(self, batches: Sequence[RaggedBatch]) -> Iterator[RaggedBatch]:
        """Let workers pack the batches, which they inherit; copy the next ones while one is
        used.
        """
        if self._loader is None or self._batches is not batches:
            self._batches = batches
            self._loader = ps.DataLoader(
                # A list is all that a map-style dataset has to be.
                batches,  # type: ignore[arg-type]
                batch_size=None,
                num_workers=self._workers,
                multiprocessing_context="fork",
                device=self._device,
                max_bytes=self._max_bytes,
            )
        return iter(self._loader)

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:  # noqa: ARG002 - a pass is counted as a whole
        """Return the averages over the loader's batches, from the loader's own counters."""
        assert self._loader is not None
        stats = self._loader.stats()
        return round(stats.copies / stats.batches), round(stats.packed_bytes / stats.batches)

    def memory(self) -> HostMemory:
        """Return what the loader's pool holds and its cap."""
        pool = None if self._loader is None else self._loader.stats().pool
        if pool is None:
            return HostMemory(0)
        pinned = self._device.type == "cuda"
        return HostMemory(pool.held_bytes, pool.max_bytes, pinned=pinned)


def _leaf_copies(batch: RaggedBatch) -> tuple[int, int]:
    leaves = batch.fragments()
    return len(leaves), sum(int(leaf.nbytes) for leaf in leaves)
