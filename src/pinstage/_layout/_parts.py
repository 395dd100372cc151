"""A tree taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch


class Parts(NamedTuple):
    """A tree taken apart."""

    treespec: optree.PyTreeSpec
    tensors: list[torch.Tensor]
    """Tensors (and arrays, as tensors, where these count), each once."""
    rest: list[Any]
    """Leaves that are neither."""
    order: tuple[int, ...] | None
    """Where each leaf stands in ``[*tensors, *rest]``; None if every leaf is a tensor met once."""
    unsure: list[torch.Tensor] | None = None
    """Those of the tensors that may be anything; the others lie over arrays, contiguous. None: all of them."""

    def together(self, tensors: Sequence[Any]) -> Any:
        """Put the tree together again, with others in place of its tensors."""
        return together(self.treespec, self.order, tensors, self.rest)


def together(
    treespec: optree.PyTreeSpec, order: tuple[int, ...] | None, tensors: Sequence[Any], rest: Sequence[Any]
) -> Any:
    """Put a tree together from its tensors and the other leaves; see `Parts`."""
    if order is None:
        return treespec.unflatten(tensors)
    values = [*tensors, *rest]
    return treespec.unflatten(map(values.__getitem__, order))
