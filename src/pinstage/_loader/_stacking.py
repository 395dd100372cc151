"""Stacking samples where the batch is to lie: default collation, but that nothing is stacked before there is a slot."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import _torch
from .._layout import Moves, Table, guards_of, put_bounded
from .._layout import packable as is_packable

_LEAVES = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes))
"""What most leaves of samples are: known at once to be no containers."""

GUARDS_KEPT = 512
"""For so many fields that look different; to make one takes twice as long as to use it."""

Stacks = dict[int, tuple[torch.Tensor, Any]]
"""By the id of the tensor that stands for a stack: that tensor, and the samples."""


def pack(table: Table, tensors: list[torch.Tensor], stacks: Stacks, slab: torch.Tensor) -> None:
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


def stacked(tensor: torch.Tensor, stacks: Stacks) -> torch.Tensor:
    return torch.stack(stacks[id(tensor)][1], 0) if id(tensor) in stacks else tensor


def collate_lazily(samples: Any, stacks: Stacks) -> Any:
    """Do what torch's default_collate does, but do not stack yet: an empty tensor stands for each stack.

    Its memory is never touched, so it costs nothing but its making. `stacks` gets the samples, by its id. Only where no
    code of the user's would see it: that could compute with it.
    """
    is_torchs = _torch.stacking() in (_torch.shipped_stacking(), stack_privately)
    if not (is_torchs and _torch.collates_as_shipped() and _in_plain_containers(samples[0])):
        return torch.utils.data.default_collate(samples)

    def collate_tensors(batch: Any, **_: Any) -> torch.Tensor:
        if not _stacks_plainly(batch):  # torch knows what to do, or what to say
            return stack_privately(batch)
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


def stack_privately(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Do what torch does in the main process. In a worker it stacks into /dev/shm, which nobody needs here."""
    if _stacks_plainly(batch):
        # Into memory of the usual strides, as torch does there: alone it would take some samples for channels last.
        return torch.stack(batch, 0, out=batch[0].new_empty((len(batch), *batch[0].shape)))
    shipped: Any = _torch.shipped_stacking()
    return shipped(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _stacks_plainly(batch: Any) -> bool:
    first = batch[0]
    if not is_packable(first):
        return False
    if _look_alike(batch):
        return True
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


def _look_alike(batch: Any) -> bool:
    """Say whether torch's guard finds all samples to be like the first; False tells nothing.

    It takes a tenth of what looking at each takes, where they are in the caches; more where one comes twice. With many
    small fields looking at each was half of a worker's time.
    """
    first = batch[0]
    guards = _guards_like(first, len(batch))
    if guards is None or guards.check(*batch):
        return guards is not None
    distinct = {id(sample): sample for sample in batch}.values()  # it takes none twice
    return len(distinct) < len(batch) and bool(_guards_like(first, len(distinct)).check(*distinct))


def _guards_like(tensor: torch.Tensor, count: int) -> Any:
    key = tensor.dtype, tensor.shape, tensor.stride(), count
    guards = _guards.get(key)
    if guards is None:
        guards = guards_of([tensor] * count)  # which keeps no tensor
        put_bounded(_guards, key, guards, GUARDS_KEPT)
    return guards


_guards: dict[Any, Any] = {}
