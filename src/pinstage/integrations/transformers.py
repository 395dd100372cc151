"""transformers: a mixin that stages the batches of a `Trainer`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderDispatcher

import pinstage as ps

from ._trainer_loaders import OPTIONS, TrainerLoaders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class StageInputs(_Trainer):
    """Stages the batches that a `transformers.Trainer` trains, evaluates and predicts on.

    Put it before the trainer's class: ``class StagingTrainer(StageInputs, Trainer): pass``. The
    workers of its loaders pack the batches, as those of `DataLoader` do, and batches arrive on the
    device.

    If Accelerate dispatches batches (``dispatch_batches``, the default for an ``IterableDataset``),
    the main process's loader stages them, and the other processes get their parts from it.

    Set the attributes below in the class, or on the trainer before the first batch.
    """

    max_bytes: ps.Size = "auto"
    """Cap on the page-locked memory of all loaders together; see `SlabPool`. If the trainer
    evaluates while it trains, training and evaluation get half each."""

    budget: ps.HostBudget | None = None
    """A second cap, shared by the pools of several processes; see `HostBudget`."""

    pool: ps.SlabPool | None = None
    """A pool over `SharedMemory` to take slabs from, instead of a new pool with these caps."""

    depth: int = 2
    """Number of batches that the loaders send ahead; see `DataLoader`."""

    keep_on_host: Iterable[str] | Callable[[str, Any], object] | None = None
    """Leaves that stay on the host, as for `DataLoader`. Wrap a function in ``staticmethod``."""

    workers: bool = True
    """Whether workers pack. If False, loaders leave batches on the host, and `training_step` and
    `prediction_step` stage each batch in the main process. With gradient accumulation, batches then
    stay on the host until used."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class in which the trainer's methods hide the mixin's.

        Raises:
            TypeError: `transformers.Trainer` comes before this class in the order of bases.
        """
        super().__init_subclass__(**options)
        from transformers import Trainer

        order = cls.__mro__
        if Trainer in order[: order.index(StageInputs)]:
            bases = sorted(cls.__bases__, key=lambda base: not issubclass(base, StageInputs))
            names = ", ".join(base.__name__ for base in bases)
            raise TypeError(
                f"{cls.__name__} would stage nothing: its bases name the trainer before "
                f"StageInputs; write class {cls.__name__}({names})"
            )

    @cached_property
    def _loaders(self) -> TrainerLoaders:
        return self._made(self.args.device, in_workers=self.workers)

    def _made(
        self, device: torch.device, *, in_workers: bool, stager: ps.Stager | None = None
    ) -> TrainerLoaders:
        options = {name: getattr(self, name) for name in OPTIONS}
        return TrainerLoaders(device, options, in_workers=in_workers, stager=stager)

    @property
    def stager(self) -> ps.Stager:
        """The stager of batches that no worker packs; all loaders use its pool. Made with the first
        loader.

        Set it before that to stage all batches in the main process with your own stager.
        """
        return self._loaders.stager

    @stager.setter
    def stager(self, stager: ps.Stager) -> None:
        self._loaders = self._made(stager.device, in_workers=False, stager=stager)

    def staging_stats(self) -> ps.LoaderStats:
        """Return the counters of all loaders in this process, however they are staged."""
        return self._loaders.stats()

    def get_train_dataloader(self) -> Any:
        """Return the loader for training, staged."""
        self._loaders.validates_while_training(self.args.eval_strategy != "no")
        return self._prepared(super().get_train_dataloader(), is_training=True)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for evaluation, staged."""
        return self._prepared(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader for prediction, staged."""
        return self._prepared(super().get_test_dataloader(*args, **kwargs))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, unless the loader did, and do the step."""
        return super().training_step(model, self._loaders.to_device(inputs), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stage, unless the loader did, and do the step."""
        return super().prediction_step(model, self._loaders.to_device(inputs), *args, **kwargs)

    def _prepared(self, loader: Any, *, is_training: bool = False) -> Any:
        """Stage Accelerate's loader. It moves and page-locks nothing itself then, even if rebuilt
        to skip batches.

        A dispatching loader always sends batches to other processes, so it stages them first. The
        Trainer may keep a loader and pass it again.
        """
        dispatches = isinstance(loader, DataLoaderDispatcher)
        if not dispatches:
            loader.device = None
            loader.base_dataloader.pin_memory = False
        return self._loaders.wrap(loader, is_training=is_training, always=dispatches)
