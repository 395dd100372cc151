"""Checks of functions that users wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import LayoutError
from ._handler import Flatten, Handler, Unflatten


class WrongFunctionsError(LayoutError):
    """The functions of a class do not take an object apart, or put it together wrongly.

    Attributes:
        cls: the class; where it is in the batch is found out by whoever has the batch.
    """

    def __init__(self, cls: type, text: str) -> None:
        super().__init__(f"{cls.__module__}.{cls.__qualname__}: {text}", "")
        self.cls = cls


def checked(cls: type, flatten: Flatten, unflatten: Unflatten) -> Handler:
    """Return how these functions take an object apart, or say what is wrong with the result of `flatten`."""
    return Handler(lambda obj: _parts(cls, flatten(obj)), unflatten)


def _parts(cls: type, found: Any) -> tuple[Any, ...]:
    """Check what flatten returned; return it, with a tuple of children."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise WrongFunctionsError(cls, f"flatten returned a {type(found).__name__}{size}; return (children, context)")
    children, *rest = found
    if isinstance(children, torch.Tensor | np.ndarray | str) or not hasattr(children, "__iter__"):
        raise WrongFunctionsError(
            cls, f"flatten returned a {type(children).__name__} as children; return ((child, ...), context)"
        )
    children = tuple(children)
    if len(rest) == 2 and rest[1] is not None:
        rest[1] = tuple(rest[1])
        if len(rest[1]) != len(children):
            raise WrongFunctionsError(cls, f"flatten returned {len(children)} children and {len(rest[1])} path entries")
    return children, *rest
