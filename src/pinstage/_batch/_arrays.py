"""Leaves that aren't tensors yet: numeric arrays of numpy, as tensors over the same memory, and
stacks.
"""

from __future__ import annotations

import types
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from pinstage._native import _core

Array: TypeAlias = np.ndarray[Any, Any]

Stack = _core.Stack
"""A leaf whose bytes are in several places until it is packed: samples to be stacked, or rows to be
gathered.
"""


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor over a numpy array, without a copy where torch can read it in place.

    Returns:
        The tensor, or None if the array is not numeric (strings, dates, records, objects): it is
        left as it is.

    Raises:
        TypeError: the array is numeric but torch has no such dtype (long double), or it is masked.
    """
    if type(array) is np.ndarray and array.flags.carray:
        with suppress(TypeError, ValueError):  # the usual case; for other arrays, see below
            return _over(array)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask")
    if array.dtype.kind not in "biufc":
        return None
    if type(array) is not np.ndarray:
        array = array.view(np.ndarray)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(step < 0 or step % array.itemsize for step in array.strides):
        array = array.copy(order="C")
    if array.dtype.char == "Q":  # ulonglong, which torch doesn't recognise as uint64
        array = array.view(np.uint64)
    if not array.flags.writeable:
        array = _writable_alias(array)
    return _over(array)


def as_tensor(leaf: Any) -> Any:
    """Return a tensor over a leaf that is a numeric array, and the tensor of a stack; any other
    leaf as it is.
    """
    if type(leaf) is Stack:
        return leaf.tensor()
    tensor = from_array(leaf) if isinstance(leaf, np.ndarray) else None
    return leaf if tensor is None else tensor


def _over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over an array, with the strides of the buffer protocol.

    An array's own strides may be meaningless in dimensions of one element. An empty tensor is
    contiguous.
    """
    tensor = torch.from_numpy(array)
    if not array.size:
        return tensor.new_empty(array.shape)
    if 1 in array.shape:
        steps = memoryview(array).strides or ()  # type: ignore[arg-type]
        stride = tuple(step // array.itemsize for step in steps)
        if stride != tensor.stride():
            return tensor.as_strided(tensor.shape, stride)
    return tensor


def _writable_alias(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same memory as a writable array: torch warns of read-only arrays, and staging only
    reads.
    """
    interface = array.__array_interface__
    owner = types.SimpleNamespace(
        array=array, __array_interface__=interface | {"data": (interface["data"][0], False)}
    )
    return np.asarray(owner)
