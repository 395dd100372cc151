"""transformers' key and value caches; ``device`` of a layer becomes that of its keys."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

import pinstage as ps

_CACHES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
_STAGED = (torch.Tensor, list, tuple, dict, *_CACHES)


def nodes(cls: Any) -> Any:
    """Return how a cache, or a layer of a cache, is taken apart; None for any other class."""
    if not issubclass(cls, _CACHES):
        return None

    def unflatten(children: Any, names: Any) -> Any:
        *staged, rest = children
        made = cls.__new__(cls)
        vars(made).update(rest, **dict(zip(names, staged, strict=True)))
        tensor = next((value for value in staged if isinstance(value, torch.Tensor)), None)
        if "device" in rest and tensor is not None:
            made.device = tensor.device
        return made

    return _flatten, unflatten


def _flatten(obj: Any) -> tuple[Any, tuple[str, ...]]:
    """Stage attributes that are tensors, containers or caches; the rest stays."""
    staged, rest = {}, {}
    for name, value in vars(obj).items():
        if isinstance(value, _STAGED):
            staged[name] = value
        else:
            rest[name] = copy.copy(value) if isinstance(value, set) else value
    return (*staged.values(), ps.on_host(rest)), tuple(staged)
