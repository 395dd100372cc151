"""Plain memory."""

from ._pages import map_pages
from ._resource import Block, Resource


class PageableMemory(Resource):
    """Plain private memory: no CUDA, no page lock, nothing rounded.

    The whole package runs on it without a GPU. Copies from it to a device make the host wait, and reach only a part of
    the bus's speed. Pages get their memory when they are first written.
    """

    def __init__(self) -> None:
        super().__init__(pinned=False)

    @property
    def granularity(self) -> int:
        """The allocation unit: single bytes. ``Block.nbytes`` is exactly the requested size."""
        return 1

    def _take(self, nbytes: int, device: int) -> Block:
        return Block(map_pages(nbytes), nbytes, _device=device)
