"""How a class of containers is taken apart, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

MOST_CLASSES = 1000
"""Classes that are remembered: a program may make some for each batch, and they would never be collected."""

Flatten = Callable[[Any], tuple[Iterable[Any], Hashable] | tuple[Iterable[Any], Hashable, Iterable[Any]]]
Unflatten = Callable[[Any, Any], Any]


class Handler(NamedTuple):
    """Functions that the walk calls, in C: see ``structure_of`` in ``_native/structure.c``."""

    flatten: Callable[..., Any]
    """Returns children and metadata of an object, and perhaps path entries."""
    unflatten: Callable[..., Any]
    """Returns a new object from metadata and a tuple of children."""
    steps: Callable[[Any], Iterable[str]] | None = None
    """Returns the paths of children by the metadata; those it leaves out have the path of the object itself. None: they
    are numbered, unless there are path entries."""
    asks: bool = False
    """Whether both functions get a dict as their last argument, the same for all that is walked or rebuilt at once."""
