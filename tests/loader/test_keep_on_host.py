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


def check(loader):
    plain = DataLoader(Mapped(sample_of_which_some_stays), 5)
    for turn in range(2):
        found = list(loader)
        for batch, expected in zip(found, plain, strict=True):
            same(batch, expected)
            values, lengths, first, second, number = storages(batch)
            assert len({values, lengths, first, second, number}) == 5, turn
            assert batch["values"].untyped_storage().nbytes() == batch["values"].nbytes
            assert batch["lengths"].device.type == "cpu"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keep_on_host", [KEPT_PATHS, is_kept], ids=["paths", "function"])
def test_what_a_loader_keeps_stays_on_the_host(keep_on_host, workers):
    check(
        ps.DataLoader(
            Mapped(sample_of_which_some_stays),
            5,
            num_workers=workers,
            device="cpu",
            max_bytes="8MiB",
            keep_on_host=keep_on_host,
        )
    )


@pytest.mark.parametrize(
    ("keep_on_host", "method"), [(KEPT_PATHS, "spawn"), (is_kept, "forkserver")]
)
def test_workers_that_begin_anew_know_what_stays(keep_on_host, method):
    check(
        ps.DataLoader(
            Mapped(sample_of_which_some_stays),
            5,
            num_workers=1,
            multiprocessing_context=method,
            device="cpu",
            max_bytes="8MiB",
            keep_on_host=keep_on_host,
        )
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapped_loader_and_copies_of_it_keep(workers):
    loader = ps.wrap_loader(
        DataLoader(Mapped(sample_of_which_some_stays), 5, num_workers=workers),
        device="cpu",
        max_bytes="8MiB",
        keep_on_host=iter(KEPT_PATHS),
    )
    check(loader)
    check(pickle.loads(pickle.dumps(loader)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_path_to_nothing_fails_the_first_batch(workers):
    loader = ps.DataLoader(
        Mapped(sample_of_which_some_stays),
        5,
        num_workers=workers,
        device="cpu",
        max_bytes="8MiB",
        keep_on_host="['length']",
    )
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
    loader = ps.DataLoader(
        Mapped(sample_of_which_some_stays), 5, device="cpu", max_bytes=64, keep_on_host=KEPT_PATHS
    )
    batch = next(iter(loader))
    same(batch, next(iter(DataLoader(Mapped(sample_of_which_some_stays), 5))))
    assert loader.stats().fallback_batches == 1
    assert len({storages(batch)[0], *storages(batch)[1:3]}) == 3
