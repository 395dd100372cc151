"""A queue from a thread that stages batches to the loop that uses them."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any


class HandOver:
    """A queue of batches. An exception in it is raised when its turn comes. Finalisers may call
    `put`.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._end: BaseException | None = None
        self.put = self._items.put
        self.waiting = self._items.qsize

    def end(self, error: BaseException) -> None:
        """Raise an exception from now on, behind the items put so far. Nothing else may be put
        afterwards.
        """
        self._end = error
        self.put(error)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item. Blocks.

        Raises:
            queue.Empty: there was no item within `timeout` seconds.
            BaseException: the next item is this exception.
        """
        item = self._items.get(timeout=timeout)
        if not isinstance(item, BaseException):
            return item
        if item is self._end:
            self.put(item)
        try:
            raise item
        finally:
            del item  # or its traceback and this frame would keep one another
