"""The pool: it decides which request gets which slab, and when.

A *slab* is one host allocation and lives as long as the pool keeps it; a *lease* is the right to use one slab once; the
*pool* decides. The life of a slab::

                    acquire()                 release()
        free  ------------------->  leased  --------------->  free        no event, no view alive
         ^                            |
         |                            |  release(after=event), or a view is still alive
         |                            v
         +-----------------------  in flight                              is free when the event is done
                                                                          and the last view is gone

*State is derived*: a slab is free if its lease and its views are dead and its event is done. Nothing else says so, and
stacks of free slabs are a cache of that, which may be rebuilt at any time.

Where to look: `_pool` has the public verbs; `_state` every decision; `_slab` what keeps a slab busy; `_lease` the lease
and its views; `_growth` slow work in threads of its own; `_waiting` owners, their quotas and waiting requests;
`_refusals` the errors; `_classes` the sizes; `_stats` the counters.

Three things may break into any line of Python: a finaliser that the garbage collector runs in the middle of it, an
interrupt (Ctrl-C), and another thread. So *what a finaliser or the end of a ``with`` may call takes no lock and does
one step of C*. An interrupt can end a decision half-way, but a decision only changes caches. *What the pool holds is
changed in threads of its own*, where no interrupt comes.

The pool counts bytes and knows nothing of shapes. It touches CUDA through three small protocols only: a memory resource
(`allocate`, `deallocate`), a fence (`query`, `synchronize`), such as a CUDA event, and a function that records the
current streams when the block of a lease is left. So all of it is tested without a GPU.
"""

from ._classes import size_class
from ._host_budget import Claim, HostBudget, PoolUsage, usage_of_host
from ._lease import Lease, descriptor_of, guard_until_release
from ._pool import SlabPool, cap_of, check_open, check_pool, close_for, lease_in_flight, state_of
from ._slab import Fence
from ._stats import OwnerStats, PoolStats
from ._waiting import check_owner, check_timeout, give_up_waiting_if

__all__ = [
    "Claim",
    "Fence",
    "HostBudget",
    "Lease",
    "OwnerStats",
    "PoolStats",
    "PoolUsage",
    "SlabPool",
    "cap_of",
    "check_open",
    "check_owner",
    "check_pool",
    "check_timeout",
    "close_for",
    "descriptor_of",
    "give_up_waiting_if",
    "guard_until_release",
    "lease_in_flight",
    "size_class",
    "state_of",
    "usage_of_host",
]
