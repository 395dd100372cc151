"""What the loader uses of torch without torch's promise is still there, and does what the loader relies on."""

import ast
import inspect
import multiprocessing
import select
import textwrap
import threading
from collections import deque

import loader_data as data
import pytest
import torch
from doubles import PATIENCE_SECONDS, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import collate, worker

import pinstage as ps
from pinstage._loader import _torch
from pinstage._loader._queues import IndexQueue

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
        (worker, "_ResumeIteration"),
    ],
)
def test_torch_still_has_it(owner, name):
    where = f"torch {torch.__version__} has no {owner.__name__}.{name} any more: adapt pinstage/_loader/_torch.py"
    assert hasattr(owner, name), where


ENDING = ["_index_queues", "_worker_result_queue", "_workers_done_event"]


@pytest.mark.parametrize(
    "name",
    ["_workers", "_persistent_workers", "_data_queue", "_rcvd_idx", "_in_order", *ENDING],
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
    assert "self._data_queue.get(timeout=timeout)" in source, "adapt SendingQueue in pinstage/_loader/_queues.py"


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


def test_the_queue_behind_has_a_file_that_can_be_waited_for():
    source = multiprocessing.Queue()
    where = "multiprocessing keeps the pipe elsewhere: adapt SendingQueue in pinstage/_loader/_queues.py"
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


@pytest.fixture
def behind():
    queue = multiprocessing.Queue()
    yield queue
    queue.close()
    queue.join_thread()


def is_waiting(behind):
    return bool(behind._notempty._waiters)


class SentAtOnce(IndexQueue):
    """One whose messages wait for no thread."""

    def __init__(self, behind):
        super().__init__(behind, deque())

    def put(self, message):
        super().put(message)
        while self._outbox:
            queue, *contents = self._outbox.popleft()
            queue.send(*contents)


@pytest.fixture
def index_queue(behind):
    """One behind which a thread runs, as it does in a loader from the first index on."""
    behind.put("first")
    assert behind.get(timeout=5) == "first"
    wait_until(lambda: is_waiting(behind))
    return SentAtOnce(behind)


@pytest.mark.parametrize("name", ["_writer", "_notempty", "_buffer", "_sem", "_closed"])
def test_a_queue_of_multiprocessing_still_has_it(behind, name):
    assert hasattr(behind, name), "adapt IndexQueue in pinstage/_loader/_queues.py"


def test_loaders_put_indexes_into_such_a_queue():
    iterator = iter(ps.DataLoader(data.Mapped(data.scalar, 4), num_workers=1, device="cpu"))
    assert [type(queue) for queue in iterator._index_queues] == [IndexQueue]
    assert len(list(iterator)) == 4


def test_a_small_message_is_written_by_the_thread_that_sends_it(behind, index_queue):
    index_queue.put((7, [1, 2]))
    assert behind._reader.poll(0)
    assert behind.get(timeout=5) == (7, [1, 2])


def test_a_message_is_kept_for_the_thread_that_sends_it_but_for_the_last(behind):
    outbox = deque()
    index_queue = IndexQueue(behind, outbox)
    index_queue.put((7, [1, 2]))
    index_queue.put(None)
    assert behind.get(timeout=5) is None
    [(of, message, _)] = outbox
    assert (of, message) == (index_queue, (7, [1, 2]))


class SlowToPickle:
    """Comes out as a text, once it may."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __reduce__(self):
        self.begun.set()
        assert self.may_go_on.wait(10)
        return str, ("slow",)


def test_a_message_waits_for_those_that_the_queues_thread_still_has(behind, index_queue):
    slow = SlowToPickle()
    behind.put(slow)
    assert slow.begun.wait(10)
    index_queue.put("quick")
    slow.may_go_on.set()
    assert [behind.get(timeout=5) for _ in range(2)] == ["slow", "quick"]


def test_a_full_pipe_blocks_nobody(behind, index_queue):
    messages = [bytes([i]) * 3000 for i in range(60)]  # three times what a pipe holds
    for message in messages:
        index_queue.put(message)
    assert [behind.get(timeout=5) for _ in messages] == messages


@given(st.lists(st.tuples(st.sampled_from([0, 10, 3000, 4080, 4096, 70_000]), st.booleans()), max_size=30))
@settings(max_examples=30, deadline=None)
def test_messages_keep_their_order(steps):
    behind = multiprocessing.Queue()
    index_queue = SentAtOnce(behind)
    sent, received = 0, []
    for nbytes, reads in steps:
        index_queue.put((sent, bytes(nbytes)))
        sent += 1
        if reads:
            received.append(behind.get(timeout=5)[0])
    while len(received) < sent:
        received.append(behind.get(timeout=5)[0])
    assert received == list(range(sent))
    behind.close()
    behind.join_thread()


def test_a_message_that_cannot_be_pickled_is_an_error_at_once_and_no_other_suffers(behind, index_queue):
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        index_queue.put([7, [lambda: None]])
    shared = [1]
    for _ in range(2):
        index_queue.put([shared, shared])
        assert behind.get(timeout=5) == [shared, shared]


def test_a_closed_queue_says_so(index_queue):
    index_queue.close()
    with pytest.raises(ValueError, match="closed"):
        index_queue.put(1)


def test_a_message_to_a_queue_that_was_closed_meanwhile_is_dropped(behind):
    outbox = deque()
    index_queue = IndexQueue(behind, outbox)
    index_queue.put(1)
    [(_, *contents)] = outbox
    index_queue.close()
    index_queue.send(*contents)


def test_a_sampler_whose_indexes_cannot_be_pickled_gets_an_error():
    """torch's own loader waits for ever."""
    sampler = [0, 1, lambda: 2]
    loader = ps.DataLoader(
        data.Mapped(data.scalar), None, sampler=sampler, num_workers=1, prefetch_factor=1, device="cpu"
    )
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        list(loader)
