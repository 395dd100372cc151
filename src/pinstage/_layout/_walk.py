"""Walking a batch: first along the structure that the last ones had, because that takes a third of finding it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from operator import call
from typing import Any, NamedTuple

import optree

from ._nodes import flatten, is_registered, learn_containers, registrations
from ._table import Picker, pick, picker

_STREAK = 2
"""So often in a row a structure has to be met again before it is prepared for: that takes as long as several walks."""

_PATIENCE = 4
"""Each time that a prepared structure was not met, the next one has to be met so many times as often in a row."""

_MAX_STREAK = 4096
_MAX_REMEMBERED = 32

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


class _Level(NamedTuple):
    """The containers of one depth of a structure, and what others have to look like to be of it."""

    picked: Picker
    """Takes them out of all that is in the containers above."""
    types: list[type]
    ask: list[Callable[[Any], Any]]
    answers: list[Any]
    """The keys of a dict, in order; the size of anything else."""
    open: list[Callable[[Any], Iterable[Any]]]
    """What takes the content out of each."""


class _Prepared(NamedTuple):
    """A structure of dicts, lists and tuples that another batch can be held against.

    `PyTreeSpec.flatten_up_to` would do so too, but for the order of keys. Its error writes the batch out, all tensors
    in it, for which a device has to be waited for.
    """

    treespec: optree.PyTreeSpec
    leaf_types: set[type]
    levels: list[_Level]
    leaves: Picker
    """Takes the leaves, in their order, out of all that is in the containers."""
    registrations: int

    def leaves_of(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch if its structure is this one, to the order of keys, and its leaf types are."""
        if self.registrations != registrations():
            return None
        found, inside = [batch], [batch]
        for level in self.levels:
            nodes = pick(inside, level.picked)
            if list(map(type, nodes)) != level.types or list(map(call, level.ask, nodes)) != level.answers:
                return None
            inside = list(chain.from_iterable(map(call, level.open, nodes)))
            found += inside
        leaves = pick(found, self.leaves)
        # One of another type may be a container, or a class that is to be looked at.
        return leaves if self.leaf_types.issuperset(map(type, leaves)) else None


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
    levels: list[_Level] = []
    places = [0] * treespec.num_leaves
    count = 0  # of all that was found before this level
    inside = [(batch, treespec, 0)]  # and the number of its first leaf
    while inside:
        containers = []
        for place, (_, spec, first) in enumerate(inside):
            if spec.type is None:
                places[first] = count + place
            else:
                containers.append(place)
        count += len(inside)
        nodes = [inside[place] for place in containers]
        if any(_WAYS.get(spec.type) is None and not _is_namedtuple(spec.type) for _, spec, _ in nodes):
            return None
        if any(type(key) is not str for node, _, _ in nodes if type(node) is dict for key in node):
            return None
        if nodes:
            types = [type(node) for node, _, _ in nodes]
            ask, ways = zip(*(_WAYS.get(kind, _OF_NAMEDTUPLES) for kind in types), strict=True)
            answers = [question(node) for question, (node, _, _) in zip(ask, nodes, strict=True)]
            levels.append(_Level(picker(containers, len(inside)), types, list(ask), answers, list(ways)))
        inside = [child for node, spec, first in nodes for child in _children(node, spec, first)]
    return _Prepared(treespec, leaf_types, levels, picker(places, count), registrations())


def _children(node: Any, spec: optree.PyTreeSpec, first: int) -> Iterable[tuple[Any, optree.PyTreeSpec, int]]:
    """Return what is in a container, in its own order; optree's, in which leaves are numbered, sorts keys."""
    children = spec.children()
    starts = accumulate((child.num_leaves for child in children), initial=first)
    if type(node) is not dict:
        _, way = _WAYS.get(type(node), _OF_NAMEDTUPLES)
        return zip(way(node), children, starts, strict=False)
    by_key = dict(zip(spec.entries(), zip(children, starts, strict=False), strict=True))
    return ((child, *by_key[key]) for key, child in node.items())


def _is_namedtuple(kind: type | None) -> bool:
    """Say whether optree takes a class apart as a tuple; of the others it knows, it was told."""
    return kind is not None and issubclass(kind, tuple) and not is_registered(kind)


def _nothing(_: Any) -> tuple[()]:
    return ()


_Way = tuple[Callable[[Any], Any], Callable[[Any], Iterable[Any]]]
_WAYS: dict[type | None, _Way] = {
    dict: (tuple, dict.values),
    list: (len, iter),
    tuple: (len, iter),
    type(None): (_nothing, _nothing),
}
"""What to ask of a container, and how to get at its content. Others have a state that the answers would not tell: the
order of keys, a default factory."""
_OF_NAMEDTUPLES: _Way = (tuple.__len__, tuple.__iter__)  # whatever methods of their own they have
