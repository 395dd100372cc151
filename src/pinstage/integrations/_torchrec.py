"""torchrec's jagged and keyed tensors: what ``.to()`` moves is staged."""

from __future__ import annotations

from typing import Any

from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

import pinstage as ps

_MOVED = {
    JaggedTensor: ("_values", "_weights", "_lengths", "_offsets"),
    KeyedJaggedTensor: ("_values", "_weights", "_lengths", "_offsets"),
    KeyedTensor: ("_values",),
    Batch: ("dense_features", "sparse_features", "labels"),
}


def nodes(cls: Any) -> Any:
    """Return how a jagged or keyed tensor is taken apart; None for any other class."""
    base = next((base for base in _MOVED if issubclass(cls, base)), None)
    if base is None:
        return None
    names = _MOVED[base]

    def flatten(obj: Any) -> tuple[Any, None, Any]:
        stored = dict(vars(obj))
        staged = [stored.pop(name) for name in names]
        keys, indices = stored.pop("_inverse_indices", None) or (None, None)
        stored.pop("_jt_dict", None)  # made of the staged tensors; `to_dict` rebuilds it
        children = *staged, indices, ps.on_host((stored, keys))
        return children, None, (*names, "_inverse_indices", "rest")

    def unflatten(children: Any, _: None) -> Any:
        *staged, indices, (stored, keys) = children
        made = cls.__new__(cls)
        vars(made).update(stored, **dict(zip(names, staged, strict=True)))
        if base is KeyedJaggedTensor:
            inverse_indices = None if keys is None else (keys, indices)
            vars(made).update(_jt_dict=None, _inverse_indices=inverse_indices)
        return made

    return flatten, unflatten
