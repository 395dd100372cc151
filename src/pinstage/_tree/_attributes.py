"""Objects taken apart by what they store, and put together again as `copy.copy` would.

A new instance is made without a call of ``__init__``; its stored attributes, ``__dict__`` and slots alike, are set
underneath any property or frozen ``__setattr__``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from ._registry import MOST_CLASSES

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, as a rule
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: no class statement makes such a type


class Item:
    """A path entry that is an item (``[key]``), beside plain strings that are attributes."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and self.key == other.key

    def __hash__(self) -> int:
        return hash((Item, self.key))


@lru_cache(MOST_CLASSES)
def slots_of(cls: type) -> dict[str, Any]:
    """Return the slots of a class and its bases: name to descriptor."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")  # the compiler put the class before it
            stored = f"_{base.__name__.lstrip('_')}{name}" if private else name
            if stored in base.__dict__ and stored not in ("__dict__", "__weakref__"):
                found.setdefault(stored, base.__dict__[stored])
    return found


def stored_attributes(obj: Any) -> dict[str, Any]:
    """Return what an object stores: its slots that are set, then its ``__dict__``."""
    stored = {}
    cls: Any = type(obj)
    for name, descriptor in slots_of(cls).items():
        try:
            stored[name] = descriptor.__get__(obj)
        except AttributeError:  # not set
            continue
    stored.update(getattr(obj, "__dict__", ()))
    return stored


def set_attributes(obj: Any, names: Iterable[str], values: Iterable[Any]) -> None:
    cls: Any = type(obj)
    slots = slots_of(cls)
    for name, value in zip(names, values, strict=True):
        if name in slots:
            slots[name].__set__(obj, value)
        else:
            obj.__dict__[name] = value


def builtin_base(cls: type) -> Any:
    """Return the first class in the order of resolution that is not written in Python: its methods ask no override.

    Some of those are heap types nevertheless (`deque` and `defaultdict` from Python 3.12 on); they are immutable, or
    have a ``__new__`` in C of their own.
    """
    return next(
        base
        for base in cls.__mro__
        if not base.__flags__ & _HEAP_TYPE
        or base.__flags__ & _IMMUTABLE
        or getattr(base.__new__, "__self__", None) is base
    )


def has_attributes_only(cls: type) -> bool:
    """Say whether an instance is no more than its stored attributes, and its items if it is a dict, list or tuple."""
    return builtin_base(cls) in (object, SimpleNamespace) or issubclass(cls, dict | list | tuple)


def maker_of(cls: Any) -> Callable[[], Any] | None:
    """Return what makes a new one of a class that is no more than its ``__dict__``; None if it is more."""
    if issubclass(cls, dict | list | tuple) or slots_of(cls) or not cls.__dictoffset__:
        return None
    return partial(builtin_base(cls).__new__, cls)


def attribute_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Return functions that take an instance apart into its items, if it has any, and its stored attributes."""
    base = builtin_base(cls)
    if issubclass(cls, dict):

        def flatten_dict(obj: Any) -> tuple[Any, Any, Any]:
            keys = tuple(base.keys(obj))
            stored = stored_attributes(obj)
            metadata = (keys, tuple(stored), obj.default_factory if isinstance(obj, defaultdict) else None)
            entries = (*map(Item, keys), *stored)
            return (*base.values(obj), *stored.values()), metadata, entries

        def unflatten_dict(metadata: Any, children: Any) -> Any:
            keys, names, factory = metadata
            children = tuple(children)
            obj = base.__new__(cls)
            if isinstance(obj, defaultdict):
                obj.default_factory = factory
            set_attributes(obj, names, children[len(keys) :])
            for key, value in zip(keys, children, strict=False):
                base.__setitem__(obj, key, value)
            return obj

        return flatten_dict, unflatten_dict

    if issubclass(cls, list | tuple):

        def flatten_sequence(obj: Any) -> tuple[Any, Any, Any]:
            items = tuple(base.__iter__(obj))
            stored = stored_attributes(obj)
            entries = (*map(Item, range(len(items))), *stored)
            return (*items, *stored.values()), (len(items), tuple(stored)), entries

        def unflatten_sequence(metadata: Any, children: Any) -> Any:
            count, names = metadata
            children = tuple(children)
            obj: Any
            if base is list:
                obj = base.__new__(cls)
                list.extend(obj, children[:count])
            else:
                obj = base.__new__(cls, children[:count])
            set_attributes(obj, names, children[count:])
            return obj

        return flatten_sequence, unflatten_sequence

    if maker_of(cls) is not None:  # the usual case, at half the cost

        def flatten_dict_alone(obj: Any) -> tuple[Any, Any, Any]:
            stored = obj.__dict__
            names = tuple(stored)
            return stored.values(), names, names

        def unflatten_dict_alone(names: Any, children: Any) -> Any:
            obj = base.__new__(cls)
            obj.__dict__.update(zip(names, children, strict=True))
            return obj

        return flatten_dict_alone, unflatten_dict_alone

    def flatten_object(obj: Any) -> tuple[Any, Any, Any]:
        stored = stored_attributes(obj)
        names = tuple(stored)
        return stored.values(), names, names

    def unflatten_object(names: Any, children: Any) -> Any:
        obj = base.__new__(cls)
        set_attributes(obj, names, children)
        return obj

    return flatten_object, unflatten_object
