"""`DataLoader`: workers write batches into shared slabs, and the main process starts one copy for each batch.

::

    worker                                        main process, a thread of its own
    collate, into a slab
       |   slab number, layout number, the rest
       +------------- worker queue -------------> a copy per block, on our own stream  -> the batch -> the loop
       ^                                              |
       +---- the slab is free, by a socket -----------+ when the copy's event is done

The slabs are of `SharedMemory`. The main process leases each slab for one worker. There the slab is page-locked; the
worker maps it, and touches no CUDA. A worker asks for slabs as it needs them: at most one more than the batches that it
may be ahead, and fewer where `max_bytes` is reached. It writes a slab again only after the main process said that the
slab is free, so a slow loop makes workers wait. A worker that can get no slab that is large enough sends the bytes
through the queue. That is slow, but no batch waits forever.

torch's own loader does the rest: samplers, seeds, order, errors. `Staging` is the one way in, a base class that stands
before torch's `DataLoader` or before a class made of it.

Where to look: `_loader` has the public names; `_iterator` a pass over the data, the start and end of its workers;
`_sending` the queue that torch's iterator reads; `_broker` who has which slab; `_messages` what workers send.
`_collate` and `_worker` run in the workers. `_slabs` has what a loader's passes share, `_stats` its counters.
"""

from ._loader import DataLoader, WrappedLoader, wrap_loader
from ._stats import LoaderStats

__all__ = ["DataLoader", "LoaderStats", "WrappedLoader", "wrap_loader"]
