"""Parameters, buffers and submodules, in the dicts in which `torch.nn.Module` registers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """A name under which a module, or one of its submodules, has a parameter or buffer."""

    path: str
    tensors: dict[str, torch.Tensor | None]
    """The dict that has the tensor: the submodule's parameters, or its buffers."""
    name: str
    tensor: torch.Tensor


def entries_of(module: torch.nn.Module) -> Iterator[Entry]:
    """Yield all names of parameters and buffers, those of tied tensors too. A submodule has one
    path.
    """
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield Entry(prefix + name, tensors, name, tensor)


class Registered:
    """The parameters, buffers and submodules of a module and of its submodules, as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._dicts = []
        self._not_persistent = []
        for submodule in module.modules():
            parts: list[Any] = [submodule._parameters, submodule._buffers, submodule._modules]
            self._dicts += [(submodule, now, dict(now)) for now in parts]
            names = submodule._non_persistent_buffers_set
            self._not_persistent.append((names, names.copy()))

    def restore(self) -> None:
        """Register the same objects again, by the same names and in the same order. After an
        interrupt, call again.
        """
        for submodule, now, before in self._dicts:
            if list(now.keys()) != list(before):
                now.clear()
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    vars(submodule).pop(name, None)  # a plain attribute of that name would hide it
                    now[name] = value
        for names, names_before in self._not_persistent:
            names.intersection_update(names_before)
            names.update(names_before)
