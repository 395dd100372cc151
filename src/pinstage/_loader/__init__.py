"""`DataLoader`: workers write batches into shared slabs, and the main process only starts one copy of each.

::

    worker                                        main process, a thread of its own
    collate, into a slot of shared memory
       |   slot number, layout number, the rest
       +------------- worker queue -------------> one copy, on a stream of ours -> views of the device slab -> the loop
       ^                                              |
       +---- the slot is free, by a socket -----------+ when the copy's event is done

A *slot* is a slab that one worker may write: a ``SharedMemory`` slab that the main process leases for it, page-locked
there and mapped in the worker, which touches no CUDA. A worker asks for slots as it needs them, up to one more than the
batches that it may be ahead, and less where `max_bytes` is reached. A slot is written again only after the main process
said that it is free, so a slow consumer makes workers wait. A worker that has no slot large enough, and can get none,
sends its bytes through the queue: slow, but no batch can wait forever.

Everything else, samplers, seeds, order, errors, is torch's own loader at work.
"""

from ._loader import DataLoader, collate_into_slab
from ._stats import LoaderStats

__all__ = ["DataLoader", "LoaderStats", "collate_into_slab"]
