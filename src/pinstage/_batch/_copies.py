"""Objects taken apart into items and attributes, and put together as `copy.copy` would.

A new instance is made without calling ``__init__``. A subclass of dict or list may have state
beside its items that the staged object must not share with the original. For example, a sorted dict
has an inner list of its keys and bound methods of that list, and a copy by attributes would have
the same inner list. So an object whose class defines how it is copied is copied that way. Then its
items, and its attributes that hold tensors, are set to the staged ones.
"""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from functools import partial
from typing import Any

import numpy as np

from ._attributes import builtin_base, set_attributes, slots_of, stored_attributes
from ._handler import Handler, WrongFunctionsError, path_steps
from ._leaves import OnHost, holds_tensor

_MUTABLE = (MutableMapping, MutableSequence, MutableSet)

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _way_to_copy(cls: type) -> Any:
    """Return the function by which a class copies its instances; None if it doesn't define one."""
    base = builtin_base(cls)
    for name in ("__copy__", "copy", "__reduce__", "__reduce_ex__"):
        own = getattr(cls, name, None)
        if callable(own) and own is not getattr(base, name, None):
            return copy.copy if name.startswith("__reduce") else own
    return None


def attribute_handler(
    cls: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Handler | Callable[[], Any]:
    """Return how an instance is taken apart into its items, if it has any, and its stored
    attributes.

    In the usual case, an object consists only of its ``__dict__``. Then the walk just needs a
    function that makes an empty object.

    Args:
        cls: the class.
        is_leaf: says whether an attribute is returned as the same object; None if a dict or list
            may share its state.
    """
    base, has_items = builtin_base(cls), issubclass(cls, dict | list | tuple)
    if not has_items and not slots_of(cls) and cls.__dictoffset__:
        return partial(base.__new__, cls)
    duplicate = _way_to_copy(cls)

    def flatten(obj: Any) -> tuple[Any, Any]:
        keys, items = _items_of(base, obj) if has_items else ((), ())
        stored = stored_attributes(obj)
        if is_leaf is not None and stored and _may_have_state(obj):
            made = None if duplicate is None else duplicate(obj)
            if type(made) is cls and made is not obj and base.__len__(made) == len(keys):
                attributes = stored_attributes(made).items()
                staged = {name: value for name, value in attributes if _is_staged(value)}
                set_attributes(made, staged, [None] * len(staged))
                _set_items(base, made, keys, [None] * len(keys))
                return (*items, *staged.values(), OnHost(made)), (keys, tuple(staged))
            _check_shares_nothing(cls, stored, is_leaf)
        factory = obj.default_factory if isinstance(obj, defaultdict) else None
        return (*items, *stored.values()), (keys, tuple(stored), factory)

    def unflatten(metadata: Any, children: Any) -> Any:
        keys, names, *factory = metadata
        items, values = children[: len(keys)], children[len(keys) : len(keys) + len(names)]
        if not factory:
            obj = duplicate(children[-1])  # copied again: a layout may unpack one batch twice
        elif issubclass(cls, tuple):
            obj = base.__new__(cls, items)
        else:
            obj = base.__new__(cls)
            if isinstance(obj, defaultdict):
                [obj.default_factory] = factory
            elif isinstance(obj, list):
                list.extend(obj, items)
        set_attributes(obj, names, values)
        if isinstance(obj, dict | list):
            _set_items(base, obj, keys, items)
        return obj

    # Keys and names come first in the metadata.
    return Handler(flatten, unflatten, lambda metadata: path_steps(*metadata[:2]))


def _items_of(base: Any, obj: Any) -> tuple[Any, Any]:
    """Return the keys of a dict, or the indexes of a list or tuple, and its items, by methods of
    its builtin base.
    """
    if isinstance(obj, dict):
        return tuple(base.keys(obj)), base.values(obj)
    return range(base.__len__(obj)), base.__iter__(obj)


def _set_items(base: Any, obj: Any, keys: Iterable[Any], items: Iterable[Any]) -> None:
    for key, item in zip(keys, items, strict=True):
        base.__setitem__(obj, key, item)


def _may_have_state(obj: Any) -> bool:
    """Return whether an object's attributes, which aren't its items, may belong to them."""
    return isinstance(obj, dict | list) and getattr(obj, "__dict__", None) is not obj


def _is_staged(value: Any) -> bool:
    try:
        return isinstance(value, np.ndarray) or holds_tensor(value)
    except OverflowError:  # too much to search: it is refused as a leaf
        return True


def _check_shares_nothing(
    cls: type, stored: dict[str, Any], is_leaf: Callable[[Any], bool]
) -> None:
    """Refuse an object that would share mutable state with its copy by attributes."""
    for name, value in stored.items():
        owner = value.__self__ if isinstance(value, _METHODS) else value
        if isinstance(owner, _MUTABLE) and (owner is not value or is_leaf(value)):
            of = "a method of " if owner is not value else ""
            raise WrongFunctionsError(
                cls,
                f"its attribute {name} is {of}a {type(owner).__qualname__}, which the staged "
                "object would share with the original; use "
                f"pinstage.register_node({cls.__qualname__}, flatten, unflatten), or give the "
                "class a __copy__",
            )
