"""Tensors of a job that are kept on the host while they aren't in use, in slabs of a pool.

::

    forward   saves a tensor --copy, on a side stream--> slab of the pool    its device memory is free
    backward  asks for it    <-copy, on another stream-- slab of the pool    and for those saved before it, ahead

Where to look: `_saving` has the context manager and decides what stays; `_scheduler` what autograd keeps instead of a
tensor, in which order tensors were saved, and which is copied back next; `_block` a piece of memory on the host;
`_optimizer` keeps an optimizer's state on the host, `_frozen` a module, and `_offloaded` is their handle.
`pinstage._stage._device` has the streams.
"""

from ._frozen import frozen_module
from ._offloaded import Offloaded, OffloadedStats
from ._optimizer import optimizer_state
from ._saving import save_on_cpu
from ._scheduler import OffloadStats

__all__ = ["OffloadStats", "Offloaded", "OffloadedStats", "frozen_module", "optimizer_state", "save_on_cpu"]
