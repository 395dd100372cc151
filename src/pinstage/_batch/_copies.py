"""Subclasses of dict and list with state beside their items, which the staged object must not share with the original.

A sorted dict has an inner list of its keys, and bound methods of that list. A copy by attributes would have the same
inner list. So an object whose class defines how it is copied is copied that way. Then its items, and those of its
attributes that hold tensors, are set to the staged ones.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np

from ._attributes import attribute_steps, builtin_base, keys_of, set_attributes, stored_attributes
from ._handler import Handler, WrongFunctionsError
from ._leaves import OnHost, holds_tensor

_MUTABLE = (MutableMapping, MutableSequence, MutableSet)

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _way_to_copy(cls: type) -> Any:
    """Return what copies an instance in the way that its class says itself; None if it does not."""
    base = builtin_base(cls)
    for name, way in (("__copy__", None), ("copy", None), ("__reduce__", copy.copy), ("__reduce_ex__", copy.copy)):
        own = getattr(cls, name, None)
        if callable(own) and own is not getattr(base, name, None):
            return way or own
    return None


def unshared(cls: type, handler: Handler, is_leaf: Callable[[Any], bool]) -> Handler:
    """Return how a subclass of dict or list is taken apart so that it shares no state with the original.

    Args:
        cls: the class.
        handler: takes it apart by its attributes.
        is_leaf: says whether an attribute is returned as the same object.
    """
    base, duplicate = builtin_base(cls), _way_to_copy(cls)

    def flatten(obj: Any) -> tuple[Any, Any]:
        stored = stored_attributes(obj)
        if not stored or getattr(obj, "__dict__", None) is obj:  # there is nothing but items
            return handler.flatten(obj)  # type: ignore[no-any-return]
        made = None if duplicate is None else duplicate(obj)
        if type(made) is not cls or made is obj or base.__len__(made) != base.__len__(obj):
            _check_shares_nothing(cls, stored, is_leaf)
            return handler.flatten(obj)  # type: ignore[no-any-return]
        keys = keys_of(base, obj)
        values = tuple(base.values(obj) if isinstance(obj, dict) else base.__iter__(obj))
        staged = {name: value for name, value in stored_attributes(made).items() if _is_staged(value)}
        _fill(base, made, keys, [None] * len(keys), staged, [None] * len(staged))
        return (*values, *staged.values(), OnHost(made)), (keys, tuple(staged))

    def unflatten(metadata: Any, children: Any) -> Any:
        if duplicate is None or len(metadata) != 2:
            return handler.unflatten(metadata, children)
        *values, kept = children
        keys, names = metadata
        made = duplicate(kept)  # again: a layout may unpack one batch twice
        _fill(base, made, keys, values[: len(keys)], names, values[len(keys) :])
        return made

    return Handler(flatten, unflatten, attribute_steps)


def _fill(base: Any, obj: Any, keys: Iterable[Any], items: Iterable[Any], names: Iterable[str], values: Any) -> None:
    set_attributes(obj, names, values)
    for key, item in zip(keys, items, strict=True):
        base.__setitem__(obj, key, item)


def _is_staged(value: Any) -> bool:
    try:
        return isinstance(value, np.ndarray) or holds_tensor(value)
    except OverflowError:  # it is refused where it is
        return True


def _check_shares_nothing(cls: type, stored: dict[str, Any], is_leaf: Callable[[Any], bool]) -> None:
    """Refuse an object that its copy by attributes would change, or be changed by."""
    for name, value in stored.items():
        owner = value.__self__ if isinstance(value, _METHODS) else value
        if isinstance(owner, _MUTABLE) and (owner is not value or is_leaf(value)):
            of = "a method of " if owner is not value else ""
            raise WrongFunctionsError(
                cls,
                f"its attribute {name} is {of}a {type(owner).__qualname__}, which the staged object would share with "
                f"the original; use pinstage.register_node({cls.__qualname__}, flatten, unflatten), or give the class "
                "a __copy__",
            )
