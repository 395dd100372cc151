"""Error types and their numbers."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from doubles import ManualEvent

import pinstage as ps
from pinstage import errors
from pinstage.errors import (
    BudgetExceededError,
    ClosedError,
    LayoutError,
    PinningError,
    PinstageError,
    PoolError,
)

NUMBERS = {
    "requested_bytes": 5,
    "held_bytes": 4,
    "leased_bytes": 3,
    "in_flight_bytes": 1,
    "max_bytes": 7,
}
CUDA = {"call": "cudaHostAlloc", "name": "cudaErrorInvalidValue", "nbytes": 5}
FIELDS = {PinningError: CUDA, LayoutError: {"path": "['obs'][3].raw"}}
EXAMPLES = [
    kind("what: 5 B; do this", **(NUMBERS if issubclass(kind, PoolError) else FIELDS.get(kind, {})))
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PinstageError)
]
every_example = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


@every_example
@pytest.mark.parametrize(
    "travel",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deep"],
)
def test_an_error_keeps_its_fields_in_other_processes(error, travel):
    error = copy.copy(error)
    error.add_note("in worker 3")
    assert (str(error), error.args) == ("what: 5 B; do this", ("what: 5 B; do this",))
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.args, vars(arrived)) == (str(error), error.args, vars(error))


def test_a_layout_error_without_path_means_the_batch():
    assert LayoutError("what: 1; do this").path == ""


def use_closed_region():
    region = ps.HostRegion(4096)
    region.close()
    region.tensor()


def use_closed_stager():
    stager = ps.Stager("cpu")
    stager.close()
    stager.to_device([torch.ones(3)])


def use_closed_checkpoint_stager():
    stager = ps.checkpoint.CheckpointStager()
    stager.close()
    stager.stage({"x": torch.ones(3)})


def use_closed_loader():
    loader = ps.DataLoader(torch.arange(8), 2, device="cpu")
    iterator = iter(loader)
    next(iterator)
    loader.close()
    next(iterator)


@pytest.mark.parametrize(
    "use", [use_closed_region, use_closed_stager, use_closed_checkpoint_stager, use_closed_loader]
)
def test_something_closed_is_never_a_refusal(use):
    with pytest.raises(ClosedError) as caught:
        use()
    assert isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, PinningError)
    assert isinstance(caught.value, PoolError) == ("pool" in str(caught.value))


# -- as the pool raises them


@pytest.fixture
def busy_pool(make_pool):
    """A pool of 1000 bytes with 512 leased, 208 in flight and 96 idle."""
    pool = make_pool(1000)
    event = ManualEvent()
    with pool.acquire(500):
        pool.acquire(200).release(after=event)
        pool.reserve(96)
        yield pool
        event.finish()


@pytest.mark.parametrize(
    ("call", "requested_bytes", "remedy"),
    [
        (
            lambda pool: pool.acquire(1001),
            1001,
            'pass max_bytes="2KiB" or more, or ask for less',
        ),
        (
            lambda pool: pool.reserve(200),
            208,
            'release leases, trim() idle slabs, or pass max_bytes="1KiB"',
        ),
    ],
)
def test_an_oversized_request_names_the_numbers(busy_pool, call, requested_bytes, remedy):
    with pytest.raises(MemoryError) as caught:
        call(busy_pool)
    error = caught.value
    assert type(error) is BudgetExceededError
    assert [getattr(error, name) for name in NUMBERS] == [requested_bytes, 816, 512, 208, 1000]
    what, _, rest = str(error).partition(": ")
    said, _, last = rest.rpartition("; ")
    assert what
    assert last == remedy
    for text in (
        f"requested {requested_bytes} B",
        "held 816 B of max_bytes 1000 B",
        "leased 512 B",
        "208 B",
    ):
        assert text in said or "are missing" in said


@pytest.mark.parametrize(
    "verb",
    [
        lambda pool: pool.acquire(1001),
        lambda pool: pool.acquire(600, timeout=0),
        lambda pool: pool.reserve(200),
        lambda pool: pool.acquire(0),
        lambda pool: pool.acquire(1, timeout=-1),
        lambda pool: pool.acquire("much"),
        lambda pool: pool.reserve(1, count=-1),
        lambda pool: pool.trim(-1),
    ],
)
def test_a_failed_call_leaves_the_pool_unchanged(busy_pool, memory, verb):
    before, allocations = busy_pool.stats(), memory.allocations
    with pytest.raises((PinstageError, ValueError)):
        verb(busy_pool)
    unwaited = {"waits": 0, "wait_seconds": 0.0}
    after = replace(busy_pool.stats(), **unwaited)
    owners = {owner: replace(stats, **unwaited) for owner, stats in after.owners.items()}
    assert replace(after, owners=owners) == before
    assert (memory.allocations, memory.deallocations) == (allocations, 0)
