"""Attributes that objects store: read and set without any property or frozen ``__setattr__``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ._handler import MOST_CLASSES

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: usually made by a class statement
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: no class statement makes such a type


@lru_cache(MOST_CLASSES)
def slots_of(cls: type) -> dict[str, Any]:
    """Return the slots of a class and its bases: name to descriptor."""
    slots: dict[str, Any] = {}
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            # The compiler adds the class's name.
            private = name.startswith("__") and not name.endswith("__")
            stored = f"_{base.__name__.lstrip('_')}{name}" if private else name
            if stored in base.__dict__ and stored not in ("__dict__", "__weakref__"):
                slots.setdefault(stored, base.__dict__[stored])
    return slots


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
    """Return the first class in the method resolution order that isn't written in Python: its
    methods call no override.

    Some such classes are heap types nevertheless (`deque` and `defaultdict` from Python 3.12 on).
    They are immutable, or have a ``__new__`` of their own in C.
    """
    return next(
        base
        for base in cls.__mro__
        if not base.__flags__ & _HEAP_TYPE
        or base.__flags__ & _IMMUTABLE
        or getattr(base.__new__, "__self__", None) is base
    )


def has_attributes_only(cls: type) -> bool:
    """Return whether an instance has only its stored attributes, and its items if it is a dict,
    list or tuple.
    """
    return builtin_base(cls) in (object, SimpleNamespace) or issubclass(cls, dict | list | tuple)
