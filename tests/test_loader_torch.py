"""What the loader uses of torch without torch's promise is still there, and does what the loader relies on."""

import ast
import inspect
import multiprocessing
import queue
import textwrap

import loader_data as data
import pytest
import torch
from doubles import wait_until
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import collate

import pinstage as ps
from pinstage._loader import _torch
from pinstage._loader._torch import PeekedQueue

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

ITERATOR = dataloader._MultiProcessingDataLoaderIter


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DataLoader, "_get_iterator"),
        (ITERATOR, "_reset"),
        (ITERATOR, "_shutdown_workers"),
        (ITERATOR, "_try_get_data"),
        (collate, "collate"),
        (collate, "collate_tensor_fn"),
        (collate, "default_collate"),
        (collate, "default_collate_fn_map"),
        (torch._utils, "ExceptionWrapper"),
    ],
)
def test_torch_still_has_it(owner, name):
    where = f"torch {torch.__version__} has no {owner.__name__}.{name} any more: adapt pinstage/_loader/_torch.py"
    assert hasattr(owner, name), where


ENDING = ["_index_queues", "_worker_result_queue", "_workers_done_event"]


@pytest.mark.parametrize(
    "name",
    ["_workers", "_persistent_workers", "_data_queue", "_rcvd_idx", "_send_idx", "_task_info", "_in_order", *ENDING],
)
def test_torchs_iterator_still_has_it(name):
    iterator = iter(DataLoader(data.Mapped(data.scalar, 4), num_workers=1))
    where = f"torch {torch.__version__}: its iterator has no {name} any more: adapt pinstage/_loader/_torch.py"
    assert hasattr(iterator, name), where


def test_a_loader_keeps_its_iterator_under_the_name_that_we_know():
    loader = DataLoader(data.Mapped(data.scalar, 4), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert loader._iterator is iterator, "adapt IntoSlabs.__iter__ in pinstage/_loader/_loader.py"


def test_torch_reads_its_queue_as_we_do():
    source = inspect.getsource(ITERATOR._try_get_data)
    assert "self._data_queue.get(timeout=timeout)" in source, "adapt PeekedQueue in pinstage/_loader/_torch.py"


def test_torch_does_for_each_batch_what_we_do_in_its_place():
    [function] = ast.parse(textwrap.dedent(inspect.getsource(ITERATOR.__next__))).body
    [within] = [node for node in function.body if isinstance(node, ast.With)]
    start, data, count, warn, end = map(ast.unparse, within.body)
    where = "adapt next_batch in pinstage/_loader/_torch.py"
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
    assert stacked[0] == 2, "adapt collate_with in pinstage/_loader/_torch.py"
    assert stacked[1].tolist() == [1, 2]


def test_a_function_added_to_default_collation_is_noticed(monkeypatch):
    assert _torch.collates_as_shipped(), "torch keeps its functions elsewhere: adapt collates_as_shipped"
    monkeypatch.setitem(collate.default_collate_fn_map, data.Cloud, data.collate_clouds)
    assert not _torch.collates_as_shipped()


def test_a_batch_is_seen_only_when_it_is_the_one_that_comes_next():
    source = multiprocessing.Queue()
    where = "multiprocessing keeps the pipe elsewhere: adapt PeekedQueue in pinstage/_loader/_torch.py"
    assert hasattr(source, "_reader"), where
    peeked = PeekedQueue(source)
    assert not peeked.holds_batch(None)
    error = torch._utils.ExceptionWrapper((ValueError, ValueError("no"), None))
    source.put((3, error))
    wait_until(lambda: peeked.holds_batch(3))
    assert peeked.holds_batch(None)
    assert not peeked.holds_batch(2)
    source.put((4, "a worker has no more"))
    wait_until(lambda: not source.empty())
    assert not peeked.holds_batch(4)
    assert [peeked.get(timeout=1)[0] for _ in range(2)] == [3, 4]
    with pytest.raises(queue.Empty):
        peeked.get(timeout=0)
    source.close()
    source.join_thread()
