"""A warning about loaders that staged nothing, such as those that a framework took apart to make another loader."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

from .._reaper import reaper
from ._slabs import Settings, Slabs

_read: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Loaders whose arguments were read before there was an iterator, by id, since they may have no hash."""


def arguments_were_read(loader: Any) -> None:
    """Note that a loader's arguments were read. If it dies before a batch was taken from it, a warning says so."""
    slabs: Slabs | None = vars(loader).get("_own_slabs")  # none in a process to which it was sent
    if slabs is None or slabs.is_used or slabs.pid != os.getpid():
        return
    if id(loader) not in _read:
        _read[id(loader)] = loader
        reaper.watch(loader, partial(_tell, slabs, _READ))


def slabs_of_original(dataset: object, settings: Settings) -> Slabs | None:
    """Return the slabs of the loader that a loader with this dataset was made of, as Lightning makes them; or None.

    So the loader that the user has shows the stats of the loader that is used.
    """
    for loader in list(_read.values()):
        slabs: Slabs = vars(loader)["_own_slabs"]
        if loader.dataset is dataset and slabs.settings == settings and not slabs.is_used and slabs.pid == os.getpid():
            slabs.is_used = True
            return slabs
    return None


def warn_if_unused(slabs: Slabs) -> None:
    """Warn, once, of a loader whose pass gets its batches in another way."""
    _tell(slabs, "its class does not get its iterator from torch's DataLoader")


def _tell(slabs: Slabs, why: str) -> bool:
    if not slabs.is_used and slabs.pid == os.getpid():
        slabs.is_used = True
        with suppress(RuntimeWarning):  # made an error: not where the reaper calls
            warnings.warn(
                f"pinstage staged no batch of a DataLoader: {why}; let the framework prepare a loader of torch's, and "
                "wrap what it returns: loader = ps.wrap_loader(accelerator.prepare(loader))",
                RuntimeWarning,
                stacklevel=4,
            )
    return True


_READ = (
    "none was taken from it, but its arguments were read, perhaps to make another loader of them, which does not stage "
    "(Accelerate's prepare() does so)"
)


@atexit.register
def _tell_at_the_end() -> None:
    for loader in list(_read.values()):
        _tell(vars(loader)["_own_slabs"], _READ)
