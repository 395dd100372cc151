"""`wrap_loader` gives loaders of other classes the features of `DataLoader`."""

import copy
import itertools
from multiprocessing import active_children

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
    for _ in range(3):
        for expected, found in zip(torchs, ours, strict=True):
            assert same(found, expected)
            assert ours.state_dict() == torchs.state_dict()
        assert ours.state_dict() == torchs.state_dict()
    assert ours.stats().fallback_batches == 0


def test_a_state_can_precede_the_first_batch(workers):
    torchs, ours = pair(mapped, num_workers=workers)
    assert ours.state_dict()["_iterator_finished"] is False
    assert same(list(ours), list(torchs))


def test_a_loader_is_changed_before_workers():
    loader = torch.utils.data.DataLoader(mapped(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    with pytest.raises(TypeError, match="has an iterator already"):
        ps.wrap_loader(loader, device="cpu")
    del iterator


def test_a_loader_that_iterates_in_its_constructor(workers):
    def endless(base):
        class Endless(base):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                sampler = itertools.cycle(list(self.batch_sampler))
                object.__setattr__(self, "batch_sampler", sampler)
                self.kept = super().__iter__()

            def __iter__(self):
                return itertools.islice(self.kept, 6)

        return Endless

    torchs = endless(torch.utils.data.DataLoader)(mapped(), 4, num_workers=workers)
    with pytest.raises(TypeError, match="if its constructor iterates, derive its class from"):
        ps.wrap_loader(torchs, device="cpu")  # its batches would stay on the host
    with endless(ps.DataLoader)(mapped(), 4, num_workers=workers, device="cpu") as ours:
        for number in (1, 2):
            assert same(list(ours), list(torchs))
            assert ours.stats().batches >= 6 * number


def test_a_wrapped_class_may_have_own_settings():
    given = torch.utils.data.DataLoader(data.Mapped(data.tensors), 4, num_workers=1)
    given._settings = given.device = "its own"
    with ps.wrap_loader(given, device="cpu") as loader:
        assert same(list(loader), list(given))
        assert (loader._settings, loader.device) == ("its own", "its own")


def test_close_calls_the_inherited_close():
    class Closes(torch.utils.data.DataLoader):
        times = 0

        def close(self):
            self.times += 1

    given = Closes(data.Mapped(data.tensors), 4, num_workers=1)
    with ps.wrap_loader(given, device="cpu") as loader:
        iterator = iter(loader)
        next(iterator)
        assert active_children()
    assert (loader.times, given.times) == (1, 0)
    assert not active_children()
    assert same(list(loader), list(given))


def test_closed_loaders_keep_their_last_batch_s_state():
    given = StatefulDataLoader(data.Mapped(data.tensors), 4, num_workers=1)
    with ps.wrap_loader(given, device="cpu") as loader:
        batches = list(itertools.islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    assert same([*batches, *loader], list(given))
