"""`Rows`: a leaf that stands for rows of a tensor, which are gathered when it is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from .. import _native
from .._compat.views import check_has_memory
from ._arrays import Array, Stack, as_tensor

_INTEGERS = {int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32}


@final
class Rows:
    """A leaf of a batch that stands for ``tensor[index]``. Made by `rows`.

    Staged, it becomes a tensor. Pickled or copied, it is the tensor that `tensor` returns, never
    the whole source.
    """

    __slots__ = ("_index", "_source")

    def __init__(
        self, tensor: torch.Tensor | Array, index: torch.Tensor | Array | Sequence[int]
    ) -> None:
        self._source = _checked_source(tensor)
        self._index = _checked_index(index)

    @property
    def shape(self) -> torch.Size:
        """The shape of the index, then the shape of a row."""
        return torch.Size(self._index.shape + self._source.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._source.dtype

    def __len__(self) -> int:
        return len(self._index)

    def tensor(self) -> torch.Tensor:
        """Gather the rows now, by one thread, and return them on the CPU.

        Raises:
            IndexError: an index is out of range.
        """
        tensor: torch.Tensor = gathered(self)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.tensor(),)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<Rows {dtype} {list(self.shape)}, of {len(self._source)}>"


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def rows(tensor: torch.Tensor | Array, index: torch.Tensor | Array | Sequence[int]) -> Rows:
    """Return a leaf of a batch that stands for ``tensor[index]``, along the first dimension.

    ```python
    for index in sampler:
        leaves = {"x": ps.rows(features, index), "y": ps.rows(labels, index)}
        batch = stager.to_device(leaves)
    ```

    The rows are gathered right into the slab when the batch is packed, by several threads if that
    is worth it. Use it for replay buffers, token windows (``data.unfold(0, length, 1)``), features
    of nodes, or embeddings on the host. It may be anywhere in a batch. Batches that stay on the
    host have the gathered tensor in its place, as does pickle.

    Staging reads tensor and index, like any leaf's memory, before it returns. It copies the index
    first, checks the copy, and uses only that.

    Args:
        tensor: on the CPU; or a numpy array, such as a memmap. Its rows may be at any distance from
            each other, and overlap.
        index: the numbers of the rows: int32 or int64, on the CPU, of any shape, or a list of ints,
            which is copied now. Negative numbers count from the end. Staging raises an `IndexError`
            if one is out of range.

    Raises:
        TypeError: `tensor` is on a device, requires grad, is of a subclass, or has no rows; or
            `index` is of another type.
    """
    return Rows(tensor, index)


def stack_of(leaf: Rows, copies: dict[Any, Any], path: Callable[[], str]) -> Stack | torch.Tensor:
    """Return the rows as a stack, or their tensor if torch had to gather them.

    Args:
        leaf: the rows.
        copies: the copied indices of the batch, which the extension adds.
        path: returns where the leaf is in the batch, for an error.

    Raises:
        IndexError: an index is out of range.
        LayoutError: the storage of the tensor is too small for it.
    """
    source, index = leaf._source, leaf._index
    try:
        stack = _native.core.stack_rows(source, index, copies)
    except IndexError as error:
        raise IndexError(f"batch{path()} {error}") from None
    if isinstance(stack, Stack):
        return stack
    check_has_memory(source, path)  # torch would read beyond its memory
    # Torch would return a view for an index without dimensions.
    return source[np.frombuffer(stack, np.int64).reshape(1, *index.shape).copy()][0]


def gathered(leaf: Any, path: Callable[[], str] = str) -> Any:
    """Return the tensor of `Rows` or a stack; any other leaf as it is. `path`: see `stack_of`."""
    made = stack_of(leaf, {}, path) if type(leaf) is Rows else leaf
    return made.tensor() if isinstance(made, Stack) else made


def _checked_source(tensor: Any) -> torch.Tensor:
    source = as_tensor(tensor)
    if (
        type(source) is torch.Tensor
        and source.is_cpu
        and source.layout is torch.strided
        and source.ndim
        and not source.requires_grad
    ):
        return source
    raise TypeError(
        "rows takes a numeric array, or a plain tensor on the CPU, with rows, which doesn't "
        f"require grad: a {type(tensor).__name__}; index it yourself, or pass its .detach() or "
        ".cpu()"
    )


def _checked_index(index: Any) -> torch.Tensor | Array:
    if isinstance(index, list | tuple | range):
        numbers = integers_of(index)
        if numbers is not None:
            return numbers
    numbers = as_tensor(index)
    if (
        type(numbers) is torch.Tensor
        and numbers.is_cpu
        and numbers.dtype in (torch.int32, torch.int64)
    ):
        return numbers
    given = f" of {index.dtype}" if hasattr(index, "dtype") else ""
    raise TypeError(
        f"rows takes an index of int32 or int64 on the CPU, or a list of ints: "
        f"{type(index).__name__}{given}; for a mask, pass mask.nonzero()[:, 0]"
    )


def integers_of(numbers: Any) -> Array | None:
    """Return integers of Python and numpy, which bools are not, as int64 ``[n]``; None if there is
    anything else, or a number that has no int64.
    """
    is_flat = isinstance(numbers, np.ndarray) and numbers.ndim == 1
    kinds = {numbers.dtype.type} if is_flat else set(map(type, numbers))
    try:
        return np.array(numbers, np.int64) if kinds <= _INTEGERS else None
    except OverflowError:
        return None
