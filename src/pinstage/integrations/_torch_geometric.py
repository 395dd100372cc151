"""PyG's data objects: values of a store are staged, marks such as slices stay.

The stores of the result have weak references to the result, not to the original.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

import numpy as np
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

import pinstage as ps


def nodes(cls: Any) -> Any:
    """Return how a data object is taken apart; None for any other class."""
    if issubclass(cls, EdgeIndex | Index):
        return False  # moved by its own .to(), with everything that it has cached
    if not issubclass(cls, BaseData):
        return None
    if issubclass(cls, Batch) and type(cls) is not type(Batch):
        # Made in a function: it can't be found by name.
        copyreg.pickle(type(cls), _reduce_batch_class)

    def unflatten(children: Any, _: None) -> Any:
        *mappings, (attributes, keyed, stores) = children
        made = cls.__new__(cls)
        vars(made).update(attributes, **{where: {} for where in keyed})
        for (where, key, kind, private), mapping in zip(stores, mappings, strict=True):
            store = kind.__new__(kind)
            vars(store).update(private, _mapping=mapping, _parent=weakref.ref(made))
            if key is _ALONE:
                vars(made)[where] = store
            else:
                vars(made)[where][key] = store
        return made

    return _flatten, unflatten


_ALONE = ""
"""Replaces the key of a store that isn't in a dict. The keys of nodes and edges are never empty."""


def _flatten(data: Any) -> tuple[Any, None]:
    attributes: dict[str, Any] = {}
    keyed, stores, mappings = [], [], []
    for where, value in vars(data).items():
        by_key = value if isinstance(value, dict) else {_ALONE: value}
        if not all(isinstance(store, BaseStorage) for store in by_key.values()):
            attributes[where] = value
            continue
        if by_key is value:
            keyed.append(where)
        for key, store in by_key.items():
            private = {name: mark for name, mark in vars(store).items() if name not in _ITS_OWN}
            stores.append((where, key, type(store), private))
            mappings.append(
                {
                    name: ps.on_host(item) if isinstance(item, np.ndarray) else item
                    for name, item in store.items()
                }
            )
    return (*mappings, ps.on_host((attributes, keyed, stores))), None


_ITS_OWN = ("_mapping", "_parent", "_cached_attr")


def _reduce_batch_class(cls: Any) -> Any:
    bases = [base for base in cls.__bases__ if base is not Batch]
    return _batch_class, (Batch, *bases)


def _batch_class(batch: Any, base: Any) -> type:
    return type(batch(_base_cls=base))
