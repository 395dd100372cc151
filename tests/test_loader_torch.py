"""What the loader uses of torch without torch's promise is still there, and does what the loader relies on."""

import ast
import inspect
import multiprocessing
import select
import textwrap

import loader_data as data
import pytest
import torch
from doubles import PATIENCE_SECONDS
from torch.utils.data import dataloader
from torch.utils.data._utils import collate

import pinstage as ps
from pinstage import _torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

ITERATOR = dataloader._MultiProcessingDataLoaderIter


def test_torch_reads_its_queue_as_we_do():
    source = inspect.getsource(ITERATOR._try_get_data)
    assert "self._data_queue.get(timeout=timeout)" in source, "adapt SendingQueue"


def test_torch_does_for_each_batch_what_we_do_in_its_place():
    [function] = ast.parse(textwrap.dedent(inspect.getsource(ITERATOR.__next__))).body
    [within] = [node for node in function.body if isinstance(node, ast.With)]
    start, data, count, warn, end = map(ast.unparse, within.body)
    where = "adapt next_batch in pinstage/_torch.py"
    assert ast.unparse(within.items[0]).startswith("torch.autograd.profiler.record_function("), where
    assert start.startswith("if self._sampler_iter is None:"), where  # never with workers
    assert (data, count, end) == ("data = self._next_data()", "self._num_yielded += 1", "return data"), where
    assert warn.startswith("if self._dataset_kind == _DatasetKind.Iterable and "), where


@pytest.mark.parametrize("streamed", [False, True])
def test_a_profile_shows_torchs_range_for_each_batch(streamed):
    dataset = (data.Streamed if streamed else data.Mapped)(data.scalar, 8)
    iterator = iter(ps.DataLoader(dataset, 2, num_workers=1, device="cpu"))
    with torch.profiler.profile() as profile:
        assert len(list(iterator)) == 4
    names = [event.name for event in profile.events()]
    assert sum(name.startswith("enumerate(DataLoader)#") for name in names) == 5  # the last one finds the end


def test_default_collation_asks_the_map_for_tensors():
    stacked = _torch.collate_with([(torch.ones(2), 1), (torch.ones(2), 2)], lambda batch, **_: len(batch))
    assert stacked[0] == 2, "adapt collate_with in pinstage/_torch.py"
    assert stacked[1].tolist() == [1, 2]


def test_a_function_added_to_default_collation_is_noticed(monkeypatch):
    assert _torch.collates_as_shipped(), "torch keeps its functions elsewhere: adapt collates_as_shipped"
    monkeypatch.setitem(collate.default_collate_fn_map, data.Cloud, data.collate_clouds)
    assert not _torch.collates_as_shipped()


def test_the_queue_behind_has_a_file_that_can_be_waited_for():
    source = multiprocessing.Queue()
    where = "multiprocessing keeps the pipe elsewhere: adapt pinstage/_torch.py"
    assert hasattr(source, "_reader"), where
    assert hasattr(source, "_writer"), where
    poll = select.poll()
    poll.register(source._reader, select.POLLIN)
    assert not poll.poll(0)
    source.put("a batch")
    assert poll.poll(PATIENCE_SECONDS * 1e3)
    assert source.get() == "a batch"
    assert not poll.poll(0)
    source.close()
    source.join_thread()


def test_loaders_put_indexes_into_a_queue_that_says_what_cannot_be_sent():
    iterator = iter(ps.DataLoader(data.Mapped(data.scalar, 4), num_workers=1, device="cpu"))
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        iterator._index_queues[0].put((7, [lambda: None]))
    assert len(list(iterator)) == 4


def test_a_sampler_whose_indexes_cannot_be_pickled_gets_an_error():
    """torch's own loader waits for ever."""
    sampler = [0, 1, lambda: 2]
    loader = ps.DataLoader(
        data.Mapped(data.scalar), None, sampler=sampler, num_workers=1, prefetch_factor=1, device="cpu"
    )
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        list(loader)
