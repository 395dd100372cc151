"""How a class of containers is taken apart and put together; checks of users' functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import LayoutError

MOST_CLASSES = 1000
"""The most classes that are remembered: a program may make new ones for each batch, which would
never be collected.
"""

Flatten = Callable[
    [Any], tuple[Iterable[Any], Hashable] | tuple[Iterable[Any], Hashable, Iterable[Any]]
]
Unflatten = Callable[[Any, Any], Any]


class Handler(NamedTuple):
    """Functions that the walk calls, in C: see ``structure_of`` in ``_native/structure.c``."""

    flatten: Callable[..., Any]
    """Returns children and metadata of an object, and perhaps path entries."""
    unflatten: Callable[..., Any]
    """Returns a new object from metadata and a tuple of children."""
    steps: Callable[[Any], Iterable[str]] | None = None
    """Returns the paths of children from the metadata; children that it leaves out have the path of
    the object itself. If it is None, children are numbered, unless there are path entries."""
    asks: bool = False
    """Whether both functions get a dict as their last argument, which all calls of one walk or one
    rebuild share.
    """


def path_steps(keys: Iterable[Any], names: Iterable[str] = ()) -> list[str]:
    """Return the paths of items, by their keys, and of attributes, as behind an object's name."""
    return [*(f"[{key!r}]" for key in keys), *(f".{name}" for name in names)]


class WrongFunctionsError(LayoutError):
    """The functions of a class take an object apart wrongly, or put it together wrongly.

    Attributes:
        cls: the class; the caller finds its place in the batch.
    """

    def __init__(self, cls: type, text: str) -> None:
        super().__init__(f"{cls.__module__}.{cls.__qualname__}: {text}", "")
        self.cls = cls


def checked(cls: type, flatten: Flatten, unflatten: Unflatten) -> Handler:
    """Return a handler of these functions, which reports wrong results of `flatten`."""
    return Handler(lambda obj: _parts(cls, flatten(obj)), unflatten)


def _parts(cls: type, flattened: Any) -> tuple[Any, ...]:
    """Check what flatten returned; return it, with a tuple of children."""
    if not isinstance(flattened, tuple) or len(flattened) not in (2, 3):
        size = f" of {len(flattened)}" if isinstance(flattened, tuple | list) else ""
        raise WrongFunctionsError(
            cls, f"flatten returned a {type(flattened).__name__}{size}; return (children, context)"
        )
    children, *rest = flattened
    if isinstance(children, torch.Tensor | np.ndarray | str) or not hasattr(children, "__iter__"):
        raise WrongFunctionsError(
            cls,
            f"flatten returned a {type(children).__name__} as children; return ((child, ...), "
            "context)",
        )
    children = tuple(children)
    if len(rest) == 2 and rest[1] is not None:
        rest[1] = tuple(rest[1])
        if len(rest[1]) != len(children):
            raise WrongFunctionsError(
                cls, f"flatten returned {len(children)} children and {len(rest[1])} path entries"
            )
    return children, *rest
