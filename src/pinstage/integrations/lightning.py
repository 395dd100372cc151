"""Lightning: a callback that stages the batches of a `Trainer`."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any

import pinstage as ps

from ._trainer_loaders import OPTIONS, TrainerLoaders

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.trainer.states import RunningStage
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.trainer.states import RunningStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from lightning.pytorch import LightningModule, Trainer


class StageBatches(Callback):
    """Stages each batch that Lightning would move to the device in training, validation, testing
    and prediction.

    The workers of the trainer's loaders pack the batches, as those of `DataLoader` do: each loader
    that Lightning has prepared is wrapped by `wrap_loader`. Loaders that don't iterate as torch's
    do are staged in the main process.

    The hooks `on_before_batch_transfer` and `transfer_batch_to_device` get batches on the host. If
    the module or its datamodule has the first hook, all batches are staged in the main process,
    after a warning. The second hook is an error. `on_after_batch_transfer` gets batches on the
    device.

    Args:
        max_bytes: cap on the page-locked memory of all loaders together; see `SlabPool`. If the
            trainer validates while it fits, training and validation get half each.
        budget: a second cap, shared by the pools of several processes; see `HostBudget`.
        pool: a pool over `SharedMemory` to take slabs from, instead of a new pool with these caps.
        depth: number of batches that the loaders send ahead; see `DataLoader`.
        keep_on_host: leaves that stay on the host, as for `DataLoader`.
        workers: whether workers pack. False stages all batches in the main process, in place of the
            hook `transfer_batch_to_device`.

    Raises:
        TypeError, ValueError: when a trainer begins, as `wrap_loader`.

    Progress, checkpoints and resumed runs are the same as without the callback: the loaders' states
    count the batches that were yielded.
    """

    def __init__(
        self,
        *,
        max_bytes: ps.Size = "auto",
        budget: ps.HostBudget | None = None,
        pool: ps.SlabPool | None = None,
        depth: int = 2,
        keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None,
        workers: bool = True,
    ) -> None:
        given = locals()
        self._options = {name: given[name] for name in OPTIONS}
        self._workers = workers
        self._has_warned = False
        self._loaders: TrainerLoaders | None = None

    @property
    def stager(self) -> ps.Stager:
        """The stager of batches that no worker packs; all loaders use its pool.

        Made when a trainer begins, and kept for later ones with the same device.

        Raises:
            RuntimeError: no trainer has begun in this process.
        """
        return self._begun().stager

    def stats(self) -> ps.LoaderStats:
        """Return the counters of all loaders in this process, however they are staged; raises as
        `stager`.
        """
        return self._begun().stats()

    def _begun(self) -> TrainerLoaders:
        if self._loaders is None:
            raise RuntimeError(
                "StageBatches has no stager yet: it is made when a trainer begins, for its device"
            )
        return self._loaders

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the loaders that the trainer will prepare, and replace the hook
        `transfer_batch_to_device`.

        Raises:
            TypeError: the module or its datamodule has a hook `transfer_batch_to_device` of its
                own.
        """
        own = _own_hook("transfer_batch_to_device", pl_module, trainer.datamodule)
        if own is not None:
            raise TypeError(
                f"StageBatches would replace {own}: leave the callback out, and let that hook "
                "return `stager.to_device(batch)`, with a pinstage.Stager for its device"
            )
        own = _own_hook("on_before_batch_transfer", pl_module, trainer.datamodule)
        in_workers = self._workers and own is None
        if self._workers and own is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"pinstage stages batches in the main process, which is slower: {own} gets them "
                "on the host; move its work into the dataset, or pass StageBatches(workers=False)",
                ps.errors.StagingWarning,
                stacklevel=2,
            )
        device = trainer.strategy.root_device
        loaders = self._loaders
        if loaders is None or loaders.stager.device != device or loaders.in_workers != in_workers:
            loaders = self._loaders = TrainerLoaders(device, self._options, in_workers=in_workers)
        loaders.validates_while_training(stage == "fit" and trainer.enable_validation)

        # So that Lightning doesn't take it for the user's hook.
        @wraps(pl_module.transfer_batch_to_device)
        def transfer(batch: Any, device: torch.device, dataloader_idx: int) -> Any:  # noqa: ARG001
            return loaders.to_device(batch)

        # Lightning calls this for each loader that it takes from the user, with the stage.
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        @wraps(prepare)
        def prepare_and_wrap(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            prepared = prepare(dataloader, shuffle=shuffle, mode=mode)
            return loaders.wrap(prepared, is_training=mode == RunningStage.TRAINING)

        vars(pl_module)["transfer_batch_to_device"] = transfer
        vars(connector)["_prepare_dataloader"] = prepare_and_wrap

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Restore the hook, and leave later loaders alone."""
        vars(pl_module).pop("transfer_batch_to_device", None)
        vars(trainer._data_connector).pop("_prepare_dataloader", None)

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Do what `teardown` does, since Lightning doesn't call that after an exception."""
        self.teardown(trainer, pl_module, "")

    def __getstate__(self) -> dict[str, Any]:
        # A copy, for example in another process, makes its own stager.
        return vars(self) | {"_loaders": None}


def _own_hook(name: str, *owners: object) -> str | None:
    """Return the name of the user's own hook; None if all are Lightning's."""
    for owner in owners:
        hook = getattr(type(owner), name, None)
        if hook is not None and not hook.__qualname__.startswith("DataHooks."):
            return str(hook.__qualname__)
    return None
