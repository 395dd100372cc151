"""Leaves whose bytes are in several places until they are packed: samples to be stacked, and rows
to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from .. import _native
from ._table import MOST_DIMS

Array: TypeAlias = np.ndarray[Any, Any]
Index: TypeAlias = torch.Tensor | Array
"""Integers of any shape, on the CPU."""

_ROW_BYTES: int = _native.core.ROW_BYTES


class Stack(NamedTuple):
    """A leaf that isn't stacked, or gathered, yet."""

    stand_in: torch.Tensor
    """The leaf: of the dtype and shape of the result, contiguous, uninitialised."""
    kept: Sequence[object]
    """The samples, or the source and the index: to be kept alive until they are read."""
    found: object
    """Where the bytes are, as ``_native.core.alike`` or ``gather`` returned it."""
    more_work: int = 0
    """Packing takes as long as packing this many bytes more: short rows wait for memory."""


def stack_samples(stacks: Iterable[Stack]) -> None:
    """Fill the stand-ins of stacks."""
    for stand_in, _, found, _ in stacks:
        _native.core.fill(found, stand_in.data_ptr(), stand_in.nbytes)


class RowStacks:
    """Makes stacks of the rows of one batch. An index is copied, and checked, once for each number
    of rows. Only the copy is used.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[Index, bytes]] = {}

    def copy(self, source: torch.Tensor, index: Index) -> bytes:
        """Return a copy of an index into a tensor: int64, no number negative.

        Raises:
            IndexError: a number is out of range. The text has no subject.
        """
        length = source.shape[0]
        key = id(index), length
        if key not in self._copies:
            # By numpy: after a large copy, torch's threads take the CPUs for a while.
            numbers = np.ascontiguousarray(index, np.int64)
            self._copies[key] = index, _native.core.copy_index(numbers, length)
        return self._copies[key][1]

    def stack(self, source: torch.Tensor, index: Index) -> Stack | None:
        """Return ``source[index]`` as a stack; None unless the source is plain, on the CPU, its
        rows have the strides of new tensors, and a table has as many dimensions. Raises as `copy`.
        """
        copy, shape = self.copy(source, index), source.shape
        found = _native.core.gather(source, shape[0], copy)
        if found is None or len(index.shape) + len(shape) > MOST_DIMS + 1:
            return None
        stand_in = source.new_empty((*index.shape, *shape[1:]))
        nbytes = stand_in.nbytes
        more_work = max(len(copy) // 8 * _ROW_BYTES - nbytes, 0) if nbytes else 0
        return Stack(stand_in, (source, copy), found, more_work)
