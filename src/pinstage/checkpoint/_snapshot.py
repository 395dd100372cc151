"""A state dict taken apart: its tensors, and everything else as it is now.

Pickle walks the state dict, in C. It takes tensors out, and writes the rest into a message, from
which the structure is rebuilt around other tensors, in this process or in another one. Each kind of
object is treated as by torch's stager: functions and classes stay the same objects,
``__deepcopy__`` is called if a class has it, and all other objects are copied by pickle's protocol.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._compat.calls import make_sharded, parts_of_sharded

_QUICK = {
    type(None), bool, int, float, str, bytes, dict, list, tuple,
    torch.Size, torch.dtype, torch.device,
}  # fmt: skip
"""Types that pickle copies by itself; checked first, because most objects of a state dict have
them.
"""

_AS_THEY_ARE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, weakref.ref, property,
    DeviceMesh, ProcessGroup,
)  # fmt: skip
"""Types that aren't copied: they are immutable, or there can be only one."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Snapshot(NamedTuple):
    message: bytes
    """The structure, and everything except tensors."""
    tensors: list[torch.Tensor]
    """Plain ones on any device; no two are the same part of the same memory."""
    kept: list[Any]
    """Objects that the message refers to: uncopied ones, and copies that ``__deepcopy__`` made."""


def take(state: Any) -> Snapshot:
    """Take a state dict apart. Copies no bytes of tensors.

    Raises:
        Exception: an object can't be copied; raised by ``copy.deepcopy`` or pickle.
    """
    buffer = io.BytesIO()
    taker = _Taker(buffer)
    with torch.no_grad():
        taker.dump(state)
    return Snapshot(buffer.getvalue(), taker.tensors, taker.kept)


def rebuild(message: bytes, tensors: Sequence[torch.Tensor], kept: Sequence[Any]) -> Any:
    """Return the structure, around other tensors."""
    with torch.no_grad():
        return _Builder(io.BytesIO(message), tensors, kept).load()


class _Taker(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._alive: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number for an object in the message: a tensor's index, or a kept object's
        index, inverted.
        """
        kind = type(obj)
        if kind in _QUICK:
            return None
        if isinstance(obj, torch.Tensor):
            return self._stand_in(obj)
        if isinstance(obj, _AS_THEY_ARE):
            return self._keep(obj, lambda: obj)
        if hasattr(kind, "__deepcopy__"):
            return self._keep(obj, lambda: copy.deepcopy(obj))
        return None

    def _stand_in(self, tensor: torch.Tensor) -> int | None:
        """Return the number for a tensor; None if it has to be taken apart."""
        kind = type(tensor)
        if kind in _PLAIN and not tensor.__dict__:
            return self._shared(tensor)
        if (
            kind.__torch_dispatch__ is _NO_DISPATCH
            or _is_wrapper(tensor)
            or parts_of_sharded(tensor) is not None
        ):
            return None
        return self._keep(tensor, lambda: copy.deepcopy(tensor.detach()).to("cpu"))

    def reducer_override(self, obj: Any) -> Any:
        """Take apart a tensor that is more than its elements: shards, a wrapper, or one with
        attributes.
        """
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        sharded = parts_of_sharded(obj)
        if sharded is not None:
            return make_sharded, sharded
        if not _is_wrapper(obj):
            bare = obj.detach().as_subclass(torch.Tensor)
            return _dress, (type(obj), bare), obj.__dict__ or None, None, None, _set_attributes
        if hasattr(obj, "trigger_wait"):  # the result of a collective, perhaps still under way
            return torch.detach, (obj.trigger_wait(),)
        wrapper: Any = obj.detach() if obj.requires_grad else obj
        names, context = wrapper.__tensor_flatten__()
        inner = {name: getattr(wrapper, name) for name in names}
        return wrapper.__tensor_unflatten__, (inner, context, wrapper.size(), wrapper.stride())

    def _shared(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor, or of an earlier tensor over the same part of the same
        memory.
        """
        key: Any = id(tensor)
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            key = *memory, tensor.is_conj(), tensor.is_neg()
        return self._number(key, tensor, self.tensors, tensor.detach)

    def _keep(self, obj: Any, copied: Callable[[], Any]) -> int:
        return ~self._number(("kept", id(obj)), obj, self.kept, copied)

    def _number(self, key: Any, obj: Any, stand_ins: list[Any], make: Callable[[], Any]) -> int:
        """Return the index of an object's stand-in in a list, and make the stand-in if the key is
        new.
        """
        if key not in self._numbers:
            self._numbers[key] = len(stand_ins)
            stand_ins.append(make())
            self._alive.append(obj)  # else another object could have its id
        return self._numbers[key]


class _Builder(pickle.Unpickler):
    def __init__(
        self, buffer: io.BytesIO, tensors: Sequence[torch.Tensor], kept: Sequence[Any]
    ) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._kept = kept

    def persistent_load(self, pid: int) -> Any:
        """Return the tensor or kept object of a number."""
        return self._tensors[pid] if pid >= 0 else self._kept[~pid]


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps other tensors, by torch's protocol for wrappers, as a DTensor
    does.
    """
    return hasattr(type(tensor), "__tensor_flatten__")


def _dress(kind: type[torch.Tensor], bare: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the original class. A parameter becomes an ordinary tensor, as in torch's
    stager.
    """
    tensor = bare.detach()
    return tensor if kind in _PLAIN else tensor.as_subclass(kind)


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)
