"""Tensors of other classes: their memory is packed like any tensor's, and the class is put around it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._keep import Keep, Whole
from ._paths import Itself
from ._registry import Functions

Rebuild = Callable[[torch.Tensor, dict[str, Any]], Any]

REBUILDS: dict[type, Rebuild | None] = {}
"""The classes that `register_tensor` was given; their subclasses follow them."""

_WHOLE = "whole"


class _Met(threading.local):
    """What was made of objects that a walk has met already: one that is in two places is packed once."""

    made: dict[Any, Any] | None = None


_met = _Met()


@contextmanager
def one_walk() -> Iterator[None]:
    """Let a tensor that is met twice in the block be the same one afterwards."""
    before, _met.made = _met.made, {}
    try:
        yield
    finally:
        _met.made = before


def _once(key: Any, make: Callable[[], Any], *alive: Any) -> Any:
    """Return what was made in this walk by that key; what it stands for is kept alive meanwhile."""
    if _met.made is None:
        return make()
    if key not in _met.made:
        _met.made[key] = make(), alive
    return _met.made[key][0]


def registered_base(cls: type) -> type:
    """Return the class that `register_tensor` was given, of which a class is made; `object` if there is none."""
    return next((base for base in cls.__mro__ if base in REBUILDS), object)


def tensor_functions(cls: type) -> Functions | None:
    """Return functions that take a tensor of a class apart, and put it together; None if it moves by its ``.to()``."""
    base = registered_base(cls)
    if base not in REBUILDS:
        return None
    if hasattr(cls, "__tensor_flatten__"):
        return _wrapper_functions(cls)
    return _subclass_functions(cls, REBUILDS[base])


def _as_a_whole(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return (_once(id(tensor), lambda: Whole(tensor), tensor),), _WHOLE, (Itself,)


def _subclass_functions(cls: type, rebuild: Rebuild | None) -> Functions:
    """Of a class over memory of its own: the tensor itself, and what its ``__dict__`` has beside it.

    ``as_subclass`` is none of the functions that a class may put its own in place of (`torch.overrides` says which).
    """

    def flatten(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
        if tensor.requires_grad:
            return _as_a_whole(tensor)
        plain = _once(id(tensor), lambda: torch.Tensor.as_subclass(tensor, torch.Tensor), tensor)
        return (plain, Keep(dict(vars(tensor)))), None, (Itself, Itself)

    def unflatten(metadata: Any, children: Any) -> Any:
        if metadata == _WHOLE:
            return children[0]
        plain, attributes = children
        return _once((id(plain), cls), lambda: make(plain, attributes), plain)

    def make(plain: torch.Tensor, attributes: dict[str, Any]) -> Any:
        if rebuild is not None:
            return rebuild(plain, attributes)
        made: Any = plain.as_subclass(cls)
        vars(made).update(attributes)
        return made

    return flatten, unflatten


def _wrapper_functions(cls: Any) -> Functions:
    """Of a class that has tensors inside, by the protocol that torch's compiler asks for: ``__tensor_flatten__``."""

    def flatten(tensor: Any) -> tuple[Any, Any, Any]:
        if tensor.requires_grad:
            return _as_a_whole(tensor)
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: part for name, part in inner.items() if isinstance(part, torch.Tensor)}
        rest = {name: part for name, part in inner.items() if name not in parts}
        kept = Keep((names, rest, context, tensor.size(), tensor.stride()))
        return (*parts.values(), kept), tuple(parts), (*parts, Itself)

    def unflatten(metadata: Any, children: Any) -> Any:
        if metadata == _WHOLE:
            return children[0]
        *parts, (names, rest, context, size, stride) = children
        inner = dict(zip(metadata, parts, strict=True)) | rest
        return cls.__tensor_unflatten__({name: inner[name] for name in names}, context, size, stride)

    return flatten, unflatten
