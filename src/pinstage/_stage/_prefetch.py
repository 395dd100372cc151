"""Reading ahead of a loop, while the source's state is kept at the batch that the loop has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeGuard, TypeVar

from torch.utils.data import DataLoader, default_collate

from .._batch import SOURCES
from .._compat import prepared
from .._compat.probes import warn_once
from ._background import Exhausted, Reading, stop_reading, surroundings_of
from ._own_work import OwnWork
from ._run_ahead import RunAhead
from ._sender import Sender
from ._target import Target
from ._transfer import Transfer

T = TypeVar("T")

InBackground: TypeAlias = bool | Literal["auto"]

_NO_MORE: Any = object()

_NOT_KEPT: Any = object()
"""Stands for the state that the source itself has."""


@dataclass(slots=True)
class _Position:
    """The position of one pass."""

    consumer: Any = None
    """The stream on which the pass began. Pipelines, such as torchrec's, request batches on
    another stream, and use them on this one: both have to wait for the copy."""
    state: Any = _NOT_KEPT
    """The source's state at the batch yielded last, or at the beginning, or the exception that
    its ``state_dict()`` raised. `_NOT_KEPT` before any pass and after the last batch."""


class Pass(Iterator[T]):
    """The batches of one pass. A request in a thread that captures a graph is refused, and the pass
    can go on afterwards. A generator that raises is at its end.
    """

    def __init__(self, batches: Generator[T], target: Target) -> None:
        self._batches, self._target = batches, target
        self.close = batches.close

    def __next__(self) -> T:
        self._target.refuse_capture()
        return next(self._batches)


class Prefetcher(Generic[T]):
    """The batches of a source on the device, staged ahead. Made by `Stager.prefetch`.

    Each ``iter()`` begins another pass over the source. ``len()`` and all other attributes are the
    source's, such as ``prefetcher.dataset``; type checkers require ``prefetcher.source.dataset``.
    Set them on ``prefetcher.source``. Batches that were read ahead aren't affected.

    If the source has ``state_dict()``, so has the prefetcher. It keeps the source's state with each
    batch that it reads, and returns the state of the batch yielded last, as in a loop that does not
    read ahead. ``load_state_dict()`` is the source's.
    """

    __slots__ = (
        "__weakref__", "_background", "_depth", "_position", "_sender", "_source"
    )  # fmt: skip

    def __init__(
        self,
        sender: Sender,
        source: Iterable[T],
        depth: int,
        background: bool,
    ) -> None:
        self._sender = sender
        self._source = source
        self._depth = depth
        self._background = background
        self._position = _Position()

    @property
    def source(self) -> Any:
        """The source given to `Stager.prefetch`."""
        return self._source

    def __iter__(self) -> Iterator[T]:
        """Begin a pass. Batches staged ahead are freed with the iterator.

        A batch is safe to use on the stream that is current when it is requested, and on the stream
        that is current now. If a thread still reads the same source for an earlier pass, the call
        stops it, and waits for it. That pass raises a `PinstageError` at its next batch.

        Raises:
            PinstageError: that thread still reads after the loader's ``timeout``, or after a
                minute; or the current stream captures a CUDA graph. A request for a batch is
                refused then, too, and loses none.
        """
        target, work = self._sender.target, OwnWork()
        target.refuse_capture()
        stop_reading(self._source)
        active = prepared.active_loader()
        read: Callable[[], Any] = partial(self._read, iter(self._source))
        stage: Callable[[Any], Transfer] = self._sender.begin
        if is_read_as_torch_does(self._source):  # else `wrap_loader` doesn't take it
            read, stage = work.timed(read), work.timed(stage)
        self._position = position = _Position(target.consumer(None), self._state())
        call = surroundings_of(target) if self._background else None
        reading = Reading(self._source, read, stage, self._depth)
        return Pass(self._pass(reading, position, active, call, work), target)

    def _pass(
        self,
        reading: Reading,
        position: _Position,
        active: object,
        call: Callable[..., None] | None,
        work: OwnWork,
    ) -> Generator[T]:
        run_ahead, target = RunAhead(), self._sender.target
        try:
            goes_on = reading.read_here()
            work.begin()
            if goes_on:
                prepared.refuse_hidden_loader(self._source, active)
                if call is not None:
                    reading.start(call)
            while True:
                yield self._hand_out(position, reading)
                run_ahead.bound(target.record(target.consumer(None)))
        except Exhausted:
            position.state = _NOT_KEPT  # the source is at its end, too
        finally:
            reading.leave()
        if (work_of_pass := work.too_much()) is not None:
            warn_once(
                f"prefetch reads and packs the batches of this {type(self._source).__name__} in "
                f"the main process: {work_of_pass}. Let its workers pack: iterate over "
                f'pinstage.wrap_loader(loader, device="{target.device}") instead',
                about="wrap_loader",
                stacklevel=4,
            )

    def _read(self, batches: Iterator[T]) -> tuple[T, Any] | None:
        batch = next(batches, _NO_MORE)
        return None if batch is _NO_MORE else (batch, self._state())

    def _state(self) -> Any:
        return None

    def _hand_out(self, position: _Position, reading: Reading) -> T:
        transfer, state = reading.get()
        batch: T = transfer.wait()
        if self._sender.target.consumer(None) != position.consumer:
            transfer.wait(position.consumer)
        position.state = state
        reading.advance()  # last, since the thread that it wakes needs the interpreter lock, too
        return batch

    def __len__(self) -> int:
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"the source of the prefetcher has no length: {type(self._source).__name__}"
            ) from error

    def __bool__(self) -> bool:
        return bool(self._source)

    if TYPE_CHECKING:  # for sources that have them; any other name is a mistake

        def state_dict(self) -> Any: ...
        def load_state_dict(self, state: Any) -> None: ...

    else:

        def __getattr__(self, name: str) -> Any:
            # `copy` and Python itself look for these
            if name in Prefetcher.__slots__ or (name.startswith("__") and name.endswith("__")):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._source, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_iterator":  # Lightning ends a loader's workers, and sets it to None
                setattr(self._source, name, value)
                return
            self._check_own(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            self._check_own(name)
            super().__delattr__(name)

    def _check_own(self, name: str) -> None:
        if name not in Prefetcher.__slots__:
            raise AttributeError(
                f"cannot set or delete {name!r} of a prefetcher: its attributes are those of its "
                f"{type(self._source).__name__}; use prefetcher.source.{name}"
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} depth={self._depth} to {self._sender.target.device} of "
            f"{self._source!r}>"
        )


class StatefulPrefetcher(Prefetcher[T]):
    """A `Prefetcher` of a source with a state. The class has the methods, since protocols look for
    them there.
    """

    __slots__ = ()

    _source: Any

    def _state(self) -> Any:
        try:
            return copy.deepcopy(self._source.state_dict())
        except Exception as error:  # noqa: BLE001 - raised when the state is asked for
            return error.with_traceback(None)

    def state_dict(self) -> Any:
        """Return the source's state as it was when it had yielded the batch that the loop has."""
        state = self._position.state
        if state is _NOT_KEPT:
            stop_reading(self._source)
            return self._source.state_dict()
        if isinstance(state, Exception):
            raise state
        return copy.deepcopy(state)

    def load_state_dict(self, state: Any) -> None:
        """Load a state into the source, for the next pass. A pass whose thread still reads ends."""
        stop_reading(self._source)
        self._source.load_state_dict(state)
        self._position = _Position()


def prefetcher_of(
    sender: Sender,
    source: Iterable[T],
    depth: int,
    background: InBackground,
) -> Prefetcher[T]:
    """Return a prefetcher of the kind that the source needs."""
    _check_source(source)
    kind = StatefulPrefetcher if _has_state(source) else Prefetcher
    return kind(sender, source, depth, _in_background(source, depth, background))


def _check_source(source: object) -> None:
    """Refuse a batch, and a collection of loaders: iterating over it yields no batches. Refuse
    Accelerate's prepared loaders.

    Raises:
        TypeError: see above.
    """
    name = type(source).__name__
    # A ParameterDict isn't a Mapping, and yields keys, too.
    if isinstance(source, Mapping) or hasattr(type(source), "keys"):
        raise TypeError(
            f"cannot prefetch from a {name}, which is a mapping: pass a batch to "
            "stager.to_device(batch), and prefetch from each loader by itself"
        )
    sources = *SOURCES, Prefetcher
    if isinstance(source, list | tuple) and any(isinstance(item, sources) for item in source):
        raise TypeError(
            f"cannot prefetch from a {name} of loaders: pass zip(...) of them for a batch of each "
            "at a time, or prefetch from each loader by itself"
        )
    prepared.refuse_prepared_loader(source)


def _in_background(source: object, depth: int, background: InBackground) -> bool:
    """Return whether a source is read in a thread.

    =========================================================  =====================  ======
    source                                                     ``"auto"``             True
    =========================================================  =====================  ======
    any, with a depth of 0                                     no                     error
    torch's loader with workers, all samplers torch's          yes                    yes
    any other: its samplers, or the source itself, may draw    no                     yes
    from the global random generators between the loop's own
    draws
    =========================================================  =====================  ======
    """
    if background is True and depth == 0:
        raise ValueError(
            "background=True needs a depth of 1 or more: 0 stages nothing ahead; pass depth=2"
        )
    if isinstance(background, bool):
        return background
    if background != "auto":
        raise ValueError(f"background must be 'auto', True or False: {background!r}")
    return depth > 0 and is_read_as_torch_does(source) and _samplers_are_of_torch(source)


def is_read_as_torch_does(source: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether a source is torch's loader with workers, or a subclass that gets its batches
    in the same way.
    """
    return _iterates_as_torch_does(source) and source.num_workers > 0


def page_locks_each_batch(source: object) -> bool:
    """Return whether a source is torch's loader, and each of its batches has page-locked memory of
    its own, so that it may be read later.

    Without workers, a collate function other than torch's may return page-locked memory that it
    uses again, and ``pin_memory=True`` passes that on.
    """
    if not _iterates_as_torch_does(source) or not source.pin_memory:
        return False
    makes_batches = source.batch_sampler is not None and source.collate_fn is default_collate
    return source.num_workers > 0 or makes_batches


def _iterates_as_torch_does(source: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(source, DataLoader) and all(
        _is_of_torch(getattr(type(source), name, None)) for name in ("__iter__", "_get_iterator")
    )


def _samplers_are_of_torch(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and _is_of_torch(type(sampler)):
        sampler = getattr(sampler, "sampler", None)  # a BatchSampler's
    return sampler is None


def _is_of_torch(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] in ("torch", "torchdata")


def _has_state(source: object) -> bool:
    """Return whether a source has a ``state_dict()`` without arguments (those of mosaicml's
    datasets require some).
    """
    state_dict = getattr(source, "state_dict", None)
    if not (callable(state_dict) and callable(getattr(source, "load_state_dict", None))):
        return False
    try:
        with suppress(ValueError):  # no signature
            inspect.signature(state_dict).bind()
    except TypeError:
        return False
    return True
