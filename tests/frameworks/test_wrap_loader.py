"""`DataLoader` and `wrap_loader` stage in the frameworks that take loaders, and report where they
can't.
"""

import gc
import os
import time
import warnings
from functools import partial

import lightning
import pytest
import torch
from accelerated import prepared, samples, state_after_three, train
from monai.data import DataLoader as MonaiLoader
from monai.data import ThreadDataLoader
from quiet_trainer import trainer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyG's own imports call torch.jit.script
    from torch_geometric.loader import DataLoader as GeometricLoader


# -- Accelerate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch_batches": True},
        {"split_batches": True},
        {"use_stateful_dataloader": True},
        {"use_seedable_sampler": True},
    ],
    ids=str,
)
def test_a_wrapped_prepared_loader_trains_like_the_original(options, workers):
    options |= {"shuffle": True, "workers": workers}
    *expected, _ = train(lambda loader: loader, **options)
    *found, loader = train(lambda loader: ps.wrap_loader(loader, max_bytes="1MiB"), **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(expected[0]) == 6  # three steps an epoch
    assert loader.stats().batches == 16


def test_a_wrapped_prepared_loader_s_state_continues_correctly():
    resumed = ps.wrap_loader(prepared(1))
    resumed.load_state_dict(state_after_three(ps.wrap_loader(prepared(1))))
    assert [batch.tolist()[0] for batch in resumed] == [12, 16, 20, 24, 28]


# -- Lightning -------------------------------------------------------------------------------------


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch):
        inputs, targets = batch
        self.seen += inputs[:, 0].tolist()
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def predict_step(self, batch):
        self.seen += batch[0][:, 0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def staging(**options):
    return ps.DataLoader(samples(), 4, device="cpu", **options)


def wrapped(cls=DataLoader, pool=None, **options):
    return ps.wrap_loader(cls(samples(), batch_size=4, **options), pool=pool, device="cpu")


MAKERS = [staging, wrapped, partial(wrapped, StatefulDataLoader)]
ALL = sorted(samples().tensors[0][:, 0].tolist() * 2)


@pytest.fixture
def distributed():
    """A distributed trainer of one process: Lightning makes new loaders with its own sampler."""
    # Lightning leaves it set: another test's port may still be in use.
    os.environ.pop("MASTER_PORT", None)
    run = trainer(strategy="ddp", devices=1, max_epochs=2)
    yield run
    vars(run).clear()  # pytest keeps it for a while, and it its loaders
    os.environ.pop("MASTER_PORT", None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("from_hook", [False, True])
def test_a_loader_that_lightning_makes_anew_stages(make, from_hook, workers, recwarn, distributed):
    loader, run, model = make(num_workers=workers), distributed, Model()
    if from_hook:
        model.train_dataloader = lambda: make(num_workers=workers)
    run.fit(model, None if from_hook else loader)
    assert isinstance(
        run.train_dataloader.batch_sampler.sampler, torch.utils.data.DistributedSampler
    )
    assert run.train_dataloader is not loader
    assert run.train_dataloader.stats().batches == 16
    assert sorted(model.seen) == ALL
    del loader, run, model
    gc.collect()
    time.sleep(0.1)  # the reaper's thread would warn
    assert [str(warning.message) for warning in recwarn if "pinstage" in str(warning.message)] == []


@pytest.mark.parametrize("make", MAKERS)
def test_a_loader_lightning_overfits_with_stages(make):
    loader = make(shuffle=True)
    run = trainer(overfit_batches=3, max_epochs=2)
    run.fit(model := Model(), loader)
    first = samples().tensors[0][:12, 0].tolist()
    assert model.seen == first * 2
    assert run.train_dataloader.stats().batches == 6
    loader = make()
    model = Model()
    trainer().predict(model, loader)
    assert sorted(model.seen * 2) == ALL


@pytest.mark.parametrize("make", MAKERS)
def test_a_given_pool_serves_the_new_loader(make, distributed):
    with ps.SlabPool("1MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        loader = make(num_workers=1, pool=pool)
        distributed.fit(Model(), loader)
        assert distributed.train_dataloader.stats().batches == 16
        assert distributed.train_dataloader.stats().pool == pool.stats()
        assert pool.stats().misses > 0
        del loader
        gc.collect()


# -- other loaders ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls", [MonaiLoader, ThreadDataLoader, GeometricLoader], ids=["monai", "monai threads", "PyG"]
)
def test_loaders_of_other_libraries_stage(cls, workers):
    images = [
        {"image": torch.full((1, 4, 4), float(number)), "name": str(number)} for number in range(10)
    ]
    loader = ps.wrap_loader(cls(images, batch_size=2, num_workers=workers), device="cpu")
    for _ in range(2):
        assert [batch["image"][:, 0, 0, 0].tolist() for batch in loader] == [
            [n, n + 1] for n in range(0, 10, 2)
        ]
    assert loader.stats().batches == 10
