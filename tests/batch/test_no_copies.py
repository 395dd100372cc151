"""Objects that own a slab, or the right to one, can't be copied: two copies would return the slab
twice.
"""

import copy
import pickle

import pytest
import torch

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
THINGS = {
    "lease": (
        lambda stager: stager.pool.acquire(10),
        "acquire another, or copy its bytes with lease.tensor",
    ),
    "pool": (lambda stager: stager.pool, "make another SlabPool, or pass this one on"),
    "stager": (lambda stager: stager, "make another Stager, or pass this one on"),
    "transfer": (lambda stager: stager.stage([torch.ones(3)]), r"copy what wait\(\) returns"),
    "fetch": (lambda stager: stager.fetch([torch.ones(3)]), r"copy what result\(\) returns"),
}


@pytest.fixture
def stager(make_stager):
    """A stager whose slabs must all have been returned at the end of a test."""
    return make_stager()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", THINGS)
def test_it_cannot_be_copied_or_pickled(stager, what, way):
    make, remedy = THINGS[what]
    thing = make(stager)
    with pytest.raises(
        TypeError,
        match=f"a (lease|pool|stager|transfer) cannot be copied or pickled: .*{remedy}",
    ):
        WAYS[way](thing)
    if what == "lease":
        thing.tensor().fill_(1)
        thing.release()
    elif what in ("transfer", "fetch"):
        batch = thing.wait() if what == "transfer" else thing.result()
        assert batch[0].tolist() == [1, 1, 1]
    del thing
    assert stager.to_device([torch.ones(2)])[0].tolist() == [1, 1]
