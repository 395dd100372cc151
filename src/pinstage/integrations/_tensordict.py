"""tensordict's classes, which keep names and locks; ``device`` is that of the tensors.

A class made by ``@tensorclass`` is a dataclass with a TensorDict in it, and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    is_tensor_collection,
)

import pinstage as ps


def nodes(cls: type) -> Any:
    """Return how a class of tensordict is taken apart; None for other classes, False for parameters
    (moved whole).
    """
    if issubclass(cls, MemoryMappedTensor):
        ps.register_tensor(MemoryMappedTensor, _plain)
        return None
    if not issubclass(cls, TensorDictBase):
        return None
    if issubclass(cls, TensorDictParams):
        return False
    if issubclass(cls, LazyStackedTensorDict):
        return _flatten_stack, _unflatten_stack
    return _flatten, _unflatten


def _plain(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    """Return a plain tensor, as ``MemoryMappedTensor.to`` does for another device: no file is
    mapped there.
    """
    return tensor


def _flatten(td: Any) -> tuple[Any, Any, Any]:
    keys = tuple(td.keys())
    names = tuple(td.names) if any(name is not None for name in td.names) else None
    values = (td.get(key) for key in keys)
    # As variable from batch to batch as the shapes of tensors.
    kept = ps.on_host((td.batch_size, td.device))
    return (*values, kept), (keys, names, td.is_locked), (*map(str, keys), "rest")


def _unflatten(children: Any, context: Any) -> Any:
    keys, names, is_locked = context
    *values, (batch_size, device) = children
    items = dict(zip(keys, values, strict=True))
    device = _device_of(values, device)
    return TensorDict(items, batch_size=batch_size, names=names, device=device, lock=is_locked)


def _device_of(values: Iterable[Any], before: Any) -> Any:
    """Return the one device of tensors; `before` if there are none, None if there are several."""
    devices = {value.device for value in values if _has_tensors(value)}
    devices.discard(None)
    if not devices:
        return before
    return devices.pop() if len(devices) == 1 else None


def _has_tensors(value: Any) -> bool:
    """Return whether a value has tensors. Without them, its device attribute is still the device
    that it came from.
    """
    if isinstance(value, LazyStackedTensorDict):
        return any(map(_has_tensors, value.tensordicts))  # `values()` would stack them
    return isinstance(value, torch.Tensor) or (
        is_tensor_collection(value) and any(map(_has_tensors, value.values()))
    )


def _flatten_stack(stack: Any) -> tuple[Any, Any]:
    hooks = ps.on_host((stack.hook_in, stack.hook_out))
    name = stack.names[stack.stack_dim]
    context = type(stack), stack.stack_dim, name, stack.is_locked
    return (*stack.tensordicts, hooks), context


def _unflatten_stack(children: Any, context: Any) -> Any:
    cls, stack_dim, name, is_locked = context
    *tensordicts, (hook_in, hook_out) = children
    options = {} if issubclass(cls, NonTensorStack) else {"hook_in": hook_in, "hook_out": hook_out}
    made = cls(*tensordicts, stack_dim=stack_dim, stack_dim_name=name, **options)
    return made.lock_() if is_locked else made
