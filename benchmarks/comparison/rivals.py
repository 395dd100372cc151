"""The ways to bring a nested batch to a device, each with an id, all with one signature.

`variant.setup(device)` is a context manager that yields `stage(batch) -> staged batch`. Each call
includes packing, and building a rival's own container from the plain nested batch. Each rival is
used as its own documentation recommends; `about` has the call. Slower ways of the same package are
left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from comparison.batches import map_leaves
from comparison.harness import Variant

if TYPE_CHECKING:
    import pinstage as ps

Stage = Callable[[Any], Any]
NAMES = {
    "to": "`.to()`",
    "pin_to": "pin + `.to()`",
    "tensordict_consolidate": "tensordict",
    "spdl_transfer": "SPDL",
    "multi_tensor_copier": "multi_tensor_copier",
    "multi_tensor_copier_openmp": "multi_tensor_copier, OpenMP",
}
"""What tables and pictures call the rivals."""


def _to(device: torch.device, *, pin: bool = False) -> Stage:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        return (leaf.pin_memory() if pin else leaf).to(device, non_blocking=True)

    return partial(map_leaves, move=move)


def _tensordict_consolidate(device: torch.device) -> Stage:
    from tensordict import TensorDict

    # Without CUDA nothing can be pinned; the smoke run takes the same path otherwise.
    pin = device.type == "cuda"

    def stage(batch: Any) -> Any:
        # Its fastest constructor for a nested dict: from_dict takes 1.5x as long.
        made = TensorDict(batch, batch_size=[])
        return made.consolidate(pin_memory=pin).to(device, non_blocking=True)

    return stage


def spdl_transfer(device: torch.device) -> Stage:
    """Return SPDL's transfer of a batch."""
    # The only place where SPDL looks for the device.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    import spdl.io

    # named transfer_tensor up to 0.7; since 0.8 that name warns on each call
    stage: Stage = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor
    return stage


def _multi_tensor_copier(package: str, device: torch.device) -> Stage:
    start_copy = import_module(package).start_copy
    # All documented features (packing, pinned staging, its own thread) are on by default, and its
    # own evaluation calls it like this. The number of threads is torch's, if it was built with
    # threads.
    return lambda batch: start_copy(batch, device).get()


@contextmanager
def _pinstage(device: torch.device) -> Iterator[Stage]:
    import pinstage as ps

    with ps.Stager(device, max_bytes="8GiB") as stager:
        yield stager.to_device


@contextmanager
def _pinstage_in_place(device: torch.device) -> Iterator[tuple[Stage, Stage]]:
    import pinstage as ps

    with ps.Stager(device, max_bytes="8GiB", borrow_pinned=True) as stager, ExitStack() as leases:
        yield stager.to_device, partial(_into_leases, stager.pool, leases)


@contextmanager
def _lease(device: torch.device) -> Iterator[tuple[Stage, Stage]]:
    import pinstage as ps

    send = _to(device)

    def stage(batch: Any) -> Any:
        staged = send(batch)
        if device.type == "cuda":
            # A user would release the lease after this event.
            torch.cuda.current_stream(device).record_event()
        return staged

    with ps.SlabPool(max_bytes="8GiB") as pool, ExitStack() as leases:
        yield stage, partial(_into_leases, pool, leases)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before the leases are released


def _into_leases(pool: ps.SlabPool, leases: ExitStack, batch: Any) -> Any:
    """Write each leaf into its own lease, which is held until the shape is done."""

    def write(leaf: torch.Tensor) -> torch.Tensor:
        view = leases.enter_context(pool.acquire(leaf.nbytes)).tensor(leaf.shape, leaf.dtype)
        return view.copy_(leaf)

    return map_leaves(batch, write)


VARIANTS = (
    Variant(
        "to", _to, "`leaf.to(device, non_blocking=True)` for each leaf, in a plain recursive walk"
    ),
    Variant(
        "pin_to",
        partial(_to, pin=True),
        "`leaf.pin_memory().to(device, non_blocking=True)` for each leaf",
        needs_cuda=True,
    ),
    Variant(
        "tensordict_consolidate",
        _tensordict_consolidate,
        "`TensorDict(batch).consolidate(pin_memory=True).to(device, non_blocking=True)`: one "
        "pinned storage, one copy",
        package="tensordict",
    ),
    Variant(
        "spdl_transfer",
        spdl_transfer,
        "`spdl.io.transfer_tensor`, `transfer_tensor_h2d` since 0.8: pins and copies each leaf "
        "on a stream, then waits",
        package="spdl.io",
        needs_cuda=True,
    ),
    Variant(
        "multi_tensor_copier",
        partial(_multi_tensor_copier, "accvlab.multi_tensor_copier"),
        "NVIDIA ACCV-Lab, C++, as its setup.py builds it: `start_copy(batch, device).get()`",
        package="accvlab.multi_tensor_copier",
    ),
    Variant(
        "multi_tensor_copier_openmp",
        partial(_multi_tensor_copier, "accvlab_openmp.multi_tensor_copier"),
        "the same built with -fopenmp, without which its parallel staging is a loop on one thread",
        package="accvlab_openmp.multi_tensor_copier",
    ),
    Variant(
        "pinstage",
        _pinstage,
        "`ps.Stager(device, max_bytes='8GiB').to_device(batch)`; of what is written in place "
        "`borrow_pinned=True`",
        ours=True,
        in_place=_pinstage_in_place,
    ),
    Variant(
        "pinstage_lease",
        _lease,
        "`pool.acquire(n)`, written in place, then `lease.tensor(...).to(device, "
        "non_blocking=True)` and an event",
        ours=True,
        in_place=_lease,
        where=lambda shape: shape.kind == "in-place",
    ),
)
