"""Accelerate: loaders that are prepared and whose batches are staged."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

import pinstage as ps


def prepare(
    accelerator: accelerate.Accelerator,
    loader: Any,
    *,
    pool: ps.SlabPool | None = None,
    max_bytes: int | str = "auto",
    depth: int = 2,
) -> Any:
    """Prepare a loader as `Accelerator.prepare` does, and stage what it yields.

    The result is Accelerate's own loader, whatever options it has: it shards, splits or dispatches batches, and says
    which one is the last. Only the torch loader inside of it writes its batches into slabs, as `DataLoader` does, and
    they arrive on the accelerator's device. `stats()` of the result are those of `DataLoader.stats`. With
    ``dispatch_batches`` the main process stages, and the others get their parts from it.

    Args:
        accelerator: whose device and options hold.
        loader: a torch `DataLoader`, ours as well, or one that was prepared by this accelerator and not iterated yet.
        pool: as for `DataLoader`.
        max_bytes: as for `DataLoader`.
        depth: as for `DataLoader`.

    Raises:
        TypeError, ValueError, StagingError: as `collate_into_slab`.
    """
    return _staged(accelerator.prepare_data_loader(loader), accelerator.device, pool, max_bytes, depth)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Do what `accelerate.skip_first_batches` does, and stage, which a loader of that function does not.

    The result has a pool of its own, with the same cap.

    Args:
        loader: what `prepare` returned.
        num_batches: how many to leave out.

    Raises:
        TypeError: `loader` is another one.
    """
    base = getattr(loader, "base_dataloader", None)
    if not hasattr(base, "max_bytes"):
        raise TypeError(
            f"cannot skip batches of this {type(loader).__name__}: it is not staged; pass what "
            "pinstage.integrations.accelerate.prepare returned"
        )
    rest = accelerate.skip_first_batches(loader, num_batches)
    return _staged(rest, base.device, None, base.max_bytes, base.depth)


def _staged(
    prepared: DataLoaderShard | DataLoaderDispatcher,
    device: Any,
    pool: ps.SlabPool | None,
    max_bytes: int | str,
    depth: int,
) -> Any:
    ps.collate_into_slab(prepared.base_dataloader, device=device, pool=pool, max_bytes=max_bytes, depth=depth)
    return prepared
