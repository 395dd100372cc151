"""The private parts of torch that the loader uses still exist, and behave as the loader relies
on.
"""

import ast
import inspect
import textwrap
import types

import loader_data as data
import pytest
import torch
from torch.utils.data import dataloader

import pinstage as ps
from pinstage._compat import loader as torchs
from pinstage._compat import probes
from pinstage.errors import StagingWarning
from pinstage.inspect._doctor import private_names

ITERATOR = dataloader._MultiProcessingDataLoaderIter


def test_torch_reads_its_queue_as_we_do():
    source = inspect.getsource(ITERATOR._try_get_data)
    assert "self._data_queue.get(timeout=timeout)" in source, "adapt SendingQueue"


def test_torch_does_per_batch_what_we_replace():
    [function] = ast.parse(textwrap.dedent(inspect.getsource(ITERATOR.__next__))).body
    [within] = [node for node in function.body if isinstance(node, ast.With)]
    start, data, count, warn, end = map(ast.unparse, within.body)
    where = "adapt next_batch in pinstage/_compat/loader.py"
    assert ast.unparse(within.items[0]).startswith("torch.autograd.profiler.record_function("), (
        where
    )
    assert start.startswith("if self._sampler_iter is None:"), where  # never with workers
    assert (data, count, end) == (
        "data = self._next_data()",
        "self._num_yielded += 1",
        "return data",
    ), where
    assert warn.startswith("if self._dataset_kind == _DatasetKind.Iterable and "), where


@pytest.mark.parametrize("streamed", [False, True])
def test_a_profile_shows_torchs_range_for_each_batch(streamed):
    dataset = (data.Streamed if streamed else data.Mapped)(data.scalar, 8)
    iterator = iter(ps.DataLoader(dataset, 2, num_workers=1, device="cpu"))
    with torch.profiler.profile() as profile:
        assert len(list(iterator)) == 4
    names = [event.name for event in profile.events()]
    # The last call finds the end.
    assert sum(name.startswith("enumerate(DataLoader)#") for name in names) == 5


# -- private names, taken away one by one ----------------------------------------------------------


class Other:
    """An iterator of torch with some attributes missing or replaced."""

    def __init__(self, behind, **other):
        vars(self).update(_behind=behind, _other=other)

    def __getattr__(self, name):
        if self._other.get(name, self) is None:
            raise AttributeError(name)
        return self._other[name] if name in self._other else getattr(self._behind, name)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._behind)

    def __len__(self):
        return len(self._behind)


def assert_batches_arrive_the_slow_way(reason, persistent=True):
    """Read a loader twice, with workers; check that it warns once that it is slow, and why."""
    dataset = data.Mapped(data.tensors, 8)
    loader = ps.DataLoader(dataset, 2, num_workers=2, device="cpu", persistent_workers=persistent)
    other = ps.DataLoader(dataset, 2, num_workers=1, device="cpu")
    expected = list(torch.utils.data.DataLoader(dataset, 2))
    with pytest.warns(
        StagingWarning, match="stages in the main process, which is slower: " + reason
    ) as told:
        assert data.same(list(loader), expected)
    for later in (loader, other):
        assert data.same(list(later), expected)
    assert [warning.category for warning in told].count(StagingWarning) == 1


@pytest.fixture
def asked_anew():
    torchs.why_loader_is_unknown.cache_clear()
    yield
    torchs.why_loader_is_unknown.cache_clear()


@pytest.fixture
def told_anew(monkeypatch):
    monkeypatch.setattr(probes, "_warned", set())


class NoFile:
    def __init__(self):
        self.get = self.put = len


@pytest.mark.usefixtures("told_anew")
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        *[
            ({name: None}, f"torch .* has no {name} any more in its loader.s iterator")
            for name in torchs._ITERATOR_HAS
        ],
        ({"_data_queue": object()}, ".*reads its workers' results in another way"),
        (dict.fromkeys(["_data_queue", "_worker_result_queue"], NoFile()), ".*in another way"),
    ],
    ids=[*torchs._ITERATOR_HAS, "another queue", "no file"],
)
def test_a_changed_private_iterator_warns_once(monkeypatch, other, reason):
    made = torch.utils.data.DataLoader._get_iterator
    monkeypatch.setattr(
        torch.utils.data.DataLoader, "_get_iterator", lambda loader: Other(made(loader), **other)
    )
    # The call that starts torch's iterator again, instead of `_reset`, has no iterator here, so it
    # can't be tested.
    assert_batches_arrive_the_slow_way(reason, persistent="_reset" not in other)


@pytest.mark.usefixtures("told_anew", "asked_anew")
@pytest.mark.parametrize("path", torchs._LOADER_HAS)
def test_without_a_name_beside_torchs_iterator_batches_arrive(monkeypatch, path):
    *modules, name = path.removesuffix(".Map").split(".")
    fakes = [types.SimpleNamespace(**vars(torch.utils.data))]
    for module in modules:
        fakes.append(types.SimpleNamespace(**vars(getattr(fakes[-1], module))))
        setattr(fakes[-2], module, fakes[-1])
    delattr(fakes[-1], name)
    monkeypatch.setattr(torchs, "_data", fakes[0])
    assert_batches_arrive_the_slow_way(f"torch .* has another loader .*{name}")
    assert "DataLoader" in [check.name for check in private_names()]
