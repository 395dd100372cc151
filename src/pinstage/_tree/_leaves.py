"""What a leaf may be, told by its type; and what is inside of it, where the type does not tell."""

from __future__ import annotations

import ctypes
import enum
import pathlib
import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ._attributes import stored_attributes
from ._keep import Keep

_ATOMS: tuple[type, ...] = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, torch.Generator, pathlib.PurePath,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, Keep,
)  # fmt: skip
"""Types that hold no tensor: leaves of these types and their subclasses are not searched."""

_ITERABLES: tuple[Any, ...] = (list, tuple, set, frozenset, deque, type({}.values()), type({}.items()))
"""Types whose items are searched by iterating."""

_SEARCH_LIMIT = 100_000
"""Objects looked at inside one opaque leaf before it is refused as too large to be searched."""


class Kind(enum.Enum):
    """How a leaf's type is treated."""

    TENSOR = "a tensor"
    ARRAY = "a numpy array"
    ATOM = "holds no tensor, whatever its value"
    OPAQUE = "has to be searched for tensors"


class _Kinds(dict[type, Kind]):
    """Kinds by type, found out when a type is met first."""

    def __missing__(self, cls: type) -> Kind:
        if issubclass(cls, torch.Tensor):
            kind = Kind.TENSOR
        elif issubclass(cls, np.ndarray):
            kind = Kind.ARRAY
        else:
            kind = Kind.ATOM if issubclass(cls, _ATOMS) else Kind.OPAQUE
        self[cls] = kind
        if kind is Kind.ATOM:
            ATOM_TYPES.add(cls)
        return kind


ATOM_TYPES: set[type] = set()
"""The types that were met whose objects hold no tensor, whatever their value."""

KINDS = _Kinds()


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor over a numpy array, without a copy where torch can read it in place.

    Returns:
        The tensor, or None if the array is not numeric (strings, dates, records, objects): it is left as it is.

    Raises:
        TypeError: the array is numeric, and torch has no such dtype (long double), or it is masked.
    """
    if type(array) is np.ndarray and array.flags.carray:
        try:  # the usual case; what torch cannot read as it lies comes below
            return _over(array)
        except (TypeError, ValueError):
            pass
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask")
    if array.dtype.kind not in "biufc":
        return None
    if type(array) is not np.ndarray:
        array = array.view(np.ndarray)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(step < 0 for step in array.strides) or any(step % array.itemsize for step in array.strides):
        array = array.copy(order="C")
    if array.dtype.char == "Q":  # ulonglong, which torch does not know for the uint64 it is
        array = array.view(np.uint64)
    if not array.flags.writeable:
        array = _writable_alias(array)
    return _over(array)


def _over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over an array, with the strides that the buffer protocol tells.

    An array's own may be of no sense in dimensions of one element.
    """
    tensor = torch.from_numpy(array)
    if 1 in array.shape:
        steps = memoryview(array).strides or ()  # type: ignore[arg-type]
        stride = tuple(step // array.itemsize for step in steps)
        if stride != tensor.stride():
            return tensor.as_strided(tensor.shape, stride)
    return tensor


def _writable_alias(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same memory as a writable array: torch warns of read-only ones, and staging only reads."""
    if array.size == 0:
        return np.empty_like(array)
    reach = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    buffer = (ctypes.c_char * reach).from_address(array.__array_interface__["data"][0])
    buffer.owner = array
    return np.ndarray(array.shape, array.dtype, buffer, strides=array.strides)


def holds_tensor(leaf: Any) -> bool:
    """Say whether an object that is no known container has a tensor or an array somewhere inside.

    Follows attributes, slots and Python's containers. What a C extension hides, or a closure, is not seen.

    Raises:
        OverflowError: there is too much to search.
    """
    return any(isinstance(found, torch.Tensor) or found is not leaf for found in _data_in(leaf))


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """Return a tensor, or the tensors in an object, as far as `holds_tensor` looks."""
    return [found for found in _data_in(thing) if isinstance(found, torch.Tensor)]


def _data_in(thing: Any) -> Iterator[Any]:
    """Yield each tensor and each numeric array in an object."""
    seen: set[int] = set()
    pending = [thing]
    while pending:
        if len(seen) > _SEARCH_LIMIT:
            raise OverflowError(f"more than {_SEARCH_LIMIT} objects")
        obj = pending.pop()
        if isinstance(obj, torch.Tensor):
            yield obj
        elif isinstance(obj, np.ndarray):
            if obj.dtype.kind in "biufc":
                yield obj
            if obj.dtype.kind == "O":
                pending.extend(obj.ravel().tolist())
        elif not isinstance(obj, _ATOMS) and id(obj) not in seen:
            seen.add(id(obj))
            pending.extend(_contents(obj))


def _contents(obj: Any) -> Iterator[Any]:
    if isinstance(obj, dict):
        yield from dict.values(obj)
    elif isinstance(obj, _ITERABLES):
        yield from obj
    elif isinstance(obj, types.MappingProxyType):
        yield from obj.values()
    elif isinstance(obj, partial):
        yield from (obj.args, obj.keywords)
    yield from stored_attributes(obj).values()
