"""The pool: it decides which request gets which slab, and when.

A *slab* is one host allocation and lives as long as the pool keeps it; a *lease* is the right to
use one slab once; the *pool* decides. The life of a slab::

                    acquire()                 release()
        free  ------------------->  leased  --------------->  free        no event, no view alive
         ^                            |
         |                            |  release(after=event), or a view is still alive
         |                            v
         +-----------------------  in flight     is free when the event is done
                                                 and the last view is gone

*State is derived*: a slab is free if its lease and its views are gone and its events are done.
Nothing else records that. The stacks of free slabs are a cache, which can be rebuilt at any time.

Where to look: `_pool` has the public methods, decides and waits; `_slab` has slabs, leases and what
keeps a slab busy; `_growth` does the slow work, in threads of its own. `_waiting` has owners and
quotas, `_refusals` the errors, `_stats` the counters, `_adaptor` the memory, `_host_budget` an
adaptor for the budget of several processes, and `_rows` its files.

Three things may interrupt any line of Python: a finaliser that the garbage collector runs, Ctrl-C,
and another thread. So *code that a finaliser or the end of a ``with`` block may call takes no lock,
and makes each change with a single C call*. Ctrl-C can end a decision half-way, but a decision
changes only caches. *Only the pool's own threads carry one out*: they set bytes aside, add slabs
and free them. Ctrl-C doesn't reach them.

The pool counts bytes and knows nothing of shapes. It uses CUDA only through three small interfaces:
a memory resource (`allocate`, `deallocate`), a fence (`query`, `synchronize`), such as a CUDA
event, and a function that records the current streams when the block of a lease ends. So all of it
can be tested without a GPU.
"""

from .._sizes import size_class
from ._host_budget import Claim, HostBudget, cap_of, usage_of_host
from ._pool import (
    SlabPool,
    check_open,
    check_pool,
    close_for,
    largest_for,
    lease_in_flight,
    refuse_if_useless,
    state_of,
)
from ._rows import PoolUsage, close_files, held_bytes
from ._slab import (
    Fence,
    Lease,
    add_guard,
    descriptor_of,
    guard_until_release,
    hold_for_good,
    is_page_locked,
)
from ._stats import OwnerStats, PoolStats
from ._waiting import check_owner, check_timeout, give_up_waiting_if
