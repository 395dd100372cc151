"""Accelerate's prepared loaders, staged by `pinstage.integrations.accelerate.prepare`."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_cases import CASES
from programs import reports
from torch.utils.data import DataLoader
from torchrun import torchrun
from visits import Visits, collate

import pinstage as ps
from pinstage.integrations.accelerate import prepare, skip_first_batches


@pytest.fixture(autouse=True)
def no_accelerator():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


# -- two processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes saw, by case and way."""
    out = tmp_path_factory.mktemp("accelerate")
    torchrun(Path(__file__).parent / "accelerate_cases.py", out, timeout=110)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_accelerate_s_own_losses_and_weights_bit_for_bit(ranks, case):
    for rank in ranks:
        plain, ours = rank[f"{case} plain"], rank[f"{case} pinstage"]
        for name in ("losses", "weights", "samples", "ends", "gathered"):
            assert ours[name] == plain[name], name
        assert len(ours["losses"]) >= 10


@pytest.mark.parametrize("case", CASES)
def test_every_batch_is_staged_where_it_is_read(ranks, case):
    batches = [rank[f"{case} pinstage"]["batches"] for rank in ranks]
    if "dispatch" in case:  # by the main process, for both
        assert batches == [15 * 2 if "skip" not in case else 15 * 2 - 3, 0]
    else:
        expected = [len(rank[f"{case} pinstage"]["losses"]) for rank in ranks]
        assert batches == expected


def test_the_program_trains_to_the_same_losses(tmp_path):
    plain, ours = (
        reports("train_accelerate.py", tmp_path / way, "--way", way, ranks=1)[0] for way in ("plain", "pinstage")
    )
    assert ours["losses"] == plain["losses"]
    assert ours["batches"] == 2 * 15


# -- one process -------------------------------------------------------------------------------------------------------


def made(samples=32, **options):
    return DataLoader(Visits(samples), 4, collate_fn=collate, **options)


def firsts(batches):
    return [batch["index"].tolist()[0] for batch in batches]


@pytest.mark.parametrize("kind", ["torch's", "ours", "prepared"])
def test_torch_s_loader_ours_and_a_prepared_one_may_be_given(kind):
    accelerator = Accelerator(cpu=True)
    given = {
        "torch's": made,
        "ours": lambda: ps.DataLoader(Visits(32), 4, collate_fn=collate, device="cpu"),
        "prepared": lambda: accelerator.prepare(made()),
    }[kind]()
    loader = prepare(accelerator, given, max_bytes="8MiB")
    assert isinstance(loader, DataLoader)
    assert len(loader) == 8
    assert firsts(loader) == firsts(loader) == list(range(0, 32, 4))
    assert loader.stats().batches == 16
    assert loader.stats().pool.max_bytes == 8 << 20


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_saved_in_the_middle_goes_on_with_the_right_sample(tmp_path, workers):
    def staged():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        return accelerator, prepare(accelerator, made(num_workers=workers), max_bytes="8MiB")

    accelerator, loader = staged()
    for number, _ in enumerate(loader, 1):
        if number == 3:
            accelerator.save_state(tmp_path)
            break
    accelerator, loader = staged()
    accelerator.load_state(tmp_path)
    assert firsts(loader) == [12, 16, 20, 24, 28]
    assert loader.stats().batches == 5
    assert firsts(loader) == list(range(0, 32, 4))


def test_a_pool_may_be_shared():
    accelerator = Accelerator(cpu=True)
    with ps.SlabPool(ps.SharedMemory(register=False), max_bytes="16MiB") as pool:
        one, other = (prepare(accelerator, made(), pool=pool) for _ in range(2))
        assert firsts(one) == firsts(other)
        assert pool.stats().total_leases == 16


def test_skipping_batches_of_a_loader_that_is_not_staged_is_refused():
    loader = Accelerator(cpu=True).prepare(made())
    with pytest.raises(TypeError, match="cannot skip batches of this DataLoaderShard: it is not staged; pass what"):
        skip_first_batches(loader, 2)
    with pytest.raises(TypeError, match="cannot skip batches of this DataLoader: it is not staged"):
        skip_first_batches(made(), 2)
    assert torch.is_tensor(next(iter(loader))["index"])
