"""Three ways to bring one batch to the device, behind one small interface.

All three take the same host batch and give the same nested batch on the device; what differs is how many copies that
takes, what memory it pins, and how long it lasts. Without CUDA the two rivals do the nearest comparable work, and
their titles say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

import pinstage as ps
from pinstage._demo.batch import Array, RaggedBatch


@dataclass(frozen=True)
class HostMemory:
    """What a way holds of the host's memory.

    Attributes:
        held_bytes: Bytes held for staging; page-locked if `pinned`.
        max_bytes: The cap on them; None if there is none.
        waste: Share of the bytes taken that nobody asked for; None if that is not known.
        pinned: Whether they are page-locked.
    """

    held_bytes: int
    max_bytes: int | None = None
    waste: float | None = None
    pinned: bool = False


class Way(Protocol):
    """One way to stage."""

    @property
    def title(self) -> str:
        """The head of its column."""
        ...

    @property
    def note(self) -> str:
        """What a reader must know to compare it; may be empty."""
        ...

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Return the batch on the device, safe to use on the current stream."""
        ...

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return the copies that staging this batch issues and the bytes that they carry."""
        ...

    def memory(self) -> HostMemory:
        """Return what it holds now."""
        ...


class PlainTo:
    """`.to(device)` on each leaf."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On the CPU `.to` would return the very same tensor: copy=True makes it move bytes, as it would to a GPU.
        self.title = "plain .to()"
        self.note = "" if device.type == "cuda" else "copy=True"

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Copy each leaf; on CUDA each call waits for its copy."""
        return batch.map_tensors(self._move)

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return one copy for each leaf."""
        return _leaf_copies(batch)

    def memory(self) -> HostMemory:
        """Return nothing held: the batch's own memory is read, through the driver's bounce buffers."""
        return HostMemory(0)

    def _move(self, leaf: Array) -> Array:
        return torch.as_tensor(leaf).to(self._device, copy=self._device.type == "cpu")


class PinThenTo:
    """`pin_memory()` on each leaf, then `.to(device, non_blocking=True)`; torch's pinned allocator lends the memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.title = "pin, then .to()" if self._cuda else "clone, then .to()"
        self.note = "" if self._cuda else "not pinned: no CUDA"
        self._asked = 0
        self._lent_before = self._lent()

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Copy each leaf twice: into memory of its own, then to the device."""
        return batch.map_tensors(self._pin_and_move if self._cuda else self._clone_and_move)

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Return one copy for each leaf."""
        return _leaf_copies(batch)

    def memory(self) -> HostMemory:
        """Return what torch's pinned allocator holds, and how far its powers of two round up."""
        if not self._cuda:
            return HostMemory(0)
        held = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        lent = self._lent() - self._lent_before
        return HostMemory(held, waste=1 - self._asked / lent if lent else None, pinned=True)

    def _pin_and_move(self, leaf: Array) -> Array:
        tensor = torch.as_tensor(leaf)
        self._asked += tensor.nbytes
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _clone_and_move(self, leaf: Array) -> Array:
        return torch.as_tensor(leaf).clone().to(self._device, copy=True)

    def _lent(self) -> int:
        return int(torch.cuda.host_memory_stats().get("active_bytes.allocated", 0)) if self._cuda else 0


class Staged:
    """`ps.Stager`: one line, one copy."""

    title = "ps.Stager"

    def __init__(self, device: torch.device, max_bytes: str | int) -> None:
        self._stager = ps.Stager(str(device), max_bytes=max_bytes)
        self._pinned = device.type == "cuda"
        self.note = "" if self._pinned else "not pinned: no CUDA"

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stager.close()

    def stage(self, batch: RaggedBatch) -> RaggedBatch:
        """Pack into one slab, copy it once, give views of it."""
        staged: RaggedBatch = self._stager.to_device(batch)
        return staged

    def issued(self, batch: RaggedBatch) -> tuple[int, int]:
        """Stage the batch and return what the transfer itself reports."""
        transfer = self._stager.stage(batch)
        copies, nbytes = transfer.copies, transfer.layout.nbytes
        transfer.get()
        return copies, nbytes

    def memory(self) -> HostMemory:
        """Return what the pool holds, its cap, and how far its size classes round up."""
        pool = self._stager.pool.stats()
        return HostMemory(pool.held_bytes, pool.max_bytes, waste=pool.rounding_waste, pinned=self._pinned)


def _leaf_copies(batch: RaggedBatch) -> tuple[int, int]:
    leaves = batch.fragments()
    return len(leaves), sum(int(leaf.nbytes) for leaf in leaves)
