"""Leaves that say themselves what becomes of them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Keep(Generic[T]):
    """Something in a batch that stays on the host, and comes back as the same object.

    It is neither searched for tensors nor compared, so it may hold anything: lengths that a kernel needs on the host,
    or metadata that cannot be hashed. From a worker of a loader it arrives as a copy, made by pickle.

    Args:
        obj: what comes back in its place.
    """

    __slots__ = ("obj",)

    def __init__(self, obj: T) -> None:
        self.obj = obj

    def __repr__(self) -> str:
        return f"Keep({type(self.obj).__qualname__})"


class Whole:
    """A tensor that was looked into, and moves by its own ``.to()`` after all."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj


WRAPPERS = frozenset({Keep, Whole})
"""What is in them goes on without them, as their ``obj``."""
