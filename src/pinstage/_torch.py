"""Private names of torch, CPython and optree: all that pinstage uses, each behind a probe of what it *does*.

A probe runs when a name is first needed. Where it fails, there is a slow way, or a clear refusal; `problems` lists what
was found to fail, for ``pinstage doctor``.
"""

from __future__ import annotations

import _thread
import contextlib
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import optree
import torch

from ._errors import StagingError
from ._host import process_exists


_told: set[str] = set()


def tell_once(text: str) -> None:
    """Warn of something that works in a slower way, once in a process."""
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def ownership(lock: threading.RLock) -> Callable[[], bool]:  # type: ignore[valid-type]
    """Return what says whether the calling thread has a lock. `threading.Condition` asks in this way; none is public."""
    return lock._is_owned  # type: ignore[attr-defined,no-any-return]


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
        self._alone = self._count()

    def are_there(self) -> bool:
        """Say whether there is another user."""
        users, references = self._count()
        return users > self._alone[0] or references > self._alone[1]

    def _count(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


@cache
def why_storages_cannot_be_counted() -> str | None:
    """Say why it cannot be told who uses a storage; None if it can."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "without the interpreter lock counts of references cannot be trusted"
    try:
        return _probe_storage_users()
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"torch {torch.__version__} does not count a storage's users as expected ({error!r})"


def _probe_storage_users() -> str | None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.zeros(64, dtype=torch.uint8, device="cpu")
        users = StorageUsers(slab)
        weight = torch.ones(4, requires_grad=True, device="cpu")

        def leaf() -> torch.Tensor:
            return slab.view(torch.float32)[:4]

        holders: dict[str, Callable[[], Any]] = {
            "a view": leaf,
            "what autograd saved": lambda: (leaf() * weight).sum(),
            "an array": lambda: leaf().numpy(),
            "the storage": lambda: leaf().untyped_storage(),
            "a capsule": lambda: torch.utils.dlpack.to_dlpack(leaf()),
        }
        if users.are_there():
            return f"torch {torch.__version__} counts a user of a storage that has none"
        for name, make in holders.items():
            holder = make()
            if not users.are_there():
                return f"torch {torch.__version__} does not count {name} as a user of a storage"
            del holder
            if users.are_there():
                return f"torch {torch.__version__} counts {name} as a user of a storage after its end"
    return None


def check_storages_can_be_counted() -> None:
    """Refuse a ring where it cannot be told who still uses a batch.

    Raises:
        StagingError: it cannot.
    """
    reason = why_storages_cannot_be_counted()
    if reason is not None:
        raise StagingError(f"ring= is not possible here: {reason}; leave it out, and each batch gets a fresh device slab")


# -- tensors -----------------------------------------------------------------------------------------------------------


def may_be_dual() -> bool:
    """Say whether tensors may have a tangent: a level of forward-mode AD is open."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


def is_dual(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a tangent of forward-mode AD, where `may_be_dual`."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def is_functional(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a wrapper of functionalisation, which has no memory of its own."""
    return bool(getattr(torch, "_is_functional_tensor", lambda _: False)(tensor))


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Say whether a tensor stands for zeros without memory, as forward-mode AD makes some."""
    return bool(getattr(tensor, "_is_zerotensor", lambda: False)())


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


_views: list[str | None] = ["the extension is not there"]
"""Why views cannot be made by the extension; None if they can."""


def why_views_cannot_be_made() -> str | None:
    """Say why the extension cannot make views of a slab; None if it can."""
    return _views[0]


def learn_tensors(core: Any, samples: dict[int, torch.Tensor]) -> None:
    """Tell the extension where torch's C shim is and where a tensor object has its C++ tensor, and try both.

    The shim (``aoti_torch_*``) is stable; that a tensor object holds an ``at::Tensor``, and where, is not promised. Nor
    is ``THPVariable_Wrap``. Without these the extension asks Python for each tensor's storage, and views are made in
    Python.

    Args:
        core: the extension.
        samples: a tensor of each dtype, by the dtype's code in tables.
    """
    core.watch_level(torch.autograd.forward_ad, "_current_level")
    try:
        _views[0] = _probe_shim(core, samples)
    except (AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        _views[0] = f"torch {torch.__version__} does not do what is expected of its C shim ({error!r})"
    if _views[0] is not None:
        core.find_handle([], [])  # forget it


def _probe_shim(core: Any, samples: dict[int, torch.Tensor]) -> str | None:
    libraries = Path(torch.__file__).parent / "lib"
    names = ("libtorch_cpu.so", "libc10.so", "libtorch_python.so")
    missing = core.find_shim(*(str(libraries / name) for name in names))
    if missing:
        return f"torch {torch.__version__} has no {', '.join(missing)}"
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.arange(256, dtype=torch.uint8, device="cpu")
        tensors = [slab, slab[64:128], slab.view(torch.float32), torch.zeros((), device="cpu"), slab.clone()]
        if not core.find_handle(tensors, [tensor._cdata for tensor in tensors]):
            return f"torch {torch.__version__}: a tensor object holds its C++ tensor in an unknown place"
        for tensor in tensors:
            if core.storage_bytes(tensor) != (tensor.untyped_storage().nbytes(), tensor.storage_offset()):
                return f"torch {torch.__version__}: its C shim tells another size of a storage"
        for code, sample in samples.items():
            if not core.add_scalar(code, sample):
                return f"torch {torch.__version__}: its C shim does not tell {sample.dtype} from other dtypes"
        if not _tells_flags(core):
            core.forget_flags()
        return _probe_views(core, slab)


def _tells_flags(core: Any) -> bool:
    """Say whether torch's C++ functions tell what the methods of a tensor do. If not, the extension asks these."""
    real, imaginary = torch.zeros(3, device="cpu"), torch.zeros(3, dtype=torch.complex64, device="cpu")
    return [core.flags(tensor) for tensor in (real, real.clone().requires_grad_(), imaginary.conj(), imaginary.conj().imag)] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
    ]


def _probe_views(core: Any, slab: torch.Tensor) -> str | None:
    """Cut a slab into a view, and look whether that is what torch would make."""
    expected = slab.view(torch.int32)[4:20].view(4, 4).t()
    shape, stride = (4, 4), (1, 4)
    header = struct.pack("=9q", 0x70696E7374616702, 1, 2, 256, 64, 1, 0, 0, 0)
    row = struct.pack("=qqBBB5x4q", 16, 64, 1, _INT32, 2, *shape, *stride)
    [view] = core.cut(header + row, slab, 256, [])
    is_as_expected = (
        type(view) is torch.Tensor
        and torch.equal(view, expected)
        and (view.stride(), view.data_ptr()) == (stride, expected.data_ptr())
        and view.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
        and (view._base, view._version, view.requires_grad) == (None, 0, False)
    )
    weight = torch.ones(4, 4, requires_grad=True, device="cpu")
    (view.float() @ weight).sum().backward()
    if not is_as_expected or not torch.equal(weight.grad, expected.float().sum(0).unsqueeze(1).expand(4, 4)):  # type: ignore[arg-type]
        return f"torch {torch.__version__} makes other views by its C shim than by its own methods"
    view.add_(1)
    if slab._version or view._version != 1 or slab[16] != 17:
        return f"torch {torch.__version__}: a view by its C shim shares its version, or not its memory"
    return None


_INT32 = 3
"""The code of int32 in tables; see `pinstage._layout`."""


# -- optree ------------------------------------------------------------------------------------------------------------


def registered_elsewhere(cls: type, but: tuple[str, ...]) -> list[Any]:
    """Return how a class is taken apart in namespaces of optree, but for some; there is no public question for all.

    Empty where optree keeps this in another way: then such a class has to be registered with pinstage, too.
    """
    found = dict.copy(getattr(optree.registry, "_NODETYPE_REGISTRY", {}))  # others may add
    return [entry for key, entry in found.items() if isinstance(key, tuple) and key[1] is cls and key[0] not in but]


# -- profiling ---------------------------------------------------------------------------------------------------------

is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
"""Says whether a profiler of torch's runs. Where it cannot be told, steps are not marked in profiles."""


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
        works = stacked[0] == 2 and callable(collate.collate_tensor_fn) and callable(collate.default_collate)
    except (AttributeError, ImportError, TypeError, IndexError):
        return None
    return collate if works else None


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
    "_reset", "_shutdown_workers", "_worker_pids_set", "_worker_result_queue", "_workers", "_workers_done_event",
)  # fmt: skip
"""What the loader uses of torch's iterator."""

_END_SECONDS = 5.0
"""How long workers may take to end when they are asked, when they get SIGTERM, and when they are killed. torch's loader
gives each of them as long."""


def why_loader_cannot_be_taken_over(batches: Any) -> str | None:
    """Say why batches of torch's iterator cannot be sent by us; None if they can.

    Args:
        batches: torch's iterator, with workers, just made.
    """
    missing = [name for name in _ITERATOR_HAS if not hasattr(batches, name)]
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


def next_batch(batches: Any) -> Any:
    """Return ``next(batches)`` of torch's iterator.

    Without the range that torch marks there for profilers, while none runs: its end lets go of the interpreter lock,
    and any other thread that wants it takes it.
    """
    from torch.utils.data import dataloader

    if (
        type(batches) is not dataloader._MultiProcessingDataLoaderIter
        or batches._dataset_kind != dataloader._DatasetKind.Map
        or is_profiling()
    ):
        return next(batches)
    batch = batches._next_data()
    batches._num_yielded += 1
    return batch


def is_resumption(mark: Any) -> bool:
    """Say whether what came out of the queue means that a persistent worker begins again."""
    from torch.utils.data._utils.worker import _ResumeIteration

    return isinstance(mark, _ResumeIteration)


class Workers:
    """The workers of torch's iterator, apart from it: they can be ended when it is gone, and in another thread.

    From then on the iterator does not end them by itself, which its finaliser would do, for up to five seconds each.

    Args:
        batches: torch's iterator.
        instead: is called where the iterator would end them.
    """

    def __init__(self, batches: Any, instead: Callable[[], object]) -> None:
        from torch.utils.data._utils import signal_handling

        self.processes: list[Any] = list(batches._workers)
        self.persistent = bool(batches._persistent_workers)
        self._index_queues = list(batches._index_queues)
        self._done = batches._workers_done_event
        self._results = batches._worker_result_queue  # kept: a worker that writes must not find it closed
        self._signals = signal_handling
        # torch raises an error from its handler of SIGCHLD if one of these fails; it knows them by the iterator's id,
        # which another one may have when the workers have ended.
        if batches._worker_pids_set:
            signal_handling._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        signal_handling._set_worker_pids(id(self), tuple(worker.pid for worker in self.processes))
        batches._shutdown_workers = instead

    def end(self) -> bool:
        """Ask the workers to end, and make them; say whether all did. Blocks for three times `_END_SECONDS` at most."""
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
        self._signals._remove_worker_pids(id(self))
        return not left

    def _set_done(self) -> bool:
        """Set the event that workers look at; say whether that came to an end: a killed worker may have its lock."""
        is_set = _thread.allocate_lock()
        is_set.acquire()

        def set_it() -> None:
            self._done.set()
            is_set.release()

        _thread.start_new_thread(set_it, ())
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
