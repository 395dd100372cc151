"""Private functions of torch and CPython that are called as they are, or have a public function in their place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from .probes import WRONG, in_this_torch, warn_once


def ownership(lock: Any) -> Callable[[], bool]:
    """Return what says whether the calling thread has a `threading.RLock`; `threading.Condition` asks the same."""
    return lock._is_owned  # type: ignore[no-any-return]


is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Says whether a profiler of torch's runs. Where that can't be known, steps are not marked in profiles."""


def ids_of(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """Return what torch knows a stream by, in the order in which its functions take and give it."""
    return stream.stream_id, stream.device_index, stream.device_type


def changes_its_loading(module: torch.nn.Module) -> bool:
    """Say whether a module's tensors can't be loaded by copying to them: its class or a hook takes part in loading."""
    base, kind = torch.nn.Module, type(module)
    # These two look at checkpoints of torch 0.4 and older only.
    harmless = [known._load_from_state_dict for known in (base, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d)]
    names = "load_state_dict", "get_extra_state", "set_extra_state"
    is_own = kind._load_from_state_dict not in harmless or any(getattr(kind, n) is not getattr(base, n) for n in names)
    return is_own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


class CudaCalls(NamedTuple):
    """torch's functions for this thread's current device and streams. Making a stream object takes ten times longer."""

    device: Callable[[], int]
    stream: Callable[[int], tuple[int, int, int]]
    """The ids of a device's current stream."""
    set_stream: Callable[[int, int, int], object]
    """Makes a stream current, by its ids, and its device."""


@cache
def cuda_calls() -> CudaCalls:
    """Return the private functions, or, where their answers differ, the public ones. Needs a GPU."""
    device = torch.cuda.current_device()
    try:
        found = CudaCalls(torch._C._cuda_getDevice, torch._C._cuda_getCurrentStream, torch._C._cuda_setStream)
        if (found.device(), found.stream(device)) == (device, ids_of(torch.cuda.current_stream(device))):
            return found
        reason = in_this_torch("tells other ids of streams than their attributes")
    except WRONG as error:
        reason = in_this_torch(f"does not set streams as expected ({error!r})")
    warn_once(f"streams are made current by torch.cuda.set_stream, which takes longer: {reason}")
    return CudaCalls(
        torch.cuda.current_device,
        lambda device: ids_of(torch.cuda.current_stream(device)),
        lambda stream, device, kind: torch.cuda.set_stream(
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
        ),
    )


def pytree_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return how torch's pytree takes a class apart, and puts it together from a list of children and the context.

    None where torch doesn't know the class, or keeps this in another way.
    """
    node = getattr(torch.utils._pytree, "SUPPORTED_NODES", {}).get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold a tensor's memory: itself, or the parts of a sparse or nested one.

    Raises:
        RuntimeError: torch shows the parts of a sparse tensor no more unless that is coalesced.
    """
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:  # torch's manual names both, for tensors that are not coalesced
        return [getattr(tensor, "_indices", tensor.indices)(), getattr(tensor, "_values", tensor.values)()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if tensor.layout is torch.strided else []


def parts_of_sharded(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Take a sharded tensor apart, for `make_sharded`; None if it is none."""
    if "torch.distributed._shard" not in sys.modules:
        return None
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    if not isinstance(tensor, module.ShardedTensor):
        return None
    return [(shard.tensor, shard.metadata) for shard in tensor.local_shards()], tensor.metadata()


def make_sharded(shards: list[tuple[torch.Tensor, Any]], metadata: Any) -> torch.Tensor:
    """Make a sharded tensor of shards that are on the CPU, in a process of the same rank.

    Args:
        shards: this rank's: each with the metadata that it had.
        metadata: of the whole tensor; it is changed.
    """
    module: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")

    def here(old: Any) -> Any:
        place = f"rank:{old.placement.rank()}/cpu"
        return module.ShardMetadata(list(old.shard_offsets), list(old.shard_sizes), place)

    metadata.shards_metadata = [here(shard) for shard in metadata.shards_metadata]
    local = [module.Shard(tensor, here(old)) for tensor, old in shards]
    made: torch.Tensor = module.ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
    return made


def copy_each(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to others of their device, in few kernels; those that overlap one after the other."""
    torch._foreach_copy_(places, sources)
