"""Accelerate's prepared loaders, staged by `pinstage.integrations.accelerate.prepare`."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from programs import both_ways, reports
from torch.utils.data import DataLoader
from torchdata import stateful_dataloader
from visits import Visits, collate

import pinstage as ps
from pinstage.integrations.accelerate import prepare, skip_first_batches

CASES = {
    "plain": [],
    "workers": ["--workers", "2"],
    "dispatch_batches": ["--dispatch-batches"],
    "split_batches": ["--split-batches"],
    "uneven_batches": ["--uneven-batches", "--samples", "54"],
    "even_batches": ["--samples", "50"],
    "skip_first_batches": ["--skip", "5", "--workers", "1"],
    "dispatch_and_skip": ["--dispatch-batches", "--skip", "3"],
    "stateful": ["--use-stateful-dataloader"],
    "stateful_with_workers": ["--use-stateful-dataloader", "--workers", "1"],
}


# -- two processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of two processes, by case and way."""
    return both_ways("train_accelerate", tmp_path_factory.mktemp("accelerate"), CASES)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_accelerate_s_results(ranks, case):
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


def test_the_program_stages_every_batch(tmp_path):
    (found,) = reports("train_accelerate.py", tmp_path, "--way", "pinstage", ranks=1)
    assert found["batches"] == len(found["losses"]) == 2 * 15


# -- one process -----------------------------------------------------------------------------------


STATEFUL = DataLoaderConfiguration(use_stateful_dataloader=True)


def made(samples=32, **options):
    return DataLoader(Visits(samples), 4, collate_fn=collate, **options)


def firsts(batches):
    return [batch["index"].tolist()[0] for batch in batches]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_torch_s_and_prepared_loaders_are_accepted(is_prepared):
    accelerator = Accelerator(cpu=True)
    loader = prepare(
        accelerator, accelerator.prepare(made()) if is_prepared else made(), max_bytes="8MiB"
    )
    assert isinstance(loader, DataLoader)
    assert len(loader) == 8
    assert firsts(loader) == firsts(loader) == list(range(0, 32, 4))
    assert loader.stats().batches == 16
    assert loader.stats().pool.max_bytes == 8 << 20


def test_a_saved_state_resumes_at_the_right_sample(tmp_path, workers):
    def staged():
        accelerator = Accelerator(cpu=True, dataloader_config=STATEFUL)
        return accelerator, prepare(accelerator, made(num_workers=workers), max_bytes="8MiB")

    accelerator, loader = staged()
    for number, _ in enumerate(loader, 1):
        if number == 3:
            accelerator.save_state(tmp_path)
            break
    accelerator, loader = staged()
    accelerator.load_state(tmp_path)
    assert firsts(loader) == [12, 16, 20, 24, 28]
    # From the pass that Accelerate begins in `prepare`, when it asks for a state.
    ahead = 2 if workers else 0
    assert 5 <= loader.stats().batches <= 5 + ahead
    assert firsts(loader) == list(range(0, 32, 4))


@pytest.mark.parametrize("is_seedable", [False, True])
@pytest.mark.parametrize("dispatch_batches", [None, True])
def test_workers_pack_stateful_loaders_in_accelerate_s_order(is_seedable, dispatch_batches):
    options = DataLoaderConfiguration(
        use_stateful_dataloader=True,
        use_seedable_sampler=is_seedable,
        dispatch_batches=dispatch_batches,
    )

    def passes(make):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        loader = make(accelerator, made(shuffle=True, num_workers=2))
        seen = [batch["index"].tolist() for _ in range(2) for batch in loader]
        return loader, seen, torch.rand(1).item()

    packed_here = []
    _, *expected = passes(Accelerator.prepare)
    loader, *found = passes(
        partial(prepare, max_bytes="8MiB", keep_on_host=lambda path, leaf: packed_here.append(path))
    )
    assert found == expected
    assert loader.stats().batches == 16
    assert packed_here == []  # the function is called where batches are packed
    assert stateful_dataloader.StatefulDataLoader.__module__.startswith("torchdata.")


def test_an_error_while_preparing_leaves_torchdata_unchanged():
    loader_class = stateful_dataloader.StatefulDataLoader
    broken = made()
    del vars(broken)["dataset"]
    with pytest.raises(AttributeError):
        prepare(Accelerator(cpu=True, dataloader_config=STATEFUL), broken)
    assert stateful_dataloader.StatefulDataLoader is loader_class


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_loader_is_prepared_and_staged_once(is_stateful):
    options = DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = prepare(accelerator, made())
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader]
    with pytest.raises(TypeError, match=r"cannot wrap this .* arrive on cpu already"):
        prepare(accelerator, loader, max_bytes="8MiB")


@pytest.mark.parametrize(
    "arguments",
    [
        lambda accelerator: (made(), None),
        lambda accelerator: (made(), accelerator),
        lambda accelerator: (accelerator, None),
    ],
    ids=["no accelerator", "swapped", "no loader"],
)
def test_preparing_anything_else_is_refused(arguments):
    arguments = arguments(Accelerator(cpu=True))
    with pytest.raises(TypeError, match="takes an Accelerator and a DataLoader, in this order: "):
        prepare(*arguments)


def test_a_prepared_optimizer_s_state_can_be_offloaded(make_pool):
    def trained(offload):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        offloaded = offload(optimizer)
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 64)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        return model.weight, offloaded

    offload = partial(ps.offload.optimizer_state, pool=make_pool("1MiB"), min_bytes="4KiB")
    weight, offloaded = trained(offload)
    assert offloaded.stats().host_bytes == 2 * weight.nbytes
    offloaded.close()
    assert torch.equal(weight, trained(id)[0])


@pytest.mark.usefixtures("slabs_for_all")
def test_a_pool_may_be_shared():
    accelerator = Accelerator(cpu=True)
    with ps.SlabPool("16MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        one, other = (prepare(accelerator, made(), pool=pool) for _ in range(2))
        assert firsts(one) == firsts(other)
        assert pool.stats().hits + pool.stats().misses == 16


def test_a_loader_and_its_rest_share_slabs():
    loader = prepare(Accelerator(cpu=True), made(num_workers=1), max_bytes="8MiB")
    rest = skip_first_batches(loader, 3)
    assert firsts(rest) == [12, 16, 20, 24, 28]
    assert firsts(loader) == list(range(0, 32, 4))
    assert rest.stats() == loader.stats()
    assert loader.stats().batches == 13
    again = skip_first_batches(loader, 7)  # in the middle of training
    assert firsts(again) == [28]
    assert again.stats().batches == loader.stats().batches == 14
    assert firsts(skip_first_batches(again, 0)) == [28]


@pytest.mark.parametrize(
    "make", [made, lambda: Accelerator(cpu=True).prepare(made())], ids=["torch's", "prepared"]
)
def test_skipping_batches_of_an_unstaged_loader_is_refused(make):
    with pytest.raises(
        TypeError,
        match=r"cannot skip batches of this DataLoader.* and stage the rest: it is not the",
    ):
        skip_first_batches(make(), 2)
