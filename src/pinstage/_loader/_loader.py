"""`DataLoader` itself: torch's, with another collate function in the workers and another iterator in front."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils.data

from .._memory import cap_bytes
from .._pool import SlabPool
from .._reaper import reaper
from .._staging import Target, check_depth, target_for
from .._torch import tell_once, why_collation_is_unknown, why_loader_cannot_be_taken_over
from ._collate import SlabCollate
from ._ending import Ending
from ._iterator import InlineIterator, WorkersIterator
from ._server import SlabServer
from ._slabs import Slabs
from ._starting import start_workers
from ._stats import Counters, LoaderStats
from ._worker import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

L = TypeVar("L")
T_co = TypeVar("T_co", covariant=True)


class IntoSlabs:
    """What is put before torch's class, or one made of it, so that workers write into slabs."""

    _before: type[Any] = torch.utils.data.DataLoader
    device: torch.device
    depth: int
    max_bytes: int | str | None

    def stats(self) -> LoaderStats:
        """Return what was done so far. Does not block."""
        pool = self._slabs.pool
        return self._counters.snapshot(self.num_workers, None if pool is None else pool.stats())  # type: ignore[attr-defined]

    def _send_to(
        self, device: torch.device | str | int | None, pool: SlabPool | None, max_bytes: int | str | None, depth: int
    ) -> None:
        self.depth = check_depth(depth)
        if pool is not None and max_bytes not in ("auto", None):
            raise ValueError(
                f"pool and max_bytes exclude each other: max_bytes={max_bytes!r}; give the cap to the pool"
            )
        if pool is not None and not pool.memory.is_shared:
            raise ValueError(
                f"workers cannot map the memory of this pool: {type(pool.memory).__name__} is not shared; pass "
                "SlabPool(SharedMemory(device), max_bytes=...)"
            )
        if max_bytes not in ("auto", None) and cap_bytes(max_bytes)[0] <= 0:
            raise ValueError(f"max_bytes must be positive: {max_bytes!r}; pass a size such as '512MiB', or 'auto'")
        self._target = target_for(device)
        self.device = self._target.device
        self.max_bytes = max_bytes if pool is None else pool.max_bytes
        self._own_slabs = Slabs(self._target, max_bytes, pool)
        self._counters = Counters()

    # A copy makes these when it is used: one in a spawned worker, whose dataset has the loader, must not touch CUDA.

    @cached_property
    def _target(self) -> Target:
        return target_for(self.device)

    @property
    def _slabs(self) -> Slabs:
        """The slabs of this loader in this process: a forked worker, whose dataset reads the loader, has its own.

        And counters: a thread that is gone may hold their lock.
        """
        slabs: Slabs | None = vars(self).get("_own_slabs")
        if slabs is None or slabs.pid != os.getpid():
            slabs = self._own_slabs = Slabs(self._target, self.max_bytes)
            self._counters = Counters()
        return slabs

    @cached_property
    def _counters(self) -> Counters:
        return Counters()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has slabs and counters of its own, and no workers yet.
        own = ("_target", "_own_slabs", "_counters")
        return {name: value for name, value in vars(self).items() if name not in own} | {"_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __iter__(self) -> Any:
        kept: Any = vars(self).get("_iterator")
        if isinstance(kept, WorkersIterator):
            kept.close_if_a_worker_is_lost()
            if kept.closed:
                reaper.bury(vars(self).pop("_iterator"))
                vars(self)["_iterator"] = None  # new workers
        return self._before.__iter__(self)

    def _get_iterator(self) -> Any:
        with self._slabs.starting:
            if self.num_workers == 0:  # type: ignore[attr-defined]
                return self._inline_iterator()
            return start_workers(self._workers_iterator)

    def _inline_iterator(self) -> InlineIterator:
        loader: Any = self
        batches = self._iterator_of_torch(loader.collate_fn)
        return InlineIterator(batches, self._slabs.stager(), self._target, self._counters, self._slabs)

    def _workers_iterator(self) -> InlineIterator | WorkersIterator:
        loader: Any = self
        pairs = [multiprocessing.Pipe() for _ in range(loader.num_workers)]
        server = SlabServer(self._slabs.shared(), [here for here, _ in pairs], self._target, self._slabs)
        try:
            terms = Terms(os.getpid(), (loader.prefetch_factor or 0) + 1)
            collate = SlabCollate(loader.collate_fn, server.token, [there for _, there in pairs], terms)
            if hasattr(
                self, "load_state_dict"
            ):  # it may read batches, to go on where it was, before its iterator is there
                server.start()
            batches = self._iterator_of_torch(collate)
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
            return WorkersIterator(batches, server, ending, self._target, self.depth, self._counters)
        except BaseException:
            ending.wait()
            raise

    def _iterator_of_torch(self, collate: Any) -> Any:
        """Return the iterator that there would be without us, but for the collate function."""
        # One call of C changes the loader back: an interrupt cannot leave it changed.
        state = vars(self)
        kept = {name: state[name] for name in ("collate_fn", "pin_memory")}
        try:
            state.update(collate_fn=collate, pin_memory=False)
            return self._before._get_iterator(self)
        finally:
            state.update(kept)


class DataLoader(IntoSlabs, torch.utils.data.DataLoader[T_co]):
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
            max_bytes: int | str | None = "auto",
            depth: int = 2,
        ) -> None: ...

    else:

        def __init__(self, dataset, *args, device=None, pool=None, max_bytes="auto", depth=2, **kwargs):
            super().__init__(dataset, *args, **kwargs)
            self._send_to(device, pool, max_bytes, depth)

    def __repr__(self) -> str:
        workers = f"{self.num_workers} workers" if self.num_workers else "no workers"
        return f"<DataLoader to {self.device}: batch_size={self.batch_size}, {workers}, max_bytes={self.max_bytes!r}>"


def collate_into_slab(
    loader: L,
    *,
    device: torch.device | str | int | None = None,
    pool: SlabPool | None = None,
    max_bytes: int | str | None = "auto",
    depth: int = 2,
) -> L:
    """Let a loader of another class do what `DataLoader` does, for programs that must keep that class.

    Changes the loader in place: from now on its workers write into slabs, and its batches arrive on the device. Its
    type becomes a subclass of what it was, with `DataLoader.stats`. torchdata's ``StatefulDataLoader`` is an example:
    its ``state_dict()`` is that of the batches that were yielded, whatever was sent ahead.

    Args:
        loader: of a class made of torch's `DataLoader`, whose iterators are torch's or made of them.
        device: as for `DataLoader`.
        pool: as for `DataLoader`.
        max_bytes: as for `DataLoader`.
        depth: as for `DataLoader`.

    Returns:
        The same loader.

    Raises:
        TypeError: the loader is no such object, or one already.
        ValueError, StagingError: as `DataLoader`.
    """
    if not isinstance(loader, torch.utils.data.DataLoader) or hasattr(loader, "_slabs"):
        raise TypeError(
            f"cannot change a {type(loader).__name__}: only a loader whose class is made of "
            "torch.utils.data.DataLoader, once; use pinstage.DataLoader, or Stager.prefetch for any iterable"
        )
    if loader._iterator is not None:
        raise TypeError(f"cannot change this {type(loader).__name__}: it has workers already; do it before iterating")
    found: Any = loader
    kept = found.__class__
    found.__class__ = _into_slabs(kept)
    try:
        found._send_to(device, pool, max_bytes, depth)
    except BaseException:
        found.__class__ = kept
        raise
    return loader


@cache
def _into_slabs(loader_class: type[Any]) -> type[Any]:
    # Its only base is the class that it was: no other can an object change to.
    ours = {name: value for name, value in vars(IntoSlabs).items() if name not in ("__dict__", "__weakref__")}
    ours |= {"_before": loader_class, "__doc__": loader_class.__doc__, "__reduce__": _reduce_changed}
    return type(loader_class.__name__, (loader_class,), ours)


def _reduce_changed(loader: Any) -> tuple[Any, ...]:  # by its name pickle would find the class that it was
    return _unpickle_changed, (loader._before, loader.__getstate__())


def _unpickle_changed(loader_class: Any, state: dict[str, Any]) -> Any:
    loader = object.__new__(_into_slabs(loader_class))
    loader.__setstate__(state)
    return loader
