"""Private functions of torch and CPython that are called directly, or replaced by public ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import PinstageError
from .probes import WRONG, in_this_torch, warn_once, why_not


def ownership(lock: Any) -> Callable[[], bool]:
    """Return the function that says whether this thread has a `threading.RLock`;
    `threading.Condition` uses it.
    """
    return lock._is_owned  # type: ignore[no-any-return]


is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Returns whether a torch profiler runs. If that can't be known, steps aren't marked in
profiles.
"""


def ids_of(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """Return a stream's ids, in the order in which torch's functions take and return them."""
    return stream.stream_id, stream.device_index, stream.device_type


def changes_its_loading(module: torch.nn.Module) -> bool:
    """Return whether a module's tensors can't be loaded by copying: it, its class or a hook takes
    part.
    """
    base, kind = torch.nn.Module, type(module)
    # BatchNorm and InstanceNorm override it only for checkpoints of torch 0.4 and older.
    harmless = base, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d
    names = "load_state_dict", "get_extra_state", "set_extra_state"
    is_own = kind._load_from_state_dict not in [one._load_from_state_dict for one in harmless]
    is_own = is_own or any(getattr(kind, name) is not getattr(base, name) for name in names)
    is_own = is_own or not vars(module).keys().isdisjoint({"_load_from_state_dict", *names})
    return is_own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


def may_lack_counter(module: torch.nn.Module, metadata: Mapping[str, Any]) -> bool:
    """Return whether `load_state_dict` accepts a checkpoint without a norm's
    ``num_batches_tracked``: one of torch 0.4 and older, or without versions, such as a file of
    safetensors.

    Args:
        module: the module whose tensors are loaded.
        metadata: the checkpoint's, for this module.
    """
    version = metadata.get("version")
    norms = torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d
    is_norm = type(module)._load_from_state_dict in [one._load_from_state_dict for one in norms]
    return is_norm and bool(module.track_running_stats) and (version is None or version < 2)


def modules_by_path(
    module: torch.nn.Module,
    path: str = "",
) -> Iterator[tuple[str, torch.nn.Module | None]]:
    """Yield a module and those in it, by all their paths, in the order of `load_state_dict`.

    A module that was replaced by None is yielded too. The module's own `named_modules` isn't asked.
    """
    yield path, module
    for name, child in module._modules.items():
        child_path = f"{path}.{name}" if path else name
        if child is None:
            yield child_path, None
        else:
            yield from modules_by_path(child, child_path)


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield a module's own tensors as `load_state_dict` reads them: parameters, then buffers.

    Its submodules and its `state_dict` aren't asked.

    Yields:
        The tensor's name, the tensor, and whether checkpoints have it (it isn't a non-persistent
        buffer).
    """
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor, name not in module._non_persistent_buffers_set


@cache
def why_checkpoints_are_unknown() -> str | None:
    """Return why a module's names in checkpoints can't be read; None if they can."""
    return why_not(_shows_names, "doesn't show which tensors checkpoints have")


def _shows_names() -> bool:
    module, tensor = torch.nn.Module(), torch.empty(1, device="meta")
    module.register_parameter("weight", torch.nn.Parameter(tensor))
    module.register_parameter("bias", None)
    module.register_buffer("count", tensor)
    module.register_buffer("angles", tensor, persistent=False)
    module.register_module("head", None)
    names = [(name, is_persistent) for name, _, is_persistent in tensors_of(module)]
    is_known = names == [("weight", True), ("count", True), ("angles", False)]
    return is_known and list(modules_by_path(module)) == [("", module), ("head", None)]


def check_checkpoints_are_known() -> None:
    """Refuse to load a module's tensors if their names can't be read.

    Raises:
        PinstageError: they can't be read.
    """
    reason = why_checkpoints_are_unknown()
    if reason is not None:
        raise PinstageError(f"load_weights can't load a module here: {reason}; use load_state_dict")


class CudaCalls(NamedTuple):
    """torch's functions for this thread's current device and streams. Making a stream object takes
    ten times longer.
    """

    device: Callable[[], int]
    stream: Callable[[int], tuple[int, int, int]]
    """The ids of a device's current stream."""
    raw_stream: Callable[[int], int]
    """CUDA's handle of a device's current stream, as `torch.cuda.Stream.cuda_stream`."""
    set_stream: Callable[[int, int, int], object]
    """Makes a stream and its device current, by the stream's ids."""


@cache
def cuda_calls() -> CudaCalls:
    """Return the private functions, or the public ones if the answers differ. Needs a GPU."""
    device, c = torch.cuda.current_device(), torch._C
    current = torch.cuda.current_stream(device)
    try:
        calls = CudaCalls(
            c._cuda_getDevice,
            c._cuda_getCurrentStream,
            c._cuda_getCurrentRawStream,
            c._cuda_setStream,
        )
        answers = calls.device(), calls.stream(device), calls.raw_stream(device)
        if answers == (device, ids_of(current), current.cuda_stream):
            return calls
        reason = in_this_torch("reports other ids for streams than their attributes")
    except WRONG as error:
        reason = in_this_torch(f"does not set streams as expected ({error!r})")
    warn_once(f"streams are made current by torch.cuda.set_stream, which takes longer: {reason}")
    return CudaCalls(
        torch.cuda.current_device,
        lambda device: ids_of(torch.cuda.current_stream(device)),
        lambda device: torch.cuda.current_stream(device).cuda_stream,
        lambda stream, device, kind: torch.cuda.set_stream(
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
        ),
    )


def pytree_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return torch's pytree functions for a class: flatten, and unflatten.

    The second rebuilds an object from a list of children and the context. None if torch doesn't
    know the class, or stores the functions in another way.
    """
    node = getattr(torch.utils._pytree, "SUPPORTED_NODES", {}).get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold a tensor's memory: itself, or the parts of a sparse or
    nested one.
    """
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        # Torch's manual names both, for tensors that are not coalesced.
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if tensor.layout is torch.strided else []


def parts_of_sharded(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Take a sharded tensor apart, for `make_sharded`; None if it isn't sharded."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    kind = getattr(module, "ShardedTensor", None)  # another thread may be importing the module
    if kind is None or not isinstance(tensor, kind):
        return None
    return [(shard.tensor, shard.metadata) for shard in tensor.local_shards()], tensor.metadata()


def make_sharded(shards: list[tuple[torch.Tensor, Any]], metadata: Any) -> torch.Tensor:
    """Make a sharded tensor from shards on the CPU, in a process of the same rank.

    Args:
        shards: this rank's shards, each with its original metadata.
        metadata: the whole tensor's; it is changed in place.
    """
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")

    def here(old: Any) -> Any:
        device = f"rank:{old.placement.rank()}/cpu"
        return module.ShardMetadata(list(old.shard_offsets), list(old.shard_sizes), device)

    metadata.shards_metadata = [here(shard) for shard in metadata.shards_metadata]
    local = [module.Shard(tensor, here(old)) for tensor, old in shards]
    made: torch.Tensor = module.ShardedTensor._init_from_local_shards_and_global_metadata(
        local, metadata
    )
    return made


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
"""Copies tensors, the second argument, to others on the same device: in few kernels if torch can,
else one by one.
"""
