"""Private names of torch and CPython: all that pinstage uses.

Where a wrong answer would corrupt data (where a tensor's memory is, whether it was changed), a probe looks at what a
name *does*, when it is first needed. If it fails, public functions do the same, more slowly, and a warning says so
once; or an error, where there are none. `problems` tries all, for ``pinstage doctor``. Other names are those of the
versions that ``pyproject.toml`` asks for and ``constraints.txt`` pins.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import inspect
import os
import sys
import time
import warnings
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
    """Return the probes that fail, but for those of workers."""
    tried = [
        ("tensors", _tensors[0], "tensors are described and made in Python, one by one"),
        ("save_on_cpu", why_changes_are_not_seen(), "pinstage.offload.save_on_cpu is refused: use torch's"),
        ("pin_memory", why_pinning_cannot_be_asked(), "pinstage audit does not say what pin_memory=True would pin"),
        ("DataLoader", _why_loader_is_unknown(), "batches of workers are staged in the main process, which is slower"),
        ("default collation", why_collation_is_unknown(), "workers stack batches first, and pack them then"),
    ]
    return [Problem(name, reason, remedy) for name, reason, remedy in tried if reason is not None]


def _in_this_torch(what: str) -> str:
    return f"torch {torch.__version__} {what}"


# -- locks -------------------------------------------------------------------------------------------------------------


def ownership(lock: Any) -> Callable[[], bool]:
    """Return what says whether the calling thread has a `threading.RLock`; `threading.Condition` asks the same."""
    return lock._is_owned  # type: ignore[no-any-return]


def _refuse(what: str, reason: str | None, remedy: str) -> None:
    if reason is not None:
        raise StagingError(f"{what} is not possible here: {reason}; {remedy}")


# -- tensors -----------------------------------------------------------------------------------------------------------


def may_be_dual() -> bool:
    """Say whether tensors may have a tangent: a level of forward-mode AD is open, or it cannot be told."""
    level = getattr(torch.autograd.forward_ad, "_current_level", None)
    return type(level) is not int or level >= 0


def is_dual(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a tangent of forward-mode AD, where `may_be_dual`."""
    unpack: Callable[[torch.Tensor], Any] = torch.autograd.forward_ad.unpack_dual
    return unpack(tensor).tangent is not None


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no memory of its own: a wrapper of functionalisation, or zeros of forward-mode AD."""
    kinds = getattr(torch, "_is_functional_tensor", None), getattr(torch.Tensor, "_is_zerotensor", None)
    return any(is_one is not None and is_one(tensor) for is_one in kinds)


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
            is_seen = (before, changes.are_there()) == (False, True)
    except _WRONG:
        is_seen = False
    return None if is_seen else _in_this_torch("does not tell that a tensor was changed")


def check_changes_are_seen() -> None:
    """Refuse to save tensors elsewhere where it cannot be told that they were changed meanwhile.

    Raises:
        StagingError: it cannot.
    """
    remedy = "use torch.autograd.graph.save_on_cpu(pin_memory=True)"
    _refuse("save_on_cpu", why_changes_are_not_seen(), remedy)


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

_tensors: list[str | None] = [None]
"""Why the extension can't describe and make tensors by torch's own functions; None if it can."""


def warn_of_tensors() -> None:
    """Warn, once, if the extension describes and makes tensors by torch's public functions."""
    if _tensors[0] is not None:
        tell_once(f"tensors are described and made in Python, which takes longer: {_tensors[0]}; see `pinstage doctor`")


def learn_tensors(samples: dict[int, torch.Tensor]) -> None:
    """Tell the extension where torch's C shim is and where a tensor object has its C++ tensor, and try both.

    The shim (``aoti_torch_*``) and the exchange of tensors by DLPack are stable; that a tensor object holds an
    ``at::Tensor``, and where, is not promised. Nor are ``THPVariable_Wrap``, what tells a tensor's flags, and what
    counts modes. If one of them does something else, tensors are described and made by torch's public functions.

    Args:
        samples: a tensor of each dtype, by the dtype's code in tables.
    """
    core = _native.core
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            _tensors[0] = _probe_tensors(core, samples)
    except _WRONG as error:
        _tensors[0] = _in_this_torch(f"does not do what is expected of its C shim ({error!r})")
    if _tensors[0] is not None:
        core.use_handle(0)


_FUNCTIONS = (
    ("libtorch_cpu.so", "aoti_torch_get_storage_size"),
    ("libtorch_cpu.so", "aoti_torch_get_storage_offset"),
    ("libtorch_cpu.so", "aoti_torch_get_dtype"),
    ("libtorch_cpu.so", "aoti_torch__reinterpret_tensor"),
    ("libtorch_cpu.so", "aoti_torch__alloc_from_pool"),
    ("libtorch_cpu.so", "aoti_torch_empty_strided"),
    ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    ("libtorch_cpu.so", "aoti_torch_delete_tensor_object"),
    ("libtorch_python.so", "_Z16THPVariable_WrapON2at10TensorBaseE"),
    ("libtorch_cpu.so", "_ZN2at25compositeimplicitautograd6is_negERKNS_6TensorE"),
    ("libtorch_cpu.so", "_ZN2at25compositeimplicitautograd7is_conjERKNS_6TensorE"),
    ("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv"),
)
"""Functions of torch that the extension calls, with their libraries, in the order of ``_native/core.h``."""


def _addresses() -> tuple[int, ...]:
    folder = Path(torch.__file__).parent / "lib"
    libraries = {name: ctypes.CDLL(str(folder / name), mode=os.RTLD_NOLOAD | os.RTLD_NOW) for name, _ in _FUNCTIONS}
    found = (ctypes.cast(getattr(libraries[library], name), ctypes.c_void_p).value for library, name in _FUNCTIONS)
    return tuple(address or 0 for address in found)


def _probe_tensors(core: Any, samples: dict[int, torch.Tensor]) -> str | None:
    """Compare what the extension says of tensors, and makes, with torch's own methods; say what differs.

    Nothing here starts autograd's engine: that would ask CUDA how many devices there are, and a forked process could
    use none of them any more.
    """
    slab, unit = torch.arange(256, dtype=torch.uint8, device="cpu"), ctypes.sizeof(ctypes.c_void_p)
    imaginary = torch.zeros(3, dtype=torch.complex64, device="cpu").conj()
    tensors = [slab, slab[64:128], slab.view(torch.float32).requires_grad_(), imaginary, imaginary.imag]
    places = range(object.__basicsize__, torch.Tensor.__basicsize__, unit)
    words = ({at for at in places if ctypes.c_size_t.from_address(id(one) + at).value == one._cdata} for one in tensors)
    core.use_torch(torch.Tensor.__dlpack_c_exchange_api__, _addresses())
    core.use_handle(min(set.intersection(*words)))
    for tensor in tensors:
        size, offset, _, *flags = core.facts(tensor)
        if (size, offset) != (tensor.untyped_storage().nbytes(), tensor.storage_offset()):
            return _in_this_torch("tells another size of a storage by its C shim")
        if flags != [tensor.requires_grad, tensor.is_neg(), tensor.is_conj()]:
            return _in_this_torch("tells other flags of a tensor by its C++ functions")
    numbers = {code: core.facts(sample)[2] for code, sample in samples.items()}
    if len(set(numbers.values())) < len(numbers):
        return _in_this_torch("does not tell dtypes from one another by its C shim")
    for code, number in numbers.items():
        core.add_scalar(code, number)
    count = torch._C._len_torch_dispatch_stack
    if type(torch.autograd.forward_ad._current_level) is not int:  # to open one would disturb other threads
        return _in_this_torch("does not tell whether a level of forward-mode AD is open")
    core.watch(torch.autograd.forward_ad, "_current_level", count)
    before = count()
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        inside = count()
    if (type(before), inside, count()) != (int, before + 1, before):
        return _in_this_torch("does not tell whether it makes views or something else")
    return _probe_views(core, slab)


def _probe_views(core: Any, slab: torch.Tensor) -> str | None:
    """Cut a slab into views, and copy it to tensors, and look whether both are what torch would make."""
    expected = [slab.view(torch.float32)[at : at + 16].view(4, 4).t() for at in (0, 16)]
    (table, *_), *_ = core.describe(expected, frozenset(), None, (1, 0), True)
    changed, saved = views = core.Blocks.of(table, 0, 0, 0, slab).leaves([])
    blocks = core.Blocks.of(table, 2, 0, 0)
    blocks.copy(slab.data_ptr(), 0, 256, 0, False)
    for made, like in zip([*views, *blocks.leaves([])], expected * 2, strict=True):
        is_view = any(made is view for view in views)
        is_as_expected = (
            type(made) is torch.Tensor
            and torch.equal(made, like)
            and made.stride() == like.stride()
            and (made.data_ptr() == like.data_ptr()) == is_view
            and made.untyped_storage().nbytes() == (256 if is_view else 64)
            and (made._base, made._version, made.requires_grad) == (None, 0, False)
        )
        if not is_as_expected:
            return _in_this_torch("makes other tensors by its C shim than by its own methods")
    product: Any = saved * torch.ones(4, 4, requires_grad=True, device="cpu")
    changed.zero_()
    if (slab._version, saved._version, changed._version) != (0, 0, 1) or slab[:64].any():
        return _in_this_torch("makes views by its C shim that share their version, or not their memory")
    [_, gradient] = product.grad_fn(torch.ones(4, 4, device="cpu"))
    return None if torch.equal(gradient, saved) else _in_this_torch("does not keep a view by its C shim for autograd")


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
    """Return the private functions, or, where these say something else, what is public. Needs a GPU."""
    device = torch.cuda.current_device()
    try:
        found = CudaCalls(torch._C._cuda_getDevice, torch._C._cuda_getCurrentStream, torch._C._cuda_setStream)
        if (found.device(), found.stream(device)) == (device, ids_of(torch.cuda.current_stream(device))):
            return found
        reason = _in_this_torch("tells other ids of streams than their attributes")
    except _WRONG as error:
        reason = _in_this_torch(f"does not set streams as expected ({error!r})")
    tell_once(f"streams are made current by torch.cuda.set_stream, which takes longer: {reason}")
    return CudaCalls(
        torch.cuda.current_device,
        lambda device: ids_of(torch.cuda.current_stream(device)),
        lambda stream, device, kind: torch.cuda.set_stream(
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
        ),
    )


# -- torch's pytree ----------------------------------------------------------------------------------------------------


def pytree_functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return how torch's pytree takes a class apart, and puts it together from a list of children and the context.

    None where torch doesn't know the class, or keeps this in another way.
    """
    node = getattr(torch.utils._pytree, "SUPPORTED_NODES", {}).get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


# -- profiling ---------------------------------------------------------------------------------------------------------


is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Says whether a profiler of torch's runs. Where it cannot be told, steps are not marked in profiles."""


# -- tensors without memory --------------------------------------------------------------------------------------------


# -- sharded tensors ---------------------------------------------------------------------------------------------------


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


# -- page-locking by torch's loader ------------------------------------------------------------------------------------


@cache
def why_pinning_cannot_be_asked() -> str | None:
    """Say why torch cannot be asked what ``DataLoader(pin_memory=True)`` does with a batch; None if it can."""
    missing = _of_utils("pin_memory", "pin_memory") is None
    return _in_this_torch("does not show what pin_memory=True does") if missing else None


def pin_as_loader(batch: Any) -> Any:
    """Do what ``DataLoader(pin_memory=True)`` does with a batch."""
    return _of_utils("pin_memory", "pin_memory")(batch)


# -- default collation -------------------------------------------------------------------------------------------------

Collate = Callable[..., Any]


@cache
def _collation() -> Any:
    """Return torch's module for collation; None if it has other names, or `collate` no map of functions."""
    try:
        from torch.utils.data._utils import collate

        is_known = "collate_fn_map" in inspect.signature(collate.collate).parameters
        is_known = is_known and all(map(callable, (collate.collate_tensor_fn, collate.default_collate)))
        return collate if is_known and collate.default_collate_fn_map else None
    except (AttributeError, ImportError, TypeError):
        return None


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
def _plain_iterator() -> tuple[Any, Any]:
    """Return the class of torch's iterator with workers, and its kind over an indexed dataset; None if unknown."""
    dataloader: Any = importlib.import_module("torch.utils.data.dataloader")
    kind = getattr(dataloader, "_DatasetKind", None)
    return getattr(dataloader, "_MultiProcessingDataLoaderIter", None), getattr(kind, "Map", None)


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)`` of torch's iterator.

    Without the range that torch marks there for profilers, while none runs: its end lets go of the interpreter lock,
    and any other thread that wants it takes it.
    """
    if is_profiling() or (type(batches), getattr(batches, "_dataset_kind", None)) != _plain_iterator():
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
