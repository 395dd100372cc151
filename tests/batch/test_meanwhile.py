"""Changes during the walk of a batch: the collector, a class's `__hash__` and other threads may run
in the middle.
"""

import contextlib
import gc
import sys
import weakref
from functools import partial

import pytest
from doubles import switching_often

from pinstage import _native
from pinstage._batch import _structure, walk

first_and_again = pytest.mark.parametrize("is_again", [False, True], ids=["first", "again"])


class Hashed(type):
    """Metaclass of classes that do something, once, when they are looked up."""

    meanwhile = None

    def __hash__(cls):
        meanwhile, cls.meanwhile = cls.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return id(cls)


@contextlib.contextmanager
def collecting_in_the_middle(cls, callback):
    """Let the garbage collector run when the walk looks up a class, and call a function then."""
    spare = []

    def meanwhile():
        # Empty Python's free lists of tuples and dicts, so that the next allocation runs the
        # collector, which is due.
        spare.extend((number,) for number in range(3000))
        spare.extend({} for _ in range(200))
        gc.enable()

    cls.meanwhile = meanwhile
    gc.disable()
    gc.callbacks.append(callback)
    try:
        yield
    finally:
        gc.callbacks.remove(callback)
        gc.enable()


class Odd(metaclass=Hashed):
    pass


class Record(metaclass=Hashed):
    pass


class Leaf:
    pass


def leaves_of(batch, is_again, meanwhile):
    """Walk a batch, and call `meanwhile` when the walk reaches its first `Odd`."""
    handlers = {Odd: None, Leaf: None}
    structure = _native.core.Structure.of(batch, handlers)[0]
    Odd.meanwhile = meanwhile
    leaves = (
        structure.leaves(batch, handlers)
        if is_again
        else _native.core.Structure.of(batch, handlers)[1]
    )
    assert Odd.meanwhile is None
    return leaves


@first_and_again
def test_items_removed_during_the_walk_stay_alive(is_again):
    batch = {"a": Odd(), "b": {"list": [Leaf()]}, "c": Leaf()}
    alive = [weakref.ref(one) for one in (batch["a"], batch["b"]["list"][0], batch["c"])]
    leaves = leaves_of(batch, is_again, batch.clear)
    assert batch == {}
    assert all(one() is not None for one in alive)
    assert leaves == [one() for one in alive]


@first_and_again
def test_items_removed_during_inspection_stay_alive(is_again):
    batch = [Odd(), Leaf()]
    alive = weakref.ref(batch[0])
    leaves = leaves_of(batch, is_again, lambda: batch.__setitem__(0, None))
    assert batch[0] is None
    assert alive() is not None
    assert leaves == [alive(), batch[1]]


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the collector runs between lines of Python only"
)
def test_a_class_forgotten_during_the_walk_is_rebuilt():
    handlers = {Record: partial(object.__new__, Record)}
    alive = weakref.ref(handlers[Record])
    record = Record()
    record.value = None
    with collecting_in_the_middle(Record, lambda phase, _: handlers.clear()):
        structure, leaves = _native.core.Structure.of(record, handlers)
    assert not handlers
    assert alive() is not None
    assert vars(structure.rebuild(leaves)) == {"value": None}
    del structure
    assert alive() is None


def test_a_dict_that_shrinks_yields_the_rest():
    batch = {f"k{index}": index for index in range(50)}
    with collecting_in_the_middle(Odd, lambda phase, _: batch.pop("k7", None)):
        structure, leaves = _native.core.Structure.of([Odd(), batch], {Odd: None, int: None})
    assert len(leaves) == structure.num_leaves == 1 + len(structure.rebuild(leaves)[1])


def test_threads_with_many_structures_stay_independent(background):
    threads, sizes = 4, range(3 * _structure._MOST_REMEMBERED)

    def walk_all(start):
        for _ in range(100):
            for size in (*sizes[start:], *sizes[:start]):
                assert walk([size] * size)[0] == [size] * size

    with switching_often():
        for walking in [background(walk_all, start) for start in sizes[:: len(sizes) // threads]]:
            walking.result()
    assert len(_structure._last) <= _structure._MOST_REMEMBERED
