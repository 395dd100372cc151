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
from collections import Counter
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
    """A tensor or numeric array, and where it is."""

    path: str
    """As you would write it after the batch's name; empty if the batch is the leaf."""
    leaf: Leaf
    parents: tuple[Any, ...]
    """The objects it was reached through, the batch itself first."""
    steps: tuple[str, ...]
    """The part of the path that each of the parents adds."""


def find_leaves(batch: Any) -> Iterator[LocatedLeaf]:
    """Yield each tensor and numeric array of a batch, in order, as often as it appears.

    An object that refers back to one it was reached through is not entered again.
    """
    pending: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = [(batch, (), ())]
    while pending:
        obj, parents, steps = pending.pop()
        if isinstance(obj, torch.Tensor) or _is_numeric(obj):
            yield LocatedLeaf("".join(steps), obj, parents, steps)
            continue
        has_no_data = is_atom(type(obj)) or isinstance(obj, _NO_DATA)
        if not has_no_data and all(parent is not obj for parent in parents):
            for step, child in reversed(_children(obj)):
                pending.append((child, (*parents, obj), (*steps, step)))


def _is_numeric(obj: Any) -> bool:
    """Return whether an object is an array that can become a tensor: not one of objects, strings,
    dates, times or records.
    """
    return isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc"


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
    if isinstance(obj, np.ndarray) and obj.dtype.kind == "O":
        return [(f"[{index}]", value) for index, value in np.ndenumerate(obj)]
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
    whole = _ask(batch)
    devices = [tensor.device for tensor in whole.tensors if tensor.device.type != "cpu"]
    error = whole.error
    # The call that was not carried out would have raised this.
    if error is None and devices:
        error = f"RuntimeError: cannot pin a tensor on {devices[0]}: only CPU tensors can be pinned"
    answers = {id(batch): whole}  # by id, since one object may hold many leaves
    stops = [_first_stop(located, answers) for located in leaves]
    stopped_by = tuple(None if stop is None else type_name(stop) for stop in stops)
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


class _Answer(NamedTuple):
    """The effect of torch's function on an object."""

    is_entered: bool
    """Whether it pins something in the object, or makes another one."""
    tensors: list[torch.Tensor]
    """The tensors that it would pin, each as often as it would."""
    pinned_paths: frozenset[str]
    """Where in the object these are, if it has a ``pin_memory()`` of its own."""
    error: str | None


def _ask(obj: Any) -> _Answer:
    result = error = None
    with _Recorder() as recorder:
        try:
            result = pin_as_loader(obj)
        except Exception as raised:  # noqa: BLE001 - a pin_memory() method may raise anything: that is the finding
            error = f"{type(raised).__name__}: {raised}"
    tensors = recorder.tensors
    paths = _paths_of(tensors, obj) if _pins_itself(obj) else frozenset()
    return _Answer(bool(tensors) or result is not obj, tensors, paths, error)


def _pins_itself(obj: Any) -> bool:
    return hasattr(obj, "pin_memory") and not isinstance(obj, torch.Tensor)


def _paths_of(tensors: Sequence[torch.Tensor], obj: Any) -> frozenset[str]:
    """Return the paths of tensors in an object.

    If one of them is in more places than its method pins, these are the first.
    """
    left = Counter(map(id, tensors))
    paths = []
    for path, leaf, *_ in find_leaves(obj):
        if left[id(leaf)]:
            left[id(leaf)] -= 1
            paths.append(path)
    return frozenset(paths)


def _first_stop(located: LocatedLeaf, answers: dict[int, _Answer]) -> Any:
    """Return the first object on the way to a leaf that torch does not look into, the leaf itself
    included; None if torch pins the leaf.

    Each object is asked about by itself: the same tensor may be pinned elsewhere in the batch.
    """
    objects = zip((*located.parents, located.leaf), (*located.steps, ""), strict=True)
    for depth, (obj, step) in enumerate(objects):
        answer = answers.get(id(obj))
        if answer is None:
            answer = answers[id(obj)] = _ask(obj)
        if _pins_itself(obj):
            return None if "".join(located.steps[depth:]) in answer.pinned_paths else obj
        has_items = isinstance(obj, Mapping | Sequence) and not hasattr(obj, "_fields")
        is_passed_by = has_items and step.startswith(".")  # torch enters the items only
        if is_passed_by or not answer.is_entered:
            return obj
    return None
