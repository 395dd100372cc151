"""`Stager.prefetch` over framework loaders trains as the plain loop does, and resumes where it
stopped.
"""

import sys
import types
from functools import partial
from operator import itemgetter

import pytest
import torch
import torchdata.nodes
from accelerate import Accelerator, DataLoaderConfiguration
from accelerated import prepared, samples, state_after_three, train
from loader_data import Costly
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import pinstage as ps


def test_tqdm_has_a_total(stager):
    loader = DataLoader(list(range(8)), 2)
    for bar in (
        tqdm(stager.prefetch(loader), disable=True),
        stager.prefetch(tqdm(loader, disable=True)),
    ):
        assert len(bar) == 4
        assert [batch.tolist() for batch in bar] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- Accelerate ------------------------------------------------------------------------------------


class Streamed(IterableDataset):
    def __iter__(self):
        yield from samples()


@pytest.mark.parametrize("depth", [0, 1, 2, 20])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch_batches": True},
        {"dispatch_batches": True, "dataset": Streamed},
        {"split_batches": True},
        {"even_batches": False},
        {"use_stateful_dataloader": True},
        {"use_seedable_sampler": True},
        {"skipped": 3},
        {"batch_size": 5},
    ],
    ids=str,
)
def test_a_prepared_loader_trains_as_unstaged(stager, options, depth):
    *expected, _ = train(lambda loader: loader, **options)
    *found, _ = train(lambda loader: stager.prefetch(loader, depth=depth), **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(expected[0]) == (4 if "skipped" in options else 6)


def test_validation_within_an_epoch_doesn_t_end_it(stager):
    accelerator = Accelerator(cpu=True)
    training, validation = accelerator.prepare(DataLoader(samples(), 8), DataLoader(samples(), 16))
    seen = []
    for _ in stager.prefetch(training):
        for _ in stager.prefetch(validation):
            assert accelerator.gradient_state.active_dataloader is validation
        for _ in stager.prefetch(validation):
            break  # from then on Accelerate treats it as the active loader
        validation.end()
        assert accelerator.gradient_state.active_dataloader is training
        seen.append(accelerator.gradient_state.end_of_dataloader)
    assert seen == [False, False, False, True]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "wrap", [tqdm, enumerate, lambda loader: (batch for batch in loader), iter]
)
def test_a_hidden_prepared_loader_is_refused(stager, wrap, background):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples(), 4))
    with pytest.raises(
        ps.errors.PinstageError, match=r"Accelerate's DataLoaderShard through a .*stager\.prefetch"
    ):
        list(stager.prefetch(wrap(loader), background=background))


@pytest.mark.parametrize(
    "options", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str
)
def test_a_prepared_loader_is_not_read_in_background(stager, options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(samples(), 4, num_workers=1))
    assert stager.prefetch(loader)._background is False
    with pytest.raises(ValueError, match=r"use pinstage\.integrations\.accelerate\.prepare"):
        stager.prefetch(loader, background=True)


def test_much_work_over_a_prepared_loader_warns(stager, monkeypatch):
    monkeypatch.setattr("pinstage._compat.probes._warned", set())
    monkeypatch.setattr("pinstage._stage._own_work._LARGE_SHARE", 0)  # the machine may be busy
    loader = DataLoader([Costly()] * 12, 1, num_workers=1, collate_fn=itemgetter(0))
    with pytest.warns(ps.errors.StagingWarning, match=r"pinstage\.wrap_loader\(loader, "):
        list(stager.prefetch(Accelerator(cpu=True).prepare(loader)))


# -- states ----------------------------------------------------------------------------------------


def stateful():
    return StatefulDataLoader(list(range(32)), batch_size=4, num_workers=2)


def nodes():
    numbers = torchdata.nodes.SamplerWrapper(range(32))
    batches = torchdata.nodes.Mapper(torchdata.nodes.Batcher(numbers, 4), torch.tensor)
    return torchdata.nodes.Loader(torchdata.nodes.Prefetcher(batches, 3))


@pytest.mark.parametrize(
    ("make", "background"),
    [
        (stateful, False),
        (stateful, True),
        (nodes, False),
        (nodes, True),
        (partial(prepared, 0), "auto"),
        (partial(prepared, 1), "auto"),
    ],
)
def test_a_state_after_three_batches_says_twelve_samples(stager, make, background):
    resumed = make()
    resumed.load_state_dict(state_after_three(stager.prefetch(make(), background=background)))
    resumed = stager.prefetch(resumed, background=background)
    assert [batch.tolist()[0] for batch in resumed] == [12, 16, 20, 24, 28]


# -- mosaicml-streaming ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streaming():
    """The package. It imports torchvision for its vision datasets, which are not used here."""
    import transformers  # noqa: F401 - it looks for torchvision, too

    names = (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    )
    modules = {name: types.ModuleType(name) for name in names}
    modules["torchvision.datasets"].VisionDataset = object
    modules["torchvision.transforms.functional"].to_tensor = None
    with pytest.MonkeyPatch.context() as patched:
        for name, module in modules.items():
            patched.setitem(sys.modules, name, module)
        import streaming
    return streaming


@pytest.fixture
def written(streaming, tmp_path):
    with streaming.MDSWriter(out=str(tmp_path), columns={"x": "int"}) as writer:
        for number in range(32):
            writer.write({"x": number})
    return str(tmp_path)


def test_a_streaming_loader_s_state_counts_yielded_samples(stager, streaming, written, workers):
    def make():
        dataset = streaming.StreamingDataset(local=written, shuffle=False, batch_size=4)
        return streaming.StreamingDataLoader(dataset, batch_size=4, num_workers=workers)

    batches = stager.prefetch(make())
    for number, batch in enumerate(batches):
        assert batch["x"].tolist() == list(range(4 * number, 4 * number + 4))
        assert batches.state_dict()["sample_in_epoch"] == 4 * number + 4
        if number == 2:
            break
    state = batches.state_dict()
    del batches
    streaming.base.util.clean_stale_shared_memory()
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch["x"].tolist()[0] for batch in stager.prefetch(resumed)] == [12, 16, 20, 24, 28]
