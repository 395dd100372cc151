"""Who may use a slab, and when.

A *slab* is one host allocation and lives as long as the pool keeps it; a *lease* is the right to use one slab once; the
*pool* decides. The life of a slab::

                    acquire()                 release()
        free  ------------------->  leased  --------------->  free        no event, no view alive
         ^                            |
         |                            |  release(after=event), or a view is still alive
         |                            v
         +-----------------------  in flight                              comes back when the event is done
                                                                          and the last view has died

Where to look: `_pool` has the public verbs and the slow work outside the lock; `_holdings` the budget and every
decision under the lock; `_idle` the slabs that nobody uses; `_waiting` the line of those who wait; `_lease` the lease,
its slab and its views; `_refusals` the errors; `_classes` the sizes; `_stats` the counters.

The pool counts bytes and knows nothing of shapes. It touches CUDA through two small protocols only, a memory resource
(`allocate`, `deallocate`) and an event (`query`, `synchronize`), so all of it is tested without a GPU.
"""

from ._classes import CLASSES_PER_DOUBLING, REUSE_FACTOR, SMALL_SLAB_BYTES, reuse_limit, size_class
from ._lease import Event, Lease
from ._pool import SlabPool
from ._stats import PoolStats

__all__ = [
    "CLASSES_PER_DOUBLING",
    "REUSE_FACTOR",
    "SMALL_SLAB_BYTES",
    "Event",
    "Lease",
    "PoolStats",
    "SlabPool",
    "reuse_limit",
    "size_class",
]
