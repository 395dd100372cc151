"""Detecting changes of a tensor's memory, by versions of tensors."""

from __future__ import annotations

from functools import cache

import torch

from ..errors import PinstageError
from .probes import why_not


@cache
def why_changes_are_not_seen() -> str | None:
    """Return why in-place changes of a tensor can't be detected; None if they can."""
    return why_not(_sees_changes, "doesn't report that a tensor was changed")


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _sees_changes() -> bool:
    tensor = torch.zeros(4, device="cpu")
    changes = Changes(tensor)
    is_seen_before = changes.are_there()
    tensor[1:].add_(1)
    return changes.are_there() and not is_seen_before


def check_changes_are_seen() -> None:
    """Refuse to save tensors elsewhere if in-place changes can't be detected.

    Raises:
        PinstageError: they can't be detected.
    """
    reason = why_changes_are_not_seen()
    if reason is not None:
        raise PinstageError(
            f"save_on_cpu is not possible here: {reason}; use "
            "torch.autograd.graph.save_on_cpu(pin_memory=True)"
        )


class Changes:
    """Detects later in-place changes of a tensor, or of a view of the same memory. Keeps no memory
    of it alive.

    Autograd counts changes; a detached tensor shares the counter of its source, and still has it
    when it is given other memory.

    Args:
        tensor: the tensor, as it is now.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version: int = tensor._version
        self._counter = tensor.detach()
        self._counter.data = _NO_MEMORY

    def are_there(self) -> bool:
        """Return whether the tensor was changed."""
        return self._counter._version != self._version


_NO_MEMORY = torch.empty(0, device="cpu")


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was changed in place, as autograd counts."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another is a view of, as autograd knows it."""
    return getattr(tensor, "_base", None)
