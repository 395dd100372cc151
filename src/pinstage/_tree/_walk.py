"""Taking a batch apart as far as there are containers."""

from __future__ import annotations

from typing import Any

from .. import _native
from ._nodes import HANDLERS, flatten, handler_of, learn_containers, too_deep
from ._structure import Structure

_MOST_REMEMBERED = 32

_last: dict[tuple[type, int], Structure] = {}
"""The structure of the last batch of each type and length: to hold another one against it takes a third of finding it
out."""


def walk(batch: Any) -> tuple[list[Any], Structure]:
    """Take a batch apart, making containers known that are met for the first time.

    Returns:
        The leaves, and the structure. Keys of a dict are sorted, as optree does it.

    Raises:
        LayoutError: the batch contains itself or is nested too deeply.
    """
    if _native.core is not None:
        found = _walk_natively(batch)
        if found is not None:
            return found
    leaves, treespec = flatten(batch)
    while learn_containers(set(map(type, leaves))):
        leaves, treespec = flatten(batch)
    return leaves, Structure(None, treespec)


def _walk_natively(batch: Any) -> tuple[list[Any], Structure] | None:
    """Do so, if there is nothing in the batch that only optree knows."""
    kind = type(batch)
    key = (kind, len(batch) if kind in (dict, list, tuple) else 0)
    structure = _last.get(key)
    try:
        if structure is not None:
            leaves = structure.leaves_of(batch, HANDLERS)
            if leaves is not None:
                return leaves, structure
        while isinstance(found := _native.core.Structure.of(batch, HANDLERS), type):
            handler_of(found)
    except RecursionError:
        raise too_deep() from None
    if found is None:
        return None
    structure = Structure(found[0], None)
    _last[key] = structure
    while len(_last) > _MOST_REMEMBERED:
        _last.pop(next(iter(_last)), None)
    return found[1], structure

