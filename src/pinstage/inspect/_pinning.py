"""Finds every tensor of a batch, and what ``DataLoader(pin_memory=True)`` would pin.

Staging refuses an object that it doesn't know. An audit comes before that: it looks into any
object, by its items and its stored attributes, and remembers through which objects each leaf was
reached.

The DataLoader passes each batch to a function (`pinstage._compat.loader.pin_as_loader`), which
enters some containers, calls ``pin_memory()`` if an object has it, and returns anything else
unchanged. The audit runs it on the batch itself, so the answer is torch's. Only the call at the
end, ``Tensor.pin_memory``, is recorded and not carried out: nothing is pinned or copied, no GPU is
needed, and other threads aren't affected.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .._batch import is_atom, stored_attributes
from .._compat.loader import pin_as_loader

Leaf = torch.Tensor | np.ndarray[Any, Any]

_NO_DATA = (memoryview, torch.nn.Module, types.MethodType)
"""Types that are not looked into, in addition to staging's atoms."""


class LocatedLeaf(NamedTuple):
    """A tensor or array, and where it is."""

    path: str
    """As you would write it after the batch's name; empty if the batch is the leaf."""
    leaf: Leaf
    parents: tuple[Any, ...]
    """The objects it was reached through, the batch itself first."""


def find_leaves(batch: Any) -> Iterator[LocatedLeaf]:
    """Yield each tensor and array of a batch, in order, as often as it appears.

    An object that refers back to one it was reached through is not entered again.
    """
    pending: list[tuple[str, Any, tuple[Any, ...]]] = [("", batch, ())]
    while pending:
        path, obj, parents = pending.pop()
        if isinstance(obj, torch.Tensor | np.ndarray):
            yield LocatedLeaf(path, obj, parents)
            continue
        has_no_data = is_atom(type(obj)) or isinstance(obj, _NO_DATA)
        if not has_no_data and all(parent is not obj for parent in parents):
            for step, child in reversed(_children(obj)):
                pending.append((path + step, child, (*parents, obj)))


def _children(obj: Any) -> list[tuple[str, Any]]:
    """Return the contents of an object, each with the suffix of its path."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return [(f".{name}", value) for name, value in zip(obj._fields, obj, strict=True)]
    items = _items(obj)
    # A mapping or sequence that is written in Python keeps its items in its attributes: they would
    # appear twice.
    if items and not isinstance(obj, dict | list | tuple):
        return items
    return items + [(f".{name}", value) for name, value in stored_attributes(obj).items()]


def _items(obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        return [(f"[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, Sequence):
        return [(f"[{index}]", value) for index, value in enumerate(obj)]
    if isinstance(obj, Set):
        return [(f".<item {index}>", value) for index, value in enumerate(obj)]
    return []


# -- pinning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pinning:
    """The effect of ``pin_memory=True`` on each leaf."""

    pinned: tuple[bool, ...]  # for each leaf, whether it would be page-locked
    # For each leaf, the name of the type that stops torch; None if pinned.
    stopped_by: tuple[str | None, ...]
    error: str | None = None  # the error that would be raised instead


def ask_torch(batch: Any, leaves: Sequence[LocatedLeaf]) -> Pinning:
    """Ask torch which leaves of a batch it would pin.

    The batch stays as it was, unless a ``pin_memory()`` method of its own changes more than
    tensors.
    """
    _, pinned, error = _ask(batch)
    devices = [tensor.device for tensor in pinned if tensor.device.type != "cpu"]
    # The call that was not carried out would have raised this.
    if error is None and devices:
        error = f"RuntimeError: cannot pin a tensor on {devices[0]}: only CPU tensors can be pinned"
    ids = {id(tensor) for tensor in pinned}
    stops: dict[int, bool] = {}  # by id, since one object may hold many leaves
    stopped_by = tuple(
        None if id(located.leaf) in ids else type_name(_first_stop(located, stops))
        for located in leaves
    )
    return Pinning(tuple(name is None for name in stopped_by), stopped_by, error)


def type_name(obj: Any) -> str:
    """Return the name of an object's type as you would import it; for a builtin, its name alone."""
    cls = type(obj)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


class _Recorder(TorchFunctionMode):
    """Records calls of ``Tensor.pin_memory`` in this thread, and returns the tensors unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            self.tensors.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


def _ask(obj: Any) -> tuple[Any, list[torch.Tensor], str | None]:
    """Return the result of torch's function for an object, the tensors that it would pin, and its
    error.
    """
    result = error = None
    with _Recorder() as recorder:
        try:
            result = pin_as_loader(obj)
        except Exception as raised:  # noqa: BLE001 - a pin_memory() method may raise anything: that is the finding
            error = f"{type(raised).__name__}: {raised}"
    return result, recorder.tensors, error


def _first_stop(located: LocatedLeaf, stops: dict[int, bool]) -> Any:
    """Return the first object on the way to a leaf that torch does not look into."""
    for parent in located.parents:
        if id(parent) not in stops:
            result, pinned, _ = _ask(parent)
            stops[id(parent)] = result is parent and not pinned
        if hasattr(parent, "pin_memory") or stops[id(parent)]:  # its pin_memory() left the leaf out
            return parent
    if isinstance(located.leaf, torch.Tensor) and located.parents:
        return located.parents[-1]  # torch looks at its items, and the leaf is an attribute
    return located.leaf
