"""The five verbs in order: acquire, pack, copy, unpack, release.

::

    batch --plan--> table, tensors
    acquire a host slab --pack--> bytes in place --copy, on a stream of ours--> device slab --unpack--> views
                    |                                |
                    +---- release(after=event) ------+---- event: the consumer's stream waits for it, the host never
                    does

Here the pool, which counts bytes, and the layout, which knows shapes, meet.
"""

from ._device import Events, Target, target_for
from ._prefetch import Prefetcher
from ._run_ahead import RunAhead, check_depth
from ._shuttle import Arrival, Shuttle, shuttle_for
from ._stager import Kept, Stager, StagerStats
from ._to_host import HostTransfer
from ._transfer import Transfer, copy_event_of, send_packed

__all__ = [
    "Arrival",
    "check_depth",
    "Events",
    "HostTransfer",
    "Kept",
    "Prefetcher",
    "RunAhead",
    "Shuttle",
    "Stager",
    "StagerStats",
    "Target",
    "Transfer",
    "copy_event_of",
    "send_packed",
    "shuttle_for",
    "target_for",
]
