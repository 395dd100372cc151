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
    """What is read: the samples, or the source and the index."""
    found: object
    """Where the bytes are, as ``_native.core.alike`` or ``gather`` returned it."""
    more_work: int = 0
    """Packing takes as long as packing this many bytes more: short rows wait for memory."""


def stack_samples(stacks: Iterable[Stack]) -> None:
    """Fill the stand-ins of stacks."""
    for stack in stacks:
        _native.core.fill(stack.found, stack.stand_in.data_ptr())


def stack_rows(source: torch.Tensor, index: torch.Tensor) -> Stack | None:
    """Return ``source[index]`` as a stack; None unless the source is plain, on the CPU, and its
    rows have the strides of new tensors.

    Args:
        source: has a first dimension.
        index: int64, contiguous, of any shape, inside the source's first dimension. Nothing else
            may change it.
    """
    count = index.numel()
    found = _native.core.gather(source, len(source), index.data_ptr(), count)
    if found is None:
        return None
    stand_in = source.new_empty((*index.shape, *source.shape[1:]))
    more_work = max(count * _ROW_BYTES - stand_in.nbytes, 0) if stand_in.nbytes else 0
    return Stack(stand_in, (source, index), found, more_work)
