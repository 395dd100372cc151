"""A driver for tests on the CPU, which says what is page-locked, and copies."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
from doubles import ManualEvent

from pinstage._batch import FindLocked
from pinstage._native import _core
from pinstage._region import pieces_at
from pinstage._stage._target import FEW_TYPES, Few, Target


@cache
def library(folder):
    """Compile and load the driver."""
    path = folder / "libcuda.so.1"
    source = Path(__file__).parents[1] / "native" / "fake_driver.c"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    assert _core.find_driver()
    return loaded


class Driver:
    """The driver, and memory that counts as page-locked."""

    def __init__(self, library):
        self._library = library
        self._numbers = 0

    def reset(self):
        self._library.fake_reset()

    def lock(self, *leaves):
        """Count leaves as page-locked, each as an allocation of its own."""
        for leaf in leaves:
            address = leaf.ctypes.data if isinstance(leaf, np.ndarray) else leaf.data_ptr()
            self.lock_range(address, leaf.nbytes)
        return leaves

    def lock_range(self, address, nbytes):
        self._numbers += 1
        self._library.fake_lock(
            ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes), ctypes.c_ulonglong(self._numbers)
        )

    def refuse(self):
        self._library.fake_refuse(1)

    def go_on(self):
        """Read what wasn't read during a call."""
        self._library.fake_go_on()

    @property
    def questions(self):
        return self._library.fake_questions()


class Locking(Target):
    """A device whose driver copies page-locked leaves.

    Args:
        stages_few: whether `stage` moves a few leaves in one call, as it does for a GPU. Otherwise
            it describes them.
    """

    def __init__(self, *, stages_few=False):
        self.stages_few = stages_few
        self.event = ManualEvent()
        self.calls = []
        self.streams = []

    def find_locked(self, *, each):
        return FindLocked(pieces_at, each)

    def copy_locked(self, blocks, parts, stream, *, at_once):
        copies = blocks.copy_locked(parts.sources, parts.locked, 2, at_once)
        self.calls.append((copies, at_once))
        return copies

    def move_few(self, leaves, *, borrows, most_bytes, is_later=False):
        if is_later and not self.stages_few:
            return None
        few = _core.move_few(leaves, FEW_TYPES, 0, 0, 0, 2, borrows, most_bytes, is_later)
        return Few(*few) if isinstance(few, tuple) else few

    def record(self, stream):
        return self.event
