"""The structure of a batch, and how a batch is taken apart into it and its leaves."""

from __future__ import annotations

import pickle
from typing import Any

import optree

from .. import _native
from ._nodes import (
    NodeType,
    classes_in,
    flatten,
    forget_classes,
    handler_of,
    learn_containers,
    node_types,
    too_deep,
)
from ._paths import path_text, path_texts
from ._registry import HANDLERS
from ._tensors import one_walk

_MOST_REMEMBERED = 32

_last: dict[tuple[type, int], Any] = {}
"""The structure of the last batch of each type and length, as the extension knows it, and its `Structure`. Verifying
that a batch has this structure costs a third of flattening it."""


class Structure:
    """Which containers a batch is made of, and where each leaf stands. Holds nothing of the batch.

    Equal if the types and keys are. The order in which a dict was filled does not count; `rebuild` keeps it.

    Args:
        native: as the extension knows it; None if it does not.
        treespec: as optree knows it; None if the other one is there, of which it is made when it is asked for.
    """

    __slots__ = ("_key", "_native", "_treespec", "num_leaves")

    def __init__(self, native: Any, treespec: optree.PyTreeSpec | None) -> None:
        self._native = native
        self._treespec = treespec
        self._key: Any = None
        self.num_leaves: int = native.num_leaves if treespec is None else treespec.num_leaves

    @property
    def treespec(self) -> optree.PyTreeSpec:
        """The structure as optree describes it."""
        if self._treespec is None:
            self._treespec = _flatten_all(self._native.skeleton())[1]
        return self._treespec

    def rebuild(self, leaves: list[Any]) -> Any:
        """Put a batch together from all its leaves, in their order."""
        if self._native is not None:
            return self._native.rebuild(leaves)
        with one_walk():
            return self.treespec.unflatten(leaves)

    def path(self, leaf: int) -> str:
        """Return where a leaf is, as one would write it after the batch's name."""
        return path_text(self.treespec, leaf)

    def paths(self) -> list[str]:
        """Return where each leaf is."""
        return path_texts(self.treespec)

    def key(self) -> Any:
        """Return what two structures have in common that `rebuild` alike, the order of keys included. Can be hashed."""
        if self._key is None:  # optree's structures are equal whatever the order of keys
            self._key = pickle.dumps(self._treespec) if self._native is None else self._native.key()
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return False
        return self is other or (self.num_leaves == other.num_leaves and _are_alike(self.treespec, other.treespec))

    def __hash__(self) -> int:
        return hash(self.treespec)

    def __reduce__(self) -> tuple[Any, ...]:
        # The classes are unpickled first, so that the structure finds them registered.
        return _restore, (node_types(self.treespec), self.treespec)

    def __str__(self) -> str:
        return str(self.treespec)


def _are_alike(one: optree.PyTreeSpec, other: optree.PyTreeSpec) -> bool:
    """Compare as optree does, to which a class is another one once it was forgotten and learnt again."""
    if one == other or hash(one) != hash(other):
        return one == other
    return str(one) == str(other) and classes_in(one) == classes_in(other)


def _restore(_nodes: tuple[NodeType, ...], treespec: optree.PyTreeSpec) -> Structure:
    return Structure(None, treespec)


def walk(batch: Any) -> tuple[list[Any], Structure]:
    """Take a batch apart as far as there are containers, making those known that are met for the first time.

    Returns:
        The leaves, and the structure. Keys of a dict are sorted, as optree does it.

    Raises:
        LayoutError: the batch contains itself or is nested too deeply.
    """
    kind = type(batch)
    key = (kind, len(batch) if kind in (dict, list, tuple) else 0)
    try:
        last = _last.get(key)
        if last is not None and _native.core is not None:
            native, structure = last
            leaves = native.leaves(batch, HANDLERS)
            if leaves is not None:
                return leaves, structure
        return _walk_anew(batch, key)
    except RecursionError:
        raise too_deep() from None


def _walk_anew(batch: Any, key: tuple[type, int]) -> tuple[list[Any], Structure]:
    """Take a batch apart whose structure is not that of the last one."""
    forget_classes()
    if _native.core is not None:
        while isinstance(found := _native.core.Structure.of(batch, HANDLERS), type):
            handler_of(found)
        if found is not None:
            native, leaves = found
            structure = Structure(native, None)
            _last[key] = native, structure
            if len(_last) > _MOST_REMEMBERED:
                for oldest in list(_last)[:-_MOST_REMEMBERED]:  # all at once: other threads add some
                    _last.pop(oldest, None)
            return leaves, structure
    # There is something in it that only optree knows.
    leaves, treespec = _flatten_all(batch)
    return leaves, Structure(None, treespec)


def _flatten_all(batch: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Take a batch apart by optree, making those containers known that it met as leaves."""
    leaves, treespec = flatten(batch)
    while learn_containers(set(map(type, leaves))):
        leaves, treespec = flatten(batch)
    return leaves, treespec
