"""Leaves whose bytes are in several places until they are packed: samples to be stacked, and rows
to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .. import _native

_ROW_BYTES: int = _native.core.ROW_BYTES


class Stack(NamedTuple):
    """A leaf that isn't stacked, or gathered, yet."""

    stand_in: torch.Tensor
    """The leaf: of the dtype and shape of the result, contiguous, uninitialised."""
    kept: Sequence[torch.Tensor]
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
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def index_for(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of an index into a tensor: int64, contiguous, no number negative.

        Raises:
            IndexError: a number is out of range. The text has no subject.
        """
        key = id(index), len(source)
        if key not in self._copies:
            self._copies[key] = index, _checked_index(index, len(source))
        return self._copies[key][1]

    def stack(self, source: torch.Tensor, index: torch.Tensor) -> Stack | None:
        """Return ``source[index]`` as a stack; None unless the source is plain, on the CPU, and its
        rows have the strides of new tensors. Raises as `index_for`.
        """
        copy = self.index_for(source, index)
        found = _native.core.gather(source, len(source), copy.data_ptr(), copy.numel())
        if found is None:
            return None
        stand_in = source.new_empty((*copy.shape, *source.shape[1:]))
        more_work = max(copy.numel() * _ROW_BYTES - stand_in.nbytes, 0) if stand_in.nbytes else 0
        return Stack(stand_in, (source, copy), found, more_work)


def _checked_index(index: torch.Tensor, length: int) -> torch.Tensor:
    copy = torch.empty(index.shape, dtype=torch.int64, device="cpu").copy_(index)
    wrong = _native.core.check_index(copy.data_ptr(), copy.numel(), length)
    if wrong >= 0:
        raise IndexError(
            f"has an index out of range: {int(copy.view(-1)[wrong])} for {length} rows, at place "
            f"{wrong} of the index; pass numbers from {-length} to {length - 1}"
        )
    return copy
