"""transformers' Trainer with the mixin `StageInputs`."""

import pytest
import torch
from programs import both_ways, reports
from train_transformers import Returns, StagingTrainer, read_options, train
from transformers import Trainer, TrainingArguments
from visits import Visits, collate

import pinstage as ps
from pinstage.integrations.transformers import StageInputs

SAME = ("losses", "samples", "weights", "evaluated")
EVALUATED = 24 // 4


def run(folder, way, *words, **further):
    return train(read_options(["--way", way, "--folder", str(folder), *words]), **further)


def settings(folder, **options):
    """Return settings for the CPU that leave nothing in the folder."""
    return TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        save_strategy="no",
        **options,
    )


def test_two_processes_train_to_the_trainer_s_results(tmp_path):
    for rank in both_ways(
        "train_transformers", tmp_path, {"plain": ["--folder", str(tmp_path / "kept")]}
    ):
        ours, plain = rank["plain pinstage"], rank["plain plain"]
        assert all(ours[name] == plain[name] for name in SAME)
        assert len(ours["losses"]) == 2 * 8
        assert len(ours["weights"]) == 2 * 3
        assert ours["batches"] == 2 * (8 + EVALUATED // 2)
        assert ours["passed"] == 0


def test_the_program_stages_every_batch(tmp_path):
    (found,) = reports("train_transformers.py", tmp_path / "out", "--folder", tmp_path, ranks=1)
    assert found["batches"] == len(found["losses"]) + 2 * EVALUATED == 2 * (15 + EVALUATED)


@pytest.mark.parametrize("place", ["workers", "main"])
def test_every_batch_of_training_and_evaluation_is_staged(tmp_path, workers, place):
    words = ["--workers", str(workers), "--pack-in", place]
    plain, ours = (run(tmp_path / way, way, *words) for way in ("plain", "pinstage"))
    assert all(ours[name] == plain[name] for name in SAME)
    assert ours["batches"] == 2 * (15 + EVALUATED)
    assert ours["passed"] == 0
    assert ours["packed_here"] == (ours["batches"] if place == "main" else 0)
    assert len(ours["weights"]) == 2 * 5


@pytest.mark.parametrize(("place", "elsewhere"), [("main", 0), ("workers", 9)])
def test_a_resumed_run_continues_at_the_right_sample(tmp_path, place, elsewhere):
    whole = run(tmp_path, "plain", "--workers", "1")
    words = ["--resume", str(tmp_path / "checkpoint-2"), "--workers", "1", "--pack-in", place]
    rest = run(tmp_path / "rest", "pinstage", *words)
    assert rest["samples"] == whole["samples"][2 * 3 :]
    assert rest["losses"] == whole["losses"][2 * 3 :]
    assert rest["weights"] == whole["weights"][2:]
    # For the rest of the epoch Accelerate makes another loader; its batches are on the device, the
    # CPU, already.
    assert rest["batches"] == 30 - 6 + 2 * EVALUATED - elsewhere


@pytest.mark.parametrize(
    "config",
    [
        {"split_batches": True},
        {"use_seedable_sampler": False},
        {"even_batches": False},
        {"dispatch_batches": True},
    ],
    ids=str,
)
def test_the_options_of_the_accelerator_hold(tmp_path, config):
    plain, ours = (
        run(tmp_path / way, way, accelerator_config=config) for way in ("plain", "pinstage")
    )
    assert all(ours[name] == plain[name] for name in SAME)
    assert "dispatch_batches" in config or ours["batches"] == 2 * (15 + EVALUATED)


class Streamed(torch.utils.data.IterableDataset):
    """Accelerate dispatches its batches by default."""

    def __iter__(self):
        return iter(Visits(32)[index] for index in range(32))


class Keeping(StagingTrainer):
    """Keeps the loaders that it uses."""

    def __init__(self, *arguments, **keywords):
        self.loaders = []
        super().__init__(*arguments, **keywords)

    def _prepared(self, loader, **options):
        self.loaders.append(super()._prepared(loader, **options))
        return self.loaders[-1]


@pytest.mark.parametrize("dataset", [Visits(32), Streamed()], ids=["asked", "streamed"])
def test_what_accelerate_dispatches_is_staged_by_its_loader(tmp_path, dataset):
    arguments = settings(
        tmp_path,
        max_steps=6,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        accelerator_config={} if isinstance(dataset, Streamed) else {"dispatch_batches": True},
    )
    trainer = Keeping(
        Returns(), arguments, data_collator=collate, train_dataset=dataset, eval_dataset=Visits(16)
    )
    trainer.train()
    for _ in range(2):
        trainer.evaluate()
    training, evaluating, again = trainer.loaders
    assert training.stats().batches >= 6
    assert evaluating is again
    if not isinstance(dataset, Streamed):
        assert evaluating.stats().batches == 4


class Custom(Trainer):
    pass


class Capped(StageInputs):
    max_bytes = "3MiB"


@pytest.mark.parametrize(
    ("bases", "better"),
    [
        ((Trainer, StageInputs), "StageInputs, Trainer"),
        ((Custom, StageInputs), "StageInputs, Custom"),
        ((Trainer, Capped), "Capped, Trainer"),
    ],
    ids=["trainer", "derived trainer", "derived mixin"],
)
def test_a_trainer_before_the_mixin_is_refused(bases, better):
    with pytest.raises(
        TypeError, match=rf"Mine would stage nothing: .*; write class Mine\({better}\)"
    ):
        type("Mine", bases, {})


def test_a_derived_trainer_may_come_before_the_mixin():
    class Mine(Custom, StageInputs, Trainer):  # methods of Custom call the mixin's
        pass

    assert Mine.get_train_dataloader is StageInputs.get_train_dataloader


def test_predictions_are_staged_under_the_class_s_cap(tmp_path):
    class Mine(StageInputs, Trainer):
        max_bytes = "3MiB"

    trainer = Mine(Returns(), settings(tmp_path), data_collator=collate)
    predicted = trainer.predict(Visits(20))
    assert predicted.label_ids.shape == (20,)
    assert trainer.staging_stats().batches == 3  # 8 in a batch
    assert trainer.stager.pool.max_bytes == 3 << 20


def test_a_stager_may_be_given(tmp_path):
    arguments = settings(tmp_path, max_steps=2)
    trainer = StagingTrainer(Returns(), arguments, data_collator=collate, train_dataset=Visits(32))
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        trainer.stager = stager
        trainer.train()
        assert stager.stats().batches == 2
    assert not torch.cuda.is_initialized()
