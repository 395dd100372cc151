"""Tensors of other classes: their memory is packed like any tensor's, and the class is put around it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._handler import Handler
from ._keep import Keep, Whole

Rebuild = Callable[[torch.Tensor, dict[str, Any]], Any]

REBUILDS: dict[type, Rebuild | None] = {}
"""The classes that `register_tensor` was given; their subclasses follow them."""


def rebuild_of(cls: type) -> Any:
    """Return what `register_tensor` was given for a class or its base; False if it was given none of them."""
    return next((REBUILDS[base] for base in cls.__mro__ if base in REBUILDS), False)


def tensor_handler(cls: Any) -> Handler | None:
    """Return how a tensor of a class is taken apart; None if it moves by its ``.to()``.

    A tensor that is met twice in a walk is packed once: then its parts are the same objects. Metadata are None for one
    that moves as a whole.
    """
    rebuild = rebuild_of(cls)
    if rebuild is False:
        return None
    take_apart, put_together = (
        _wrapper_functions(cls) if hasattr(cls, "__tensor_flatten__") else _functions(cls, rebuild)
    )

    def flatten(tensor: torch.Tensor, met: dict[Any, Any]) -> tuple[Any, Any]:
        if tensor.requires_grad:
            return (_once(met, id(tensor), tensor, lambda: Whole(tensor)),), None
        found: tuple[Any, Any] = take_apart(tensor, met)
        return found

    def unflatten(metadata: Any, children: Any, met: dict[Any, Any]) -> Any:
        return children[0] if metadata is None else put_together(metadata, children, met)

    return Handler(flatten, unflatten, lambda names: [f".{name}" for name in names or ()], asks=True)


def _once(met: dict[Any, Any], key: Any, alive: Any, make: Callable[[], Any]) -> Any:
    """Return what was made in this walk by that key; what it stands for is kept alive meanwhile."""
    if key not in met:
        met[key] = make(), alive
    return met[key][0]


def _functions(cls: type, rebuild: Rebuild | None) -> Any:
    """Of a class over memory of its own: the tensor itself, and what its ``__dict__`` has beside it.

    ``as_subclass`` is none of the functions that a class may put its own in place of (`torch.overrides` says which).
    """

    def flatten(tensor: torch.Tensor, met: dict[Any, Any]) -> tuple[Any, Any]:
        plain = _once(met, id(tensor), tensor, lambda: torch.Tensor.as_subclass(tensor, torch.Tensor))
        return (plain, Keep(dict(vars(tensor)))), ()

    def unflatten(_: Any, children: Any, met: dict[Any, Any]) -> Any:
        plain, attributes = children
        return _once(met, (id(plain), cls), plain, lambda: make(plain, attributes))

    def make(plain: torch.Tensor, attributes: dict[str, Any]) -> Any:
        if rebuild is not None:
            return rebuild(plain, attributes)
        made: Any = plain.as_subclass(cls)
        vars(made).update(attributes)
        return made

    return flatten, unflatten


def _wrapper_functions(cls: Any) -> Any:
    """Of a class that has tensors inside, by the protocol that torch's compiler asks for: ``__tensor_flatten__``."""

    def flatten(tensor: Any, _: Any) -> tuple[Any, Any]:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
        rest = {name: part for name, part in inner.items() if name not in parts}
        kept = Keep((names, rest, context, tensor.size(), tensor.stride()))
        return (*parts.values(), kept), tuple(parts)

    def unflatten(metadata: Any, children: Any, _: Any) -> Any:
        *parts, (names, rest, context, size, stride) = children
        inner = dict(zip(metadata, parts, strict=True)) | rest
        return cls.__tensor_unflatten__({name: inner[name] for name in names}, context, size, stride)

    return flatten, unflatten
