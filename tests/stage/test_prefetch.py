"""`Stager.prefetch` behaves as its source: it can be iterated again, and has its length, attributes
and state.
"""

import copy
import itertools
import weakref

import loader_data as data
import pytest
import torch
import torchdata.nodes
from loader_data import same
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps

# If its own thread has the last reference, torchdata raises "cannot join current thread".
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*_ParallelMapperIter\.__del__:pytest.PytestUnraisableExceptionWarning"
)


def loader(size=12, batch_size=2, **options):
    return torch.utils.data.DataLoader(data.Mapped(data.scalar, size), batch_size, **options)


def numbers(batches):
    return [int(batch[0]) for batch in batches]


def test_a_pass_after_an_abandoned_one_starts_over(prefetch):
    batches = prefetch(loader())
    assert numbers(itertools.islice(batches, 2)) == [0, 2]
    assert numbers(batches) == [0, 2, 4, 6, 8, 10]


def test_two_passes_at_once_do_not_meet(stager):
    batches = stager.prefetch(loader())
    assert numbers(map(torch.add, batches, batches)) == [0, 4, 8, 12, 16, 20]


def test_an_iterator_is_read_once(prefetch):
    batches = prefetch(iter(loader()))
    assert numbers(batches) == [0, 2, 4, 6, 8, 10]
    assert numbers(batches) == []


def test_a_pass_begins_when_it_is_asked_for(prefetch):
    with pytest.raises(TypeError, match="not iterable"):
        iter(prefetch(3))


def test_the_length_is_the_sources(prefetch):
    batches = prefetch(loader(11))
    assert len(batches) == len(list(batches)) == 6
    assert batches
    assert not prefetch([])


@pytest.mark.parametrize("source", [map(abs, [1]), loader(batch_size=None, sampler=map(abs, [1]))])
def test_without_a_length_the_error_names_the_source(prefetch, source):
    batches = prefetch(source)
    with pytest.raises(
        TypeError, match=f"the source of the prefetcher has no length: {type(source).__name__}"
    ):
        len(batches)


def test_a_source_without_a_length_counts_as_something(prefetch):
    assert prefetch(map(abs, [1]))


def test_other_attributes_are_the_sources(prefetch):
    source = loader()
    batches = prefetch(source)
    assert batches.dataset is source.dataset
    assert batches.batch_size == 2
    assert not hasattr(batches, "state_dict")
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'epoch'"):
        batches.epoch  # noqa: B018


@pytest.mark.parametrize("name", ["epoch", "batch_size", "state_dict", "source"])
@pytest.mark.parametrize("change", [lambda it, name: setattr(it, name, 3), delattr])
def test_attributes_can_only_be_changed_on_the_source(stager, change, name):
    source = StatefulDataLoader(range(8), 4)
    before = vars(source).copy()
    batches = stager.prefetch(source)
    with pytest.raises(AttributeError, match=rf"{name!r} of .*; use prefetcher\.source\.{name}$"):
        change(batches, name)
    next(iter(batches))
    assert vars(source).keys() == before.keys()
    batches.source.epoch = 3
    assert batches.epoch == 3


def test_a_copied_prefetcher_shares_its_source(prefetch):
    class Source(list):
        def __copy__(self):
            raise AssertionError

    batches = copy.copy(prefetch(Source([torch.ones(1)])))
    assert isinstance(batches, ps.Prefetcher)
    assert len(list(batches)) == 1
    with pytest.raises(TypeError, match="a stager cannot be copied"):
        copy.deepcopy(batches)


def test_a_dropped_batch_is_kept_by_nothing(prefetch):
    iterator = iter(prefetch(loader()))
    gone = weakref.ref(next(iterator))
    assert gone() is None


# -- states ----------------------------------------------------------------------------------------


class Counting(data.Streamed):
    """Returns its state, and changes it in place."""

    def __init__(self, size=24):
        super().__init__(data.scalar, size)
        self.state = {"position": [0]}

    def __iter__(self):
        position = self.state["position"]
        while position[0] < self.size:
            position[0] += 1
            yield self.sample(position[0] - 1)
        position[0] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = copy.deepcopy(state)


def nodes():
    sampler = torchdata.nodes.SamplerWrapper(torch.utils.data.SequentialSampler(range(24)))
    mapped = torchdata.nodes.ParallelMapper(sampler, torch.tensor, num_workers=2, method="thread")
    batched = torchdata.nodes.Mapper(torchdata.nodes.Batcher(mapped, 4), torch.stack)
    return torchdata.nodes.Loader(torchdata.nodes.Prefetcher(batched, 2))


def in_workers(**options):
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(1)} | options
    return StatefulDataLoader(data.Mapped(data.scalar, 24), **options)


SOURCES = {
    "inline": in_workers,
    "shuffled": lambda: in_workers(shuffle=True),
    "workers": lambda: in_workers(num_workers=2),
    "persistent": lambda: in_workers(num_workers=2, persistent_workers=True),
    "some snapshots": lambda: in_workers(num_workers=2, snapshot_every_n_steps=3),
    "iterable": lambda: StatefulDataLoader(Counting(), 4),
    "nodes": nodes,
    "ours": lambda: ps.wrap_loader(in_workers(num_workers=1), device="cpu"),
}


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]


@pytest.mark.parametrize("depth", [0, 1, 10])
def test_the_state_is_that_of_yielded_batches(prefetch, source, depth):
    plain, ahead = source(), prefetch(source(), depth=depth)
    for _ in range(2):
        assert same(ahead.state_dict(), plain.state_dict())
        for ours, theirs in zip(ahead, plain, strict=True):
            assert same(ours, theirs)
            assert same(ahead.state_dict(), plain.state_dict())
        assert same(ahead.state_dict(), plain.state_dict())


@pytest.mark.parametrize("taken", [1, 5])
def test_an_abandoned_loop_s_state_continues_after_it(prefetch, source, taken):
    expected = list(source())
    batches = prefetch(source(), depth=2)
    for number, _ in enumerate(batches, 1):
        if number == taken:
            break
    state = batches.state_dict()
    for again in (source(), prefetch(source(), depth=2), batches):
        again.load_state_dict(copy.deepcopy(state))
        assert same(list(again), expected[taken:])


def test_an_older_pass_does_not_change_the_state(prefetch):
    batches = prefetch(in_workers())
    older, newer = iter(batches), iter(batches)
    next(newer)
    state = batches.state_dict()
    next(older)
    assert batches.state_dict() == state


def test_a_state_that_was_given_is_the_callers(prefetch):
    batches = prefetch(StatefulDataLoader(Counting(), 4))
    next(iter(batches))
    state = batches.state_dict()
    expected = copy.deepcopy(state)
    state.clear()
    assert batches.state_dict() == expected


class Stateless(list):
    def state_dict(self):
        raise RuntimeError("no state today")

    def load_state_dict(self, state):
        raise AssertionError


def test_an_unavailable_state_fails_when_asked_for(prefetch):
    batches = prefetch(Stateless([torch.ones(1)] * 3))
    for _ in batches:
        with pytest.raises(RuntimeError, match="no state today"):
            batches.state_dict()


def test_a_state_with_arguments_is_the_source_s(prefetch):
    class Source(list):
        def state_dict(self, samples, from_beginning):
            return {"samples": samples, "from_beginning": from_beginning}

        def load_state_dict(self, state):
            self.clear()

    batches = prefetch(Source([torch.ones(1)] * 3))
    next(iter(batches))
    assert batches.state_dict(4, from_beginning=True) == {"samples": 4, "from_beginning": True}
