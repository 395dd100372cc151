"""Leaves that cannot be described, and what to do about them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from .._compat.views import check_is_plain
from ..errors import LayoutError
from ._arrays import from_array
from ._attributes import has_attributes_only, stored_attributes
from ._leaves import holds_tensor, is_atom
from ._nodes import moves_as_a_whole
from ._structure import Structure, walk

SOURCES = (Iterator, DataLoader, IterableDataset)
"""Classes whose objects yield batches, and so can't be one, or a part of one."""

_MOST_NAMED = 32
"""The most classes named in one error: a linked structure may have any number."""


def tensor_over(
    structure: Structure, array: np.ndarray[Any, Any], index: int
) -> torch.Tensor | None:
    """Return a tensor over a numpy array; None if it is not numeric.

    Raises:
        LayoutError: torch has no such dtype, or the array is masked.
    """
    try:
        tensor = from_array(array)
    except TypeError as error:
        masked = isinstance(array, np.ma.MaskedArray)
        remedy = (
            "pass .filled(...) and .mask separately"
            if masked
            else "convert it to a dtype that torch has"
        )
        what = f"numpy {type(array).__name__} {array.dtype} {list(array.shape)}"
        raise _refusal(structure, index, f"cannot be staged: {what}: {error}; {remedy}") from error
    if tensor is not None:
        check_is_plain(tensor)
    return tensor


def hides_tensor(structure: Structure, leaf: Any, index: int) -> bool:
    """Return whether an unknown object has a tensor or an array somewhere inside.

    Raises:
        LayoutError: there is too much to search.
    """
    try:
        return holds_tensor(leaf)
    except OverflowError as error:
        name = type(leaf).__qualname__
        text = (
            f"isn't a known container, and too large to search for tensors: {name}, {error}; make "
            f"it known with pinstage.register_node({name}), or pass it as pinstage.on_host(...)"
            f"{_where_to_register()}"
        )
        raise _refusal(structure, index, text) from error


def unknown_classes(leaves: list[Any], structure: Structure, index: int) -> LayoutError:
    """Return an error that names all classes of a batch that hold tensors and aren't known
    containers.

    Classes inside others are named, too: they would be refused next. The leaf at `index` is always
    named, even if it has other items when it is searched again.
    """
    unknown: dict[type, str] = {}
    _find_unknown(leaves, structure, None, unknown)
    unknown = unknown or {type(leaves[index]): structure.path(index)}
    (first, path), *more = unknown.items()
    name = first.__qualname__
    if issubclass(first, np.ndarray | set | frozenset):
        text = f"batch{path} holds tensors in {name}, which cannot be staged; use a list"
    else:
        by_attributes = (
            f"pinstage.register_node({name}), or " if has_attributes_only(first) else "pinstage."
        )
        text = (
            f"batch{path} holds tensors and isn't a known container: {first.__module__}.{name}; "
            f"make it known with {by_attributes}register_node({name}, flatten, unflatten), or give "
            f"it tree_flatten and tree_unflatten{_where_to_register()}"
        )
    lines = [
        f"\n    {_line(cls)}  # {cls.__module__}.{cls.__qualname__}, batch{where}"
        for cls, where in more
    ]
    return LayoutError(f"{text}{'; the same for' if lines else ''}{''.join(lines)}", path)


def _where_to_register() -> str:
    """Return what to add in a process that didn't run all of the main module."""
    if getattr(sys.modules.get("__main__"), "__name__", "") != "__mp_main__":
        return ""
    return (
        '. If it is registered below `if __name__ == "__main__"`, register it at module level: the '
        "worker imports the module as `__mp_main__` and doesn't run that block"
    )


def _line(cls: type) -> str:
    """Return the line of code that makes a class known."""
    if issubclass(cls, np.ndarray | set | frozenset):
        return f"use a list instead of {cls.__qualname__}"
    functions = "" if has_attributes_only(cls) else ", flatten, unflatten"
    return f"pinstage.register_node({cls.__qualname__}{functions})"


def _find_unknown(
    leaves: list[Any], structure: Structure, where: str | None, unknown: dict[type, str]
) -> None:
    """Add the unknown classes that hold tensors, with the path of one object each, and the classes
    inside them.

    Depth first, in the order of the batch. One object of each class is searched.
    """
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if len(unknown) < _MOST_NAMED and type(leaf) not in unknown and _is_unknown(leaf):
            # Inside an object the first key is an attribute: ['a'][0] means .a[0].
            name, _, rest = path.removeprefix("['").partition("']")
            unknown[type(leaf)] = here = path if where is None else f"{where}.{name}{rest}"
            with suppress(LayoutError):  # it contains itself
                _find_unknown(*walk(stored_attributes(leaf)), here, unknown)


def _is_unknown(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor) or is_atom(type(leaf)) or moves_as_a_whole(type(leaf)):
        return False
    try:
        return holds_tensor(leaf)
    except OverflowError:
        return True


def check_yields_no_batches(structure: Structure, leaf: Any, index: int) -> None:
    """Refuse a whole batch that is a loader or an iterator."""
    if isinstance(leaf, SOURCES) and not structure.path(index):
        raise LayoutError(
            f"batch is of type {type(leaf).__qualname__}, which yields batches: pass one of "
            "these, or iterate over pinstage.wrap_loader(loader, device=...) for a torch "
            "DataLoader, else over stager.prefetch(source)",
            "",
        )


def too_large(structure: Structure, tensor: torch.Tensor, index: int) -> LayoutError:
    """Return the error of an expanded tensor, whose repeated elements would fit into no memory."""
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    text = f"is too large: {nbytes} bytes of {list(tensor.shape)}; stage it before you expand it"
    return _refusal(structure, index, text)


def _refusal(structure: Structure, index: int, text: str) -> LayoutError:
    """Return an error about a leaf."""
    path = structure.path(index)
    return LayoutError(f"batch{path} {text}", path)
