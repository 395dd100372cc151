"""transformers: a mixin that stages the batches of a `Trainer`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pinstage as ps

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class StageInputs(_Trainer):
    """Stages the batches that a `transformers.Trainer` trains, evaluates and predicts on.

    Put it before the trainer's class, ``class StagingTrainer(StageInputs, Trainer): pass``. Loaders then leave batches
    on the host, and `training_step` and `prediction_step` send each by one asynchronous copy. The batches that are
    waited for with gradient accumulation stay on the host until it is their turn. What Accelerate dispatches
    (``dispatch_batches``) is on the device already, and stays there.
    """

    max_bytes: int | str = "auto"
    """Cap on the page-locked memory; see `SlabPool`. Set it in the class or before the first batch."""

    @cached_property
    def stager(self) -> ps.Stager:
        """What stages, with the `Stager.stats`; made for the first batch, unless it was set before."""
        return ps.Stager(self.args.device, max_bytes=self.max_bytes)

    def get_train_dataloader(self) -> Any:
        """Return the loader for training, which leaves batches on the host."""
        return _on_host(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for evaluation, which leaves batches on the host."""
        return _on_host(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for prediction, which leaves batches on the host."""
        return _on_host(super().get_test_dataloader(*args, **kwargs))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, and do the step."""
        return super().training_step(model, self.stager.to_device(inputs), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, and do the step."""
        return super().prediction_step(model, self.stager.to_device(inputs), *args, **kwargs)


def _on_host(loader: Any) -> Any:
    """Let a loader of Accelerate's send and page-lock nothing; as does one that it makes of this to skip batches."""
    loader.device = None
    loader.base_dataloader.pin_memory = False
    return loader
