"""`DataLoader` and `wrap_loader`: torch's loader, and classes derived from it, staged."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.utils.data

from .._batch import OwnStorage
from .._compat import prepared
from .._compat.loader import (
    end_workers,
    has_begun,
    returns_unseen,
    why_loader_cannot_be_taken_over,
)
from .._compat.probes import warn_once
from .._pool import HostBudget, SlabPool
from .._reaper import reaper
from .._sizes import Size, count
from ._broker import SlabBroker
from ._collate import InlineCollate, SlabCollate
from ._in_memory import index_sampler
from ._iterator import Ending, LoaderIterator, WorkersIterator, start_workers
from ._slabs import Settings, Slabs
from ._stats import LoaderStats

T_co = TypeVar("T_co", covariant=True)


class Staging(torch.utils.data.DataLoader[T_co]):
    """A base class before a loader's own class: workers write into slabs, and batches are sent.

    torch's loader, and each class derived from it, calls ``_get_iterator`` to begin a pass. This
    class overrides it.

    An object may lack our attributes: a framework may have rebuilt the loader, and a copy in
    another process must not touch the device before it is used.
    """

    device: torch.device
    _staging_settings: Settings

    def __repr__(self) -> str:
        workers = count(self.num_workers, "worker") if self.num_workers else "no workers"
        device, max_bytes = self._staging_settings.device, self._staging_settings.max_bytes
        return (
            f"<{type(self).__name__} to {device}: batch_size={self.batch_size}, {workers}, "
            f"max_bytes={max_bytes!r}>"
        )

    def stats(self) -> LoaderStats:
        """Return the counters of all passes so far. Does not block."""
        slabs = self._slabs
        pool = None if slabs.pool is None else slabs.pool.stats()
        return slabs.counters.snapshot(self.num_workers, pool)

    def close(self) -> None:
        """End all passes and their workers now, and give back the idle slabs of a pool that the
        loader made.

        Blocks until the workers have ended. An unfinished pass raises an error instead of its next
        batch. The loader can be used again: the next pass starts new workers. Use the loader in a
        ``with`` statement to close it at the end of the block. In a forked child, `close` does
        nothing.
        """
        slabs = self._slabs
        slabs.target.refuse_capture()
        for iterator in list(slabs.iterators):
            iterator.close()
        if slabs.pool is not None and slabs.settings.pool is None:
            slabs.pool.trim()
        inherited = getattr(super(), "close", None)  # of a class that is wrapped
        if inherited is not None:
            inherited()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _slabs(self) -> Slabs:
        """The slabs of this loader in this process. A forked worker whose dataset reads the loader
        gets its own.
        """
        slabs: Slabs | None = vars(self).get("_own_slabs")
        if slabs is None:
            slabs = Slabs(self._staging_settings)
        elif slabs.pid != os.getpid():
            slabs = Slabs(self._staging_settings._replace(pool=None))
        vars(self)["_own_slabs"] = slabs
        return slabs

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets slabs and counters of its own, and has no workers yet.
        return {name: value for name, value in vars(self).items() if name != "_own_slabs"} | {
            "_iterator": None
        }

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        self._slabs.target.refuse_capture()
        kept: Any = vars(self).get("_iterator")
        if isinstance(kept, WorkersIterator):
            kept.close_if_it_cannot_begin_again()
        if isinstance(kept, LoaderIterator) and kept.closed:
            reaper.bury(vars(self).pop("_iterator"))
            vars(self)["_iterator"] = None  # new workers
        return super().__iter__()

    def _get_iterator(self) -> Any:
        with self._slabs.starting:
            if self.num_workers == 0:
                return self._inline_iterator()
            return start_workers(self._workers_iterator)

    def _inline_iterator(self) -> LoaderIterator:
        collate = InlineCollate(self.collate_fn, self._staging_settings.keeping())
        batches = self._torchs_iterator(collate if self.num_workers == 0 else self.collate_fn)
        collate.is_unseen = returns_unseen(batches)
        return LoaderIterator(batches, self._slabs)

    def _workers_iterator(self) -> LoaderIterator:
        slabs = self._slabs
        for iterator in [iterator for iterator in slabs.iterators if iterator.closed]:
            iterator.close()  # its slabs may be needed
        random_states = _random_states(torch.default_generator, self.generator)
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(self.num_workers)), strict=True)
        broker = SlabBroker(slabs, ours)
        ending: Ending | None = None
        try:  # a signal's handler may raise anywhere
            limit = (self.prefetch_factor or 0) + 1
            collate = SlabCollate(
                self.collate_fn,
                broker.token,
                theirs,
                os.getpid(),
                limit,
                slabs.settings.keeping(),
            )
            # Torchdata's may read batches while its iterator is being made.
            if hasattr(self, "load_state_dict"):
                broker.start()
            batches = self._torchs_iterator(collate)
            unknown = why_loader_cannot_be_taken_over(batches)
            if unknown is None:
                ending = Ending(batches, broker)
                return WorkersIterator(batches, broker, ending, slabs, self.num_workers * limit)
        except BaseException:
            if ending is not None:
                ending.wait()
            broker.finish(leak=False)
            raise
        finally:
            for channel in theirs:
                channel.close()
        broker.finish(leak=False)
        end_workers(batches)  # else they end when it is freed
        warn_once(f"ps.DataLoader stages in the main process, which is slower: {unknown}")
        for generator, state in random_states:
            generator.set_state(state)  # or samples would come in another order
        return self._inline_iterator()

    def _torchs_iterator(self, collate: Any) -> Any:
        """Return torch's own iterator, but with this collate function, and perhaps another
        sampler.
        """
        # One call of C restores the attributes, so that an interrupt cannot leave the loader
        # changed.
        state, begin = vars(self), super()._get_iterator
        changed = {"collate_fn": collate, "pin_memory": False}
        changed |= index_sampler(self, begin, collate)
        kept = {name: state[name] for name in changed}
        try:
            state.update(changed)
            return begin()
        finally:
            state.update(kept)


class DataLoader(Staging[T_co]):
    """torch's `DataLoader`, whose batches arrive on a device.

    With Accelerate, use ``pinstage.integrations.accelerate.prepare``:
    ``accelerator.prepare(ps.DataLoader(...))`` rebuilds the loader and stages nothing.

    Takes all of torch's arguments, and yields the same batches in the same order, from the same
    seeds, with the same types and structure. As with `Stager`, tensors and numeric numpy arrays
    become tensors on the device, and everything else stays as it was. `pin_memory` is accepted and
    has no effect.

    Workers write each batch into a slab that the main process has page-locked; default collation
    stacks the samples there. Asynchronous copies then send the batch. Slabs that can't be
    page-locked are ordinary shared memory, and a `StagingWarning` says so once. Without workers,
    several threads stack the samples of a large batch there, after the last one was loaded. All
    samples have been read when the batch is yielded. For a loader that exists, use `wrap_loader`.

    Args:
        dataset: as torch's.
        *args: as torch's.
        device: the device of the batches: CUDA, or ``"cpu"``. None is ``"cuda"`` if it is
            available, else ``"cpu"``.
        pool: a pool over `SharedMemory` to take slabs from. Other loaders and stagers may share it.
            Workers keep their slabs until the iterator ends, so leave room for the others. None
            makes a pool. A copy of the loader always makes a pool of its own, with the same caps.
        max_bytes: cap on the slabs of all iterators of this loader together; see `SlabPool`. At the
            cap, workers wait. A batch that can't get a slab is sent through the worker queue, which
            is slower.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        depth: how many of the batches that have arrived are sent ahead of the yielded one; 0 for
            none. Without workers, no batch is sent ahead.
        keep_on_host: leaves that stay on the host, as for `Stager`, but batches may lack them; a
            path that leads to nothing in a whole pass is a warning. A function is called in the
            workers, so it must be picklable if they are not forked. Tensors that stay are sent
            through torch's shared memory.
        own_storage: which tensors of a batch have memory of their own, and which share blocks, as
            for `Stager`. It does not change what workers write.
        owner: the name under which the loader takes slabs. `PoolStats.owners` counts by this name,
            and `SlabPool.set_quota` can limit it.
        **kwargs: as torch's.

    Raises:
        TypeError: `dataset` is a loader (see `wrap_loader`), `depth` is not an int, `keep_on_host`
            is neither paths nor a function, `pool` is not a `SlabPool`, or `budget` is not a
            `HostBudget`.
        ValueError: `depth` is negative; `max_bytes` is not a size; `device` is neither CUDA nor the
            CPU; `pool` is not over shared memory; `pool` is given with `max_bytes` or `budget`; or
            `own_storage` is another value.
        CudaUnavailableError: `device` is a CUDA device, and CUDA is not available.
        LayoutError: while iterating: a batch holds an object that cannot be staged; see `Layout`.

    The loop may queue the work of three batches on the device, as with `Stager.prefetch`. Before
    the next one, the host waits. In a thread whose current stream captures a CUDA graph, a request
    for a batch raises `PinstageError`, and the pass can go on afterwards.

    Slabs are kept between passes. If the loader made the pool, its slabs are freed when the loader
    and its iterators are gone. An iterator that is left early gives its slabs back as soon as it is
    dropped. `close`, or the end of a ``with`` block, ends the workers at once.
    """

    # Attributes have the names of the arguments: Lightning rebuilds loaders from them.
    pool: SlabPool | None
    max_bytes: Size
    budget: HostBudget | None
    depth: int
    keep_on_host: tuple[str, ...] | Callable[[str, Any], object] | None
    own_storage: OwnStorage
    owner: str

    # Torch's arguments by name; at run time, whatever arguments the installed torch takes.
    if TYPE_CHECKING:

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
            max_bytes: Size = "auto",
            budget: HostBudget | None = None,
            depth: int = 2,
            keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
            own_storage: OwnStorage = "auto",
            owner: str = "loader",
        ) -> None: ...

    else:

        def __init__(
            self,
            dataset: torch.utils.data.Dataset[T_co],
            *args: Any,
            device: torch.device | str | int | None = None,
            pool: SlabPool | None = None,
            max_bytes: Size = "auto",
            budget: HostBudget | None = None,
            depth: int = 2,
            keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
            own_storage: OwnStorage = "auto",
            owner: str = "loader",
            **kwargs: Any,
        ) -> None:
            _refuse_staged(dataset)
            if isinstance(dataset, torch.utils.data.DataLoader):
                raise TypeError(
                    f"dataset is a {type(dataset).__name__}, which is a loader already: to stage "
                    "its batches, write pinstage.wrap_loader(loader, device=...)"
                )
            super().__init__(dataset, *args, **kwargs)
            vars(self).update(Settings.among(locals())._asdict())
            self._slabs  # noqa: B018 - made now, where the device may be touched

    @property
    def _staging_settings(self) -> Settings:  # type: ignore[override]
        return Settings(*(getattr(self, name) for name in Settings._fields))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"pool": None}


class WrappedLoader(Staging[T_co]):
    """The result of `wrap_loader`: a loader whose class derives from this class and from the given
    loader's.
    """

    if TYPE_CHECKING:  # the attributes of the loader's own class

        def __getattr__(self, name: str) -> Any: ...


def wrap_loader(
    loader: torch.utils.data.DataLoader[T_co],
    *,
    device: torch.device | str | int | None = None,
    pool: SlabPool | None = None,
    max_bytes: Size = "auto",
    budget: HostBudget | None = None,
    depth: int = 2,
    keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
    own_storage: OwnStorage = "auto",
    owner: str = "loader",
) -> WrappedLoader[T_co]:
    """Return a loader like the given one, but with batches that arrive on a device, like those of
    `DataLoader`.

    ```python
    for batch in ps.wrap_loader(loader, device="cuda:0"):
        train_step(batch)
    ```

    Use this for a torch `DataLoader` that exists, of torch's class or of any subclass, such as
    torchdata's ``StatefulDataLoader``. Wrap it before its workers start. For everything else that
    yields batches, use `Stager.prefetch`. The state of a stateful loader counts the batches that
    were yielded, not those that were sent ahead.

    The given loader stays as it was; use the returned one, which also has `DataLoader.stats`,
    `DataLoader.close` and ``device``. A loader that Accelerate prepared is the exception: it is
    changed in place, and returned.

    A ``StatefulDataLoader`` begins its first pass when its state is requested. If that happened
    before, its workers run already, and the batches of that pass are staged in the main process.
    Accelerate requests the state when it prepares such a loader;
    `pinstage.integrations.accelerate.prepare` wraps it earlier.

    Args:
        loader: a loader whose class derives from torch's `DataLoader`, or one prepared by
            Accelerate. It must not have been iterated over yet.
        device: as for `DataLoader`. None is the device of a prepared loader, if it has one.
        pool: as for `DataLoader`.
        max_bytes: as for `DataLoader`.
        budget: as for `DataLoader`.
        depth: as for `DataLoader`.
        keep_on_host: as for `DataLoader`.
        own_storage: as for `DataLoader`.
        owner: as for `DataLoader`.

    Raises:
        TypeError: `loader` is of another class, stages its batches already, or has an iterator
            already.
        ValueError, CudaUnavailableError: as `DataLoader`.
    """
    given: Any = loader
    is_torchs = issubclass(type(given), torch.utils.data.DataLoader)
    inner = given if is_torchs else prepared.inner_loader(given)
    if inner is not given and device is None:
        device = getattr(given, "device", None)
    _refuse_staged(inner)
    if not isinstance(inner, torch.utils.data.DataLoader):
        raise TypeError(
            f"cannot wrap a {type(inner).__name__}: it isn't derived from "
            "torch.utils.data.DataLoader; iterate over stager.prefetch(source) instead"
        )
    wrapped = _wrap(inner, Settings.among(locals()))
    if inner is given:
        return wrapped
    prepared.replace_inner_loader(given, wrapped)
    return given  # type: ignore[no-any-return]


def _refuse_staged(loader: object) -> None:
    if isinstance(loader, Staging):
        raise TypeError(
            f"cannot wrap this {type(loader).__name__}: its batches arrive on {loader.device} "
            "already; iterate over it as it is"
        )


def _random_states(*generators: Any) -> list[tuple[Any, Any]]:
    """Return each generator, unless it is None, with its state."""
    return [(generator, generator.get_state()) for generator in generators if generator is not None]


def _wrap(loader: Any, settings: Settings) -> WrappedLoader[Any]:
    if has_begun(loader) and not hasattr(loader, "load_state_dict"):
        raise TypeError(
            f"cannot wrap this {type(loader).__name__}: it has an iterator already; wrap it before "
            "iterating, or, if its constructor iterates, derive its class from pinstage.DataLoader"
        )
    begun = loader._iterator
    made = _wrapped(type(loader), settings, vars(loader) | {"_iterator": None})
    slabs = made._slabs  # made now, where the device may be touched
    # Its state was requested: the pass goes on, since its seed is drawn already.
    if begun is not None:
        vars(made)["_iterator"] = LoaderIterator(begun, slabs)
        if loader.persistent_workers:
            warn_once(
                "a wrapped loader stages in the main process, which is slower: its workers were "
                "started before"
            )
    return made


def _wrapped(
    loader_class: type[Any], settings: Settings, state: dict[str, Any]
) -> WrappedLoader[Any]:
    """Return a loader with a class of its own that has the settings: a framework may rebuild it
    from its type.
    """

    def reduce(loader: Any) -> tuple[Any, ...]:
        # By its name, pickle would find the class that was wrapped.
        return _wrapped, (loader_class, settings._replace(pool=None), loader.__getstate__())

    ours = {
        "_staging_settings": settings,
        "device": settings.device,
        "__reduce__": reduce,
        "__doc__": loader_class.__doc__,
    }
    metaclass: Any = type(loader_class)
    made = metaclass(loader_class.__name__, (WrappedLoader, loader_class), ours)
    loader: WrappedLoader[Any] = made.__new__(made)
    vars(loader).update(state)
    return loader
