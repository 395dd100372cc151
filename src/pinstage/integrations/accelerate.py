"""Accelerate: loaders that are prepared and whose batches are staged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate

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
    """Prepare a loader as `Accelerator.prepare` does, and stage what it yields.

    The result is Accelerate's own loader with all of its options: it shards, splits or dispatches batches, and says
    which one is the last. The torch loader inside it writes its batches into slabs, as `DataLoader` does, and they
    arrive on the accelerator's device. With ``dispatch_batches`` the main process stages, and the others get their
    parts from it.

    Args:
        accelerator: its device and options are used.
        loader: torch's `DataLoader`, or a loader that this accelerator prepared and that wasn't iterated yet. If that
            is stateful, its first pass is packed in the main process: its workers run already.
        max_bytes: as for `DataLoader`.
        budget: as for `DataLoader`.
        pool: as for `DataLoader`.
        depth: as for `DataLoader`.
        keep_on_host: as for `DataLoader`.

    Returns:
        The prepared loader, which also has `DataLoader.stats`.

    Raises:
        TypeError, ValueError, CudaUnavailableError: as `wrap_loader`.
    """
    options: dict[str, Any] = {
        "device": accelerator.device, "max_bytes": max_bytes, "budget": budget, "pool": pool, "depth": depth,
        "keep_on_host": keep_on_host,
    }  # fmt: skip
    with _stateful_loaders_staged(accelerator, options) as staged:
        prepared = accelerator.prepare_data_loader(loader)
    if not staged:
        prepared = ps.wrap_loader(prepared, **options)
    prepared.pinstage_options = options
    prepared._is_accelerate_prepared = True  # as Accelerator.prepare says, so that it prepares it once
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Do what `accelerate.skip_first_batches` does, and stage the remaining batches.

    Args:
        loader: what `prepare` returned. Both have the same slabs and stats.
        num_batches: how many to leave out.

    Raises:
        TypeError: `loader` does not come from `prepare`.
    """
    options = vars(loader).get("pinstage_options")
    if options is None:
        raise TypeError(
            f"cannot skip batches of this {type(loader).__name__} and stage the rest: it is not of "
            "pinstage.integrations.accelerate.prepare; pass what that returned"
        )
    rest = ps.wrap_loader(accelerate.skip_first_batches(loader, num_batches), **options)
    rest.pinstage_options = options
    vars(rest.base_dataloader)["_own_slabs"] = loader.base_dataloader._slabs
    return rest


@contextmanager
def _stateful_loaders_staged(accelerator: accelerate.Accelerator, options: dict[str, Any]) -> Iterator[list[Any]]:
    """Let Accelerate make a staged loader where it would make a ``StatefulDataLoader``.

    Accelerate asks such a loader for its state as soon as it is made, and with that its first pass begins. Its workers
    then run, and its seeds are drawn: too late to let these workers write into slabs. So the first loader that is made
    here, by the name that Accelerate imports when it makes one, is wrapped before it is asked, and put into the list.
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
