"""What workers run in place of the collate function: collate, and pack into a slot."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.utils.data

from .._layout import Moves, Plan, Table, dump_structure, plan, structure_key
from .._layout import packable as is_packable
from . import _torch
from ._arrivals import Message
from ._worker import Terms, WorkerSlots

STRUCTURES_KNOWN = 64
"""Structures that a worker and the main process know by number, from the second batch of each on. Ragged batches bring
a new one every time: a thousand small objects that would be kept, and walked by the garbage collector, for nothing."""

STRUCTURES_MET = 4096
"""Structures of which a worker remembers that it met them, by their hash."""

_LEAVES = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes))
"""What most leaves of samples are: known at once to be no containers."""

Stacks = dict[int, tuple[torch.Tensor, Any]]


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
        lazily = self._collate is _torch.default_collate
        batch = _collate_lazily(samples, stacks) if lazily else self._collate(samples)
        planned = plan(batch)
        others = [_stacked(tensor, stacks) for tensor in planned.passthrough()]
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
                _pack(planned.table, planned.tensors, stacks, torch.frombuffer(raw, dtype=torch.uint8))
            else:
                assert slot.tensor is not None
                try:
                    _pack(planned.table, planned.tensors, stacks, slot.tensor)
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
        if _torch.stacking() is _torch.stack_tensors:  # also for a collate_fn that calls torch's
            _torch.set_stacking(_collate_tensors_privately)
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
            _put(self._structures, key, number, STRUCTURES_KNOWN)
        else:
            _put(self._met, hash(key), None, STRUCTURES_MET)


def _put(entries: dict[Any, Any], key: Any, value: Any, capacity: int) -> None:
    """Add an entry, in the place of the oldest one where there are so many."""
    if len(entries) >= capacity:
        del entries[next(iter(entries))]
    entries[key] = value


def _pack(table: Table, tensors: list[torch.Tensor], stacks: Stacks, slab: torch.Tensor) -> None:
    moves = Moves(table, tensors, slab)
    if not stacks:
        moves.everything()
        return
    stacked = [position for position, tensor in enumerate(tensors) if id(tensor) in stacks]
    if len(stacked) < len(tensors):
        moves.only(set(range(len(tensors))).difference(stacked))
    views = table.views(slab, [None] * len(table.columns.passthrough))
    for position in stacked:
        if views[position] is not None:
            torch.stack(stacks[id(tensors[position])][1], 0, out=views[position])


def _stacked(tensor: torch.Tensor, stacks: Stacks) -> torch.Tensor:
    return torch.stack(stacks[id(tensor)][1], 0) if id(tensor) in stacks else tensor


def _collate_lazily(samples: Any, stacks: Stacks) -> Any:
    """Do what torch's default_collate does, but do not stack yet: an empty tensor stands for each stack.

    Its memory is never touched, so it costs nothing but its making. `stacks` gets the samples, by its id. Only where no
    code of the user's would see it: that could compute with it.
    """
    is_torchs = _torch.stacking() in (_torch.stack_tensors, _collate_tensors_privately)
    if not (is_torchs and _torch.collates_as_shipped() and _in_plain_containers(samples[0])):
        return _torch.default_collate(samples)

    def collate_tensors(batch: Any, **_: Any) -> torch.Tensor:
        if not _stacks_plainly(batch):  # torch knows what to do, or what to say
            return _collate_tensors_privately(batch)
        stand_in = torch.empty((len(batch), *batch[0].shape), dtype=batch[0].dtype, device="cpu")
        stacks[id(stand_in)] = (stand_in, batch)
        return stand_in

    return _torch.collate_with(samples, collate_tensors)


def _in_plain_containers(sample: Any) -> bool:
    """Say whether all containers of a sample are Python's own: a class may look at what default collation puts in."""
    kind = type(sample)
    if kind in _LEAVES:
        return True
    if kind in (dict, OrderedDict, defaultdict):
        return all(map(_in_plain_containers, sample.values()))
    is_namedtuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")  # itself: no subclass with a __new__
    if kind in (list, tuple) or is_namedtuple:
        return all(map(_in_plain_containers, sample))
    return isinstance(sample, str | bytes) or not isinstance(sample, Mapping | Sequence)


def _collate_tensors_privately(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Do what torch does in the main process. In a worker it stacks into /dev/shm, which nobody needs here."""
    if _stacks_plainly(batch):
        # Into memory of the usual strides, as torch does there: alone it would take some samples for channels last.
        return torch.stack(batch, 0, out=batch[0].new_empty((len(batch), *batch[0].shape)))
    return _torch.stack_tensors(batch, collate_fn_map=collate_fn_map)


def _stacks_plainly(batch: Any) -> bool:
    first = batch[0]
    if not is_packable(first):
        return False
    dtype, shape = first.dtype, first.shape
    return all(
        type(sample) is torch.Tensor
        and sample.dtype is dtype
        and sample.shape == shape
        and sample.is_cpu
        and sample.layout is torch.strided
        and not sample.requires_grad
        for sample in batch
    )
