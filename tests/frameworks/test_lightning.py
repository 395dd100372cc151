"""Lightning's trainer with `StageBatches`, and with `ps.DataLoader`."""

import logging

import pytest
import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from programs import reports
from torch.utils.data import DataLoader
from train_lightning import Module
from visits import Visits, collate

import pinstage as ps
from pinstage.integrations.lightning import StageBatches

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(samples=32, **options):
    return DataLoader(Visits(samples), batch_size=4, collate_fn=collate, **options)


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}
    return Trainer(callbacks=list(callbacks), **quiet | options)


def module():
    seed_everything(0, verbose=False)
    return Module()


# -- two processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the ranks of two processes reported, by way."""
    out = tmp_path_factory.mktemp("lightning")
    return {way: reports("train_lightning.py", out / way, "--way", way) for way in ("plain", "callback", "loader")}


@pytest.mark.parametrize("way", ["callback", "loader"])
def test_two_processes_train_to_lightning_s_own_losses_bit_for_bit(ranks, way):
    for ours, plain in zip(ranks[way], ranks["plain"], strict=True):
        assert ours["losses"] == plain["losses"]
        assert ours["samples"] == plain["samples"]
        assert len(ours["losses"]) == 2 * 64 // 4 // 2


def test_the_callback_stages_every_batch_of_each_process(ranks):
    # 8 of each epoch, 2 of its validation, and 2 of the sanity check
    assert [rank["batches"] for rank in ranks["callback"]] == [2 * (8 + 2) + 2] * 2


def test_lightning_s_own_copy_of_the_loader_stages_every_batch(ranks):
    assert [rank["batches"] for rank in ranks["loader"]] == [2 * 8] * 2


def test_each_process_trains_on_half_of_the_samples(ranks):
    first, second = ({index for batch in rank["samples"][:8] for index in batch} for rank in ranks["loader"])
    assert first | second == set(range(64))
    assert not first & second


# -- what a trainer does -----------------------------------------------------------------------------------------------


def test_every_batch_of_training_validation_sanity_check_test_and_prediction_is_staged():
    stage, model = StageBatches(max_bytes="8MiB"), module()
    one = trainer(stage, num_sanity_val_steps=1)
    one.fit(model, loader(), loader(8))
    assert stage.stats().batches == 1 + 8 + 2
    one.validate(model, loader(8), verbose=False)
    one.predict(model, loader(12))
    assert stage.stats().batches == 1 + 8 + 2 + 2 + 3
    assert stage.stats().pool.max_bytes == 8 << 20


def test_predictions_are_in_order_and_of_every_sample():
    for make in (loader, lambda samples, **options: ps.DataLoader(Visits(samples), 4, device="cpu", **options)):
        predicted = trainer(StageBatches()).predict(module(), make(14, drop_last=True, num_workers=1))
        assert torch.cat(predicted).tolist() == list(range(14))  # Lightning takes drop_last back


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 4), ("max_size_cycle", 8)])
def test_the_loaders_of_a_combined_loader_are_staged_together(mode, steps):
    class Pairs(Module):
        def training_step(self, batch, batch_idx):
            losses = [self.model(**part) for part in batch.values()]
            self.losses.append(sum(loss.item() for loss in losses))
            return sum(losses)

        def validation_step(self, batch, batch_idx, dataloader_idx):
            pass

    found = []
    for callbacks in ([], [StageBatches()]):
        seed_everything(0, verbose=False)
        model = Pairs()
        trainer(*callbacks, num_sanity_val_steps=0).fit(
            model, CombinedLoader({"a": loader(16), "b": loader(32)}, mode), [loader(8), loader(12)]
        )
        found.append(model.losses)
    assert found[0] == found[1]
    assert len(found[1]) == steps
    assert callbacks[0].stats().batches == steps + 2 + 3


@pytest.mark.parametrize("kind", ["callback", "loader"])
def test_overfit_batches_trains_on_the_same_ones_again(kind):
    found = {}
    for way in ("plain", kind):
        model, stage = module(), StageBatches()
        data = loader(shuffle=True) if way != "loader" else ps.DataLoader(Visits(32), 4, shuffle=True, device="cpu")
        one = trainer(*([stage] if way == "callback" else []), overfit_batches=2, max_epochs=3)
        one.fit(model, data)
        found[way] = model.losses, model.samples
    assert found["plain"] == found[kind]
    assert found[kind][1] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


def test_iterable_datasets_and_epochs_cut_short_are_staged():
    stage = StageBatches()

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(loader(32))

    trainer(stage, limit_train_batches=3).fit(module(), DataLoader(Batches(), batch_size=None))
    assert stage.stats().batches == 3


def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_with_the_right_sample(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def data():
        torch.manual_seed(3)
        return StatefulDataLoader(Visits(32), batch_size=4, collate_fn=collate, shuffle=True)

    def run(callbacks, **options):
        model = module()
        keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
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


def test_a_data_module_s_hooks_around_the_transfer_stay_its_own(caplog):
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
    trainer(stage).fit(module(), datamodule=data)
    assert stage.stats().batches == 8
    assert data.seen == (torch.int64, torch.Size([4])) * 8
    assert "overridden" not in caplog.text


def test_a_hook_of_the_user_s_own_is_not_replaced_but_named():
    class Own(Module):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    with pytest.raises(TypeError, match=r"Own\.transfer_batch_to_device: leave the callback out, and let that hook"):
        trainer(StageBatches()).fit(Own(), loader())


def test_the_hook_has_its_place_back_after_a_run_and_after_an_error():
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
