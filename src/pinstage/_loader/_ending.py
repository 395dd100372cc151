"""The end of an iterator: its workers end, then all slabs come back."""

from __future__ import annotations

import _thread
import os
import threading
from functools import partial
from typing import Any

from .._reaper import reaper, running
from .._torch import Workers
from ._server import SlabServer


class Ending:
    """Ends the workers of an iterator and gives all slabs back; once, in a thread of its own.

    The iterator is not a part of this: it may be gone. A collate function may have the loader, so whoever kept the
    iterator would keep all of these forever.

    Args:
        batches: torch's iterator, which does not end its workers by itself from now on.
        server: of their slabs.
    """

    def __init__(self, batches: Any, server: SlabServer) -> None:
        self._pid = os.getpid()
        self._server = server
        self._begun = False
        self._done = threading.Lock()
        self._done.acquire()
        self.workers = Workers(batches, partial(reaper.tasks.put, self))

    @property
    def begun(self) -> bool:
        """Whether the workers were told to end."""
        return self._begun

    def reap(self) -> bool:
        """Begin. The reaper calls it when the iterator has died."""
        if not self._begun and os.getpid() == self._pid:  # not in a forked child
            self._begun = True
            _thread.start_new_thread(self._run, ())
        return True

    def wait(self) -> None:
        """Begin, and wait for the end."""
        self.reap()
        if os.getpid() == self._pid:
            with self._done:
                pass

    def _run(self) -> None:
        running[self] = None
        ended = False
        try:
            self._server.close()
            ended = self.workers.end()
        finally:
            self._server.finish(leak=not ended)
            del running[self]
            self._done.release()
