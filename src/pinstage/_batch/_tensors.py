"""Tensors of other classes: their memory is packed like any tensor's, and the class is put around it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._handler import Handler
from ._on_host import OnHost, Whole

Rebuild = Callable[[torch.Tensor, dict[str, Any]], Any]

REBUILDS: dict[type, Rebuild | None] = {}
"""The classes that `register_tensor` was given; their subclasses follow them."""


def rebuild_of(cls: type) -> Any:
    """Return what `register_tensor` was given for a class or its base; False if it was given none of them."""
    return next((REBUILDS[base] for base in cls.__mro__ if base in REBUILDS), False)


def tensor_handler(cls: Any) -> Handler | None:
    """Return how a tensor of a class is taken apart; None if it moves by its ``.to()``.

    One with tensors inside is taken apart by the protocol that torch's compiler asks for, ``__tensor_flatten__``. Any
    other is a plain tensor over the same memory, and its ``__dict__``. A tensor that is met twice in a walk is packed
    once: then its parts are the same objects. Metadata are None for one that moves as a whole.
    """
    rebuild = rebuild_of(cls)
    if rebuild is False:
        return None
    is_wrapper = hasattr(cls, "__tensor_flatten__")
    make = partial(_in_class, cls) if rebuild is None else rebuild

    def flatten(tensor: Any, met: dict[Any, Any]) -> tuple[Any, Any]:
        if tensor.requires_grad:
            return (_once(met, id(tensor), tensor, Whole),), None
        if not is_wrapper:
            return (_once(met, id(tensor), tensor, _plain), OnHost(dict(vars(tensor)))), ()
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
        rest = {name: part for name, part in inner.items() if name not in parts}
        kept = OnHost((names, rest, context, tensor.size(), tensor.stride()))
        return (*parts.values(), kept), tuple(parts)

    def unflatten(metadata: Any, children: Any, met: dict[Any, Any]) -> Any:
        if metadata is None:
            return children[0]
        *parts, kept = children
        if not is_wrapper:
            return _once(met, (id(parts[0]), cls), parts[0], lambda plain: make(plain, kept))
        names, rest, context, size, stride = kept
        inner = dict(zip(metadata, parts, strict=True)) | rest
        return cls.__tensor_unflatten__({name: inner[name] for name in names}, context, size, stride)

    return Handler(flatten, unflatten, lambda names: [f".{name}" for name in names or ()], asks=True)


def _once(met: dict[Any, Any], key: Any, tensor: Any, make: Callable[[Any], Any]) -> Any:
    """Return what was made in this walk by that key; the tensor, whose id it may be, is kept alive meanwhile."""
    if key not in met:
        met[key] = make(tensor), tensor
    return met[key][0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor; a class can put none of its own in place of this function, see `torch.overrides`."""
    return torch.Tensor.as_subclass(tensor, torch.Tensor)


def _in_class(cls: Any, plain: torch.Tensor, attributes: dict[str, Any]) -> Any:
    made = plain.as_subclass(cls)
    vars(made).update(attributes)
    return made
