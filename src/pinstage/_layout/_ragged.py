"""Recognises ragged batches: those that differ from others in no more than how long their tensors are.

They look alike but for the first dimension of each tensor, so all that has to be found out is how long that is. The
rest one call of torch's own guard tells, which compares type, device, dtype, the other dimensions and autograd of all
tensors, and sees to it that none comes twice (see `_recall`). What differs in anything is described anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._arrange import RunKinds
from ._cache import TableCache
from ._leaves import KINDS, Kind, tensors_over
from ._parts import Parts
from ._recall import guards_of
from ._table import Picker, Table, columns_of_plain, pick, picker

_STREAK = 2
"""So often in a row batches have to be alike, and to be described anew, before a pattern is made of them: that takes as
long as describing one, and batches that are alike in all dimensions are recognised by then."""


class Ragged:
    """Keeps the patterns of the ragged batches met last.

    May be used by several threads, which may race for it: they lose no more than a pattern.

    Args:
        tables: where the tables of these batches are kept.
        kept: how many patterns.
    """

    def __init__(self, tables: TableCache, *, kept: int = 4) -> None:
        self._tables = tables
        self._kept = kept
        self._patterns: tuple[_Pattern, ...] = ()  # replaced as a whole
        self._last: tuple[list[type], tuple[int, ...] | None, RunKinds] | None = None
        self._streak = 0

    def find(self, leaves: list[Any], treespec: Any) -> tuple[Parts, Table] | None:
        """Return a batch's parts and its table; None if it is like none of the patterns."""
        for pattern in self._patterns:
            parts = pattern.fit(leaves, treespec)
            if parts is not None:
                columns = columns_of_plain(parts.tensors, pattern.dtypes)
                return parts, self._tables.table_of(columns, None if columns.strides else pattern.kinds)
        return None

    def learn(self, leaves: list[Any], parts: Parts, table: Table) -> None:
        """Take note of a batch that was described anew; keep a pattern if it was alike the ones before.

        Args:
            leaves: of the batch, before they were sorted out.
            parts: what they were sorted into.
            table: of the tensors.
        """
        last, self._last = self._last, (list(map(type, leaves)), parts.order, table.kinds)
        self._streak = self._streak + 1 if last == self._last else 0
        if self._streak == _STREAK:
            pattern = _pattern(leaves, parts, table)
            if pattern is not None:
                self._patterns = (pattern, *self._patterns)[: self._kept]


class _Pattern(NamedTuple):
    """What all batches have in common that are alike but for the first dimension of their tensors."""

    types: list[type]
    arrays: Picker
    """Takes the arrays out of the leaves."""
    tensors: Picker
    """Takes the tensors out of the leaves, followed by the tensors that the arrays became."""
    rest: Picker
    order: tuple[int, ...] | None
    guards: Any
    dtypes: tuple[torch.dtype, ...]
    kinds: RunKinds

    def fit(self, leaves: list[Any], treespec: Any) -> Parts | None:
        """Return the parts of a batch with these leaves; None if it is not like the pattern."""
        if len(leaves) != len(self.types) or list(map(type, leaves)) != self.types:
            return None
        arrays = pick(leaves, self.arrays)
        from_arrays = tensors_over(arrays)
        if from_arrays is None or len(set(map(id, arrays))) < len(arrays):
            return None
        tensors = pick([*leaves, *from_arrays], self.tensors)
        if not self.guards.check(*tensors) or not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        return Parts(treespec, tensors, pick(leaves, self.rest), self.order)


def _pattern(leaves: list[Any], parts: Parts, table: Table) -> _Pattern | None:
    """Make a pattern; None if there is anything among the leaves that has to be looked at each time."""
    columns = table.columns
    if not parts.tensors or len(leaves) != len(parts.tensors) + len(parts.rest):
        return None  # a tensor was met twice
    if columns.strides or columns.lazy or columns.passthrough:
        return None
    if any(KINDS[type(leaf)] is not Kind.ATOM for leaf in parts.rest):
        return None  # may hide a tensor the next time
    guards = guards_of(
        parts.tensors,
        sizes=[[None, *shape[1:]] if shape else [] for shape in columns.shapes],
        strides=[[None] * len(shape) for shape in columns.shapes],  # an empty tensor may have any
    )
    if guards is None:
        return None
    types = list(map(type, leaves))
    count = len(leaves)
    arrays = [place for place, cls in enumerate(types) if KINDS[cls] is Kind.ARRAY]
    behind = {place: count + number for number, place in enumerate(arrays)}
    tensors = [behind.get(place, place) for place, cls in enumerate(types) if KINDS[cls] is not Kind.ATOM]
    rest = [place for place, cls in enumerate(types) if KINDS[cls] is Kind.ATOM]
    pickers = picker(arrays, count), picker(tensors, count + len(arrays)), picker(rest, count)
    return _Pattern(types, *pickers, parts.order, guards, columns.dtypes, table.kinds)
