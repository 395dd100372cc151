"""Walking a batch: first along the structure that the last ones had, because that takes a third of finding it out."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import optree

from ._nodes import NAMESPACE, flatten, is_registered, learn_containers, registrations

_STREAK = 2
"""So often in a row a structure has to be met again before it is prepared for: that takes as long as several walks."""

_PATIENCE = 4
"""Each time that a prepared structure was not met, the next one has to be met so many times as often in a row."""

_MAX_STREAK = 4096
_MAX_REMEMBERED = 32

_WITH_A_STATE = (OrderedDict, defaultdict, deque)  # order, factory, length: what a structure's walk does not compare

_ONLY_DICTS = {dict}

_remembered: dict[tuple[type, int], _Memory] = {}


def walk(batch: Any) -> tuple[list[Any], optree.PyTreeSpec, set[type]]:
    """Take a batch apart as far as there are containers, making those known that are met for the first time.

    Returns:
        The leaves, the structure, and the types of the leaves.

    Raises:
        LayoutError: the batch contains itself or is nested too deeply.
    """
    kind = type(batch)
    key = (kind, len(batch) if kind in (dict, list, tuple) else 0)
    memory = _remembered.get(key)
    if memory is None:
        memory = _remembered[key] = _Memory()
        while len(_remembered) > _MAX_REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
    elif memory.prepared is not None:
        leaves = memory.prepared.leaves_of(batch)
        if leaves is not None:
            return leaves, memory.prepared.treespec, memory.prepared.leaf_types
        memory.was_wrong()
    leaves, treespec = flatten(batch)
    while learn_containers(leaf_types := set(map(type, leaves))):
        leaves, treespec = flatten(batch)
    if memory.meet(treespec):
        memory.prepared = _prepare(batch, treespec, leaf_types)
    return leaves, treespec, leaf_types


class _Prepared(NamedTuple):
    """A structure of dicts, lists and tuples that another batch can be held against."""

    treespec: optree.PyTreeSpec
    leaf_types: set[type]
    orders: list[tuple[optree.PyTreeSpec, list[int], list[tuple[str, ...]]]]
    """The keys of all dicts, level by level: how to get at the dicts, which of what one gets they are, their keys."""
    registrations: int

    def leaves_of(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch if its structure is this one, to the order of keys, and its leaf types are."""
        try:
            leaves = self.treespec.flatten_up_to(batch)
            # One of another type may be a container, or a class that is to be looked at.
            if not self.leaf_types.issuperset(map(type, leaves)) or self.registrations != registrations():
                return None
            # To optree dicts whose keys are in another order are alike, and so are OrderedDict and defaultdict.
            for above, places, orders in self.orders:
                nodes = above.flatten_up_to(batch)
                dicts = [nodes[place] for place in places]
                if set(map(type, dicts)) != _ONLY_DICTS or list(map(tuple, dicts)) != orders:
                    return None
        except ValueError:  # another structure
            return None
        return leaves


class _Memory:
    """What batches of one kind looked like. Threads may race for it: they lose no more than a walk."""

    def __init__(self) -> None:
        self.prepared: _Prepared | None = None
        self._last: optree.PyTreeSpec | None = None
        self._streak = 0
        self._needed = _STREAK

    def meet(self, treespec: optree.PyTreeSpec) -> bool:
        """Take note of a structure; say whether it is time to prepare for it."""
        self._streak = self._streak + 1 if self._last == treespec else 0
        self._last = treespec
        return self._streak == self._needed

    def was_wrong(self) -> None:
        """Take note that the structure prepared for was not that of a batch."""
        self.prepared = None
        self._streak = 0
        self._needed = min(_PATIENCE * self._needed, _MAX_STREAK)


def _prepare(batch: Any, treespec: optree.PyTreeSpec, leaf_types: set[type]) -> _Prepared | None:
    """Prepare for more batches of a structure; None where holding them against it would not tell all differences."""
    dicts: list[dict[Any, Any]] = []
    others: set[type] = set()

    def look(node: Any) -> bool:
        if type(node) is dict:
            dicts.append(node)
        else:
            others.add(type(node))
        return False

    optree.tree_flatten(batch, look, namespace=NAMESPACE)
    if any(issubclass(cls, _WITH_A_STATE) or is_registered(cls) for cls in others):
        return None
    if len(set(map(id, dicts))) < len(dicts) or any(type(key) is not str for found in dicts for key in found):
        return None
    seen: set[int] = set()
    orders = []
    while len(seen) < len(dicts):
        nodes, above = optree.tree_flatten(
            batch, lambda node: type(node) is dict and id(node) not in seen, namespace=NAMESPACE
        )
        places = [place for place, node in enumerate(nodes) if type(node) is dict]
        orders.append((above, places, [tuple(nodes[place]) for place in places]))
        seen.update(id(nodes[place]) for place in places)
    return _Prepared(treespec, leaf_types, orders, registrations())
