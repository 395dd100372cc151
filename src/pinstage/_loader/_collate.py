"""What workers run in place of the collate function: collate, and pack into a slot."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.utils.data

from .. import _torch
from .._layout import Plan, dump_structure, plan, put_bounded, structure_key
from ._arrivals import Message
from ._stacking import Stacks, collate_lazily, pack, stack_privately, stacked
from ._worker import Terms, WorkerSlots

STRUCTURES_KNOWN = 64
"""Structures that a worker and the main process know by number, from the second batch of each on. Ragged batches bring
a new one every time: a thousand small objects that would be kept, and walked by the garbage collector, for nothing."""

STRUCTURES_MET = 4096
"""Structures of which a worker remembers that it met them, by their hash."""


class SlabCollate:
    """Collates with a function of the user's, or torch's default, and packs the result into a slot.

    Runs in workers only; travels there with the process object, whatever the start method.

    Args:
        collate: the loader's collate function.
        token: number of the main process's keeper.
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
        self._structures: dict[Any, int] = {}
        self._met: dict[int, None] = {}

    def __call__(self, samples: Any) -> Message:
        """Return a small message that stands for the batch."""
        slots = self._slots if self._slots is not None else self._begin()
        slots.waited_seconds = 0.0
        stacks: Stacks = {}
        lazily = _torch.is_default_collate(self._collate)
        batch = collate_lazily(samples, stacks) if lazily else self._collate(samples)
        planned = plan(batch)
        others = [stacked(tensor, stacks) for tensor in planned.passthrough()]
        # Here, not in the queue's thread: there an error would be printed, and the main process would wait for ever.
        pickled = bytes(ForkingPickler.dumps((planned.rest, others))) if planned.rest or others else None
        key = structure_key(planned)
        number, structure = self._number(key, planned)
        nbytes = planned.table.nbytes
        slot, raw = None, None
        if nbytes:
            slot = slots.take(nbytes)
            if slot is None:
                raw = bytearray(nbytes)
                pack(planned.table, planned.tensors, stacks, torch.frombuffer(raw, dtype=torch.uint8))
            else:
                assert slot.tensor is not None
                try:
                    pack(planned.table, planned.tensors, stacks, slot.tensor)
                except BaseException:
                    slots.give_back(slot)
                    raise
        if structure is not None:
            self._remember(key, number)
        where = None if slot is None else slot.number
        return Message(self._token, self._worker, where, number, structure, pickled, raw, slots.waited_seconds)

    def _begin(self) -> WorkerSlots:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "workers only"
        self._worker = info.id
        for worker, channel in enumerate(self._channels):
            if worker != info.id:
                channel.close()
        if _torch.stacking() is not None and _torch.stacking() is _torch.shipped_stacking():  # also for a collate_fn that calls torch's
            _torch.set_stacking(stack_privately)
        self._slots = WorkerSlots(self._channels[info.id], self._terms)
        return self._slots

    def _number(self, key: Any, planned: Plan) -> tuple[int | None, bytes | None]:
        """Return the number of a batch's structure, if it gets one, and what it means if that is not known yet."""
        known = self._structures.get(key)
        if known is not None:
            return known, None
        number = None
        if hash(key) in self._met:
            number = len(self._structures)
            if number >= STRUCTURES_KNOWN:
                number = next(iter(self._structures.values()))  # the oldest one's
        return number, dump_structure(planned)

    def _remember(self, key: Any, number: int | None) -> None:
        """Let a number stand for a structure, which may have stood for the oldest one."""
        if number is not None:
            put_bounded(self._structures, key, number, STRUCTURES_KNOWN)
        else:
            put_bounded(self._met, hash(key), None, STRUCTURES_MET)
