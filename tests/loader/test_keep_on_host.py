"""`keep_on_host` of a loader: the named leaves stay on the host, with workers and without."""

import pickle

import pytest
from loader_data import KEPT_PATHS, Mapped, is_kept, same, sample_of_which_some_stays
from torch.utils.data import DataLoader

import pinstage as ps
from pinstage.errors import LayoutError


def storages(batch):
    """Return the leaves' memory."""
    leaves = [batch["values"], batch["lengths"], *batch["more"]]
    return [leaf.untyped_storage().data_ptr() for leaf in leaves]


def make(loader=DataLoader, **options):
    return loader(Mapped(sample_of_which_some_stays), 5, **options)


def keeping(**options):
    return make(ps.DataLoader, **{"device": "cpu", "max_bytes": "8MiB"} | options)


def check(loader):
    for turn in range(2):
        for batch, expected in zip(list(loader), make(), strict=True):
            assert same(batch, expected)
            assert len(set(storages(batch))) == 5, turn
            assert batch["values"].untyped_storage().nbytes() == batch["values"].nbytes
            assert batch["lengths"].device.type == "cpu"


@pytest.mark.parametrize(
    ("keep_on_host", "workers", "method"),
    [
        (KEPT_PATHS, 0, None),
        (is_kept, 0, None),
        (KEPT_PATHS, 2, "fork"),
        (is_kept, 2, "fork"),
        (KEPT_PATHS, 1, "spawn"),
        (is_kept, 1, "forkserver"),
    ],
)
def test_what_a_loader_keeps_stays_on_the_host(keep_on_host, workers, method):
    check(keeping(keep_on_host=keep_on_host, num_workers=workers, multiprocessing_context=method))


def test_a_wrapped_loader_and_copies_of_it_keep(workers):
    loader = ps.wrap_loader(
        make(num_workers=workers), device="cpu", max_bytes="8MiB", keep_on_host=iter(KEPT_PATHS)
    )
    check(loader)
    check(pickle.loads(pickle.dumps(loader)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_path_to_nothing_fails_the_first_batch(workers):
    loader = keeping(num_workers=workers, keep_on_host="['length']")
    with pytest.raises(
        LayoutError,
        match=r"keep_on_host=\"\['length'\]\" leads to nothing in this batch; its leaves are at",
    ):
        next(iter(loader))


@pytest.mark.usefixtures("slabs_for_all")
@pytest.mark.filterwarnings(
    "ignore:no batch of a DataLoader found a slab:pinstage.errors.StagingWarning"
)
def test_a_batch_above_the_cap_keeps_too():
    samples = Mapped(sample_of_which_some_stays, 100)
    loader = ps.DataLoader(samples, 100, device="cpu", max_bytes=4096, keep_on_host=KEPT_PATHS)
    batch = next(iter(loader))
    assert same(batch, next(iter(DataLoader(samples, 100))))
    assert loader.stats().fallback_batches == 1
    assert len(set(storages(batch)[:3])) == 3
