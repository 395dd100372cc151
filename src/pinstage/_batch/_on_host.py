"""Leaves that say themselves what becomes of them."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class OnHost:
    """Something in a batch that stays on the host; see `on_host`."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __repr__(self) -> str:
        return f"on_host({type(self.obj).__qualname__})"


def on_host(x: T) -> T:
    """Mark something in a batch that stays on the host. The staged batch has `x` itself in its place.

    It is neither searched for tensors nor compared, so it may be anything: lengths that a kernel needs on the host, or
    metadata that can't be hashed. From a loader's worker it arrives as a copy, made by pickle.

    Args:
        x: the object that stays.

    Returns:
        A wrapper, for the batch only; type checkers see the type of `x`. It has the attributes of neither.
    """
    return OnHost(x)  # type: ignore[return-value]


class Whole:
    """A tensor that was looked into, and moves by its own ``.to()`` after all."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj


WRAPPERS = frozenset({OnHost, Whole})
"""What is in them goes on without them, as their ``obj``."""
