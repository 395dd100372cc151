"""`Stager.prefetch` over framework loaders resumes where it stopped, or refuses them."""

import sys
import types

import pytest
import torch
import torchdata.nodes
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerated import samples, state_after_three
from torch.utils.data import DataLoader
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


@pytest.mark.parametrize(
    "options", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str
)
@pytest.mark.parametrize("skipped", [0, 3])
def test_a_prepared_loader_is_refused(stager, options, skipped):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(samples(), 4))
    with pytest.raises(
        TypeError,
        match=r"Accelerate's DataLoader\w+: .*pinstage\.integrations\.accelerate\.prepare\(",
    ):
        stager.prefetch(skip_first_batches(loader, skipped))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "wrap", [tqdm, enumerate, lambda loader: (batch for batch in loader), iter]
)
def test_a_hidden_prepared_loader_is_refused(stager, wrap, background):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples(), 4))
    with pytest.raises(
        ps.errors.PinstageError, match=r"Accelerate's DataLoaderShard through a .*prepare\("
    ):
        list(stager.prefetch(wrap(loader), background=background))


# -- states ----------------------------------------------------------------------------------------


def stateful():
    return StatefulDataLoader(list(range(32)), batch_size=4, num_workers=2)


def nodes():
    numbers = torchdata.nodes.SamplerWrapper(range(32))
    batches = torchdata.nodes.Mapper(torchdata.nodes.Batcher(numbers, 4), torch.tensor)
    return torchdata.nodes.Loader(torchdata.nodes.Prefetcher(batches, 3))


@pytest.mark.parametrize("make", [stateful, nodes])
@pytest.mark.parametrize("background", [False, True])
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
