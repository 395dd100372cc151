"""Keeps tensors of a job on the host, in slabs of a pool, while they aren't in use.

::

    forward   saves a tensor --copy, on a side stream--> slab; its device memory is free
    backward  asks for it    <-copy, on another stream-- slab; those saved before it follow, ahead

Where to look: `_saving` has the context manager, and decides which tensors stay. `_scheduler` has
the objects that autograd keeps instead of tensors, and decides which tensor is copied back next.
`_block` is a piece of memory on the host. `_optimizer` keeps an optimizer's state on the host,
`_frozen` a module; `_offloaded` is their handle. `pinstage._stage._cuda_target` has the streams.
"""

from ._frozen import frozen_module
from ._offloaded import Offloaded, OffloadedStats
from ._optimizer import optimizer_state
from ._saving import save_on_cpu
from ._scheduler import OffloadStats

__all__ = [
    "OffloadStats",
    "Offloaded",
    "OffloadedStats",
    "frozen_module",
    "optimizer_state",
    "save_on_cpu",
]
