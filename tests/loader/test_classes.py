"""`wrap_loader` gives loaders of other classes the features of `DataLoader`."""

import copy
import itertools
import pickle

import loader_data as data
import pytest
import torch
from loader_data import same
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps


class Counted(data.Streamed):
    """Has a state, as torchdata expects."""

    position = 0

    def __iter__(self):
        for index, sample in enumerate(super().__iter__()):
            if index >= self.position:
                self.position += 1
                yield sample
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def pair(dataset, **options):
    """Return torchdata's loader, and a wrapped one."""
    torchs, ours = (
        StatefulDataLoader(
            dataset(), **{"batch_size": 2} | options, generator=torch.Generator().manual_seed(1)
        )
        for _ in range(2)
    )
    return torchs, ps.wrap_loader(ours, device="cpu", max_bytes="4MiB", depth=3)


def mapped():
    return data.Mapped(data.mixed, 24)


def streamed():
    return data.Streamed(data.mixed, 24)


def counted():
    return Counted(data.mixed, 24)


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def workers(request):
    return request.param


def test_a_wrapped_loader_keeps_its_class(workers):
    loader = StatefulDataLoader(mapped(), 4, num_workers=workers, drop_last=True)
    wrapped = ps.wrap_loader(loader, device="cpu", depth=2)
    assert isinstance(wrapped, StatefulDataLoader)
    assert type(wrapped).__name__ == "StatefulDataLoader"
    assert (len(wrapped), wrapped.batch_size, wrapped.drop_last) == (6, 4, True)
    assert (wrapped.dataset, wrapped.sampler, wrapped.collate_fn) == (
        loader.dataset,
        loader.sampler,
        loader.collate_fn,
    )
    assert len(list(wrapped)) == 6
    assert wrapped.collate_fn is loader.collate_fn
    assert wrapped.stats().batches == 6
    assert type(loader) is type(StatefulDataLoader(mapped())) is StatefulDataLoader
    assert len(list(loader)) == wrapped.stats().batches == 6


def test_a_changed_loader_yields_identical_passes(workers):
    torchs, ours = pair(mapped, num_workers=workers)
    for _ in range(3):
        assert same(list(ours), list(torchs))
    assert ours.stats().fallback_batches == 0


@pytest.mark.parametrize("dataset", [mapped, streamed, counted])
@pytest.mark.parametrize("taken", [1, 7])
def test_a_state_is_that_of_what_was_yielded(dataset, taken, workers):
    torchs, ours = pair(dataset, num_workers=workers)
    expected = list(torchs)
    iterator = iter(ours)
    assert same(list(itertools.islice(iterator, taken)), expected[:taken])
    state = copy.deepcopy(ours.state_dict())
    assert same(list(iterator), expected[taken:])
    # A state is torchdata's own, so both loaders can load it.
    for loader in pair(dataset, num_workers=workers):
        loader.load_state_dict(copy.deepcopy(state))
        assert same(list(loader), expected[taken:])


def test_a_state_goes_with_every_batch(workers):
    torchs, ours = pair(mapped, num_workers=workers)
    for _ in zip(torchs, ours, strict=True):
        assert ours.state_dict() == torchs.state_dict()
    assert ours.state_dict() == torchs.state_dict()


def test_a_state_can_precede_the_first_batch(workers):
    torchs, ours = pair(mapped, num_workers=workers)
    assert ours.state_dict()["_iterator_finished"] is False
    assert same(list(ours), list(torchs))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_changed_loader_can_be_copied_and_pickled(copied):
    loader = ps.wrap_loader(StatefulDataLoader(mapped(), 4, num_workers=1), device="cpu", depth=2)
    expected = list(loader)
    other = copied(loader)
    assert isinstance(other, StatefulDataLoader)
    assert same(list(other), expected)
    assert (loader.stats().batches, other.stats().batches, other._settings.depth) == (6, 6, 2)


def test_persistent_workers_with_one_slab_restart_midway():
    options = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True, "timeout": 20}
    loader = ps.wrap_loader(
        StatefulDataLoader(mapped(), 2, **options), device="cpu", max_bytes="4KiB"
    )
    expected = list(torch.utils.data.DataLoader(mapped(), 2))
    for taken in range(6):
        assert same(list(itertools.islice(loader, taken)), expected[:taken])
    assert loader.stats().pool.held_slabs == 1


def test_a_loader_is_changed_before_workers():
    loader = torch.utils.data.DataLoader(mapped(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    with pytest.raises(TypeError, match="has workers already"):
        ps.wrap_loader(loader, device="cpu")
    del iterator


@pytest.mark.parametrize("is_persistent", [False, True])
def test_close_ends_workers_and_calls_the_inherited_close(is_persistent):
    class Closes(torch.utils.data.DataLoader):
        times = 0

        def close(self):
            self.times += 1

    given = Closes(data.Mapped(data.tensors), 4, num_workers=1, persistent_workers=is_persistent)
    with ps.wrap_loader(given, device="cpu") as loader:
        iterator = iter(loader)
        next(iterator)
        workers = iterator._workers
    assert (loader.times, given.times) == (1, 0)
    assert not any(worker.is_alive() for worker in workers)
    assert same(list(loader), list(given))


def test_closed_loaders_keep_their_last_batch_s_state():
    given = StatefulDataLoader(data.Mapped(data.tensors), 4, num_workers=1)
    with ps.wrap_loader(given, device="cpu") as loader:
        batches = list(itertools.islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    assert same([*batches, *loader], list(given))
