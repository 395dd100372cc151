"""Functions that others wrote, tried on the first object that they take apart."""

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
    """Return how these functions take an object apart, or say what is wrong with what `flatten` returns.

    The order of arguments that `unflatten` has is looked at once: torch's pytree passes children and metadata in the
    other one.
    """
    is_tried = False

    def flatten_checked(obj: Any) -> Any:
        nonlocal is_tried
        found = _parts(cls, flatten(obj))
        if not is_tried:
            _check_order(cls, obj, found, flatten, unflatten)
            is_tried = True
        return found

    return Handler(flatten_checked, unflatten)


def _parts(cls: type, found: Any) -> tuple[Any, ...]:
    """Check what flatten returned; return it, with a tuple of children."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise WrongFunctionsError(cls, f"flatten returned a {type(found).__name__}{size}; return (children, metadata)")
    children, *rest = found
    if isinstance(children, torch.Tensor | np.ndarray | str) or not hasattr(children, "__iter__"):
        raise WrongFunctionsError(
            cls, f"flatten returned a {type(children).__name__} as children; return ((child, ...), metadata)"
        )
    children = tuple(children)
    if len(rest) == 2 and rest[1] is not None:
        rest[1] = tuple(rest[1])
        if len(rest[1]) != len(children):
            raise WrongFunctionsError(cls, f"flatten returned {len(children)} children and {len(rest[1])} path entries")
    return children, *rest


def _check_order(cls: type, obj: Any, found: tuple[Any, ...], flatten: Flatten, unflatten: Unflatten) -> None:
    """Put an object together again, in one order and in the other: which one is right shows if only one of them is."""
    children, metadata = found[:2]

    def gives_the_object(first: Any, second: Any) -> bool:
        try:
            made = unflatten(first, second)
            again, metadata_again = _parts(cls, flatten(made))[:2]
        except Exception:  # noqa: BLE001 - that is the answer
            return False
        alike = list(map(type, again)) == list(map(type, children)) and type(metadata_again) is type(metadata)
        return type(made) is type(obj) and alike

    if not gives_the_object(metadata, children) and gives_the_object(children, metadata):
        raise WrongFunctionsError(
            cls,
            "unflatten takes (children, metadata), the order of torch's pytree; pinstage calls it with (metadata, "
            "children), as optree and JAX do: pass lambda metadata, children: unflatten(children, metadata)",
        )
