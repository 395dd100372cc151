"""Reading ahead of a loop: what a source says of itself has to be about the batch that the loop has."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import StagingError
from ._device import Target
from ._run_ahead import RunAhead
from ._transfer import Transfer

T = TypeVar("T")

_NO_MORE: Any = object()

_FLAGS = ("end_of_dataloader", "remainder")
"""Attributes of Accelerate's prepared loaders: its gradient accumulation and `gather_for_metrics` go by them."""


class _Said(NamedTuple):
    """What a source said of itself when a batch had been read."""

    state: Any
    """Of its ``state_dict()``; a `_Failed` if that failed; None if it has none."""
    flags: dict[str, Any]
    """Those of `_FLAGS`, if it has them."""


class _Failed(NamedTuple):
    error: Exception


class _Place:
    """Where one pass is."""

    said: _Said | None = None
    """Of the batch that was yielded last; None before the first one and after the last one."""

    def __init__(self, consumer: Any = None) -> None:
        self.consumer = consumer
        """The stream on which the pass began. Pipelines, such as torchrec's, ask for batches on another one of theirs,
        and use them on this one: a ring has to know both."""


class Prefetcher(Generic[T]):
    """The batches of a source on the device, staged ahead. Made by `Stager.prefetch`.

    Each ``iter()`` begins another pass over the source. ``len()`` and all other attributes are the source's, such as
    ``prefetcher.dataset``. Setting or deleting one does so on the source. Batches that were read ahead don't see it.

    If the source has ``state_dict()``, so has the prefetcher. The source's state is kept with each batch that is read,
    so the state is that of the batch yielded last, as in a loop that does not read ahead. ``load_state_dict()`` is the
    source's.

    Accelerate's prepared loaders tell by ``end_of_dataloader`` and ``remainder`` which batch the loop has. These are
    kept with each batch too, and set again when it is yielded.
    """

    __slots__ = ("__dict__", "__weakref__", "_depth", "_place", "_source", "_stage", "_target")

    def __init__(self, stage: Callable[[Any], Transfer], target: Target, source: Iterable[T], depth: int) -> None:
        self._stage = stage
        self._target = target
        self._source = source
        self._depth = depth
        self._place = _Place()

    def __iter__(self) -> Iterator[T]:
        """Begin a pass. What was staged ahead is given back when the iterator dies.

        A batch is safe to use on the stream that is current when it is asked for, and on that which is current now.
        """
        active = _active_loader()
        batches = iter(self._source)
        self._place = place = _Place(self._target.consumer(None))
        return self._pass(batches, place, active)

    def _pass(self, batches: Iterator[T], place: _Place, active: object) -> Iterator[T]:
        ahead: deque[tuple[Transfer, _Said]] = deque()
        run_ahead = RunAhead(self._target)
        failure: Exception | None = None
        is_first, is_last, is_over = True, False, False
        while ahead or not is_over:
            if not (is_over or (is_last and ahead)):
                try:
                    batch = next(batches, _NO_MORE)
                    if is_first:
                        _refuse_hidden_loader(self._source, active)
                        is_first = False
                    is_over = batch is _NO_MORE
                    if not is_over:
                        said = self._ask()
                        is_last = bool(said.flags.get("end_of_dataloader"))
                        ahead.append((self._stage(batch), said))
                    del batch  # the next one may take its memory
                except Exception as error:  # noqa: BLE001 - raised when its turn comes
                    failure, is_over = error, True
            if len(ahead) > self._depth or (ahead and (is_last or is_over)):
                yield self._hand_out(place, *ahead.popleft())
                run_ahead.bound()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # or its traceback and this frame would keep one another
        place.said = None  # the source is at its end, too

    def _ask(self) -> _Said:
        """Return what the source says of itself now."""
        source = self._source
        flags = _FLAGS if hasattr(source, "gradient_state") else ()
        return _Said(self._state(), {name: getattr(source, name) for name in flags})

    def _state(self) -> Any:
        return None

    def _hand_out(self, place: _Place, transfer: Transfer, said: _Said) -> T:
        batch: T = transfer.get()
        if self._target.consumer(None) != place.consumer:
            transfer.get(place.consumer)
        for name, value in said.flags.items():
            setattr(self._source, name, value)
        place.said = said
        return batch

    def __len__(self) -> int:
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"the source of the prefetcher has no length: {type(self._source).__name__}") from error

    def __bool__(self) -> bool:
        return bool(self._source)

    def __getattr__(self, name: str) -> Any:
        if self._is_own(name):  # for copies, and for Python
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._source, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._source, name)

    def _is_own(self, name: str) -> bool:
        return hasattr(type(self), name) or (name.startswith("__") and name.endswith("__"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} depth={self._depth} to {self._target.device} of {self._source!r}>"


class StatefulPrefetcher(Prefetcher[T]):
    """A `Prefetcher` of a source with a state. The methods stand in a class, where protocols look for them."""

    _source: Any

    def _state(self) -> Any:
        try:
            return copy.deepcopy(self._source.state_dict())
        except Exception as error:  # noqa: BLE001 - raised when somebody asks for the state
            return _Failed(error.with_traceback(None))

    def state_dict(self) -> Any:
        """Return the source's state as it was when it had yielded what the loop has. A copy."""
        said = self._place.said
        if said is None:
            return self._source.state_dict()
        if isinstance(said.state, _Failed):
            raise said.state.error
        return copy.deepcopy(said.state)

    def load_state_dict(self, state: Any) -> None:
        """Load a state into the source, for the next pass."""
        self._source.load_state_dict(state)
        self._place = _Place()


def prefetcher_of(stage: Callable[[Any], Transfer], target: Target, source: Iterable[T], depth: int) -> Prefetcher[T]:
    """Return a prefetcher of the kind that the source needs."""
    kind = StatefulPrefetcher if _has_state(source) else Prefetcher
    return kind(stage, target, source, depth)


def _has_state(source: object) -> bool:
    """Say whether a source has a state that can be asked for without arguments (mosaicml's datasets want some)."""
    state_dict = getattr(source, "state_dict", None)
    if not (callable(state_dict) and callable(getattr(source, "load_state_dict", None))):
        return False
    try:
        inspect.signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # no signature
        return True
    return True


def _active_loader() -> object:
    """Return the loader that Accelerate takes for the one of the loop; None if there is none."""
    state = sys.modules.get("accelerate.state")
    return None if state is None else state.GradientState().active_dataloader


def _refuse_hidden_loader(source: object, active: object) -> None:
    """Look whether reading a first batch began a pass of an Accelerate loader that is not the source itself.

    Args:
        source: of batches.
        active: what `_active_loader` returned before.

    Raises:
        StagingError: it did: nobody could set that loader's flags.
    """
    now = _active_loader()
    if now is not active and now is not source:
        outside, inside = type(source).__name__, type(now).__name__
        raise StagingError(
            f"cannot prefetch from Accelerate's {inside} through a {outside}: gradient accumulation would see its end "
            f"too early; call stager.prefetch(loader) with the prepared loader, and put the {outside} around that"
        )
