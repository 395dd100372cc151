"""pinstage: a reusable pool of page-locked staging buffers for PyTorch.

One line copies any nested batch to the device, asynchronously, and page-locks at most `max_bytes`:

    import pinstage as ps

    stager = ps.Stager("cuda:0", max_bytes="2GiB")
    for batch in loader:
        batch = stager.to_device(batch)  # asynchronous; safe on the current stream

Importing the package pins nothing and does not initialise CUDA. Submodules, the loader and `audit`
are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import errors as errors
from ._batch import Layout, Rows, Slot, StagingNode, on_host, register_node, register_tensor, rows
from ._pool import Fence, HostBudget, Lease, OwnerStats, PoolStats, PoolUsage, SlabPool
from ._region import HostRegion, RegionHandle
from ._sizes import Size
from ._stage import HostTransfer, IncompatibleKeys, Prefetcher, Stager, StagerStats, Transfer

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import inspect as inspect
    from . import integrations as integrations
    from . import memory as memory
    from . import metrics as metrics
    from . import offload as offload
    from ._loader import DataLoader, LoaderStats, WrappedLoader, wrap_loader
    from .inspect import audit

__version__ = "0.4.0"

__all__ = [
    "DataLoader",
    "Fence",
    "HostBudget",
    "HostRegion",
    "HostTransfer",
    "IncompatibleKeys",
    "Layout",
    "Lease",
    "LoaderStats",
    "OwnerStats",
    "PoolStats",
    "PoolUsage",
    "Prefetcher",
    "RegionHandle",
    "Rows",
    "Size",
    "SlabPool",
    "Slot",
    "Stager",
    "StagerStats",
    "StagingNode",
    "Transfer",
    "audit",
    "WrappedLoader",
    "wrap_loader",
    "on_host",
    "register_node",
    "register_tensor",
    "rows",
]

_LATER = {
    "audit": ".inspect",
    **dict.fromkeys(("DataLoader", "LoaderStats", "WrappedLoader", "wrap_loader"), "._loader"),
    "checkpoint": ".checkpoint",
    "inspect": ".inspect",
    "integrations": ".integrations",
    "memory": ".memory",
    "metrics": ".metrics",
    "offload": ".offload",
}


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_LATER[name], __name__)
        value = globals()[name] = module if _LATER[name] == f".{name}" else getattr(module, name)
        return value


def __dir__() -> list[str]:
    # `help`, `inspect.getmembers` and completion load every name that is listed here.
    missing = set() if find_spec("prometheus_client") else {"metrics"}
    return sorted({*globals(), *_LATER} - missing)
