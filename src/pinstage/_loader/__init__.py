"""`DataLoader`: workers write batches into shared slabs, and the main process only starts one copy of each.

::

    worker                                        main process, a thread of its own
    collate, into a slab
       |   slab number, layout number, the rest
       +------------- worker queue -------------> one copy, on a stream of ours -> views of the device slab -> the loop
       ^                                              |
       +---- the slab is free, by a socket -----------+ when the copy's event is done

The slabs are of `SharedMemory`. The main process leases each for one worker: it is page-locked there, and mapped in the
worker, which touches no CUDA. A worker asks for slabs as it needs them, up to one more than the batches that it may be
ahead, and less where `max_bytes` is reached. It writes a slab again only after the main process said that it is free,
so a slow loop makes workers wait. A worker that has no slab large enough, and can get none, sends its bytes through the
queue: slow, but no batch can wait forever.

Samplers, seeds, order and errors are those of torch's own loader, which does the rest. `Staging` is the one way in: a
base class that stands before torch's `DataLoader`, or before a class made of it.
"""

from ._loader import DataLoader, wrap_loader
from ._stats import LoaderStats

__all__ = ["DataLoader", "LoaderStats", "wrap_loader"]
