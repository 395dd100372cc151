"""What workers run in place of the collate function: collate, and pack into a slot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.utils.data

from .. import _torch
from .._layout import Parts, Table, take_apart
from ._arrivals import Message
from ._stacking import Stacks, collate_lazily, pack_and_stack, stack_privately
from ._worker import Terms, WorkerSlots

LOOKS_KNOWN = 64
"""Structures of batches that a worker and the main process know by number, each with the last batch's offset table.
What is only ragged sends its table each time; a batch of a structure that is not known sends that, too."""


class SlabCollate:
    """Collates with a function of the user's, or torch's default, and packs the result into a slot.

    Runs in workers only; travels there with the process object, whatever the start method.

    Args:
        collate: the loader's collate function.
        token: number of the main process's server.
        channels: one for each worker.
        terms: how slots are had.
    """

    def __init__(self, collate: Callable[[Any], Any], token: int, channels: list[Connection], terms: Terms) -> None:
        self._collate = collate
        self._token = token
        self._channels = channels
        self._terms = terms
        self._worker = -1
        self._slots: WorkerSlots | None = None
        self._known: dict[Any, tuple[int, Table]] = {}  # by the structure's key

    def __call__(self, samples: Any) -> Message:
        """Return a small message that stands for the batch."""
        slots = self._slots if self._slots is not None else self._begin()
        slots.waited_seconds = 0.0
        stacks: Stacks = {}
        lazily = _torch.is_default_collate(self._collate)
        batch = collate_lazily(samples, stacks) if lazily else self._collate(samples)
        parts = take_apart(batch)
        others = parts.others()
        # Here, not in the queue's thread: there an error would be printed, and the main process would wait forever.
        pickled = bytes(ForkingPickler.dumps(others)) if others else None
        number, structure, table = self._looks(parts)
        nbytes = parts.table.nbytes
        slot, raw = None, None
        if nbytes:
            slot = slots.take(nbytes)
            if slot is None:
                raw = bytearray(nbytes)
                pack_and_stack(parts, stacks, torch.frombuffer(raw, dtype=torch.uint8))
            else:
                assert slot.tensor is not None
                try:
                    pack_and_stack(parts, stacks, slot.tensor)
                except BaseException:
                    slots.give_back(slot)
                    raise
        if table is not None:
            self._told(number, parts)
        where = None if slot is None else slot.number
        return Message(self._token, self._worker, where, number, structure, table, pickled, raw, slots.waited_seconds)

    def _begin(self) -> WorkerSlots:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "workers only"
        self._worker = info.id
        for worker, channel in enumerate(self._channels):
            if worker != info.id:
                channel.close()
        stacking = _torch.stacking()
        if stacking is not None and stacking is _torch.shipped_stacking():
            _torch.set_stacking(stack_privately)  # also for a collate_fn that calls torch's
        self._slots = WorkerSlots(self._channels[info.id], self._terms)
        return self._slots

    def _looks(self, parts: Parts) -> tuple[int, bytes | None, bytes | None]:
        """Return the number of batches that look like this one, and what the main process does not know of them yet."""
        key = parts.structure.key()
        known = self._known.get(key)
        if known is not None:
            number, table = known
            return number, None, None if table == parts.table else parts.table.data
        number = len(self._known)
        if number >= LOOKS_KNOWN:
            number = next(iter(self._known.values()))[0]  # the oldest one's
        return number, pickle.dumps(parts.structure), parts.table.data

    def _told(self, number: int, parts: Parts) -> None:
        """Let a number stand for what was sent of a batch; it may have stood for the oldest one's structure."""
        key = parts.structure.key()
        if key not in self._known and len(self._known) >= LOOKS_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = number, parts.table
