"""Private names of torch and CPython: all that pinstage uses, each behind a probe of what it *does*.

A probe runs when a name is first needed. Where it fails, there is a slow way, or a clear refusal, which is told once;
`problems` tries them all, for ``pinstage doctor``.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import struct
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _native
from ._host import process_exists
from .errors import StagingError

_WRONG = (AttributeError, ImportError, TypeError, ValueError, IndexError, RuntimeError, OSError)
"""Errors of a private name that is gone, or does something else than it did."""

_told: set[str] = set()


def tell_once(text: str) -> None:
    """Warn of something that works in a slower way, once in a process."""
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


class Problem(NamedTuple):
    """A private name that does not do what is expected."""

    name: str
    """What it is about."""
    reason: str
    remedy: str
    """What follows from it, and what to do."""


def problems() -> list[Problem]:
    """Try everything here that needs neither a worker nor, where there is none, a GPU."""
    tried = [
        ("ring=", why_storages_cannot_be_counted(), "ring= is refused: leave it out"),
        ("views", _views[0] if _views[0] != _NO_EXTENSION else None, "views of a slab are made in Python, one by one"),
        ("streams", why_streams_cannot_be_set() if torch.cuda.is_available() else None, "torch.cuda.stream is used"),
        ("profiles", _why_profilers_are_not_seen(), "steps are not marked in torch's profiles: use pinstage.profile()"),
        (
            "tensors without memory",
            _why_kinds_are_not_seen(),
            "those of forward-mode AD and functionalisation are refused",
        ),
        ("forward-mode AD", _why_levels_are_not_seen(), "each tensor is asked whether it has a tangent"),
        ("save_on_cpu", why_changes_are_not_seen(), "pinstage.offload.save_on_cpu is refused: use torch's"),
        ("pytree", why_pytree_cannot_be_asked(), "register_node classes that were registered with torch's pytree"),
        ("locks", _why_owners_are_not_seen(), "the pool asks a Condition instead"),
        ("pin_memory", why_pinning_cannot_be_asked(), "pinstage audit does not say what pin_memory=True would pin"),
        ("DataLoader", _why_loader_is_unknown(), "batches of workers are staged in the main process, which is slower"),
        ("default collation", why_collation_is_unknown(), "workers stack batches first, and pack them then"),
    ]
    return [Problem(name, reason, remedy) for name, reason, remedy in tried if reason is not None]


def _in_this_torch(what: str) -> str:
    return f"torch {torch.__version__} {what}"


# -- locks -------------------------------------------------------------------------------------------------------------


@cache
def _why_owners_are_not_seen() -> str | None:
    lock: Any = threading.RLock()
    try:
        before = lock._is_owned()
        with lock:
            if (before, lock._is_owned()) == (False, True):
                return None
    except _WRONG as error:
        return f"threading.RLock does not tell whose it is ({error!r})"
    return "threading.RLock does not tell whose it is"


def ownership(lock: Any) -> Callable[[], bool]:
    """Return what says whether the calling thread has a `threading.RLock`. What is public says so by an error."""
    reason = _why_owners_are_not_seen()
    if reason is None:
        return lock._is_owned  # type: ignore[no-any-return]
    tell_once(f"locks are asked by way of a Condition, which takes longer: {reason}")
    condition = threading.Condition(lock)

    def is_owned() -> bool:
        try:
            condition.notify(0)
        except RuntimeError:
            return False
        return True

    return is_owned


# -- who uses a storage ------------------------------------------------------------------------------------------------


class StorageUsers:
    """Tells whether anything but one tensor shows the tensor's storage: views, arrays, what autograd saved.

    Every tensor over a storage counts as a user of it, in C++; what has the storage itself, in Python, counts as a
    reference of the one Python object that stands for it.

    Args:
        tensor: is alone now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._address: int = self._storage._cdata
        self._place = self._storage.data_ptr(), self._storage.nbytes()
        self._count: Callable[[int], int] = torch._C._storage_Use_Count
        self._alone = self._count(self._address), sys.getrefcount(self._storage)

    def are_there(self) -> bool:
        """Say whether there is another user."""
        users, references = self._alone
        return self._count(self._address) > users or sys.getrefcount(self._storage) > references

    def have_moved(self) -> bool:
        """Say whether a user has given the storage another size or other memory, or freed it."""
        return (self._storage.data_ptr(), self._storage.nbytes()) != self._place


@cache
def why_storages_cannot_be_counted() -> str | None:
    """Say why it cannot be told who uses a storage; None if it can."""
    if not has_interpreter_lock():
        return "without the interpreter lock counts of references cannot be trusted"
    try:
        return _probe_storage_users()
    except _WRONG as error:
        return _in_this_torch(f"does not count a storage's users as expected ({error!r})")


def has_interpreter_lock() -> bool:
    """Say whether one thread at a time runs Python. Before Python 3.13 there is nothing to ask."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _probe_storage_users() -> str | None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.zeros(64, dtype=torch.uint8, device="cpu")
        users = StorageUsers(slab)
        weight = torch.ones(4, requires_grad=True, device="cpu")

        def leaf() -> torch.Tensor:
            return slab.view(torch.float32)[:4]

        holders: dict[str, Callable[[], Any]] = {
            "a view": leaf,
            "what autograd saved": lambda: leaf() * weight,
            "an array": lambda: leaf().numpy(),
            "the storage": lambda: leaf().untyped_storage(),
            "a capsule": lambda: leaf().__dlpack__(),
        }
        if users.are_there():
            return _in_this_torch("counts a user of a storage that has none")
        for name, make in holders.items():
            holder = make()
            if not users.are_there():
                return _in_this_torch(f"does not count {name} as a user of a storage")
            del holder
            if users.are_there():
                return _in_this_torch(f"counts {name} as a user of a storage after its end")
    return None


def check_storages_can_be_counted() -> None:
    """Refuse a ring where it cannot be told who still uses a batch.

    Raises:
        StagingError: it cannot.
    """
    reason = why_storages_cannot_be_counted()
    if reason is not None:
        raise StagingError(
            f"ring= is not possible here: {reason}; leave it out, and each batch gets a fresh device slab"
        )


# -- tensors -----------------------------------------------------------------------------------------------------------


@cache
def _why_levels_are_not_seen() -> str | None:
    level = getattr(torch.autograd.forward_ad, "_current_level", None)  # to open one would disturb other threads
    return None if type(level) is int else _in_this_torch("does not tell whether a level of forward-mode AD is open")


def may_be_dual() -> bool:
    """Say whether tensors may have a tangent: a level of forward-mode AD is open."""
    reason = _why_levels_are_not_seen()
    if reason is None:
        return torch.autograd.forward_ad._current_level >= 0
    tell_once(f"each tensor is asked whether it has a tangent, which takes longer: {reason}")
    return True


def is_dual(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a tangent of forward-mode AD, where `may_be_dual`."""
    unpack: Callable[[torch.Tensor], Any] = torch.autograd.forward_ad.unpack_dual
    return unpack(tensor).tangent is not None


@cache
def _why_kinds_are_not_seen() -> str | None:
    try:
        if not (_PLAIN._is_zerotensor() or torch._is_functional_tensor(_PLAIN)):
            return None
    except _WRONG as error:
        return _in_this_torch(f"does not tell which tensors have no memory ({error!r})")
    return _in_this_torch("takes a plain tensor for one without memory")


_PLAIN = torch.zeros(1, device="cpu")  # made here: the first question may come in a mode that makes no such tensors


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no memory of its own: a wrapper of functionalisation, or zeros of forward-mode AD."""
    return _why_kinds_are_not_seen() is None and (torch._is_functional_tensor(tensor) or tensor._is_zerotensor())


def check_is_plain(made: torch.Tensor) -> None:
    """Refuse what torch made in place of memory, or of a view of some.

    Raises:
        StagingError: a mode is on in which it makes something else.
    """
    if type(made) is not torch.Tensor:
        raise StagingError(
            f"cannot stage where torch makes no memory of its own: it made a {type(made).__name__}; leave the mode "
            "(FakeTensorMode, say), or move the batch by .to()"
        )


@cache
def why_changes_are_not_seen() -> str | None:
    """Say why it cannot be told that a tensor was changed in place; None if it can."""
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            tensor = torch.zeros(4, device="cpu")
            changes = Changes(tensor)
            before = changes.are_there()
            tensor[1:].add_(1)
            if (before, changes.are_there()) == (False, True):
                return None
    except _WRONG as error:
        return _in_this_torch(f"does not tell that a tensor was changed ({error!r})")
    return _in_this_torch("does not tell that a tensor was changed")


def check_changes_are_seen() -> None:
    """Refuse to save tensors elsewhere where it cannot be told that they were changed meanwhile.

    Raises:
        StagingError: it cannot.
    """
    reason = why_changes_are_not_seen()
    if reason is not None:
        raise StagingError(
            f"save_on_cpu is not possible here: {reason}; use torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )


class Changes:
    """Tells whether a tensor, or a view of the same memory, was changed in place since. Keeps no memory of it alive.

    Autograd counts changes; a detached tensor has the counter of the one that it comes from, and still has it when it
    is given other memory.

    Args:
        tensor: of now.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version: int = tensor._version
        self._counter = tensor.detach()
        self._counter.data = _NO_MEMORY

    def are_there(self) -> bool:
        """Say whether it was changed."""
        return self._counter._version != self._version


_NO_MEMORY = torch.empty(0, device="cpu")


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was changed in place, as autograd counts."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another is a view of, as autograd knows it."""
    return getattr(tensor, "_base", None)


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


# -- what the extension has to know ------------------------------------------------------------------------------------

_NO_EXTENSION = "the extension is not there"

_views: list[str | None] = [_NO_EXTENSION]
"""Why views cannot be made by the extension; None if they can."""


def tell_of_extension() -> None:
    """Tell, once, if it is by torch that the extension, or a part of it, is not in use."""
    if _native.core is None and str(_native.why_not).startswith("torch "):
        tell_once(f"batches are described and packed in Python, which takes longer: {_native.why_not}")
    elif _native.core is not None and _views[0] is not None:
        tell_once(f"views of a slab are made in Python, which takes longer: {_views[0]}; see `pinstage doctor`")


def learn_tensors(core: Any, samples: dict[int, torch.Tensor]) -> None:
    """Tell the extension where torch's C shim is and where a tensor object has its C++ tensor, and try both.

    The shim (``aoti_torch_*``) is stable; that a tensor object holds an ``at::Tensor``, and where, is not promised. Nor
    is ``THPVariable_Wrap``, nor what counts modes. Without these the extension asks Python for each tensor's storage,
    and views are made in Python.

    Args:
        core: the extension.
        samples: a tensor of each dtype, by the dtype's code in tables.
    """
    if _why_levels_are_not_seen() is None:  # else it takes no tensor for one without a tangent
        core.watch_level(torch.autograd.forward_ad, "_current_level")
    try:
        _views[0] = _probe_shim(core, samples)
    except _WRONG as error:
        _views[0] = _in_this_torch(f"does not do what is expected of its C shim ({error!r})")
    if _views[0] is not None:
        core.find_handle([], [])  # forget it


def _probe_shim(core: Any, samples: dict[int, torch.Tensor]) -> str | None:
    libraries = Path(torch.__file__).parent / "lib"
    names = ("libtorch_cpu.so", "libc10.so", "libtorch_python.so")
    missing = core.find_shim(*(str(libraries / name) for name in names))
    if missing:
        return _in_this_torch(f"has no {', '.join(missing)}")
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.arange(256, dtype=torch.uint8, device="cpu")
        tensors = [slab, slab[64:128], slab.view(torch.float32), torch.zeros((), device="cpu"), slab.clone()]
        if not core.find_handle(tensors, [tensor._cdata for tensor in tensors]):
            return _in_this_torch("keeps the C++ tensor of a tensor object in an unknown place")
        for tensor in tensors:
            if core.storage_bytes(tensor) != (tensor.untyped_storage().nbytes(), tensor.storage_offset()):
                return _in_this_torch("tells another size of a storage by its C shim")
        for code, sample in samples.items():
            if not core.add_scalar(code, sample):
                return _in_this_torch(f"does not tell {sample.dtype} from other dtypes by its C shim")
        if not _tells_flags(core):
            core.forget_flags()
        return _probe_modes(core) or _probe_views(core, slab)


def _tells_flags(core: Any) -> bool:
    """Say whether torch's C++ functions tell what the methods of a tensor do. If not, the extension asks these."""
    real, imaginary = torch.zeros(3, device="cpu"), torch.zeros(3, dtype=torch.complex64, device="cpu")
    return [
        core.flags(tensor) for tensor in (real, real.clone().requires_grad_(), imaginary.conj(), imaginary.conj().imag)
    ] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
    ]


def _probe_modes(core: Any) -> str | None:
    count = torch._C._len_torch_dispatch_stack
    before = count()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        inside = count()
    if (type(before), inside, count()) != (int, before + 1, before):
        return _in_this_torch("does not tell whether it makes views or something else")
    core.watch_modes(count)
    return None


def _probe_views(core: Any, slab: torch.Tensor) -> str | None:
    """Cut a slab into two views of one place, and look whether that is what torch would make.

    Nothing here starts autograd's engine: that would ask CUDA how many devices there are, and a forked process could
    use none of them any more.
    """
    expected = slab.view(torch.float32)[4:20].view(4, 4).t()
    shape, stride = (4, 4), (1, 4)
    header = struct.pack("=9q", 0x70696E7374616703, 2, 2, 256, 128, 2, 0, 0, 0)
    row = struct.pack("=qqBBBxI4q", 16, 64, 1, _FLOAT32, 2, 0, *shape, *stride)
    saved, changed = views = core.Blocks.of(header + row + row, 0, 0, 0, slab).leaves([])
    for view in views:
        is_as_expected = (
            type(view) is torch.Tensor
            and torch.equal(view, expected)
            and (view.stride(), view.data_ptr()) == (stride, expected.data_ptr())
            and view.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
            and (view._base, view._version, view.requires_grad) == (None, 0, False)
        )
        if not is_as_expected:
            return _in_this_torch("makes other views by its C shim than by its own methods")
    product: Any = saved * torch.ones(4, 4, requires_grad=True, device="cpu")
    changed.zero_()
    if (slab._version, saved._version, changed._version) != (0, 0, 1) or slab[16:80].any():
        return _in_this_torch("makes views by its C shim that share their version, or not their memory")
    [_, gradient] = product.grad_fn(torch.ones(4, 4, device="cpu"))
    if not torch.equal(gradient, saved):
        return _in_this_torch("does not keep a view by its C shim for autograd")
    return _probe_own(core, header + row + row, slab)


def _probe_own(core: Any, table: bytes, slab: torch.Tensor) -> str | None:
    """Make two tensors of their own from a slab, and look whether they are what torch would make."""
    expected = slab.view(torch.float32)[4:20].view(4, 4).t()
    blocks = core.Blocks.of(table, 2, 0, 0)
    copies = blocks.copy(slab.data_ptr(), 0, 256, 0, False)
    for made in blocks.leaves([]):
        is_as_expected = (
            type(made) is torch.Tensor
            and torch.equal(made, expected)
            and (made.stride(), made.storage_offset(), made.untyped_storage().nbytes()) == (expected.stride(), 0, 64)
            and (made._base, made._version, made.requires_grad, copies) == (None, 0, False, 2)
        )
        if not is_as_expected:
            return _in_this_torch("makes other tensors by its C shim than by its own functions")
    return None


_FLOAT32 = 11
"""The code of float32 in tables; see `pinstage._layout`."""


# -- CUDA's current device and stream ----------------------------------------------------------------------------------


def ids_of(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """Return what torch knows a stream by, in the order in which its functions take and give it."""
    return stream.stream_id, stream.device_index, stream.device_type


class CudaCalls(NamedTuple):
    """How torch is asked for what is current in this thread. To make an object of a stream takes ten times as long."""

    device: Callable[[], int]
    stream: Callable[[int], tuple[int, int, int]]
    """The ids of a device's current stream."""
    set_stream: Callable[[int, int, int], object]
    """Makes a stream current, by its ids, and its device."""


@cache
def cuda_calls() -> CudaCalls:
    """Return the private functions, or, where these do something else, what is public. Needs a GPU."""
    reason = why_streams_cannot_be_set()
    if reason is None:
        return CudaCalls(torch._C._cuda_getDevice, torch._C._cuda_getCurrentStream, torch._C._cuda_setStream)
    tell_once(f"streams are made current by torch.cuda.set_stream, which takes longer: {reason}")
    return CudaCalls(
        torch.cuda.current_device,
        lambda device: ids_of(torch.cuda.current_stream(device)),
        lambda stream, device, kind: torch.cuda.set_stream(
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
        ),
    )


@cache
def why_streams_cannot_be_set() -> str | None:
    """Say why torch's private functions for streams are of no use; None if they are of use. Needs a GPU."""
    with torch.cuda.device(_device_in_use()):
        return _why_streams_cannot_be_set_here()


def _device_in_use() -> int:
    """Return a device that has a context, where there is one: a stream on another would make one, of 500 MiB."""
    current = torch.cuda.current_device()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == current)
    return next(filter(has_context, range(torch.cuda.device_count())), current)


def _why_streams_cannot_be_set_here() -> str | None:
    device = torch.cuda.current_device()
    before, another = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        told = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(device)
        torch._C._cuda_setStream(*ids_of(another))
        inside = torch.cuda.current_stream(device)
        torch._C._cuda_setStream(*told[1])
        works = (*told, inside, torch.cuda.current_stream(device)) == (device, ids_of(before), another, before)
    except _WRONG as error:
        return _in_this_torch(f"does not set streams as expected ({error!r})")
    finally:
        torch.cuda.set_stream(before)
    return None if works else _in_this_torch("does not set streams as expected")


# -- torch's pytree ----------------------------------------------------------------------------------------------------


@cache
def why_pytree_cannot_be_asked() -> str | None:
    """Say why classes that are registered with torch's pytree cannot be found; None if they can."""
    try:
        take_apart, put_together = _pytree_entry(OrderedDict)
        children, context = take_apart(OrderedDict(a=1, b=2))
        if list(children) == [1, 2] and put_together([3, 4], context) == OrderedDict(a=3, b=4):
            return None
    except _WRONG as error:
        return _in_this_torch(f"keeps its registry of containers in another way ({error!r})")
    return _in_this_torch("keeps its registry of containers in another way")


def _pytree_entry(cls: type) -> Any:
    node = torch.utils._pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def pytree_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return how torch's pytree takes a class apart, and puts it together from a list of children and the context.

    None where torch keeps this in another way: then such a class has to be registered with pinstage.
    """
    reason = why_pytree_cannot_be_asked()
    if reason is None:
        return _pytree_entry(cls)  # type: ignore[no-any-return]
    tell_once(f"classes that torch's pytree knows are not known: {reason}; give them to pinstage.register_node")
    return None


# -- profiling ---------------------------------------------------------------------------------------------------------


def _why_profilers_are_not_seen() -> str | None:
    try:
        answer: object = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if type(answer) is bool:
            return None
    except _WRONG as error:
        return _in_this_torch(f"does not tell whether a profiler runs ({error!r})")
    return _in_this_torch("does not tell whether a profiler runs")


is_profiling: Callable[[], bool] = (
    (lambda: False) if _why_profilers_are_not_seen() else torch.autograd._profiler_enabled  # type: ignore[attr-defined]
)
"""Says whether a profiler of torch's runs. Where it cannot be told, steps are not marked in profiles."""


# -- tensors without memory --------------------------------------------------------------------------------------------


def shell_of(kind: type[torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a class of ours that has a shape and a dtype, is on the CPU, and has no memory.

    Raises:
        StagingError: this torch makes none.
    """
    is_dense = source.is_contiguous() or source.untyped_storage().nbytes() == source.nbytes
    stride = source.stride() if is_dense else torch.empty(source.shape, device="meta").stride()
    try:
        shell: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            kind, source.size(), stride, dtype=source.dtype, device=torch.device("cpu")
        )
    except _WRONG as error:
        raise StagingError(
            f"{_in_this_torch('makes no tensors without memory')}: {error!r}; raise max_bytes"
        ) from error
    return shell


# -- sharded tensors ---------------------------------------------------------------------------------------------------


@cache
def _sharding() -> Any:
    """Return torch's classes of sharded tensors, of a shard and of its metadata; None if they are not as they were."""
    try:
        module = importlib.import_module("torch.distributed._shard.sharded_tensor")
        found = module.ShardedTensor, module.Shard, module.ShardMetadata
    except _WRONG:
        return None
    has = ("local_shards", "metadata", "_init_from_local_shards_and_global_metadata")
    return found if all(callable(getattr(found[0], name, None)) for name in has) else None


def parts_of_sharded(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Take a sharded tensor apart, for `make_sharded`; None if it is none."""
    if "torch.distributed._shard" not in sys.modules:
        return None
    found = _sharding()
    if found is None or not isinstance(tensor, found[0]):
        return None
    sharded: Any = tensor
    return [(shard.tensor, shard.metadata) for shard in sharded.local_shards()], sharded.metadata()


def make_sharded(shards: list[tuple[torch.Tensor, Any]], metadata: Any) -> torch.Tensor:
    """Make a sharded tensor of shards that are on the CPU, in a process of the same rank.

    Args:
        shards: this rank's: each with the metadata that it had.
        metadata: of the whole tensor; it is changed.
    """
    sharded_tensor, shard_of, metadata_of = _sharding()

    def here(old: Any) -> Any:
        rank = old.placement.rank()
        return metadata_of(list(old.shard_offsets), list(old.shard_sizes), f"rank:{rank}/cpu")

    metadata.shards_metadata = [here(shard) for shard in metadata.shards_metadata]
    local = [shard_of(tensor, here(old)) for tensor, old in shards]
    made: torch.Tensor = sharded_tensor._init_from_local_shards_and_global_metadata(local, metadata)
    return made


# -- page-locking by torch's loader ------------------------------------------------------------------------------------


@cache
def why_pinning_cannot_be_asked() -> str | None:
    """Say why torch cannot be asked what ``DataLoader(pin_memory=True)`` does with a batch; None if it can."""
    thing = object()
    try:
        if pin_as_loader([thing, "text"]) == [thing, "text"] and pin_as_loader({"a": thing}) == {"a": thing}:
            return None
    except _WRONG as error:
        return _in_this_torch(f"does not show what pin_memory=True does ({error!r})")
    return _in_this_torch("changes what it does not know, with pin_memory=True")


def pin_as_loader(batch: Any) -> Any:
    """Do what ``DataLoader(pin_memory=True)`` does with a batch."""
    from torch.utils.data._utils import pin_memory

    return pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


# -- default collation -------------------------------------------------------------------------------------------------

Collate = Callable[..., Any]


@cache
def _collation() -> Any:
    """Return torch's room for collation; None if it is not as it was."""
    try:
        from torch.utils.data._utils import collate

        stacked = collate.collate(
            [(torch.ones(2), 1), (torch.ones(2), 2)],
            collate_fn_map=collate.default_collate_fn_map | {torch.Tensor: lambda batch, **_: len(batch)},
        )
        works = stacked[0] == 2 and all(map(callable, (collate.collate_tensor_fn, collate.default_collate)))
    except (AttributeError, ImportError, TypeError, IndexError):
        return None
    return collate if works else None


def why_collation_is_unknown() -> str | None:
    """Say why default collation cannot be taken apart; None if it can."""
    return None if _collation() is not None else _in_this_torch("collates in another way")


def is_default_collate(function: Collate) -> bool:
    """Say whether a function is a loader's `collate_fn` where the user gave none, and can be taken apart."""
    found = _collation()
    return found is not None and function is found.default_collate


def stacking() -> Collate | None:
    """Return what default collation does with tensors now; None if the user took it out."""
    found = _collation()
    return None if found is None else found.default_collate_fn_map.get(torch.Tensor)


def shipped_stacking() -> Collate | None:
    """Return what torch ships for that. In a worker it stacks in shared memory of torch's own kind."""
    found = _collation()
    return None if found is None else found.collate_tensor_fn


def set_stacking(function: Collate) -> None:
    """Change, in this process, what default collation does with tensors."""
    _collation().default_collate_fn_map[torch.Tensor] = function


def collates_as_shipped() -> bool:
    """Return whether what default collation does with all but tensors is torch's own, or known to ask for no value."""
    collate = _collation()
    found = {
        getattr(function, "__module__", None)
        for kind, function in collate.default_collate_fn_map.items()
        if kind is not torch.Tensor
    }
    return found <= {collate.__name__, "tensordict.tensorclass"}  # which stacks TensorDicts, as torch does


def collate_with(samples: Any, stack: Collate) -> Any:
    """Do what default collation does, but for tensors."""
    collate = _collation()
    return collate.collate(samples, collate_fn_map=collate.default_collate_fn_map | {torch.Tensor: stack})


# -- torch's loader ----------------------------------------------------------------------------------------------------

_ITERATOR_HAS = (
    "_data_queue", "_in_order", "_index_queues", "_next_data", "_num_yielded", "_persistent_workers", "_rcvd_idx",
    "_reset", "_send_idx", "_shutdown_workers", "_worker_pids_set", "_worker_result_queue", "_workers",
    "_workers_done_event",
)  # fmt: skip
"""What the loader uses of torch's iterator."""

_UTILS_HAVE = (
    ("signal_handling", "_remove_worker_pids"),
    ("signal_handling", "_set_worker_pids"),
    ("worker", "_ResumeIteration"),
)
"""And of the modules beside it."""

_END_SECONDS = 5.0
"""How long workers may take to end when they are asked, when they get SIGTERM, and when they are killed. torch's loader
gives each of them as long."""


def _of_utils(module: str, name: str) -> Any:
    """Return a name of a private module of torch's loader, None if it is not there."""
    try:
        return getattr(importlib.import_module(f"torch.utils.data._utils.{module}"), name, None)
    except ImportError:
        return None


def _why_loader_is_unknown() -> str | None:
    missing = [name for module, name in _UTILS_HAVE if not callable(_of_utils(module, name))]
    if missing:
        return _in_this_torch(f"has no {', '.join(missing)} any more beside its loader")
    return None


def why_loader_cannot_be_taken_over(batches: Any) -> str | None:
    """Say why batches of torch's iterator cannot be sent by us; None if they can.

    Args:
        batches: torch's iterator, with workers, just made.
    """
    reason = _why_loader_is_unknown()
    if reason is not None:
        return reason
    missing = [name for name in _ITERATOR_HAS if not hasattr(batches, name)]
    if {"_data_queue", "_workers"} <= set(missing):
        kind = f"{type(batches).__module__}.{type(batches).__qualname__}"
        return f"its iterator is a {kind}, which has work to do here; of PyG's loaders, filter_per_worker=True has none"
    if missing:
        return f"torch {torch.__version__}: its loader's iterator has no {', '.join(missing)} any more"
    source = batches._data_queue
    if source is not batches._worker_result_queue:
        return f"torch {torch.__version__}: its loader reads another queue than its workers write"
    if not (callable(getattr(source, "get", None)) and hasattr(getattr(source, "_reader", None), "fileno")):
        return f"the queue of {type(batches).__name__} has no file that can be waited for"
    if not (isinstance(batches._rcvd_idx, int) and all(callable(queue.put) for queue in batches._index_queues)):
        return f"torch {torch.__version__}: its loader counts batches, or tells workers what to load, in another way"
    return None


def queue_file(source: Any) -> int:
    """Return the file of a `multiprocessing.Queue` that can be read when there is a message."""
    return int(source._reader.fileno())


def close_writing_end(source: Any) -> None:
    """Close this process's writing end of a `multiprocessing.Queue`: half a message of a killed process ends then."""
    source._writer.close()


@cache
def _plain_iterator() -> tuple[Any, Any] | None:
    """Return the class of torch's iterator with workers, and its kind over an indexed dataset; None if unknown."""
    try:
        dataloader: Any = importlib.import_module("torch.utils.data.dataloader")
        return dataloader._MultiProcessingDataLoaderIter, dataloader._DatasetKind.Map
    except AttributeError:
        return None


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)`` of torch's iterator.

    Without the range that torch marks there for profilers, while none runs: its end lets go of the interpreter lock,
    and any other thread that wants it takes it.
    """
    plain = _plain_iterator()
    is_plain = plain is not None and type(batches) is plain[0] and batches._dataset_kind == plain[1]
    if not is_plain or is_profiling():
        return next(batches)
    batch: object = batches._next_data()
    batches._num_yielded += 1
    return batch


def is_resumption(mark: Any) -> bool:
    """Say whether what came out of the queue means that a persistent worker begins again."""
    return isinstance(mark, _of_utils("worker", "_ResumeIteration"))


def end_workers(batches: Any) -> None:
    """End the workers of torch's iterator, if it has any, by its own method."""
    getattr(batches, "_shutdown_workers", lambda: None)()


class Workers:
    """The workers of torch's iterator, apart from it: they can be ended when it is gone, and in another thread.

    Args:
        batches: torch's iterator.
    """

    def __init__(self, batches: Any) -> None:
        self.processes: list[Any] = list(batches._workers)
        self.persistent = bool(batches._persistent_workers)
        self._index_queues = list(batches._index_queues)
        self._done = batches._workers_done_event
        self._results = batches._worker_result_queue  # kept: a worker that writes must not find it closed
        self._forget_pids = _of_utils("signal_handling", "_remove_worker_pids")

    def take_over(self, batches: Any, instead: Callable[[], object]) -> None:
        """Have `instead` called where the iterator would end them: its finaliser would wait up to five seconds each."""
        # torch raises an error from its handler of SIGCHLD if one of these fails; it knows them by the iterator's id,
        # which another one may have when the workers have ended.
        if batches._worker_pids_set:
            self._forget_pids(id(batches))
            batches._worker_pids_set = False
        _of_utils("signal_handling", "_set_worker_pids")(id(self), tuple(worker.pid for worker in self.processes))
        batches._shutdown_workers = instead

    def end(self) -> bool:
        """Ask the workers to end, and make them; say whether all did. Blocks for three times `_END_SECONDS` at most."""
        # First of all: torch would raise an error anywhere in the main thread when one of them is killed.
        self._forget_pids(id(self))
        if self._set_done():
            for queue in self._index_queues:
                with contextlib.suppress(OSError, ValueError):  # closed
                    queue.put(None)
            left = self._wait(self.processes)
        else:
            left = self.processes
        for stop in ("terminate", "kill"):
            for worker in left:
                getattr(worker, stop)()
            left = self._wait(left)
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()
        return not left

    def _set_done(self) -> bool:
        """Set the event that workers look at; say whether that came to an end: a killed worker may have its lock."""
        is_set = _thread.allocate_lock()
        is_set.acquire()

        def set_it() -> None:
            self._done.set()
            is_set.release()

        try:
            _thread.start_new_thread(set_it, ())
        except RuntimeError:  # no thread can be had
            return False
        return is_set.acquire(timeout=_END_SECONDS)

    def _wait(self, workers: list[Any]) -> list[Any]:
        """Return those of some workers that have not ended in time."""
        deadline = time.monotonic() + _END_SECONDS
        left = list(workers)
        while left and (seconds := deadline - time.monotonic()) > 0:
            wait([worker.sentinel for worker in left], seconds)
            left = [worker for worker in left if not _has_ended(worker)]
        return left


def _has_ended(worker: Any) -> bool:
    worker.join(0)
    # One that another thread has just waited for, by starting a process say, counts as alive until that thread goes on.
    return not worker.is_alive() or not process_exists(worker.pid)
