"""`DataLoader` and `wrap_loader`: what makes a loader of torch's stage its batches."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils.data

from .._pool import HostBudget, SlabPool
from .._reaper import reaper
from .._torch import tell_once, why_collation_is_unknown, why_loader_cannot_be_taken_over
from ._collate import SlabCollate
from ._ending import Ending
from ._iterator import InlineIterator, WorkersIterator
from ._server import SlabServer
from ._slabs import Settings, Slabs, checked
from ._starting import start_workers
from ._stats import LoaderStats
from ._unused import arguments_were_read, slabs_of_original, warn_if_unused
from ._worker import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

L = TypeVar("L")
T_co = TypeVar("T_co", covariant=True)


class Staging:
    """What stands before a loader's own class: workers write into slabs, and batches are sent.

    torch's loader, and classes made of it, call ``_get_iterator`` to begin a pass; that is what changes. Attributes of
    ours may be missing in an object: a framework makes loaders anew, and a copy in another process must not reach for
    the device before it is used.
    """

    @property
    def _settings(self) -> Settings:
        raise NotImplementedError

    def stats(self) -> LoaderStats:
        """Return what was done so far. Does not block."""
        slabs = self._slabs
        pool = None if slabs.pool is None else slabs.pool.stats()
        return slabs.counters.snapshot(self.num_workers, pool)  # type: ignore[attr-defined]

    @property
    def _slabs(self) -> Slabs:
        """The slabs of this loader in this process: a forked worker, whose dataset reads the loader, has its own."""
        slabs: Slabs | None = vars(self).get("_own_slabs")
        if slabs is None:
            slabs = slabs_of_original(self.dataset, self._settings) or Slabs(self._settings)  # type: ignore[attr-defined]
        elif slabs.pid != os.getpid():
            slabs = Slabs(self._settings.without_pool())
        vars(self)["_own_slabs"] = slabs
        return slabs

    def __getstate__(self) -> dict[str, Any]:
        # A copy has slabs and counters of its own, and no workers yet.
        return {name: value for name, value in vars(self).items() if name != "_own_slabs"} | {"_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __iter__(self) -> Any:
        kept: Any = vars(self).get("_iterator")
        if isinstance(kept, WorkersIterator):
            kept.close_if_a_worker_is_lost()
            if kept.closed:
                reaper.bury(vars(self).pop("_iterator"))
                vars(self)["_iterator"] = None  # new workers
        batches = super().__iter__()  # type: ignore[misc]
        if inspect.isgenerator(batches):
            return self._looked_after(batches)
        warn_if_unused(self._slabs)
        return batches

    def _looked_after(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        warn_if_unused(self._slabs)

    @property
    def timeout(self) -> float:
        arguments_were_read(self)
        timeout: float = vars(self).get("timeout", 0)
        return timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        vars(self)["timeout"] = timeout

    @property
    def multiprocessing_context(self) -> Any:
        arguments_were_read(self)
        return super().multiprocessing_context  # type: ignore[misc]

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        torch.utils.data.DataLoader.multiprocessing_context.fset(self, context)  # type: ignore[attr-defined]

    def _get_iterator(self) -> Any:
        slabs = self._slabs
        slabs.is_used = True
        with slabs.starting:
            if self.num_workers == 0:  # type: ignore[attr-defined]
                return self._inline_iterator()
            return start_workers(self._workers_iterator)

    def _inline_iterator(self) -> InlineIterator:
        loader: Any = self
        return InlineIterator(self._torchs_iterator(loader.collate_fn), self._slabs)

    def _workers_iterator(self) -> InlineIterator | WorkersIterator:
        loader: Any = self
        slabs = self._slabs
        pairs = [multiprocessing.Pipe() for _ in range(loader.num_workers)]
        server = SlabServer(slabs.shared(), [here for here, _ in pairs], slabs.target, slabs, self._settings.owner)
        try:
            terms = Terms(os.getpid(), (loader.prefetch_factor or 0) + 1)
            collate = SlabCollate(loader.collate_fn, server.token, [there for _, there in pairs], terms)
            if hasattr(self, "load_state_dict"):  # it may read batches before its iterator is there
                server.start()
            batches = self._torchs_iterator(collate)
        except BaseException:
            server.finish(leak=False)
            raise
        finally:
            for _, there in pairs:
                there.close()
        reason = why_loader_cannot_be_taken_over(batches)
        if reason is not None:
            server.finish(leak=False)
            getattr(batches, "_shutdown_workers", lambda: None)()  # else they end when it has died
            tell_once(f"ps.DataLoader stages in the main process, which is slower: {reason}")
            return self._inline_iterator()
        reason = why_collation_is_unknown()
        if reason is not None:
            tell_once(f"workers stack batches before they pack them, which takes longer: {reason}")
        ending = Ending(batches, server)
        try:
            server.start()
            return WorkersIterator(batches, server, ending, slabs, self._settings.depth)
        except BaseException:
            ending.wait()
            raise

    def _torchs_iterator(self, collate: Any) -> Any:
        """Return the iterator that there would be without us, but for the collate function."""
        # One call of C changes the loader back: an interrupt cannot leave it changed.
        state = vars(self)
        kept = {name: state[name] for name in ("collate_fn", "pin_memory")}
        try:
            state.update(collate_fn=collate, pin_memory=False)
            return super()._get_iterator()  # type: ignore[misc]
        finally:
            state.update(kept)


class DataLoader(Staging, torch.utils.data.DataLoader[T_co]):
    """torch's `DataLoader`, whose batches arrive on a device.

    Takes all its arguments, and yields what it would yield, on the device: same order, seeds, types and structure. With
    workers, these write batches into slabs that the main process has page-locked (default collation stacks the samples
    there), and each batch is sent by one asynchronous copy. `pin_memory` is accepted and has no effect. Batches are as
    `Stager` makes them: tensors and numeric numpy arrays are tensors on the device, everything else is as it was.

    Args:
        dataset: as torch's.
        *args: as torch's.
        device: where batches go: a CUDA device or ``"cpu"``; None is ``"cuda"`` where it is available, else ``"cpu"``.
        pool: a pool over `SharedMemory` to take slabs from, perhaps shared with other loaders and stagers; None makes
            one. Workers keep their slabs until the iterator ends, so leave room for the others. A copy of the loader
            makes a pool of its own, with the same cap.
        max_bytes: cap on the slabs of all iterators of this loader together; see `SlabPool`. Workers wait where it is
            reached; a batch for which there can be no slab travels through the worker queue, more slowly.
        owner: for whom slabs are taken, in `PoolStats.owners`, and by which name a share of the pool binds the loader;
            see `SlabPool.share`.
        depth: batches sent ahead of the one that is yielded, of those that have arrived; 0 for none. Without workers
            there are none ahead.
        **kwargs: as torch's.

    Raises:
        TypeError: `depth` is no int.
        ValueError: `depth` is negative, `max_bytes` no size, `device` another kind of device, `pool` not over
            shared memory, or both `pool` and `max_bytes` are given.
        StagingError: a CUDA device without CUDA.
        LayoutError: while iterating: a batch holds an object that cannot be staged; see `Layout`.

    The slabs are kept between passes. Those of a pool that the loader made are freed when it and its iterators are
    gone. An iterator that is left early gives all back as soon as it is dropped.
    """

    # Attributes with the names of arguments: Lightning makes loaders anew from these.
    device: torch.device
    pool: SlabPool | None
    max_bytes: int | str | HostBudget | None
    depth: int
    owner: str

    if TYPE_CHECKING:  # torch's arguments by name; at run time, whatever the torch that is installed takes

        def __init__(
            self,
            dataset: torch.utils.data.Dataset[T_co],
            batch_size: int | None = 1,
            shuffle: bool | None = None,
            sampler: Iterable[Any] | None = None,
            batch_sampler: Iterable[Any] | None = None,
            num_workers: int = 0,
            collate_fn: Callable[[list[Any]], Any] | None = None,
            pin_memory: bool = False,
            drop_last: bool = False,
            timeout: float = 0,
            worker_init_fn: Callable[[int], None] | None = None,
            multiprocessing_context: Any = None,
            generator: Any = None,
            *,
            prefetch_factor: int | None = None,
            persistent_workers: bool = False,
            pin_memory_device: str = "",
            in_order: bool = True,
            device: torch.device | str | int | None = None,
            pool: SlabPool | None = None,
            max_bytes: int | str | HostBudget | None = "auto",
            owner: str = "loader",
            depth: int = 2,
        ) -> None: ...

    else:

        def __init__(
            self,
            dataset: torch.utils.data.Dataset[T_co],
            *args: Any,
            device: torch.device | str | int | None = None,
            pool: SlabPool | None = None,
            max_bytes: int | str | HostBudget | None = "auto",
            owner: str = "loader",
            depth: int = 2,
            **kwargs: Any,
        ) -> None:
            super().__init__(dataset, *args, **kwargs)
            settings = checked(device, pool, max_bytes, depth, owner)
            self.device, self.pool, self.max_bytes, self.depth, self.owner = settings
            self._slabs  # noqa: B018 - made here, where the device may be reached for

    @property
    def _settings(self) -> Settings:
        return Settings(self.device, self.pool, self.max_bytes, self.depth, self.owner)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"pool": None}

    def __repr__(self) -> str:
        workers = f"{self.num_workers} workers" if self.num_workers else "no workers"
        return f"<DataLoader to {self.device}: batch_size={self.batch_size}, {workers}, max_bytes={self.max_bytes!r}>"


def wrap_loader(
    loader: L,
    *,
    device: torch.device | str | int | None = None,
    pool: SlabPool | None = None,
    max_bytes: int | str | HostBudget | None = "auto",
    owner: str = "loader",
    depth: int = 2,
) -> L:
    """Return a loader like another one, of a class made of that one's, that does what `DataLoader` does.

    For loaders of other classes, such as torchdata's ``StatefulDataLoader``: its ``state_dict()`` is that of the
    batches that were yielded, whatever was sent ahead. The loader that is given stays as it was. Use the one that is
    returned, which has `DataLoader.stats` as well. Only a loader that Accelerate prepared is changed itself, and
    returned.

    A ``StatefulDataLoader`` that was asked for its state has begun its first pass, and Accelerate asks. With workers,
    the batches of that pass are staged in the main process.

    Args:
        loader: of a class made of torch's `DataLoader`, or prepared by Accelerate. Not iterated over yet.
        device: as for `DataLoader`; None is that of a prepared loader, if it has one.
        pool: as for `DataLoader`.
        max_bytes: as for `DataLoader`.
        owner: as for `DataLoader`.
        depth: as for `DataLoader`.

    Raises:
        TypeError: the loader is no such object, or wrapped already, or has workers already.
        ValueError, StagingError: as `DataLoader`.
    """
    given: Any = loader
    inside = getattr(given, "base_dataloader", None)
    if isinstance(inside, torch.utils.data.DataLoader) and not issubclass(type(given), torch.utils.data.DataLoader):
        device = getattr(given, "device", None) if device is None else device
        given.base_dataloader = wrap_loader(
            inside, device=device, pool=pool, max_bytes=max_bytes, owner=owner, depth=depth
        )
        return loader
    if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader, Staging):
        raise TypeError(
            f"cannot wrap a {type(loader).__name__}: only a loader whose class is made of torch.utils.data.DataLoader, "
            "once; use pinstage.DataLoader, or Stager.prefetch for any iterable"
        )
    begun = loader._iterator
    if begun is not None and not hasattr(loader, "load_state_dict"):
        raise TypeError(f"cannot wrap this {type(loader).__name__}: it has workers already; do it before iterating")
    made = _wrapped(type(given), checked(device, pool, max_bytes, depth, owner), vars(given) | {"_iterator": None})
    slabs: Slabs = made._slabs  # made here, where the device may be reached for
    if begun is not None:  # it was asked for its state; what it has drawn from its generator stays drawn
        slabs.is_used = True
        vars(made)["_iterator"] = InlineIterator(begun, slabs)
        if loader.persistent_workers:
            tell_once("a wrapped loader stages in the main process, which is slower: its workers were there before")
    return made  # type: ignore[no-any-return]


def _wrapped(loader_class: type[Any], settings: Settings, state: dict[str, Any]) -> Any:
    """Return a loader of a class of its own, which has its settings: a framework may make it anew by its type."""

    def reduce(loader: Any) -> tuple[Any, ...]:  # by its name pickle would find the class that it was
        return _wrapped, (loader_class, settings.without_pool(), loader.__getstate__())

    ours = {"_settings": settings, "__reduce__": reduce, "__doc__": loader_class.__doc__}
    metaclass: Any = type(loader_class)
    made = metaclass(loader_class.__name__, (Staging, loader_class), ours)
    loader = made.__new__(made)
    vars(loader).update(state)
    return loader
