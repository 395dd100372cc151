"""Objects that own a slab, or the right to one, can't be copied: two copies would return the slab
twice.
"""

import copy
import pickle

import pytest
import torch

from pinstage import SlabPool, Stager
from pinstage.memory import PageableMemory

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
THINGS = {
    "lease": (
        lambda stager: stager.pool.acquire(10),
        "acquire another, or copy its bytes with lease.tensor",
    ),
    "pool": (lambda stager: stager.pool, "make another SlabPool, or pass this one on"),
    "stager": (lambda stager: stager, "make another Stager, or pass this one on"),
    "transfer": (lambda stager: stager.stage([torch.ones(3)]), r"copy what wait\(\) returns"),
    "fetch": (lambda stager: stager.fetch([torch.ones(3)]), r"copy what wait\(\) returns"),
}


@pytest.fixture
def stager():
    with SlabPool("1MiB", memory=PageableMemory()) as pool:
        yield Stager("cpu", pool=pool)
        stats = pool.stats()
        assert (stats.leased_slabs, stats.in_flight_slabs) == (0, 0)


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
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        WAYS[way]({"nested": [thing]} if way != "copy" else thing)
    if what == "lease":
        thing.tensor().fill_(1)
        thing.release()
    elif what in ("transfer", "fetch"):
        assert thing.wait()[0].tolist() == [1, 1, 1]
    del thing
    assert stager.to_device([torch.ones(2)])[0].tolist() == [1, 1]
