"""The five steps of staging: acquire, pack, copy, unpack, release.

::

    batch --describe--> table, tensors
    acquire a host slab --pack--> bytes in place --copy--> tensors and blocks --> leaves
                    |                              |
                    +---- release(after=event) ----+---- event: the consumer's stream waits

A few small leaves, and batches of at most 64 KiB, take no slab; see `Sender`.

This package joins the pool, which counts bytes, and the layout, which knows shapes.
"""

from ._device import (
    Arrival,
    EventGroup,
    HostBytes,
    HostCopy,
    Target,
    Targets,
    shared_targets,
    target_for,
    wait_here,
)
from ._frames import clear_own_frames
from ._hand_over import HandOver
from ._host_slabs import SLAB_BYTES, HostSlabs
from ._prefetch import Prefetcher
from ._run_ahead import RunAhead, check_depth
from ._sender import Sender
from ._stager import Stager, sender_of
from ._stats import StagerStats
from ._to_host import Fetcher, FetchPlan, HostTransfer, duplicate_rest, event_of, landings
from ._transfer import (
    Kept,
    Packed,
    Transfer,
    copy_event_of,
    keep_until,
    send_packed,
    structure_of,
    table_of,
)
from ._weights import IncompatibleKeys
