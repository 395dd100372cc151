"""transformers: a mixin that stages the batches of a `Trainer`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderDispatcher

import pinstage as ps

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class StageInputs(_Trainer):
    """Stages the batches that a `transformers.Trainer` trains, evaluates and predicts on.

    Put it before the trainer's class, ``class StagingTrainer(StageInputs, Trainer): pass``. Loaders then leave batches
    on the host, and `training_step` and `prediction_step` send each asynchronously. With gradient
    accumulation, batches stay on the host until they are used.

    What Accelerate dispatches (``dispatch_batches``, the default for an ``IterableDataset``) is on the device before
    the step. Its main process stages it as `wrap_loader` does, with a pool of the loader's own under the same
    `max_bytes`, and the other processes get their parts from it.
    """

    max_bytes: int | str = "auto"
    """Cap on the page-locked memory; see `SlabPool`. Set it in the class or before the first batch."""

    @cached_property
    def stager(self) -> ps.Stager:
        """The stager; made for the first batch, unless it was set before."""
        return ps.Stager(self.args.device, max_bytes=self.max_bytes)

    def get_train_dataloader(self) -> Any:
        """Return the loader for training, which leaves batches on the host."""
        return self._prepared(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for evaluation, which leaves batches on the host."""
        return self._prepared(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for prediction, which leaves batches on the host."""
        return self._prepared(super().get_test_dataloader(*args, **kwargs))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, and do the step."""
        return super().training_step(model, self.stager.to_device(inputs), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, and do the step."""
        return super().prediction_step(model, self.stager.to_device(inputs), *args, **kwargs)

    def _prepared(self, loader: Any) -> Any:
        """Let a loader of Accelerate's send and page-lock nothing, as does one that it makes of this to skip batches.

        One that dispatches sends all the same; it stages what it sends. The Trainer may keep a loader and give it
        again.
        """
        if not isinstance(loader, DataLoaderDispatcher):
            loader.device = None
            loader.base_dataloader.pin_memory = False
        elif not hasattr(loader.base_dataloader, "stats"):
            loader = ps.wrap_loader(loader, device=self.args.device, max_bytes=self.max_bytes)
        return loader
