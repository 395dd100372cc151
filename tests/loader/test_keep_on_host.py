"""`keep_on_host` of a loader: the named leaves stay on the host, with workers and without."""

import contextlib
import pickle

import pytest
import torch
from loader_data import KEPT_PATHS, Mapped, is_kept, same, sample_of_which_some_stays
from torch.utils.data import DataLoader

import pinstage as ps
from pinstage.errors import StagingWarning


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


def kept_in_some(numbers):
    """Collate to a batch that has ``['lengths']`` in every second one."""
    batch = {"x": torch.full((len(numbers), 20_000), float(numbers[0]))}
    return batch | ({"lengths": torch.tensor(numbers)} if numbers[0] % 2 == 0 else {})


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("cap", ["8MiB", "64KiB"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.filterwarnings(
    "ignore:no batch of a DataLoader found a slab:pinstage.errors.StagingWarning"
)
def test_some_batches_may_lack_a_kept_leaf(workers, cap, first):
    loader = ps.DataLoader(
        range(first, 12 + first),
        3,
        num_workers=workers,
        collate_fn=kept_in_some,
        device="cpu",
        max_bytes=cap,
        keep_on_host="['lengths']",
    )
    assert ["lengths" in batch for batch in loader] == [first == 0, first == 1] * 2


@pytest.mark.parametrize("size", [12, 0])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_path_to_nothing_warns_once(options, size):
    loader = ps.DataLoader(
        range(size),
        3,
        device="cpu",
        max_bytes="8MiB",
        keep_on_host=["['length']", ""],
        **options,
    )
    told = r"keep_on_host=\"\['length'\]\" led to nothing in all batches of this pass: .* at \. Correct the path"
    with contextlib.nullcontext() if size == 0 else pytest.warns(StagingWarning, match=told):
        assert len(list(loader)) == size / 3
    assert len(list(loader)) == size / 3, "a second warning would be an error"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_path_is_missed_with_the_last_batch(workers):
    """A loop that knows the length doesn't ask for more."""
    loader = ps.DataLoader(
        range(12), 3, num_workers=workers, device="cpu", keep_on_host="['x']", max_bytes="8MiB"
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.warns(StagingWarning, match="led to nothing"):
        next(iterator)


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
