"""Lightning's trainer with `StageBatches`, and with `ps.DataLoader`."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from lightning import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from programs import reports
from quiet_trainer import trainer
from torch.utils.data import DataLoader
from train_lightning import Module
from visits import Visits, collate

import pinstage as ps
from pinstage.errors import LayoutError, StagingWarning
from pinstage.integrations._trainer_loaders import TrainerLoaders
from pinstage.integrations.lightning import StageBatches


def loader(samples=32, **options):
    return DataLoader(Visits(samples), batch_size=4, collate_fn=collate, **options)


def module():
    seed_everything(0, verbose=False)
    return Module()


# -- two processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The reports of two processes, by way."""
    out = tmp_path_factory.mktemp("lightning")
    ways = ("plain", "callback", "loader")
    return {
        way: reports("train_lightning.py", out / way, "--way", way, "--workers", "1")
        for way in ways
    }


@pytest.mark.parametrize(
    ("way", "batches"),
    # 8 of each epoch, 2 of its validation, and 2 of the sanity check
    [("callback", 2 * (8 + 2) + 2), ("loader", 2 * 8)],
)
def test_two_processes_train_to_lightning_s_losses(ranks, way, batches):
    for ours, plain in zip(ranks[way], ranks["plain"], strict=True):
        assert ours["batches"] == batches
        assert ours["losses"] == plain["losses"]
        assert ours["samples"] == plain["samples"]
        assert len(ours["losses"]) == 2 * 64 // 4 // 2


# -- features of a trainer -------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["workers", "main process"])
def in_workers(request):
    return request.param


def test_options_reach_the_loaders(in_workers):
    stage = StageBatches(max_bytes="8MiB", depth=1, keep_on_host="['nothing']", workers=in_workers)
    missed = (
        pytest.warns(StagingWarning, match="led to nothing in all batches of this pass")
        if in_workers
        else pytest.raises(LayoutError, match="leads to nothing in this batch")
    )
    with missed:
        trainer(stage).fit(module(), loader())


def test_loaders_take_slabs_from_a_given_pool(in_workers):
    with ps.SlabPool("8MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        stage = StageBatches(pool=pool, workers=in_workers)
        trainer(stage).fit(module(), loader(num_workers=1))
        assert stage.stager.pool is pool
        assert stage.stats().batches == 8


def test_batches_of_every_stage_are_staged(in_workers, workers):
    stage, model = StageBatches(max_bytes="8MiB", workers=in_workers), module()
    one = trainer(stage, num_sanity_val_steps=2)
    one.fit(model, loader(num_workers=workers), loader(8, num_workers=workers))
    assert stage.stats().batches == 2 + 8 + 2
    one.validate(model, loader(8, num_workers=workers), verbose=False)
    one.predict(model, loader(12, num_workers=workers))
    stats = stage.stats()
    assert type(stats) is ps.LoaderStats
    assert (stats.batches, stats.fallback_batches) == (2 + 8 + 2 + 2 + 3, 0)
    assert stats.pool.max_bytes == 8 << 20
    assert stats.num_workers == (workers if in_workers else 0)
    assert stage.stager.stats().batches == (0 if in_workers else stats.batches)
    assert stats.bottleneck.startswith("Loading was not timed") is not in_workers


class Reloaded(LightningDataModule):
    """Makes new loaders of one kind for each epoch."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.made = []

    def train_dataloader(self):
        self.made.append(self.make(32))
        return self.made[-1]

    def val_dataloader(self):
        return [self.make(8), self.make(12)]


class OfItsOwn(Module):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.samples.append(batch["index"].tolist())


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(loader(self.samples))


class Listed(list):
    """Batches in a sequence of a class that Lightning doesn't take apart."""


class OwnIteration(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch | {"index": batch["index"] + 1}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("make", "packs"),
    [
        (loader, True),
        (lambda samples, **options: loader(samples, shuffle=samples == 32, **options), True),
        (lambda samples, **options: DataLoader(Batches(samples), batch_size=None, **options), True),
        (
            lambda samples, **options: OwnIteration(
                Visits(samples), 4, collate_fn=collate, **options
            ),
            False,
        ),
        (lambda samples, **_: Listed(loader(samples)), False),
    ],
    ids=["maps", "shuffled", "iterable", "an iteration of its own", "a list"],
)
def test_loaders_made_per_epoch_train_the_same(in_workers, make, packs, persistent):
    found, stage = [], StageBatches(workers=in_workers)
    for callbacks in ([], [stage]):
        seed_everything(0, verbose=False)
        model = OfItsOwn()
        loaders = Reloaded(partial(make, num_workers=1, persistent_workers=persistent))
        trainer(*callbacks, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(
            model, datamodule=loaders
        )
        found.append((model.losses, model.samples))
        assert len(loaders.made) == 3
    assert found[0] == found[1]
    stats = stage.stats()
    assert stats.batches >= 3 * (8 + 2 + 3) + 2 + 2
    assert (stage.stager.stats().batches == 0) is (in_workers and packs)


def test_validation_finds_slabs_beside_training_workers():
    def large(samples):
        return DataLoader(
            torch.arange(samples * 50_000.0).reshape(samples, 50_000), 4, num_workers=2
        )

    class Large(Module):
        def training_step(self, batch, batch_idx):
            return self.model(**collate([Visits(1)[0]])) * batch.mean()

        def validation_step(self, batch, batch_idx):
            self.samples.append(batch[:, 0].tolist())

    slab = 851_968  # for 800,000 bytes
    stage, model = StageBatches(max_bytes=4 * slab), Large()
    trainer(stage, val_check_interval=4, max_epochs=2, num_sanity_val_steps=0).fit(
        model, large(80), large(32)
    )
    stats = stage.stats()
    assert (stats.batches, stats.fallback_batches) == (2 * (20 + 5 * 8), 0)
    assert stats.pool.peak_held_bytes <= 4 * slab
    assert len(model.samples) == 2 * 5 * 8


def test_a_loader_that_stages_already_is_left_alone():
    stage, model = StageBatches(), module()
    data = ps.DataLoader(Visits(32), 4, collate_fn=collate, device="cpu", num_workers=1)
    trainer(stage).fit(model, data)
    assert (stage.stats().batches, data.stats().batches) == (0, 8)
    assert len(model.losses) == 8


def test_a_loader_s_own_attributes_are_ignored():
    class Loader:
        _staging_settings = "its own"

        def __iter__(self):
            return iter(loader())

    stage = StageBatches()
    trainer(stage).fit(module(), Loader())
    assert stage.stats().batches == 8


def test_a_field_of_a_batch_may_be_values():
    @dataclass
    class Rollout:
        values: torch.Tensor

    loaders = TrainerLoaders(torch.device("cpu"), StageBatches()._options, in_workers=True)
    batch = Rollout(torch.ones(1))
    assert loaders.to_device(batch) is batch


def test_running_loaders_are_staged_in_the_main_process():
    stage, model, data = StageBatches(), module(), loader(num_workers=1, persistent_workers=True)
    next(iter(data))
    trainer(stage).fit(model, data)
    assert stage.stats().batches == stage.stager.stats().batches == 8


def test_a_wrong_option_is_an_error_here_too():
    with pytest.raises(ValueError, match="depth must"):
        trainer(StageBatches(max_bytes="1MiB", depth=-1)).fit(module(), loader())


def test_predictions_are_in_order_and_of_every_sample():
    for make in (
        loader,
        lambda samples, **options: ps.DataLoader(Visits(samples), 4, device="cpu", **options),
    ):
        predicted = trainer(StageBatches()).predict(
            module(), make(14, drop_last=True, num_workers=1)
        )
        assert torch.cat(predicted).tolist() == list(range(14))  # Lightning undoes drop_last


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 4), ("max_size_cycle", 8)])
def test_the_loaders_of_a_combined_loader_are_staged(mode, steps, in_workers):
    class Pairs(Module):
        def training_step(self, batch, batch_idx):
            losses = [self.model(**part) for part in batch.values()]
            self.losses.append(sum(loss.item() for loss in losses))
            return sum(losses)

        def validation_step(self, batch, batch_idx, dataloader_idx):
            pass

    found = []
    for callbacks in ([], [StageBatches(workers=in_workers)]):
        seed_everything(0, verbose=False)
        model = Pairs()
        trainer(*callbacks, num_sanity_val_steps=0).fit(
            model, CombinedLoader({"a": loader(16), "b": loader(32)}, mode), [loader(8), loader(12)]
        )
        found.append(model.losses)
    assert found[0] == found[1]
    assert len(found[1]) == steps
    assert callbacks[0].stats().batches == (2 * steps if in_workers else steps) + 2 + 3


def test_a_resumed_run_continues_at_the_right_sample(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def data():
        torch.manual_seed(3)
        return StatefulDataLoader(Visits(32), batch_size=4, collate_fn=collate, shuffle=True)

    def run(callbacks, **options):
        model = module()
        keep = ModelCheckpoint(
            dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        one = trainer(keep, *callbacks, enable_checkpointing=True, max_epochs=2, **options)
        return one, model

    whole, expected = run([])
    whole.fit(expected, data())
    first, _ = run([StageBatches()], max_steps=3)
    first.fit(module(), data())
    (path,) = tmp_path.glob("step=3.ckpt")
    stage = StageBatches()
    second, model = run([stage])
    second.fit(model, data(), ckpt_path=path, weights_only=False)
    assert model.samples == expected.samples[3:]
    assert stage.stats().batches == len(model.samples) == 13


def test_a_data_module_s_transfer_hooks_stay(caplog):
    class Data(LightningDataModule):
        seen = ()

        def train_dataloader(self):
            return loader()

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.seen += (batch["index"].dtype,)
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.seen += (batch["labels"].shape,)
            return batch

    stage, data = StageBatches(), Data()
    with pytest.warns(
        StagingWarning,
        match=r"Data\.on_before_batch_transfer gets them on the host; .*workers=False",
    ):
        trainer(stage).fit(module(), datamodule=data)
    assert stage.stats().batches == stage.stager.stats().batches == 8
    assert data.seen == (torch.int64, torch.Size([4])) * 8
    assert "overridden" not in caplog.text


def test_a_user_s_hook_is_named_not_replaced():
    class Own(Module):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    with pytest.raises(
        TypeError, match=r"Own\.transfer_batch_to_device: leave the callback out, and let that hook"
    ):
        trainer(StageBatches()).fit(Own(), loader())


def test_the_hook_is_restored_after_runs_and_errors():
    model = module()
    trainer(StageBatches()).fit(model, loader(8))
    assert "transfer_batch_to_device" not in vars(model)

    class Fails(Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    model = Fails()
    with pytest.raises(RuntimeError, match="no"):
        trainer(StageBatches()).fit(model, loader(8))
    assert "transfer_batch_to_device" not in vars(model)


def test_there_is_no_stager_before_a_trainer_begins():
    with pytest.raises(RuntimeError, match="has no stager yet: it is made when a trainer begins"):
        StageBatches().stats()
