"""Lightning: a callback that stages the batches of a `Trainer`."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import pinstage as ps

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer


class StageBatches(Callback):
    """Stages each batch that Lightning would have moved to the device, while training, validating, testing, predicting.

    Replaces the hook `transfer_batch_to_device` while the trainer runs. The other hooks do not change:
    `on_before_batch_transfer` gets the batch on the host, and `on_after_batch_transfer` on the device. Any loader may
    be used. Tensors that are on the device already, such as those of `pinstage.DataLoader`, stay there.

    Args:
        max_bytes: cap on the page-locked memory; see `SlabPool`.
        **options: other options of `Stager`, but not `device`, which is the trainer's.

    A batch is sent asynchronously, while the device works on the one before. Nothing is read ahead, so the
    trainer's progress and checkpoints are those without the callback. A `training_step` that takes ``dataloader_iter``
    moves its batches itself.
    """

    def __init__(self, *, max_bytes: int | str = "auto", **options: Any) -> None:
        self._options = {"max_bytes": max_bytes, **options}
        self._stager: ps.Stager | None = None

    @property
    def stager(self) -> ps.Stager:
        """The stager; made when a trainer begins, and kept for later ones with the same device.

        Raises:
            RuntimeError: no trainer has begun in this process.
        """
        if self._stager is None:
            raise RuntimeError("StageBatches has no stager yet: it is made when a trainer begins, for its device")
        return self._stager

    def stats(self) -> ps.StagerStats:
        """Return the stager's counters in this process; raises as `stager`."""
        return self.stager.stats()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Take the place of the hook.

        Raises:
            TypeError: the module or its datamodule has such a hook of its own.
        """
        for owner in (pl_module, trainer.datamodule):
            hook = getattr(type(owner), "transfer_batch_to_device", None)
            if hook is not None and not hook.__qualname__.startswith("DataHooks."):
                raise TypeError(
                    f"StageBatches would take the place of {hook.__qualname__}: leave the callback out, and let that "
                    "hook return `stager.to_device(batch)`, with a pinstage.Stager for its device"
                )
        device = trainer.strategy.root_device
        if self._stager is None or self._stager.device != device:
            self._stager = ps.Stager(device, **self._options)
        stager = self._stager

        @wraps(pl_module.transfer_batch_to_device)  # so Lightning does not take it for a hook of the user's
        def transfer(batch: Any, device: torch.device, dataloader_idx: int) -> Any:  # noqa: ARG001
            return stager.to_device(batch)

        vars(pl_module)["transfer_batch_to_device"] = transfer

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Give the hook its place back."""
        vars(pl_module).pop("transfer_batch_to_device", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Give the hook its place back: after an exception there is no teardown."""
        self.teardown(trainer, pl_module, "")

    def __getstate__(self) -> dict[str, Any]:  # a copy, as in a process that is started, makes a stager of its own
        return vars(self) | {"_stager": None}
