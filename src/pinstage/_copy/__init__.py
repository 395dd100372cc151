"""How bytes get into slabs and out: by several threads and in chunks that travel meanwhile, or gathered on a device."""

from ._borrowing import Borrowed, borrow
from ._gather import DIRECT_BYTES, Gathering, arrange, duplicate, flat, gather
from ._packing import most_threads, reuses_places, start_packing
from ._windows import windows

__all__ = [
    "DIRECT_BYTES",
    "Borrowed",
    "Gathering",
    "arrange",
    "borrow",
    "duplicate",
    "flat",
    "gather",
    "most_threads",
    "reuses_places",
    "start_packing",
    "windows",
]
