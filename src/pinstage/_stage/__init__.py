"""The five steps of staging: acquire, pack, copy, unpack, release.

::

    batch --describe--> table, tensors
    acquire a host slab --pack--> bytes in place --copy--> tensors and blocks --> leaves
                    |                              |
                    +---- release(after=event) ----+---- event: the consumer's stream waits

A few small leaves, and batches of at most 64 KiB, take no slab; see `Sender`.

Where to look: `_stager` has the public methods, `_sender` the ways to the device, `_transfer` a
batch on its way, `_to_host` the ways back, `_out` and `_weights` copies into existing tensors,
`_host_slabs` the slabs of one user. `_target` is a device, `_cuda_target` a GPU, `_targets` finds
them; `_events` and `_at_once` are for their streams. `_prefetch` reads ahead, `_background` by a
thread.

This package joins the pool, which counts bytes, and the layout, which knows shapes.
"""

from ._events import EventGroup, wait_here
from ._frames import clear_own_frames
from ._hand_over import HandOver
from ._host_slabs import SLAB_BYTES, HostSlabs
from ._prefetch import Prefetcher
from ._run_ahead import RunAhead, check_depth
from ._sender import Sender
from ._stager import Stager, sender_of
from ._stats import StagerStats
from ._target import Arrival, HostBytes, HostCopy, Target
from ._targets import Targets, shared_targets, target_for
from ._to_host import Fetcher, FetchPlan, HostTransfer, duplicate_rest, event_of, landings
from ._transfer import (
    Packed,
    Transfer,
    kept,
    send_packed,
    sizes_of,
    structure_of,
)
from ._weights import IncompatibleKeys, overlapping
