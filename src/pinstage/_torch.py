"""Private names of torch, CPython and optree: all that pinstage uses, each behind a probe of what it *does*.

A probe runs when a name is first needed. Where it fails, there is a slow way, or a clear refusal; `problems` lists what
was found to fail, for ``pinstage doctor``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ._errors import StagingError


def owns(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Say whether this thread has a lock. `threading.Condition` asks in this way; there is no public one."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]


# -- who uses a storage ------------------------------------------------------------------------------------------------


class StorageUsers:
    """Tells whether anything but one tensor shows the tensor's storage: views, arrays, what autograd saved.

    Every tensor over a storage counts as a user of it, in C++; what has the storage itself, in Python, counts as a
    reference of the one Python object that stands for it.

    Args:
        tensor: is alone now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._alone = self._count()

    def are_there(self) -> bool:
        """Say whether there is another user."""
        users, references = self._count()
        return users > self._alone[0] or references > self._alone[1]

    def _count(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


@cache
def why_storages_cannot_be_counted() -> str | None:
    """Say why it cannot be told who uses a storage; None if it can."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "without the interpreter lock counts of references cannot be trusted"
    try:
        return _probe_storage_users()
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"torch {torch.__version__} does not count a storage's users as expected ({error!r})"


def _probe_storage_users() -> str | None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        slab = torch.zeros(64, dtype=torch.uint8, device="cpu")
        users = StorageUsers(slab)
        weight = torch.ones(4, requires_grad=True, device="cpu")

        def leaf() -> torch.Tensor:
            return slab.view(torch.float32)[:4]

        holders: dict[str, Callable[[], Any]] = {
            "a view": leaf,
            "what autograd saved": lambda: (leaf() * weight).sum(),
            "an array": lambda: leaf().numpy(),
            "the storage": lambda: leaf().untyped_storage(),
            "a capsule": lambda: torch.utils.dlpack.to_dlpack(leaf()),
        }
        if users.are_there():
            return f"torch {torch.__version__} counts a user of a storage that has none"
        for name, make in holders.items():
            holder = make()
            if not users.are_there():
                return f"torch {torch.__version__} does not count {name} as a user of a storage"
            del holder
            if users.are_there():
                return f"torch {torch.__version__} counts {name} as a user of a storage after its end"
    return None


def check_storages_can_be_counted() -> None:
    """Refuse a ring where it cannot be told who still uses a batch.

    Raises:
        StagingError: it cannot.
    """
    reason = why_storages_cannot_be_counted()
    if reason is not None:
        raise StagingError(f"ring= is not possible here: {reason}; leave it out, and each batch gets a fresh device slab")
