"""Shared memory of staged leaves: the memory that each keeps, what is saved of it, and what changes
with it.
"""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
from doubles import calls_of, record_work
from hypothesis import given
from own_leaves import assert_in_blocks, assert_own, few, many, of_bytes, samples, storage_bytes
from strategies import assert_same, batches

import pinstage as ps
from pinstage._stage._target import Target

KIB, MIB = 1024, 1024 * 1024
OWN_LEAVES = 8
RUN_AHEAD = 3

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def numbered(count):
    return [torch.full((3,), float(number)) for number in range(count)]


METHODS = {
    "to_device": ps.Stager.to_device,
    "stage": lambda stager, batch: stager.stage(batch).wait(),
    "prefetch": lambda stager, batch: next(iter(stager.prefetch([batch]))),
}
LOADERS = {
    "loader": partial(ps.DataLoader, batch_size=None),
    "workers": partial(ps.DataLoader, batch_size=None, num_workers=2),
    "wrap_loader": lambda batches, **options: ps.wrap_loader(
        torch.utils.data.DataLoader(batches, batch_size=None), **options
    ),
}


def to_device(batch, own_storage, method=ps.Stager.to_device):
    with ps.Stager("cpu", max_bytes="64MiB", own_storage=own_storage) as stager:
        return method(stager, batch)


@pytest.fixture(params=[*METHODS, *LOADERS])
def way(request):
    """Stage one batch: ``way(batch, own_storage)``."""
    if request.param in METHODS:
        return partial(to_device, method=METHODS[request.param])

    def load(batch, own_storage):
        options = {"device": "cpu", "max_bytes": "64MiB", "own_storage": own_storage}
        (staged,) = LOADERS[request.param]([batch], **options)
        return staged

    return load


# -- what a leaf keeps -----------------------------------------------------------------------------


def assert_in_one_slab(batch, staged):
    slabs = {
        (leaf.untyped_storage().data_ptr(), storage_bytes(leaf)) for leaf in staged if leaf.nbytes
    }
    assert [nbytes for _, nbytes in slabs] == [ps.Layout.of(batch).nbytes]


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(
    ("make", "own_storage", "check"),
    [
        (few, "auto", assert_own),
        (few, True, assert_own),
        (many, True, assert_own),
        (many, "auto", assert_in_blocks),
        (few, False, assert_in_one_slab),
        (many, False, assert_in_one_slab),
    ],
)
def test_leaves_keep_the_memory_that_was_chosen(way, make, own_storage, check):
    batch = make()
    staged = way(batch, own_storage)
    assert_same(batch, staged)
    check(batch, staged)
    if check is assert_own:
        staged[0].resize_(5000).fill_(7)
        assert_same(batch[1:], staged[1:])


@pytest.fixture(scope="module")
def stagers():
    made = [
        ps.Stager("cpu", max_bytes="64MiB", own_storage=own_storage)
        for own_storage in ("auto", True, False)
    ]
    yield made
    for stager in made:
        stager.close()


@given(batch=batches())
def test_a_batch_is_the_same_whoever_shares_memory(stagers, batch):
    for stager in stagers:
        assert_same(batch, stager.to_device(batch))
        assert_same(batch, stager.stage(batch).wait())


# -- saving, sending, copying ----------------------------------------------------------------------


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def saved_bytes(thing):
    return len(saved(thing))


def through_queue(tensors):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(tensors)
    return queue.get()


@pytest.mark.parametrize(("make", "own_storage"), [(few, "auto"), (samples, True), (many, True)])
def test_own_leaves_are_saved_like_those_of_to(make, own_storage):
    batch = make()
    staged = to_device(batch, own_storage)
    for leaf, other in zip(staged, batch, strict=True):
        assert saved_bytes(leaf) == saved_bytes(other.clone())
    assert_own(batch, copy.deepcopy(staged))
    received = through_queue(staged)
    assert_same(batch, received)
    assert list(map(storage_bytes, received)) == [leaf.nbytes for leaf in batch]


def test_leaves_in_blocks_are_saved_with_their_block():
    batch = samples()
    staged = to_device(batch, "auto")
    payload = sum(leaf.nbytes for leaf in batch)
    assert saved_bytes(staged) < payload + 20 * KIB
    loaded = torch.load(io.BytesIO(saved(staged)))
    assert_same(batch, loaded)
    assert storage_bytes(staged[0]) == storage_bytes(copy.deepcopy(staged[0]))
    assert saved_bytes(staged[0]) > saved_bytes(batch[0].clone())
    assert saved_bytes(staged[0].clone()) == saved_bytes(batch[0].clone())


# -- changes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("own_storage", ["auto", True, False])
@pytest.mark.parametrize("make", [few, samples])
def test_changing_a_leaf_changes_no_other(make, own_storage):
    batch = make()
    staged = to_device(batch, own_storage)
    versions = [leaf._version for leaf in staged]
    staged[0].zero_()
    assert staged[0]._version == versions[0] + 1
    assert [leaf._version for leaf in staged[1:]] == versions[1:]
    assert_same(batch[1:], staged[1:])


@pytest.mark.parametrize("others", [0, 18])
def test_compiled_functions_can_change_a_leaf_in_place(make_stager, others):
    batch = [torch.arange(6.0), torch.arange(6), *numbered(others)]
    staged = make_stager().to_device(batch)
    weight = torch.full((6,), 2.0, requires_grad=True)

    def step(weight, values, *more):
        values.add_(1)
        return (values * weight).sum() + sum(one.sum() for one in more)

    torch.compiler.reset()
    found = torch.compile(step, backend="aot_eager")(weight, *staged)
    assert torch.equal(found, step(weight, batch[0].clone(), *batch[1:]))
    assert torch.equal(staged[0], batch[0] + 1)
    assert_same(batch[1:], staged[1:])
    found.backward()
    assert torch.equal(weight.grad, batch[0] + 1)


# -- the offset table ------------------------------------------------------------------------------


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(
    "make",
    [few, many, samples, lambda: numbered(OWN_LEAVES), lambda: numbered(OWN_LEAVES + 1)],
    ids=["few", "many", "samples", "as many as are own", "one more"],
)
def test_transfers_and_stats_count_device_tensors(make_stager, make):
    batch = make()
    in_blocks = len({slot.block for slot in ps.Layout.of(batch).slots})
    expected = {
        "auto": len(batch) if len(batch) <= OWN_LEAVES else in_blocks,
        True: len(batch),
        False: 1,
    }
    for own_storage, blocks in expected.items():
        stager = make_stager("64MiB", own_storage=own_storage)
        transfer = stager.stage(batch)
        assert (transfer.blocks, stager.stats().blocks) == (blocks, blocks)
        assert stager.stats().copies == transfer.copies
        stager.to_device(batch)
        assert stager.stats().blocks == 2 * blocks


@pytest.mark.parametrize("wrong", [None, "yes", 1, 16])
@pytest.mark.parametrize("make", [ps.Stager, partial(ps.DataLoader, [1])])
def test_other_values_of_own_storage_are_refused(make, wrong):
    with pytest.raises(ValueError, match="own_storage must be 'auto', True or False"):
        make(device="cpu", own_storage=wrong)


# -- how far the host runs ahead -------------------------------------------------------------------


LARGE = 2 * MIB
BATCHES = {
    "large": lambda: [of_bytes(LARGE)],
    "small": lambda: [of_bytes(70 * KIB) for _ in range(9)],
}
"""Each takes a slab."""


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("run_ahead", [1, RUN_AHEAD, 5])
def test_the_host_waits_for_the_run_ahead_limit(monkeypatch, kind, run_ahead):
    made, waited = record_work(monkeypatch)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=run_ahead) as stager:
        for number in range(1, 10):
            stager.to_device(BATCHES[kind]())
            assert len(made) == number
            assert waited == made[: max(0, number - run_ahead)]
        made.clear()  # closing waits for the slabs in flight


def test_stage_is_bounded_and_prefetch_bounds_itself(monkeypatch):
    made, waited = record_work(monkeypatch)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=1) as stager:
        for _ in range(3):
            stager.stage([of_bytes(LARGE)])
        assert waited == made[:2]
        made.clear()
        waited.clear()
        for _ in stager.prefetch([[of_bytes(LARGE)] for _ in range(RUN_AHEAD)], depth=1):
            assert not waited


@pytest.mark.parametrize("kind", BATCHES)
def test_without_a_bound_the_host_never_waits(monkeypatch, kind):
    _, waited = record_work(monkeypatch)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=None) as stager:
        for _ in range(20):
            stager.to_device(BATCHES[kind]())
        assert not waited


def test_batches_without_a_slab_are_not_bounded(monkeypatch):
    move_few = Target.move_few
    made, _ = record_work(monkeypatch)
    monkeypatch.setattr(Target, "move_few", move_few)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=1) as stager:
        for _ in range(20):
            stager.to_device([of_bytes(KIB), of_bytes(64 * KIB)])
        assert not made


# -- a few small leaves ----------------------------------------------------------------------------


# Packed, each of these has padding.
DIRECT = {
    "one leaf": lambda: torch.arange(11),
    "numpy": lambda: [np.arange(5), np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3))],
    "as many as are own": lambda: numbered(OWN_LEAVES),
    "1 MiB": lambda: [of_bytes(64 * KIB - 8), of_bytes(960 * KIB + 8, torch.int64)],
    "channels last": lambda: [torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)],
    "0-d and empty": lambda: [torch.tensor(3), torch.zeros(0)],
    "two views of one storage": lambda: list(torch.arange(10).split(5)),
}
# Tensors that can't be packed are tested with the batch.
NOT_DIRECT = {
    "too many": lambda: numbered(OWN_LEAVES + 1),
    "more than 1 MiB": lambda: [torch.ones(2), of_bytes(1024 * KIB)],
    "strided": lambda: [torch.arange(10)[::2]],
    "expanded": lambda: [torch.arange(3).expand(3, 3)],
    "conjugated": lambda: [torch.randn(3, dtype=torch.complex64).conj()],
    "negated": lambda: [torch.randn(3, dtype=torch.complex64).conj().imag],
    "repeated": lambda: [torch.ones(3)] * 2,
    "array of text": lambda: [np.array(["a", "b"]), torch.ones(2)],
    "big-endian": lambda: [np.arange(5.0).astype(">f8")],
}


@pytest.mark.parametrize("kind", DIRECT | NOT_DIRECT)
def test_only_plain_small_leaves_are_moved_directly(stager, kind):
    batch = (DIRECT | NOT_DIRECT)[kind]()
    assert_same(batch, stager.to_device(batch))
    layout, stats = ps.Layout.of(batch), stager.stats()
    packed_bytes = sum(slot.nbytes for slot in layout.slots)
    padding_bytes = layout.nbytes - packed_bytes
    assert padding_bytes
    assert (stats.batches, stats.packed_leaves) == (1, len(layout.slots))
    assert (stats.packed_bytes, stats.padding_bytes) == (
        packed_bytes,
        0 if kind in DIRECT else padding_bytes,
    )


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("make", [lambda: [torch.ones(3)], samples], ids=["few", "samples"])
def test_staged_leaves_respect_modes_like_to(stager, mode, make):
    with mode():
        batch = make()
        staged = stager.to_device(batch)
        assert_same(batch, staged)
    assert {leaf.is_inference() for leaf in staged} == {mode is torch.inference_mode}


@pytest.mark.parametrize("make", [lambda: numbered(2), few, samples, many])
@pytest.mark.parametrize("method", ["to_device", "stage"])
def test_a_closed_pool_refuses_what_it_packs(stager, method, make):
    stager.close()
    with pytest.raises(ps.errors.PoolClosedError):
        getattr(stager, method)(make())
    assert stager.stats().batches == 0


def test_empty_leaves_are_no_copies(stager):
    stager.to_device([torch.zeros(0), torch.ones(3)])
    assert stager.stats().copies == stager.stage([torch.zeros(0), torch.ones(3)]).copies == 1


def test_a_warm_small_batch_takes_few_python_calls(stager):
    batch = {"x": torch.ones(100), "y": torch.arange(8)}
    for _ in range(3):
        stager.to_device(batch)
    files = calls_of(lambda: stager.to_device(batch))
    assert 0 < len(files) <= 15
    assert len(set(files)) <= 7
