"""In a thread that captures a graph, all staging is refused, and nothing is lost."""

import pytest
import torch
from doubles import HeldTarget, fetch_from, use_target
from torch.utils.data import DataLoader

import pinstage as ps
from pinstage.errors import PinstageError

CALLS = {
    "stage": lambda stager: stager.stage([torch.ones(3)]),
    "to_device": lambda stager: stager.to_device([torch.ones(3)]),
    "to_device, large": lambda stager: stager.to_device(torch.ones(1 << 20)),
    "to_device, out": lambda stager: stager.to_device(torch.ones(3), out=torch.zeros(3)),
    "fetch": lambda stager: stager.fetch(torch.ones(3)),
    "to_host": lambda stager: stager.to_host([torch.ones(3)]),
    "load_weights": lambda stager: stager.load_weights(
        {"weight": torch.zeros(3)}, {"weight": torch.ones(3)}
    ),
    "prefetch": lambda stager: iter(stager.prefetch([torch.ones(3)])),
}


def refuse(call, *args, **options):
    with pytest.raises(PinstageError, match="captures a graph"):
        call(*args, **options)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_are_refused_and_change_nothing(stager, capture, call):
    before = stager.stats()
    with capture():
        refuse(call, stager)
    assert stager.stats() == before
    call(stager)


def test_a_refused_lease_stays_the_caller_s(stager, capture):
    layout = ps.Layout.of(torch.ones(3))
    with stager.pool.acquire(layout.nbytes) as lease:
        layout.pack(torch.ones(3), lease.tensor())
        with capture():
            refuse(stager.stage_lease, lease, layout)
        assert not lease.released
        assert stager.stage_lease(lease, layout).wait().eq(1).all()


class Unasked(HeldTarget):
    """A device whose events must not be asked in a capture."""

    def to_host(self, copies, **options):
        super().to_host(copies, **options)
        return self.stream


@pytest.mark.parametrize(
    ("way", "method"),
    [
        (way, method)
        for way, result in (("stage", "wait"), ("fetch", "result"))
        for method in (result, "query", "synchronize")
    ],
)
def test_transfers_are_refused_and_go_on(stager, capture, way, method):
    target = use_target(stager, Unasked())
    fetch_from(stager, target)
    transfer = getattr(stager, way)([torch.ones(3)])
    target.stream.finish()
    asked = target.stream.queries
    with capture():
        refuse(getattr(transfer, method))
        assert " done" not in repr(transfer)
        assert target.stream.queries == asked
    assert " done" in repr(transfer)
    getattr(transfer, method)()
    result = transfer.wait() if way == "stage" else transfer.result()
    assert result[0].eq(1).all()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_refused_request_loses_no_batch(prefetch, capture, depth):
    batches = iter(prefetch((torch.full((3,), number) for number in range(6)), depth=depth))
    found = []
    for _ in range(6):
        with capture():
            for _ in range(2):
                refuse(next, batches)
        found.append(int(next(batches)[0]))
    assert found == list(range(6))
    with capture():
        refuse(next, batches)
    assert next(batches, None) is None


def test_a_refused_pass_reads_nothing(stager, capture):
    source = iter([torch.ones(3)])
    with capture():
        refuse(iter, stager.prefetch(source))
    assert len(list(stager.prefetch(source))) == 1


def test_a_thread_stages_while_the_loop_captures(stager, capture):
    loader = DataLoader(list(range(8)), 2, num_workers=1, multiprocessing_context="fork")
    batches = iter(stager.prefetch(loader, depth=3, background=True))
    found = next(batches).tolist()
    with capture():
        refuse(next, batches)
    assert found + [number for batch in batches for number in batch.tolist()] == list(range(8))
