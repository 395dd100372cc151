"""Containers that optree would take apart in a way that does not suit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from ._attributes import Item
from ._keep import Keep
from ._registry import NAMESPACE, register


def _flatten_packed_sequence(packed: Any) -> tuple[Any, Any, Any]:
    # batch_sizes has to stay on the CPU (torch.nn.utils.rnn), so it travels as a value; a tensor is not hashable.
    children = (packed.data, packed.sorted_indices, packed.unsorted_indices)
    return children, tuple(packed.batch_sizes.tolist()), ("data", "sorted_indices", "unsorted_indices")


def _unflatten_packed_sequence(batch_sizes: Any, children: Any) -> Any:
    data, sorted_indices, unsorted_indices = children
    batch_sizes = torch.tensor(batch_sizes, dtype=torch.int64, device="cpu")
    return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


# optree would take it for a namedtuple and stage batch_sizes with the rest.
register(PackedSequence, (_flatten_packed_sequence, _unflatten_packed_sequence), None, again=False)


class _Unsorted:
    """A dict whose keys are tensors, as ``optimizer.state`` is: optree would sort them. The keys stay as they are."""

    def __init__(self, kind: type, factory: Any, keys: list[Any], values: list[Any]) -> None:
        self.kind = kind
        self.factory = factory
        self.keys = keys
        self.values = values


class _Number:
    """A key in a path, by its number: a tensor is too long to be written out, and may be on a device."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<key {self.number}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


def _flatten_unsorted(unsorted: _Unsorted) -> tuple[Any, Any, Any]:
    entries = (*(Item(_Number(number)) for number in range(len(unsorted.values))), "keys")
    return (*unsorted.values, Keep(unsorted.keys)), (unsorted.kind, unsorted.factory), entries


def _unflatten_unsorted(metadata: Any, children: Any) -> Any:
    kind, factory = metadata
    *values, keys = children
    items = zip(keys, values, strict=True)
    return defaultdict(factory, items) if kind is defaultdict else dict(items)


register(_Unsorted, (_flatten_unsorted, _unflatten_unsorted), None, again=False)


def _has_tensors_as_keys(obj: Any) -> bool:
    return type(obj) in (dict, defaultdict) and any(isinstance(key, torch.Tensor) for key in obj)


def without_sorting(batch: Any) -> Any:
    """Return a batch whose dicts with tensors as keys are taken apart in their order; None if there are none."""
    is_found = False

    def replace(obj: Any) -> Any:
        nonlocal is_found
        if not _has_tensors_as_keys(obj):
            return obj
        is_found = True
        factory = obj.default_factory if isinstance(obj, defaultdict) else None
        return _Unsorted(type(obj), factory, list(obj), list(map(replace_inside, obj.values())))

    def replace_inside(obj: Any) -> Any:
        return optree.tree_map(replace, obj, is_leaf=_has_tensors_as_keys, namespace=NAMESPACE)

    replaced = replace_inside(batch)
    return replaced if is_found else None
