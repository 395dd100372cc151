"""When a loader sends its batches, and the messages that torch's iterator reads."""

import queue
import time
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.worker import _ResumeIteration

from pinstage._loader._messages import Failed, PackedBatch
from pinstage._loader._sending import SendingQueue
from pinstage._stage import Transfer


class Sent(Transfer):
    """A transfer without a copy."""

    def __init__(self, arrival):
        self.number, arrival.number = arrival.number, None  # the copy has the slab


class ThreadError(Exception):
    """An exception with weak references."""


class Broker:
    """Records which batches were dropped unsent."""

    def __init__(self):
        self.free = []

    def give_back(self, number, event):
        assert event is None
        self.free.append(number)


class Batches:
    """torch's iterator, as far as the queue uses it."""

    def __init__(self, in_order):
        self._rcvd_idx = 0
        self._in_order = in_order


class Loop:
    """A loop over torch's iterator, with both threads in this one."""

    def __init__(self, depth, *, in_order=True):
        self.batches = Batches(in_order)
        self.arrived, self.broker, self.sent, self.woken = deque(), Broker(), [], 0
        self.queue = SendingQueue(
            SimpleNamespace(get=self.read), self.batches, self.send, depth, self.wake
        )

    def send(self, arrival):
        if arrival.others == ["cannot be sent"]:
            raise ValueError("no")
        sent = Sent(arrival)
        self.sent.append(sent.number)
        return sent

    def wake(self):
        self.woken += 1
        self.queue.send_ready()

    def read(self):
        item = self.arrived.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def arrive(self, *items):
        """Let the broker's thread find messages."""
        for item in items:
            self.arrived.append(item)
            self.queue.receive()
            self.queue.send_ready()

    def batch(self, number, *others):
        return number, PackedBatch(self.broker, None, None, number, None, list(others), 0.0)

    def ready(self):
        """Take all that is ready."""
        found = []
        while True:
            try:
                found.append(self.queue.get(timeout=0)[0])
            except queue.Empty:
                return found


def test_the_thread_sleeps_while_a_batch_is_missing():
    loop = Loop(1)
    loop.arrive(loop.batch(2))
    loop.batches._rcvd_idx = 1
    loop.queue.advance()
    assert (loop.woken, loop.sent) == (0, [])


@given(st.data(), st.integers(0, 3), st.booleans())
def test_every_batch_comes_once_and_none_too_early(data, depth, in_order):
    workers = data.draw(st.integers(1, 4))
    counts = [data.draw(st.integers(0, 5)) for _ in range(workers)]
    # As torch assigns tasks: each worker answers in order, and reports when it has no more.
    tasks = [
        deque((turn * workers + worker) for turn in range(count + 1))
        for worker, count in enumerate(counts)
    ]
    last = [numbers[-1] for numbers in tasks]
    loop, found, early, done = Loop(depth, in_order=in_order), [], set(), set()
    wanted = 0
    while len(done) < workers:
        while in_order and (
            wanted in early or (wanted % workers in done and wanted >= last[wanted % workers])
        ):
            if wanted in early:
                found.append(wanted)
            wanted += 1
        loop.batches._rcvd_idx = wanted
        if data.draw(st.booleans()):  # the loop got a batch or an error, or torch only looks again
            loop.queue.advance()
        try:
            number, payload = loop.queue.get(timeout=0)
        except queue.Empty:  # so a worker has to answer
            worker = data.draw(st.sampled_from([w for w in range(workers) if tasks[w]]))
            number = tasks[worker].popleft()
            loop.arrive((number, "no more") if number == last[worker] else loop.batch(number))
            continue
        if payload == "no more":
            worker = number % workers
            assert [n for n in loop.sent if n % workers == worker] == list(
                range(worker, last[worker], workers)
            )
            done.add(worker)
        elif in_order:
            assert wanted <= number <= max(wanted, wanted - 1 + depth)
            early.add(number)
        else:
            assert len(loop.sent) - len(found) <= depth + 1
            found.append(number)
    found += sorted(early.difference(found))
    everything = sorted(n for w in range(workers) for n in range(w, last[w], workers))
    assert (found if in_order else sorted(found)) == everything
    assert sorted(loop.sent) == everything


def test_an_unpickling_error_doesn_t_stop_later_batches():
    loop = Loop(1)
    loop.arrive(ValueError("no number"), loop.batch(0))
    with pytest.raises(ValueError, match="no number"):
        loop.queue.get(timeout=0)
    assert loop.ready() == [0]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_sending_error_keeps_its_place(stateful):
    loop = Loop(1)
    number, arrival = loop.batch(0, "cannot be sent")
    loop.arrive((number, (arrival, 0, "state") if stateful else arrival), loop.batch(1))
    number, payload = loop.queue.get(timeout=0)
    failed, *rest = payload if stateful else [payload]
    assert (number, isinstance(failed, Failed), rest) == (0, True, [0, "state"] if stateful else [])
    with pytest.raises(ValueError, match="no"):
        failed.reraise()
    loop.batches._rcvd_idx = 1
    assert loop.ready() == [1]


def test_a_sending_error_without_order_displaces_no_batch():
    loop = Loop(0, in_order=False)
    loop.arrive(loop.batch(0, "cannot be sent"), loop.batch(1))
    assert loop.ready() == [0, 1]


def test_a_thread_s_error_is_not_kept():
    """Its traceback has the frames of the loop, so that a queue that kept it would keep all that
    the loop holds.
    """
    loop = Loop(1)
    loop.queue.fail(ThreadError())
    try:
        loop.queue.get(timeout=0)
    except ThreadError as error:
        kept = weakref.ref(error)
    assert kept() is None


def test_batches_of_an_abandoned_pass_are_dropped():
    loop = Loop(0)
    loop.arrive(loop.batch(3), loop.batch(4))
    loop.queue.drop_until_resumed(2)
    assert sorted(loop.broker.free) == [3, 4]
    loop.arrive(loop.batch(5), (_ResumeIteration(), None), loop.batch(6))
    assert sorted(loop.broker.free) == [3, 4, 5, 6]
    loop.arrive((_ResumeIteration(), None))
    loop.queue.begin()
    loop.arrive(loop.batch(0))
    assert len(loop.ready()) == 3
    assert loop.sent == [0]


def test_get_waits_for_its_timeout():
    loop = Loop(0)
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        loop.queue.get(timeout=0.0501)
    assert time.monotonic() - began >= 0.05


def test_the_queue_does_not_keep_torchs_iterator():
    loop = Loop(0)
    kept = weakref.ref(loop.batches)
    del loop.batches
    assert kept() is None
    loop.queue.advance()


def test_two_ends_close_the_pipe_once():
    """The second thread arrives while the first is inside ``os.close``, before the pipe is marked
    as closed.
    """
    closed = []

    def close():
        closed.append(None)
        if len(closed) == 1:
            sending.close()

    source = SimpleNamespace(_writer=SimpleNamespace(close=close))
    sending = SendingQueue(source, Batches(in_order=True), None, 2, None)
    sending.close()
    assert len(closed) == 1
