"""Datasets of tensors in memory: rows are gathered, and batches are those of torch's loader."""

import contextlib
import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_data import collated_by_torch, same
from strategies import tensor_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps
from pinstage._loader._in_memory import ToWorker
from pinstage._loader._samplers import _is_as_here

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128, torch.uint16]
SHAPES = [(), (3,), (2, 3), (0,), (1, 4), (700,)]


def plain(length, dtype, shape):
    if dtype is torch.bool:  # of any other bytes, torch's stack makes 0 or 1
        return tensor_of(torch.uint8, (length, *shape), 1) > 99
    return tensor_of(dtype, (length, *shape), 1)


FORMS = [
    plain,
    plain,
    lambda length, dtype, shape: plain(length * 2, dtype, shape)[::2],
    lambda length, dtype, shape: plain(length + 4, dtype, ()).unfold(0, 5, 1),
    lambda length, dtype, shape: plain(1, dtype, shape).expand(length, *shape),
    lambda length, dtype, shape: plain(length, dtype, (3, 2)).mT,  # torch has to stack it
    lambda length, dtype, shape: torch.ones(length, *shape, requires_grad=True),
]

INDICES = [
    list,
    tuple,
    np.array,
    torch.tensor,
    lambda numbers: torch.tensor(numbers, dtype=torch.int32),
    lambda numbers: [np.int32(number) for number in numbers],
    lambda numbers: range(len(numbers) - 1, -1, -1),
    lambda numbers: np.array([number % 100 for number in numbers], np.uint8),
    lambda numbers: [torch.tensor(number) for number in numbers],
]


@st.composite
def tensors(draw, length):
    form, dtype = draw(st.sampled_from(FORMS)), draw(st.sampled_from(DTYPES))
    return form(length, dtype, draw(st.sampled_from(SHAPES)))


@st.composite
def datasets(draw, length, level=2):
    kind = draw(st.integers(0, 3 if level else 0))
    if kind == 0:
        return TensorDataset(*draw(st.lists(tensors(length), min_size=1, max_size=3)))
    if kind == 1:
        larger = length + draw(st.integers(0, 3))
        numbers = [(number * 7 + 3) % larger for number in range(length)]
        return Subset(draw(datasets(larger, level - 1)), draw(st.sampled_from(INDICES))(numbers))
    parts = draw(st.lists(datasets(length, level - 1) | tensors(length), min_size=1, max_size=3))
    if kind == 2:
        return StackDataset(*parts)
    return StackDataset(**dict(zip("zab", parts, strict=False)))


class Foreign(Sampler):
    """Yields indices of several types, negative ones too."""

    def __init__(self, length, kinds):
        self.length = length
        self.kinds = kinds

    def __len__(self):
        return self.length

    def __iter__(self):
        for number in range(self.length):
            yield self.kinds[number % len(self.kinds)](number - self.length)


SAMPLERS = [
    lambda length, generator: SequentialSampler(range(length)),
    lambda length, generator: RandomSampler(range(length), generator=generator),
    lambda length, generator: RandomSampler(range(length)),
    lambda length, generator: RandomSampler(
        range(length), num_samples=2 * length + 1, generator=generator
    ),
    lambda length, generator: RandomSampler(range(length), True, 70, generator),
    lambda length, generator: SubsetRandomSampler(range(0, length, 2), generator),
    lambda length, generator: SubsetRandomSampler([*range(length)] * 2, generator),
    lambda length, generator: WeightedRandomSampler(torch.ones(length), 9, generator=generator),
    lambda length, generator: DistributedSampler(range(length), 3, 1, seed=2),
    lambda length, generator: DistributedSampler(range(length), 2, 0, drop_last=True),
    lambda length, generator: Foreign(length, [int]),
    lambda length, generator: Foreign(length, [np.int64, int]),
    lambda length, generator: Foreign(length, [torch.tensor, int]),
]


@st.composite
def loaders(draw):
    """Return a function that makes a loader of a class, the number of steps of each pass, and a
    generator that it draws from.
    """
    length = draw(st.integers(1, 40))
    dataset, sampler = draw(datasets(length)), draw(st.sampled_from(SAMPLERS))
    size, drop_last = draw(st.integers(1, 13)), draw(st.booleans())
    is_batched = draw(st.booleans()) or type(dataset) is not TensorDataset

    def make(kind, generator, **options):
        chosen = sampler(length, generator)
        if is_batched:
            options |= {"batch_size": size, "drop_last": drop_last, "sampler": chosen}
        else:
            options |= {"batch_size": None, "sampler": BatchSampler(chosen, size, drop_last)}
        return kind(dataset, generator=generator, **options)

    return make, draw(st.lists(st.integers(0, 9) | st.none(), min_size=1, max_size=3))


def states(generator):
    return [torch.get_rng_state(), generator.get_state()]


def trace(make, passes, kind, **options):
    """Return each batch of some passes, the states of the generators behind it, and errors."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    found = []
    loader = make(kind, generator, **options)
    for steps in passes:
        with contextlib.suppress(StopIteration):
            found.append([len(loader), states(generator)])
            iterator = iter(loader)
            found.append(states(generator))
            for _ in itertools.count() if steps is None else range(steps):
                try:
                    batch = next(iterator)
                except (RuntimeError, TypeError, IndexError) as error:
                    batch = type(error).__name__, str(error)
                found.append([batch, states(generator)])
                if isinstance(batch, tuple):
                    break
        found.append(states(generator))
    return found


@settings(max_examples=150)
@given(loaders())
def test_batches_states_and_errors_are_torchs(case):
    make, passes = case
    expected = trace(make, passes, DataLoader)
    found = trace(make, passes, ps.DataLoader, device="cpu")
    assert same(without_grad(found), without_grad(expected))


def without_grad(thing):
    """Return a nest in which no tensor requires grad: those of ours that do are moved."""
    if isinstance(thing, torch.Tensor):
        return thing.detach()
    if isinstance(thing, list | tuple):
        return type(thing)(map(without_grad, thing))
    return {k: without_grad(v) for k, v in thing.items()} if isinstance(thing, dict) else thing


def features(length=50):
    return torch.randn(length, 3), torch.arange(length)


X, Y = features()

SOURCES = [
    TensorDataset(X, Y),
    StackDataset(x=X, y=TensorDataset(Y)),
    StackDataset(X, Subset(TensorDataset(Y, X), np.arange(50))),
    Subset(Subset(TensorDataset(X), range(49, -1, -1)), [*range(50)]),
    random_split(TensorDataset(X, Y), [40, 10])[0],
]


@pytest.mark.parametrize("dataset", SOURCES)
@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": Foreign(40, [int])}, {}])
@pytest.mark.parametrize("wrap", [False, True])
def test_rows_are_gathered_instead_of_stacked(dataset, options, wrap, stacked):
    if wrap:
        loader = ps.wrap_loader(DataLoader(dataset, 8, **options), device="cpu")
    else:
        loader = ps.DataLoader(dataset, 8, device="cpu", **options)
    torch.manual_seed(1)
    found = list(loader)
    assert not stacked
    torch.manual_seed(1)
    assert same(found, list(DataLoader(dataset, 8, **options)))
    assert stacked


@pytest.mark.parametrize(
    "kind",
    [
        *(SequentialSampler, RandomSampler, SubsetRandomSampler),
        *(WeightedRandomSampler, DistributedSampler),
    ],
)
def test_this_torchs_samplers_yield_tensors(kind):
    assert _is_as_here(kind)


class Subclass(TensorDataset):
    pass


class SubclassOfSubset(Subset):
    pass


def with_its_own(dataset, **functions):
    vars(dataset).update(functions)
    return dataset


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Subclass(X, Y), {}),
        (SubclassOfSubset(TensorDataset(X), range(9)), {}),
        (StackDataset(X, Subclass(Y)), {}),
        (with_its_own(TensorDataset(X), __getitem__=len), {}),
        (
            with_its_own(
                TensorDataset(X), __getitems__=lambda indices: [(X[i] + 1,) for i in indices]
            ),
            {},
        ),
        (TensorDataset(X, Y), {"collate_fn": collated_by_torch}),
        (TensorDataset(X, Y), {"keep_on_host": lambda path, leaf: leaf.sum() is None}),
        (Subset(TensorDataset(X), Y > 3), {}),
        (TensorDataset(X.T.contiguous().T), {}),
    ],
)
def test_anything_else_goes_as_before(dataset, options, stacked):
    keep = options.pop("keep_on_host", None)
    found = list(ps.DataLoader(dataset, 4, device="cpu", keep_on_host=keep, **options))
    assert stacked
    assert same(found, list(DataLoader(dataset, 4, **options)))


class IndexTypes(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return type(index).__name__


NUMPYS = list(np.arange(50, dtype=np.int16))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [NUMPYS, SubsetRandomSampler(Y), SubsetRandomSampler(NUMPYS)])
def test_other_datasets_get_the_samplers_own_indices(sampler, workers):
    options = {"sampler": sampler, "batch_size": 8, "num_workers": workers}
    dataset = StackDataset(TensorDataset(X), IndexTypes())
    found = [batch[1] for batch in ps.DataLoader(dataset, device="cpu", **options)]
    assert found == [batch[1] for batch in DataLoader(dataset, **options)]


@pytest.mark.filterwarnings("ignore:Using a non-tuple:UserWarning", "ignore:indexing with dtype")
@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(torch.arange(3)), [np.uint8(1)] * 50, [np.uint16(1), 2, 3]]
)
def test_lists_torch_takes_for_masks_go_as_before(sampler):
    def trace_of(make, **options):
        dataset = TensorDataset(torch.arange(50 * 50 * 50).view(50, 50, 50))
        sampled = BatchSampler(sampler, len(sampler), False)
        loader = make(dataset, batch_size=None, sampler=sampled, **options)
        torch.manual_seed(1)
        try:
            return list(loader)
        except (IndexError, RuntimeError) as error:
            return type(error), str(error)

    assert same(trace_of(ps.DataLoader, device="cpu"), trace_of(DataLoader))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "batch",
    [torch.tensor([True, True]), np.array([3, -2]), b"ab"],
)
def test_batches_that_are_no_lists_go_as_before(batch, workers):
    options = {"batch_sampler": [batch], "num_workers": workers}
    dataset = TensorDataset(torch.arange(100.0).view(100, 1))
    found = list(ps.DataLoader(dataset, device="cpu", **options))
    assert same(found, list(DataLoader(dataset, **options)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_another_batch_size_counts_when_torch_reads_it(drop_last):
    def sizes(make, **options):
        loader = make(TensorDataset(X), 8, drop_last=drop_last, **options)
        for batch in loader:
            loader.batch_sampler.batch_size = 12
            yield len(batch[0])

    assert [*sizes(ps.DataLoader, device="cpu")] == [*sizes(DataLoader)]


def test_patches_of_torchs_class_are_called(monkeypatch):
    dataset = TensorDataset(X)
    monkeypatch.setattr(
        TensorDataset, "__getitems__", lambda self, indices: [(X[i] * 2,) for i in indices], False
    )
    found = list(ps.DataLoader(dataset, 50, device="cpu"))
    assert same(found, [[X * 2]])


def test_a_map_of_collate_functions_is_asked(monkeypatch):
    monkeypatch.setitem(
        torch.utils.data._utils.collate.default_collate_fn_map,
        torch.Tensor,
        lambda batch, **_: torch.stack(batch) * 2,
    )
    assert same(list(ps.DataLoader(TensorDataset(X), 50, device="cpu")), [[X * 2]])


def test_nothing_of_a_dataset_is_remembered():
    dataset = Subset(TensorDataset(X.clone(), Y), [*range(50)])
    loader = iter(ps.DataLoader(dataset, 5, device="cpu"))
    assert same(next(loader), [X[:5], Y[:5]])
    dataset.dataset.tensors[0].zero_()
    assert same(next(loader), [torch.zeros(5, 3), Y[5:10]])
    dataset.dataset.tensors = (Y, X)
    assert same(next(loader), [Y[10:15], X[10:15]])
    dataset.indices[15:20] = [-1, 0, 3, 3, 1]
    assert same(next(loader), [Y[[-1, 0, 3, 3, 1]], X[[-1, 0, 3, 3, 1]]])
    dataset.indices = np.arange(50)[::-1]
    assert same(next(loader), [Y[25:30].flip(0), X[25:30].flip(0)])
    dataset.indices = Y > 3
    assert same(next(loader), default_collate([dataset[index] for index in range(30, 35)]))


@pytest.mark.parametrize("number", [50, -51, 2**62, 2**70])
@pytest.mark.parametrize("dataset", [TensorDataset(X), Subset(TensorDataset(X), [*range(50)])])
def test_errors_are_torchs(dataset, number):
    check_errors(dataset, number, 0)


def test_errors_of_workers_are_torchs():
    check_errors(TensorDataset(X), 50, 1)


def check_errors(dataset, number, workers):
    sampler = [[1, 2], [3, number]]
    expected = []
    for kind, options in ((DataLoader, {}), (ps.DataLoader, {"device": "cpu"})):
        iterator = iter(kind(dataset, batch_sampler=sampler, num_workers=workers, **options))
        next(iterator)
        with pytest.raises((IndexError, TypeError, RuntimeError, ValueError)) as raised:
            next(iterator)
        expected.append((type(raised.value), str(raised.value).splitlines()[-1]))
    assert expected[0] == expected[1]


@pytest.mark.parametrize("dataset", SOURCES[:3])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7, "shuffle": True},
        {"batch_size": 7, "persistent_workers": True, "shuffle": True},
        {"batch_sampler": [[3, 1], (0, -1), torch.tensor([2, 5]), [torch.tensor(4)]]},
    ],
)
def test_workers_gather_rows_into_their_slabs(dataset, options):
    found, expected = [], []
    for kind, where, batches in (
        (DataLoader, {}, expected),
        (ps.DataLoader, {"device": "cpu"}, found),
    ):
        generator = torch.Generator().manual_seed(1)
        loader = kind(dataset, num_workers=2, generator=generator, **options, **where)
        for steps in (3, None, None):
            batches += [*itertools.islice(iter(loader), steps), generator.get_state()]
    assert same(found, expected)


def test_a_worker_sees_the_users_dataset():
    def change(_):
        assert type(get_worker_info().dataset) is TensorDataset
        get_worker_info().dataset.tensors = (Y, X)

    options = {"num_workers": 1, "worker_init_fn": change}
    found = list(ps.DataLoader(TensorDataset(X, Y), 25, device="cpu", **options))
    assert same(found, [[Y[:25], X[:25]], [Y[25:], X[25:]]])


def test_a_worker_gets_one_batchs_indices():
    permutation = torch.randperm(1_000_000).numpy()
    assert len(pickle.dumps(ToWorker(permutation[8:16]))) < 400


def test_epochs_of_a_distributed_sampler_differ():
    dataset = TensorDataset(X)
    sampler, theirs = (DistributedSampler(dataset, 4, 2) for _ in range(2))
    loader = ps.DataLoader(dataset, 5, sampler=sampler, device="cpu")
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        theirs.set_epoch(epoch)
        epochs.append(list(loader))
        assert same(epochs[-1], list(DataLoader(dataset, 5, sampler=theirs)))
    assert not same(epochs[0], epochs[1])


@pytest.mark.parametrize(("drop_last", "length"), [(False, 30), (True, 3)])
def test_another_length_is_torchs_error(length, drop_last):
    dataset = TensorDataset(torch.zeros(10))
    sampler = DistributedSampler(dataset, 3, 1, drop_last=drop_last)
    dataset.tensors = (torch.zeros(length),)
    errors = []
    for loader in (
        DataLoader(dataset, 2, sampler=sampler),
        ps.DataLoader(dataset, 2, sampler=sampler, device="cpu"),
    ):
        with pytest.raises(AssertionError) as raised:
            list(loader)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_several_threads_share_a_loader(workers):
    length = 2000
    dataset = TensorDataset(torch.arange(length), torch.arange(length) * 2)
    loader = ps.DataLoader(dataset, 100, shuffle=True, num_workers=workers, device="cpu")
    found = []

    def read():
        first, second = zip(*loader, strict=True)
        assert torch.equal(torch.cat(first) * 2, torch.cat(second))
        found.append(torch.cat(first).sort().values.tolist())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(length))] * 3


def test_empty_datasets_and_batches():
    assert list(ps.DataLoader(TensorDataset(torch.zeros(0, 3)), 4, device="cpu")) == []
    with pytest.raises(IndexError):
        list(ps.DataLoader(TensorDataset(X), batch_sampler=[[]], device="cpu"))


def test_leaves_stay_on_the_host_by_their_paths():
    loader = ps.DataLoader(TensorDataset(X, Y), 50, device="cpu", keep_on_host=["[1]"])
    assert same(list(loader), [[X, Y]])


def test_a_stateful_loader_goes_as_before(stacked):
    loader = ps.wrap_loader(StatefulDataLoader(TensorDataset(X, Y), 10, shuffle=True), device="cpu")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    assert same(list(loader), rest)
    assert stacked
