"""A queue from a thread that stages batches to the loop that uses them."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from ..errors import PinstageError

_ENDED = object()


class HandOver:
    """A queue of batches. An exception in it is raised when its turn comes. Finalisers may call
    `put`.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._ended_by = ""  # not the exception, which would keep the frames that it went through
        self.put = self._items.put
        self.waiting = self._items.qsize

    def end(self, error: BaseException) -> None:
        """Raise an exception behind the items put so far, and then errors that quote it. Nothing
        else may be put afterwards.
        """
        self.put(error)
        self._ended_by = repr(error)
        self.put(_ENDED)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next item. Blocks.

        Raises:
            queue.Empty: there was no item within `timeout` seconds.
            PinstageError: an exception that `end` put was raised before.
            BaseException: the next item is this exception.
        """
        item = self._items.get(timeout=timeout)
        if item is _ENDED:
            self.put(item)
            raise PinstageError(f"this pass ended by an error: {self._ended_by}; begin another one")
        if not isinstance(item, BaseException):
            return item
        try:
            raise item
        finally:
            del item  # or its traceback and this frame would keep one another
