"""`Stager.load_weights`: a checkpoint's tensors are copied into the tensors of a module or dict, in groups.

::

    tensors       mapping, pairs, or safetensors' safe_open; read in its order, one group at a time
    known names   all names, shapes and devices are checked before the first byte is written
    each group    host tensors --staged--> device --copied--> destinations; meta tensors are made just before

The packing threads take the page faults of mapped files, each group while the one before is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from .._compat.calls import changes_its_loading
from ._groups import Write


class IncompatibleKeys(NamedTuple):
    """Names that a module and a checkpoint don't share; ``torch.nn.Module.load_state_dict`` returns the same pair."""

    missing_keys: list[str]
    """Names of tensors that weren't loaded, under this name or another."""
    unexpected_keys: list[str]
    """Names that the module or dict doesn't have."""


Shape: TypeAlias = tuple[int, ...] | None
"""None for values that aren't tensors."""


def _opened(tensors: Any) -> tuple[dict[str, Shape] | None, Callable[[Iterable[str]], Iterable[tuple[str, Any]]]]:
    """Return the shapes of a checkpoint's tensors, and a function that reads tensors by name.

    If names aren't known beforehand, the shapes are None and all tensors are read.
    """
    if hasattr(tensors, "get_slice"):  # safe_open is neither a mapping nor an iterable
        shapes: Any = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        return shapes, lambda names: ((name, tensors.get_tensor(name)) for name in names)
    if isinstance(tensors, Mapping):
        shapes = {name: _shape_of(tensor) for name, tensor in tensors.items()}
        return shapes, lambda names: ((name, tensors[name]) for name in names)
    if isinstance(tensors, Iterable) and not isinstance(tensors, str | torch.Tensor):
        return None, lambda _: map(_pair, tensors)
    raise _not_a_checkpoint(f"a {type(tensors).__name__}")


def _pair(item: Any) -> tuple[str, Any]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise _not_a_checkpoint(f"an iterable that yields a {type(item).__name__}")


def _not_a_checkpoint(kind: str) -> TypeError:
    return TypeError(
        f"tensors must be a mapping, pairs of name and tensor, or safetensors' safe_open: {kind}. Pass for example "
        "torch.load(path, mmap=True)"
    )


class Destination:
    """The tensors of a module or dict.

    Attributes:
        tensors: the tensors that a checkpoint has, by name.
        keys: a key for each name, equal for names that share a tensor or its memory.
    """

    def __init__(self, target: Any, device: torch.device, *, strict: bool) -> None:
        self._target, self._device, self._strict = target, device, strict
        if isinstance(target, torch.nn.Module):
            for path, module in target.named_modules():
                if changes_its_loading(module):
                    raise TypeError(
                        f"load_weights can't load {path or 'the module'}: {type(module).__name__} has a "
                        "_load_from_state_dict of its own, a load hook or extra state. Use load_state_dict, or pass a "
                        "dict of its tensors"
                    )
            self.tensors: dict[str, Any] = target.state_dict(keep_vars=True)
            parameters = target.named_parameters(remove_duplicate=False)
            self._all: dict[str, Any] = dict((*parameters, *target.named_buffers(remove_duplicate=False)))
        elif isinstance(target, dict):
            for name, tensor in target.items():
                if not isinstance(tensor, torch.Tensor):
                    raise TypeError(f"{name} must be a tensor to load into: {type(tensor).__name__}. Leave it out")
            self.tensors = self._all = target
        else:
            raise TypeError(f"load_weights loads a torch.nn.Module or a dict of tensors: {type(target).__name__}")
        self.keys = {name: _key_of(tensor) for name, tensor in self._all.items()}

    def problem_of(self, name: str, shape: Shape) -> str | None:
        """Return why a tensor of this shape can't be loaded; None if it can."""
        tensor = self._all[name]
        if shape is None:
            return f"{name} in state_dict isn't a tensor."
        if tuple(tensor.shape) != shape:
            return (
                f"size mismatch for {name}: copying a param with shape {torch.Size(shape)} from checkpoint, the shape "
                f"in current model is {tensor.shape}."
            )
        if _is_dtensor(tensor):
            if not {type(placement).__name__ for placement in tensor.placements} <= {"Shard", "Replicate"}:
                return f"{name} has placements {tensor.placements}; load_weights knows plain Shard and Replicate."
        elif tensor.is_meta and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{name} is a {type(tensor).__name__} on meta; make it on the device first."
        device = _local(tensor).device
        if device.type != "meta" and device != self._device:
            return f"{name} is on {device}, the stager is for {self._device}; move it, or make a stager for its device."
        return None

    def check(self, loaded: set[Any], unexpected: list[str], problems: list[str]) -> None:
        """Raise the error of `load_state_dict`, if anything is wrong.

        Args:
            loaded: keys of the tensors that are loaded, or will be.
            unexpected: names that aren't here.
            problems: found by `problem_of`.
        """
        missing = self.missing(loaded)
        meta = [name for name, tensor in self._all.items() if tensor.is_meta and self.keys[name] not in loaded]
        listed = {
            "Missing key(s) in state_dict: ": missing if self._strict else [],
            "Unexpected key(s) in state_dict: ": unexpected if self._strict else [],
            "Still on meta after loading: ": [name for name in meta if not self._strict or name not in missing],
        }
        lines = [what + ", ".join(f'"{name}"' for name in names) + ". " for what, names in listed.items() if names]
        if lines or problems:
            self.refuse([*lines, *problems])

    def missing(self, loaded: set[Any]) -> list[str]:
        return [name for name in self.tensors if self.keys[name] not in loaded]

    def refuse(self, problems: list[str]) -> NoReturn:
        lines = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(self._target).__name__}:\n\t{lines}")

    def part_of(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of global shape."""
        tensor = self._all[name]
        if _is_dtensor(tensor):
            mesh = tensor.device_mesh
            if mesh.get_coordinate() is None:  # this rank isn't in the mesh
                return source.new_empty(0)
            for placement, index, count in zip(tensor.placements, mesh.get_coordinate(), mesh.shape, strict=True):
                if placement.is_shard():  # as torch.chunk splits; a second shard splits the part of the first
                    size = source.shape[placement.dim]
                    begin = min(index * -(-size // count), size)
                    source = source.narrow(placement.dim, begin, min(-(-size // count), size - begin))
        return source

    def local(self, name: str) -> torch.Tensor:
        """Return the plain tensor to write to; one on meta is made first, for all names that share it."""
        tensor, part = self._all[name], _local(self._all[name])
        if not part.is_meta:
            return part
        made = part = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=self._device)
        if _is_dtensor(tensor):
            made = type(tensor).from_local(
                part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            )
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        for other in [other for other, shared in self._all.items() if shared is tensor]:
            self._all[other] = made
            if isinstance(self._target, torch.nn.Module):
                path, _, key = other.rpartition(".")
                setattr(self._target.get_submodule(path), key, made)
            else:
                self._target[other] = made
        return part


@torch.no_grad()
def load_weights(
    write: Callable[[Iterable[Write]], None], device: torch.device, target: Any, tensors: Any, *, strict: bool
) -> IncompatibleKeys:
    """See `Stager.load_weights`.

    Args:
        write: copies tensors into other tensors; see `write_in_groups`.
        device: where the destinations have to be.
        target: see `Stager.load_weights`.
        tensors: the same.
        strict: the same.
    """
    shapes, read = _opened(tensors)
    destination = Destination(target, device, strict=strict)
    unexpected = [name for name in shapes or () if name not in destination.tensors]
    known = {name: shape for name, shape in (shapes or {}).items() if name in destination.tensors}
    problems = [problem for name, shape in known.items() if (problem := destination.problem_of(name, shape))]
    hoped = destination.tensors if shapes is None else known
    destination.check({destination.keys[name] for name in hoped}, unexpected, problems)
    # Of names that share a tensor, the module's last one is loaded, as in `load_state_dict`. The checkpoint's order
    # decides in which order names are read.
    last = {destination.keys[name]: name for name in destination.tensors if name in known}
    names = [name for name in known if last[destination.keys[name]] == name]
    loaded: set[Any] = set()
    write(_writes(read(names), destination, loaded, unexpected, strict=strict))
    destination.check(loaded, unexpected, [])
    return IncompatibleKeys(destination.missing(loaded), unexpected)


def _writes(
    pairs: Iterable[tuple[str, Any]], destination: Destination, loaded: set[Any], unexpected: list[str], *, strict: bool
) -> Iterator[Write]:
    """Yield this rank's parts of the tensors that have a destination; note other names."""
    for name, tensor in pairs:
        if name in destination.tensors:
            if problem := destination.problem_of(name, _shape_of(tensor)):
                destination.refuse([problem])
            yield Write(name, destination.part_of(name, tensor), destination.local(name).detach())
            loaded.add(destination.keys[name])
        elif strict:
            destination.refuse([f'Unexpected key(s) in state_dict: "{name}". '])
        else:
            unexpected.append(name)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # if it isn't loaded, there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Any) -> torch.Tensor:
    """Return a tensor, or this rank's part of a DTensor."""
    local: torch.Tensor = tensor.to_local() if _is_dtensor(tensor) else tensor
    return local


def _key_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors of the same memory."""
    local = _local(tensor)
    if local.is_meta or local.layout is not torch.strided or not local.numel():
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()


def _shape_of(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
