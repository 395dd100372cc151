"""Who uses a tensor's memory, and whether it was changed: counts of storages, and versions of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .probes import WRONG, in_this_torch, refuse


class StorageUsers:
    """Tells whether anything but one tensor shows the tensor's storage: views, arrays, what autograd saved.

    Every tensor over a storage counts as a user of it, in C++; what has the storage itself, in Python, counts as a
    reference of the one Python object that stands for it.

    Args:
        tensor: is alone now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._address: int = self._storage._cdata
        self._place = self._storage.data_ptr(), self._storage.nbytes()
        self._count: Callable[[int], int] = torch._C._storage_Use_Count
        self._alone = self._count(self._address), sys.getrefcount(self._storage)

    def are_there(self) -> bool:
        """Say whether there is another user."""
        users, references = self._alone
        return self._count(self._address) > users or sys.getrefcount(self._storage) > references

    def have_moved(self) -> bool:
        """Say whether a user has given the storage another size or other memory, or freed it."""
        return (self._storage.data_ptr(), self._storage.nbytes()) != self._place


@cache
def why_storages_cannot_be_counted() -> str | None:
    """Say why it cannot be told who uses a storage; None if it can."""
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            slab = torch.zeros(64, dtype=torch.uint8, device="cpu")
            users, weight = StorageUsers(slab), torch.ones(4, requires_grad=True, device="cpu")
            if users.are_there():
                return in_this_torch("counts a user of a storage that has none")
            holders: dict[str, Callable[[torch.Tensor], Any]] = {
                "a view": lambda leaf: leaf,
                "what autograd saved": lambda leaf: leaf * weight,
                "an array": lambda leaf: leaf.numpy(),
                "the storage": lambda leaf: leaf.untyped_storage(),
                "a capsule": lambda leaf: leaf.__dlpack__(),
            }
            for name, make in holders.items():
                holder = make(slab.view(torch.float32)[:4])
                is_seen = users.are_there()
                del holder
                if not is_seen or users.are_there():
                    return in_this_torch(f"does not count {name} as a user of a storage until its end")
        return None
    except WRONG as error:
        return in_this_torch(f"does not count a storage's users as expected ({error!r})")


def check_storages_can_be_counted() -> None:
    """Refuse a ring where it cannot be told who still uses a batch.

    Raises:
        StagingError: it cannot.
    """
    refuse("ring=", why_storages_cannot_be_counted(), "leave it out, and each batch gets a fresh device slab")


@cache
def why_changes_are_not_seen() -> str | None:
    """Say why it cannot be told that a tensor was changed in place; None if it can."""
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            tensor = torch.zeros(4, device="cpu")
            changes = Changes(tensor)
            before = changes.are_there()
            tensor[1:].add_(1)
            is_seen = (before, changes.are_there()) == (False, True)
    except WRONG:
        is_seen = False
    return None if is_seen else in_this_torch("does not tell that a tensor was changed")


def check_changes_are_seen() -> None:
    """Refuse to save tensors elsewhere where it cannot be told that they were changed meanwhile.

    Raises:
        StagingError: it cannot.
    """
    remedy = "use torch.autograd.graph.save_on_cpu(pin_memory=True)"
    refuse("save_on_cpu", why_changes_are_not_seen(), remedy)


class Changes:
    """Tells whether a tensor, or a view of the same memory, was changed in place since. Keeps no memory of it alive.

    Autograd counts changes; a detached tensor has the counter of the one that it comes from, and still has it when it
    is given other memory.

    Args:
        tensor: of now.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version: int = tensor._version
        self._counter = tensor.detach()
        self._counter.data = _NO_MEMORY

    def are_there(self) -> bool:
        """Say whether it was changed."""
        return self._counter._version != self._version


_NO_MEMORY = torch.empty(0, device="cpu")


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was changed in place, as autograd counts."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another is a view of, as autograd knows it."""
    return getattr(tensor, "_base", None)
