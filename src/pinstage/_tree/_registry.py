"""The classes that are known as containers, in a namespace of ours in optree.

optree walks the tree. Python's own containers it knows; the others are made known to it when they are first met. From
then on the walk stays in C++.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import optree

NAMESPACE = "pinstage"

Flatten = Callable[[Any], tuple[Iterable[Any], Hashable] | tuple[Iterable[Any], Hashable, Iterable[Any]]]
Unflatten = Callable[[Any, Any], Any]
Functions = tuple[Flatten, Unflatten]

BY_ATTRIBUTES = "by its attributes"
"""How a class was registered, if not by functions of somebody's."""

MOST_CLASSES = 1000
"""Classes that are remembered: a program may make some for each batch, and they would never be collected."""

REGISTERED: dict[type, Any] = {}
"""The classes that we have told optree of, and how: `BY_ATTRIBUTES`, the functions that the user gave, or None."""

_met: set[type] = set()
"""Those of them that were met in a batch: if they are forgotten, they are learnt again."""

HANDLERS: dict[type, Any] = {}
"""What the native walk does with a class that is none of Python's plain containers, no tensor and no array: None for a
leaf, True for a named tuple, what makes a new one of a class that is no more than its ``__dict__``, and False for what
only optree knows."""

_lock = threading.RLock()  # a finaliser may stage a class that is new, too


def _unlock() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not there may hold it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def register(cls: type, functions: Functions, how: Any, *, again: bool) -> bool:
    """Make a class known to optree; say whether it was not.

    Args:
        cls: the class.
        functions: take an instance apart, and put one together.
        how: what the user gave, or None; to give the same again does nothing.
        again: whether it was met in a batch: then it is all the same if it is known in another way, and it may be
            forgotten.

    Raises:
        ValueError: it is known already, and in another way.
    """
    with _lock:
        if cls in REGISTERED:
            if again or REGISTERED[cls] == how:
                return False
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} is already registered in another way, or was met in a batch "
                "before; register it once, before its first batch"
            )
        # Not `catch_warnings`, which changes the whole process for a moment, in any thread.
        warnings.filterwarnings("ignore", "PyTree type .* is a subclass of", UserWarning, module=re.escape(__name__))
        optree.register_pytree_node(cls, *functions, namespace=NAMESPACE)
        REGISTERED[cls] = how
        if again:
            _met.add(cls)
        HANDLERS.pop(cls, None)
        return True


def unregister() -> None:
    """Let go of the classes that were met in batches, but for those that their module keeps anyway.

    Structures that have them go on: they hold what they need.
    """
    with _lock:
        for cls in [cls for cls in _met if not _is_kept(cls)]:
            optree.unregister_pytree_node(cls, namespace=NAMESPACE)
            _met.discard(cls)
            del REGISTERED[cls]


def _is_kept(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is cls
