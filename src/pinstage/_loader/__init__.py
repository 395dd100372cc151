"""`DataLoader`: workers write batches into shared slabs, and the main process starts the copies.

::

    worker                                      main process, a thread of its own
    collate, into a slab
       |   slab number, layout, the rest
       +------------- worker queue -----------> a copy per block, on our own stream
       ^                                          |      -> the batch -> the loop
       +---- the slab is free, by a socket -------+ when the copy's event is done

The slabs are `SharedMemory`. The main process page-locks each slab, and leases it for one worker.
The worker maps it, and doesn't touch CUDA. A worker asks for slabs as it needs them: at most one
more than the batches that it may be ahead, and fewer if `max_bytes` is reached. It writes a slab
again only after the main process has reported the slab as free, so a slow loop makes workers wait.
A worker that can't get a slab that is large enough sends the bytes through the queue. That is slow,
but no batch waits forever.

torch's own loader does the rest: samplers, seeds, order, errors. A loader stages because `Staging`
is a base class before torch's `DataLoader`, or before a class derived from it.

Where to look: `_loader` has the public names; `_iterator` a pass over the data, and the start and
end of its workers; `_sending` the queue that torch's iterator reads; `_loans` the table of slabs
that workers have, `_broker` the thread that serves it; `_messages` all messages between processes.
`_collate` has the collate functions, with and without workers.
`_worker` runs in the workers. `_slabs` has what a loader's passes share, `_stats` its counters.
"""

from ._loader import DataLoader, WrappedLoader, wrap_loader
from ._stats import LoaderStats
