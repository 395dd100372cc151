"""Default collation that stacks samples right into the slab: it is put off until there is a slab."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _native
from .._batch import Parts, pack
from .._compat.loader import collation

_LEAVES = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes))
"""What most leaves of samples are. None of them is a container."""


class Stack(NamedTuple):
    """Samples of one field, which are stacked later."""

    stand_in: torch.Tensor
    """What the batch has in place of the stack, of its dtype and shape ``[samples, ...]``. Nobody reads its memory."""
    samples: Any
    found: bytes
    """Addresses and strides of the samples."""


Stacks = dict[int, Stack]
"""By the id of the stand-in."""


def pack_and_stack(parts: Parts, stacks: Stacks, slab: torch.Tensor) -> None:
    """Write a batch into a slab, uint8 ``[n]``. Samples of a stack are written one by one to their places in it."""
    if not stacks:
        pack(parts, slab)
        return
    offsets = parts.table.rows["offset"].tolist()
    stacked = [index for index, leaf in enumerate(parts.leaves) if id(leaf) in stacks and offsets[index] >= 0]
    pack(parts, slab, stacked)
    for index in stacked:
        stand_in, _, found = stacks[id(parts.leaves[index])]
        _native.core.stack(found, slab.data_ptr() + offsets[index], stand_in.nbytes)


def collate_lazily(samples: Any, stacks: Stacks) -> Any:
    """Do what torch's ``default_collate`` does, but put an empty tensor in the place of each stack.

    `stacks` gets the samples, by the id of the empty tensor. Where code of the user's would see that tensor, and could
    compute with it, torch's function runs as it is.
    """
    collate = collation()
    if not (collates_as_shipped(collate) and _in_plain_containers(samples[0])):
        return torch.utils.data.default_collate(samples)

    def collate_tensors(batch: Any, **_: Any) -> torch.Tensor:
        found = _native.core.alike(batch)
        if found is None:  # torch knows what to do, or what to say
            return stack_privately(batch)
        stand_in = torch.empty((len(batch), *batch[0].shape), dtype=batch[0].dtype, device="cpu")
        stacks[id(stand_in)] = Stack(stand_in, batch, found)
        return stand_in

    return collate.collate(samples, collate_fn_map=collate.default_collate_fn_map | {torch.Tensor: collate_tensors})


def collates_as_shipped(collate: Any) -> bool:
    """Say whether the functions of default collation, in torch's module, are torch's, or known to ask for no value."""
    others = dict(collate.default_collate_fn_map)
    stacks = others.pop(torch.Tensor, None) in (collate.collate_tensor_fn, stack_privately)
    found = {getattr(function, "__module__", None) for function in others.values()}
    return stacks and found <= {collate.__name__, "tensordict.tensorclass"}  # which stacks TensorDicts, as torch does


def _in_plain_containers(sample: Any) -> bool:
    """Say whether all containers of a sample are Python's own. Other classes may look at what is put into them."""
    kind = type(sample)
    if kind in _LEAVES:
        return True
    if kind in (dict, OrderedDict, defaultdict):
        return all(map(_in_plain_containers, sample.values()))
    is_namedtuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")  # no subclass, which may have a __new__
    if kind in (list, tuple) or is_namedtuple:
        return all(map(_in_plain_containers, sample))
    return isinstance(sample, str | bytes) or not isinstance(sample, Mapping | Sequence)


def stack_privately(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack as torch does in the main process. In a worker, torch would stack into /dev/shm, which nobody needs."""
    if _stacks_plainly(batch):
        # Into memory of the usual strides, as torch does there. Without it, some stacks would be channels-last.
        return torch.stack(batch, 0, out=batch[0].new_empty((len(batch), *batch[0].shape)))
    return collation().collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _stacks_plainly(batch: Any) -> bool:
    """Say whether samples are plain CPU tensors of one dtype and shape."""
    first = batch[0]
    return all(
        type(sample) is torch.Tensor
        and sample.is_cpu
        and sample.layout is torch.strided
        and not sample.is_nested  # which has no shape to look at
        and not sample.is_quantized
        and not sample.requires_grad
        and sample.dtype is first.dtype
        and sample.shape == first.shape
        for sample in batch
    )
