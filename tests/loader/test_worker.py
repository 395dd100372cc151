"""The slabs of a worker: whatever the order of the main process's answers, a slab has one batch at
a time.
"""

import io
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinstage._loader import _worker
from pinstage._loader._messages import Freed, Granted, Refused, Waiting
from pinstage._loader._worker import WorkerSlab, WorkerSlabs

LIMIT = 3
CAP = 1000
SIZES = st.integers(1, 300)


class Slab(WorkerSlab):
    """A slab without memory."""

    def __init__(self, number, nbytes):
        self.number, self.nbytes, self.is_free = number, nbytes, True
        self.tensor, self._mapping = None, io.BytesIO()


class MainProcess:
    """The other end of the worker's channel; `draw` chooses the next message among the possible
    ones.
    """

    def __init__(self, draw):
        self.draw = draw
        self.ask = None
        self.held = {}
        self.copying = set()
        self.count = self.refusals = self.sent = 0

    # -- the channel

    def send(self, message):
        if isinstance(message, Waiting):
            assert message.received == self.sent
            return
        assert self.ask is None, "the worker asks while it waits for an answer"
        assert message.wanted >= message.nbytes
        for number in message.given_up:
            assert number not in self.copying, "the worker gives up a slab that is being copied"
            del self.held[number]
        self.ask = message.nbytes, message.wanted

    def poll(self):
        return bool(self.messages()) and self.draw(st.booleans())

    def recv(self):
        messages = self.messages()
        assert messages, "the worker waits for what nobody will send"
        self.sent += 1
        return self.draw(st.sampled_from(messages))()

    def messages(self):
        messages = [lambda number=number: self.free(number) for number in sorted(self.copying)]
        if self.ask is not None:
            messages += [
                lambda size=size: self.grant(size)
                for size in self.ask
                if self.held_bytes() + size <= CAP
            ]
            messages.append(self.refuse)
        return messages

    # -- messages that it may send

    def free(self, number):
        self.copying.remove(number)
        return Freed(number)

    def grant(self, nbytes):
        self.ask, self.count = None, self.count + 1
        self.held[self.count] = nbytes
        assert len(self.held) <= LIMIT
        return Granted(self.count, nbytes)

    def refuse(self):
        self.ask, self.refusals = None, self.refusals + 1
        return Refused()

    def held_bytes(self):
        return sum(self.held.values())


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(_worker, "wait", lambda sources, timeout: sources[:1])

    def attach(slabs, granted):
        slabs._slabs[granted.number] = Slab(granted.number, granted.nbytes)
        return True

    monkeypatch.setattr(WorkerSlabs, "_attach", attach)


@settings(max_examples=300)
@given(st.data())
def test_a_slab_is_written_by_one_batch(data):
    main = MainProcess(data.draw)
    slabs = WorkerSlabs(main, os.getpid(), LIMIT)
    for nbytes in data.draw(st.lists(SIZES, max_size=12)):
        refusals = main.refusals
        slab = slabs.take(nbytes)
        if slab is None:
            assert main.refusals > refusals
            assert not [size for size in main.held.values() if size >= nbytes]
            continue
        assert slab.nbytes == main.held[slab.number] >= nbytes
        assert slab.number not in main.copying, "two batches in one slab"
        assert not slab._mapping.closed
        main.copying.add(slab.number)
