"""Every tensor and array of a batch, wherever it hides.

Staging stops at an object that it does not know, with an error. An audit comes before that: it looks into any object,
by its items and its stored attributes, and remembers through which objects each leaf was reached.
"""

from __future__ import annotations

import enum
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

_ATOMS: tuple[type, ...] = (
    str, bytes, bytearray, memoryview, int, float, complex, bool, type(None), type, range, slice, enum.Enum, np.generic,
    np.dtype, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, torch.Generator,
    torch.nn.Module, pathlib.PurePath, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.ModuleType,
)  # fmt: skip
"""Types that are no part of a batch's data: not looked into."""


class Place(NamedTuple):
    """A tensor or array, and where it is."""

    path: str
    """As one would write it after the batch's name; empty if the batch is the leaf."""
    leaf: torch.Tensor | np.ndarray[Any, Any]
    parents: tuple[Any, ...]
    """The objects it was reached through, the batch itself first."""


def places(batch: Any) -> Iterator[Place]:
    """Yield each tensor and array of a batch, in order; one that is in two places comes twice.

    An object that refers back to one it was reached through is not entered again.
    """
    pending: list[tuple[str, Any, tuple[Any, ...]]] = [("", batch, ())]
    while pending:
        path, obj, parents = pending.pop()
        if isinstance(obj, torch.Tensor | np.ndarray):
            yield Place(path, obj, parents)
        elif not isinstance(obj, _ATOMS) and not any(parent is obj for parent in parents):
            below = (*parents, obj)
            pending.extend([(path + step, child, below) for step, child in _children(obj)][::-1])


def _children(obj: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, with what is written behind its name to get there."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return [(f".{name}", value) for name, value in zip(obj._fields, obj, strict=True)]
    if isinstance(obj, Mapping):
        items = [(f"[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, Sequence) or type(obj).__name__ == "deque":
        items = [(f"[{index}]", value) for index, value in enumerate(obj)]
    elif isinstance(obj, Set):
        items = [(f".<item {index}>", value) for index, value in enumerate(obj)]
    else:
        return _attributes(obj)
    # A mapping or sequence that is written in Python keeps its items in its attributes: they would come twice.
    return items + _attributes(obj) if isinstance(obj, dict | list | tuple) else items


def _attributes(obj: Any) -> list[tuple[str, Any]]:
    names = [
        name
        for cls in type(obj).__mro__
        for name in _slot_names(cls)
        if name not in ("__dict__", "__weakref__") and hasattr(obj, name)
    ]
    stored = {name: getattr(obj, name) for name in names} | dict(getattr(obj, "__dict__", {}))
    return [(f".{name}", value) for name, value in stored.items()]


def _slot_names(cls: type) -> list[str]:
    names = cls.__dict__.get("__slots__", ())
    listed = [names] if isinstance(names, str) else list(names)
    return [f"_{cls.__name__.lstrip('_')}{name}" if _is_private(name) else name for name in listed]


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
