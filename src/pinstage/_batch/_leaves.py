"""Leaves: their kinds, by type, and a search of their contents where the type isn't enough."""

from __future__ import annotations

import array
import datetime as dt
import enum
import gc
import pathlib
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ._attributes import builtin_base, slots_of, stored_attributes
from ._handler import MOST_CLASSES
from ._rows import gathered

T = TypeVar("T")


class _Wrapper:
    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj


class OnHost(_Wrapper):
    """Something in a batch that stays on the host; see `on_host`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"on_host({type(self.obj).__qualname__})"


def on_host(x: T) -> T:
    """Mark something in a batch that stays on the host. The staged batch contains `x` itself.

    It is neither searched for tensors nor compared, so it may be anything: lengths that a kernel
    needs on the host, or metadata that can't be hashed. From a loader's worker it arrives as a
    copy, made by pickle.

    Args:
        x: the object that stays. `Rows` are gathered now.

    Returns:
        A wrapper, for use in the batch only. Type checkers see the type of `x`, but the wrapper has
        none of its attributes.
    """
    return OnHost(gathered(x))  # type: ignore[return-value]


class Whole(_Wrapper):
    """A tensor of a registered class that moves by its own ``.to()`` after all, because it requires
    grad.
    """

    __slots__ = ()


WRAPPERS = frozenset({OnHost, Whole})
"""Wrappers of leaves: their ``obj`` is used in their place."""


def unwrapped(leaf: Any) -> Any:
    return leaf.obj if type(leaf) in WRAPPERS else leaf


_ATOMS: tuple[type, ...] = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice, enum.Enum,
    np.generic, np.dtype, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
    torch.Generator, torch.UntypedStorage, torch.TypedStorage, pathlib.PurePath, array.array,
    memoryview, re.Pattern, re.Match, dt.date, dt.time, dt.timedelta, type({}.keys()),
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    types.TracebackType, types.FrameType, OnHost,
)  # fmt: skip
"""Types that hold no tensor: leaves of these types and their subclasses are not searched."""

_ATOM_LIBRARIES = ("PIL", "pyarrow")
"""Libraries whose classes hold no tensor, either: searching their images and columns would take
long.
"""

_ITERABLES: tuple[Any, ...] = (
    list,
    tuple,
    set,
    frozenset,
    deque,
    type({}.values()),
    type({}.items()),
)
"""Types whose items are searched by iterating."""

_PYTHONS: tuple[Any, ...] = (dict, *_ITERABLES, types.MappingProxyType, np.ndarray)
"""Types of containers that are searched completely."""

_NO_CONTAINERS: tuple[Any, ...] = (Iterator, Callable)
"""Types in C whose objects aren't searched through the garbage collector."""

_SEARCH_LIMIT = 100_000
"""The most objects that are searched inside one leaf before it is refused as too large."""

_FIRST_ITEMS, _LEVELS_OF_ITEMS = 16, 2
"""The number of items that are read by an object's own ``__getitem__``, and the levels at which
they are.
"""


IS_ATOM: dict[type, bool] = {}
"""Results of `is_atom`."""

ATOM_TYPES: set[type] = set()
"""The types for which `is_atom` is true, for the extension."""


def is_atom(cls: type) -> bool:
    """Return whether objects of a type hold no tensor, whatever their value."""
    known = IS_ATOM.get(cls)
    if known is None:
        IS_ATOM[cls] = known = (
            issubclass(cls, _ATOMS) or cls.__module__.partition(".")[0] in _ATOM_LIBRARIES
        )
        if known:
            ATOM_TYPES.add(cls)
    return known


def holds_tensor(leaf: Any) -> bool:
    """Return whether an unknown object has a tensor or an array somewhere inside.

    Follows attributes, slots, Python's containers, the first items of others, and references that
    only the garbage collector knows. Behind the last, only tensors count: a data frame keeps its
    numbers in arrays. Closures, bound methods and iterators are not followed.

    Raises:
        OverflowError: there is too much to search.
    """
    return any(isinstance(data, torch.Tensor) or data is not leaf for data in _data_in(leaf))


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """Return a tensor, or the tensors in an object, as far as `holds_tensor` looks."""
    return [data for data in _data_in(thing) if isinstance(data, torch.Tensor)]


def _data_in(thing: Any) -> Iterator[Any]:
    """Yield each tensor and each numeric array in an object."""
    # Keeps the objects alive: an item may be made when it is read, and its id used again.
    seen: dict[int, Any] = {}
    pending = [(thing, 0, True)]
    while pending:
        if len(seen) > _SEARCH_LIMIT:
            raise OverflowError(f"more than {_SEARCH_LIMIT} objects")
        obj, level, arrays = pending.pop()
        is_array = arrays and isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc"
        if is_array or isinstance(obj, torch.Tensor):
            yield obj
        elif not is_atom(type(obj)) and id(obj) not in seen:
            seen[id(obj)] = obj
            pending.extend(_inside(obj, level, arrays))


def _inside(obj: Any, level: int, arrays: bool) -> Iterator[tuple[Any, int, bool]]:
    """Yield what to search next: the objects inside another one, the level of items, and whether
    arrays count.
    """
    cls: Any = type(obj)
    if _has_more(cls):
        yield from ((inner, level, False) for inner in gc.get_referents(obj))
    if level < _LEVELS_OF_ITEMS:
        yield from ((item, level + 1, arrays) for item in _first_items(obj))
    yield from ((inner, level, arrays) for inner in _contents(obj))


def _contents(obj: Any) -> Iterator[Any]:
    if isinstance(obj, np.ndarray):
        yield from obj.ravel().tolist() if obj.dtype.kind == "O" else ()
        return
    if isinstance(obj, dict):
        yield from dict.values(obj)
    elif isinstance(obj, _ITERABLES):
        yield from obj
    elif isinstance(obj, types.MappingProxyType):
        yield from obj.values()
    elif isinstance(obj, partial):
        yield from (obj.args, obj.keywords)
    yield from stored_attributes(obj).values()


@lru_cache(MOST_CLASSES)
def _has_more(cls: Any) -> bool:
    """Return whether a class is made in C, so that its objects may hold more than Python's
    attributes and items.
    """
    is_plain = builtin_base(cls) in (object, types.SimpleNamespace) and (
        cls.__dictoffset__ or slots_of(cls)
    )
    return not is_plain and not issubclass(cls, _PYTHONS + _NO_CONTAINERS)


@lru_cache(MOST_CLASSES)
def _has_items(cls: Any) -> bool:
    """Return whether the items of objects of a class can be read; False for Python's own
    containers.

    A dataset makes its items when they are read, and so may an ``__iter__`` in Python; one in C is
    that of a container. Sets compare their items, which tensors don't support.
    """
    if issubclass(cls, (*_PYTHONS, Dataset, DataLoader)):
        return False
    if hasattr(cls, "__getitem__"):
        return hasattr(cls, "__len__") or hasattr(cls, "keys")
    is_in_c = isinstance(getattr(cls, "__iter__", None), types.WrapperDescriptorType)
    return is_in_c and hasattr(cls, "__len__") and not issubclass(cls, Set)


def _first_items(obj: Any) -> list[Any]:
    """Return the first items of an object; those before an error, if it raises one."""
    cls: Any = type(obj)
    items: list[Any] = []
    if _has_items(cls):
        with suppress(Exception):  # objects may raise anything: then no more items are searched
            items.extend(islice(_items(obj), _FIRST_ITEMS))
    return items


def _items(obj: Any) -> Iterator[Any]:
    cls: Any = type(obj)
    if not hasattr(cls, "__getitem__"):
        return iter(obj)
    keys = obj.keys() if hasattr(cls, "keys") else range(len(obj))
    return (obj[key] for key in keys)
