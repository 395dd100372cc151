"""Accelerate: prepared loaders whose batches are staged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from torch.utils.data import DataLoader

import pinstage as ps


def prepare(
    accelerator: accelerate.Accelerator,
    loader: Any,
    *,
    max_bytes: ps.Size = "auto",
    budget: ps.HostBudget | None = None,
    pool: ps.SlabPool | None = None,
    depth: int = 2,
    keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
) -> Any:
    """Prepare a loader as `Accelerator.prepare` does, and stage its batches.

    The result is Accelerate's own loader with all of its options: it shards, splits or dispatches
    batches, and marks the last one. The torch loader inside it writes its batches into slabs, as
    `DataLoader` does, and they arrive on the accelerator's device. With ``dispatch_batches``, the
    main process stages, and the others get their parts from it.

    Args:
        accelerator: its device and options are used.
        loader: torch's `DataLoader`, or a loader that this accelerator prepared and that wasn't
            iterated over yet. If a prepared loader is stateful, its first pass is packed in the
            main process: its workers run already.
        max_bytes: as for `DataLoader`.
        budget: as for `DataLoader`.
        pool: as for `DataLoader`.
        depth: as for `DataLoader`.
        keep_on_host: as for `DataLoader`.

    Returns:
        The prepared loader, which also has `DataLoader.stats`.

    Raises:
        TypeError: `accelerator` isn't an `Accelerator`, or `loader` isn't a `DataLoader`.
        TypeError, ValueError, CudaUnavailableError: as `wrap_loader`.
    """
    if not (isinstance(accelerator, accelerate.Accelerator) and isinstance(loader, DataLoader)):
        raise TypeError(
            "prepare takes an Accelerator and a DataLoader, in this order: "
            f"{type(accelerator).__name__}, {type(loader).__name__}"
        )
    options: dict[str, Any] = {
        "device": accelerator.device, "max_bytes": max_bytes, "budget": budget, "pool": pool,
        "depth": depth, "keep_on_host": keep_on_host,
    }  # fmt: skip
    with _stateful_loaders_staged(accelerator, options) as staged:
        prepared = accelerator.prepare_data_loader(loader)
    if not staged:
        prepared = ps.wrap_loader(prepared, **options)
    prepared.pinstage_options = options
    prepared._is_accelerate_prepared = True  # Accelerator.prepare sets this, and skips such loaders
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Do what `accelerate.skip_first_batches` does, and stage the remaining batches.

    Args:
        loader: the result of `prepare`. Both loaders share slabs and stats.
        num_batches: number of batches to skip.

    Raises:
        TypeError: `loader` does not come from `prepare`.
    """
    options = vars(loader).get("pinstage_options")
    if options is None:
        raise TypeError(
            f"cannot skip batches of this {type(loader).__name__} and stage the rest: it is not "
            "the result of pinstage.integrations.accelerate.prepare; pass that result"
        )
    rest = ps.wrap_loader(accelerate.skip_first_batches(loader, num_batches), **options)
    rest.pinstage_options = options
    vars(rest.base_dataloader)["_own_slabs"] = loader.base_dataloader._slabs
    return rest


@contextmanager
def _stateful_loaders_staged(
    accelerator: accelerate.Accelerator, options: dict[str, Any]
) -> Iterator[list[Any]]:
    """Make Accelerate create a staged loader instead of a ``StatefulDataLoader``.

    Accelerate requests the state of such a loader as soon as it has made it, which begins the
    loader's first pass. Then the workers run and the seeds are drawn: too late to let these workers
    write into slabs. So this replaces the class by the name that Accelerate imports: the first
    loader made in the block is wrapped at once, and put into the list.
    """
    staged: list[Any] = []
    if not accelerator.use_stateful_dataloader:
        yield staged
        return
    from torchdata import stateful_dataloader as module

    loader_class = module.StatefulDataLoader

    def make(*args: Any, **kwargs: Any) -> Any:
        module.StatefulDataLoader = loader_class  # now: workers may be forked next
        staged.append(ps.wrap_loader(loader_class(*args, **kwargs), **options))
        return staged[0]

    module.StatefulDataLoader = make
    try:
        yield staged
    finally:
        module.StatefulDataLoader = loader_class
