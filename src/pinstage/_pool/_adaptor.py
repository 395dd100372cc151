"""The memory of a pool: a memory resource, through an adaptor that may refuse requests for a
while.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from .._memory import Block, MemoryResource
from .._sizes import size_to_paste


class RefusedForNow(Exception):  # noqa: N818 - a signal, which makes the request wait
    """The memory can't be allocated now, but perhaps later: others have to free some first."""


class ResourceAdaptor:
    """A memory resource, as a pool uses it: several blocks at once, or none.

    This class never refuses. A class derived from it may do so, by `RefusedForNow`. Then `allowed`
    is what the pool may hold, until it is worth trying again. Call `allocate` and `deallocate` in
    threads that no interrupt reaches.

    Args:
        resource: where the memory comes from.
    """

    is_entered: Callable[[], bool] | None = None
    """Returns whether the calling thread is in a call for which other threads wait; None if there
    is no such call.
    """

    def __init__(self, resource: MemoryResource) -> None:
        self.resource = resource

    def allocate(self, nbytes: int, count: int, deadline: float) -> list[Block]:  # noqa: ARG002
        """Allocate blocks of the same size, all or none.

        Args:
            nbytes: bytes of each block.
            count: the number of blocks.
            deadline: the time until which it may wait for others, by `time.monotonic`.

        Raises:
            RefusedForNow: there is no room now.
            Exception: as `MemoryResource.allocate`.
        """
        blocks: list[Block] = []
        try:
            while len(blocks) < count:
                blocks.append(self.resource.allocate(nbytes))
        except BaseException:
            while blocks:
                with contextlib.suppress(Exception):  # the first error is raised
                    self.resource.deallocate(blocks.pop())
            raise
        return blocks

    def deallocate(self, block: Block) -> None:
        self.resource.deallocate(block)

    @property
    def allowed(self) -> int:
        """Bytes that the pool may hold, as far as is known without a call."""
        return sys.maxsize

    def holders(self) -> str:
        """Return a text for errors that says what limits the pool besides its own cap; empty if
        nothing does.
        """
        return ""

    def cap(self, nbytes: int) -> str:
        """Return the argument under which the pool may hold this many bytes."""
        return f'max_bytes="{size_to_paste(nbytes)}"'

    def end(self) -> None:
        """Note that the pool is closed. Slabs that are still in use are deallocated later."""
