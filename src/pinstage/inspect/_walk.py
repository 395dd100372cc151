"""Every tensor and array of a batch, wherever it hides.

Staging refuses an object that it does not know. An audit comes before that: it looks into any object, by its items and
its stored attributes, and remembers through which objects each leaf was reached.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import is_atom, stored_attributes

Leaf = torch.Tensor | np.ndarray[Any, Any]

_NO_DATA = (memoryview, torch.nn.Module, types.MethodType)
"""Types that are not looked into, besides those that staging takes for atoms."""


class FoundLeaf(NamedTuple):
    """A tensor or array, and where it is."""

    path: str
    """As one would write it after the batch's name; empty if the batch is the leaf."""
    leaf: Leaf
    parents: tuple[Any, ...]
    """The objects it was reached through, the batch itself first."""


def places(batch: Any) -> Iterator[FoundLeaf]:
    """Yield each tensor and array of a batch, in order; one that is in two places comes twice.

    An object that refers back to one it was reached through is not entered again.
    """
    pending: list[tuple[str, Any, tuple[Any, ...]]] = [("", batch, ())]
    while pending:
        path, obj, parents = pending.pop()
        if isinstance(obj, torch.Tensor | np.ndarray):
            yield FoundLeaf(path, obj, parents)
            continue
        has_no_data = is_atom(type(obj)) or isinstance(obj, _NO_DATA)
        if not has_no_data and not any(parent is obj for parent in parents):
            below = (*parents, obj)
            pending.extend([(path + step, child, below) for step, child in _children(obj)][::-1])


def _children(obj: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, with what is written behind its name to get there."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return [(f".{name}", value) for name, value in zip(obj._fields, obj, strict=True)]
    attributes = [(f".{name}", value) for name, value in stored_attributes(obj).items()]
    if isinstance(obj, Mapping):
        items = [(f"[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, Sequence | deque):
        items = [(f"[{index}]", value) for index, value in enumerate(obj)]
    elif isinstance(obj, Set):
        items = [(f".<item {index}>", value) for index, value in enumerate(obj)]
    else:
        return attributes
    # A mapping or sequence that is written in Python keeps its items in its attributes: they would come twice.
    return items + attributes if isinstance(obj, dict | list | tuple) else items
