"""A batch is taken apart in the same way, whether or not similar batches were staged before."""

import gc
import pickle
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from doubles import wait_until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Record, assert_same, batches

from pinstage import register_node
from pinstage._batch import WRAPPERS, _nodes, _structure, walk
from pinstage.errors import LayoutError

many = settings(max_examples=3 * settings.default.max_examples)
OFTEN = 3

Pair = namedtuple("Pair", "a b")


class Items(list):
    """Only a different type."""


class Named(str):
    """Only a different type, with its own `repr`."""

    __slots__ = ()

    def __repr__(self):
        return f"Named({str(self)!r})"


@pytest.fixture(autouse=True)
def forgotten():
    """Forget the structures of other tests."""
    _structure._last.clear()


def again(batch):
    leaves, structure = walk(batch)
    return structure.rebuild(leaves)


def dicts_of(child, make=dict):
    return st.lists(
        st.tuples(st.sampled_from("ab"), child), max_size=2, unique_by=lambda item: item[0]
    ).map(make)


def containers_of(child):
    pairs = st.tuples(child, child)
    return st.one_of(
        dicts_of(child),
        dicts_of(child, OrderedDict),
        dicts_of(child, lambda items: defaultdict(list, items)),
        pairs,
        pairs.map(list),
        pairs.map(Items),
        pairs.map(lambda two: Pair(*two)),
        pairs.map(deque),
        pairs.map(lambda two: Record(*two)),
        child.map(lambda one: {"same": one, "again": [one]}),
    )


LEAVES = st.sampled_from([torch.tensor(1), torch.tensor([2.0]), 3, "four", None])
alike = st.recursive(LEAVES, containers_of, max_leaves=6)
"""Small enough that two are often equal except for a detail."""

SHARED = {"a": 1, "b": 2}


@many
@given(alike, alike)
@example({"a": 1, "b": 2}, {"b": 1, "a": 2})
@example([{"a": {"a": 1, "b": 2}}], [{"a": {"b": 2, "a": 1}}])
@example([{"a": 1}], [OrderedDict(a=1)])
@example([{"a": 1}], [defaultdict(list, a=1)])
@example({"a": [1]}, {"a": [None]})
@example({"a": [1]}, {"a": [[1]]})
@example([1, 2], Items([1, 2]))
@example((1, 2), Pair(1, 2))
@example(Record({"a": 1}, 2), Record({"b": 1}, 2))
@example([SHARED, {"c": SHARED}], [{"a": 1, "b": 2}, {"c": {"b": 2, "a": 1}}])
def test_what_came_before_does_not_show(before, batch):
    _structure._last.clear()
    for _ in range(OFTEN):
        assert_same(before, again(before), copied=False)
    assert_same(batch, again(batch), copied=False)
    assert_same(before, again(before), copied=False)


@given(st.one_of(alike, batches()))
def test_walking_again_finds_the_same(batch):
    leaves, structure = walk(batch)
    for forget in (False, True, True):
        if forget:
            _structure._last.clear()
            _nodes.HANDLERS.clear()
        again, other = walk(batch)
        assert list(map(id, again)) == list(map(id, leaves)) or any(
            type(leaf) in WRAPPERS for leaf in leaves
        )
        assert (other.paths(), str(other)) == (structure.paths(), str(structure))
        assert other.matches(structure)


@many
@given(alike, alike)
@example({"a": 1, "b": 2}, {"b": 1, "a": 2})
@example([OrderedDict(), {"a": 1, "b": 2}], [OrderedDict(), {"b": 1, "a": 2}])
@example({1: 2}, {True: 2})
@example({"a": 2}, {Named("a"): 2})
def test_equal_structures_rebuild_alike(one, other):
    (_, first), (_, second) = walk(one), walk(other)
    _structure._last.clear()
    assert first == walk(one)[1]
    assert hash(first) == hash(walk(one)[1])
    numbers = list(range(first.num_leaves))
    if first == second:
        assert hash(first) == hash(second)
        assert_same(first.rebuild(numbers), second.rebuild(numbers))
    elif first.matches(second):  # except for the order of keys, or their types
        assert repr(first.rebuild(numbers)) != repr(second.rebuild(numbers))


@given(alike)
def test_a_structure_that_was_pickled_rebuilds_the_batch(batch):
    leaves, structure = walk(batch)
    copy = pickle.loads(pickle.dumps(structure))
    assert copy == structure
    assert_same(batch, copy.rebuild(leaves), copied=False)


class Told:
    """Is taken apart by functions, with metadata."""

    def __init__(self, metadata):
        self.metadata = metadata

    def tree_flatten(self):
        return [1], self.metadata

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return cls(metadata)


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (("a", 1), ("a", 1), True),
        (torch.Size([1]), torch.Size([1]), True),
        (frozenset("ab"), frozenset("ba"), True),
        (1, True, False),
        ((("a", 1),), (("a", True),), False),
        (Pair(1, 2), (1, 2), False),
        ([1], [1], False),  # which may change
    ],
)
def test_metadata_are_equal_with_their_types(one, other, are_equal):
    structures = walk([Told(one)])[1], walk([Told(other)])[1]
    assert (structures[0] == structures[1]) is are_equal
    assert (structures[0] != structures[1]) is not are_equal


def test_a_structure_that_refers_to_itself_is_collected():
    class Owner:
        def make(self):
            return []

    owner = Owner()
    owner.structure = walk([defaultdict(owner.make, a=1), Told(owner)])[1]
    alive = weakref.ref(owner)
    del owner
    # A collection in another thread makes this one a no-op.
    wait_until(lambda: gc.collect() >= 0 and alive() is None)


LEAF_NODE = (0, 0, None, None)
WRONG_NODES = {
    "none": [],
    "one more": [LEAF_NODE, LEAF_NODE],
    "one less": [(2, 1, list, None)],
    "no operation": [(99, 0, None, None)],
    "a negative number": [(2, -1, list, None)],
    "a leaf with children": [(0, 1, None, None), LEAF_NODE],
    "keys missing": [(1, 1, dict, ()), LEAF_NODE],
    "no keys": [(1, 1, dict, None), LEAF_NODE],
    "keys that are not text": [(1, 2, dict, (1, "a")), LEAF_NODE, LEAF_NODE],
    "no named tuple": [(5, 1, Told, None), LEAF_NODE],
    "no plain object": [(6, 1, Told, ("a",)), LEAF_NODE],
    "functions of a named tuple": [(7, 1, Pair, None), LEAF_NODE],
    "no class": [(7, 1, [], None), LEAF_NODE],
    "a list that is a tuple": [(2, 1, tuple, None), LEAF_NODE],
    "a dict that is a list": [(1, 0, list, ())],
    "more levels than a batch has": [(2, 1, list, None)] * 1001 + [LEAF_NODE],
    "too short": [(0, 0)],
    "no tuple": [0],
}


@pytest.mark.parametrize("nodes", WRONG_NODES.values(), ids=WRONG_NODES)
def test_nodes_that_fit_no_structure_are_refused(nodes):
    with pytest.raises((ValueError, TypeError)):
        _structure.Structure.restore(nodes, _nodes.HANDLERS)


def test_an_unregistered_class_isn_t_unpickled(monkeypatch):
    pickled = pickle.dumps(walk([Told(1)])[1])
    assert pickle.loads(pickled) == walk([Told(1)])[1]
    _nodes.HANDLERS.clear()
    monkeypatch.delattr(Told, "tree_flatten")
    with pytest.raises(
        LayoutError, match=r"Told isn't registered in this process.*; call pinstage\.register_node"
    ):
        pickle.loads(pickled)
    _nodes.HANDLERS.clear()


@pytest.mark.parametrize(
    "wrap",
    [lambda batch: [batch], lambda batch: {"a": batch}, Record],
    ids=["list", "dict", "class"],
)
def test_batches_of_1000_levels_are_walked(wrap):
    batch = 5
    for _ in range(1000):
        batch = wrap(batch)
    for _ in range(OFTEN):
        leaves, structure = walk(batch)
        assert leaves[0] == 5
        assert len(pickle.loads(pickle.dumps(structure)).nodes()) == len(structure.nodes())
        assert type(structure.rebuild(leaves)) is type(batch)
        assert structure.path(0)
    with pytest.raises(LayoutError, match="more than 1000 levels"):
        walk(wrap(batch))


def test_a_class_registered_during_lookup_is_a_container(monkeypatch):
    class Late:
        def __init__(self):
            self.value = 1

    def registered_meanwhile(cls):
        if cls is Late:
            register_node(Late)

    late = Late()
    monkeypatch.setattr(_nodes, "library_functions", registered_meanwhile)
    walk([late])
    assert walk([late])[0] == [1]


def refuse(*arguments, **keywords):
    pytest.fail("walked as if nothing like it had come before")


@pytest.mark.parametrize(
    "batches",
    [
        [
            {
                "a": torch.ones(1),
                "b": {"d": torch.ones(2), "c": [1, {"e": "x"}]},
                "f": ({}, Pair(1, None)),
            }
        ],
        [[Record(torch.ones(1), {"a": 1})] * 3],
        [(torch.ones(1), 2)],
        [torch.ones(1)],
        [{}],
        [{"a": 1, "b": [2]}, {"a": 1}],
    ],
    ids=["nested", "list", "tuple", "leaf", "empty", "alternating"],
)
def test_similar_batches_are_compared_with_their_own_last(batches, monkeypatch):
    for batch in batches:
        again(batch)
    monkeypatch.setattr(_structure, "forget_classes", refuse)
    for batch in batches:
        assert_same(batch, again(batch), copied=False)


@pytest.mark.parametrize("key", [True, 1.0, Named("a"), (True, "a")], ids=repr)
@pytest.mark.parametrize("before", [1, "a", (1, "a")], ids=repr)
def test_equal_but_different_keys_are_kept(before, key):
    for _ in range(OFTEN):
        assert list(map(type, again({before: 2}))) == [type(before)]
    assert list(map(type, again({key: 2}))) == [type(key)]


class Unspeakable:
    """Stands for a tensor on a device: printing it would wait for the device."""

    def __repr__(self):
        pytest.fail("the batch was written out")


LEAF = Unspeakable()


@pytest.mark.parametrize(
    "other",
    [
        {"a": LEAF, "b": LEAF},
        {"a": (LEAF, LEAF), "b": (LEAF, None)},
        {"b": (LEAF, None), "a": [LEAF, LEAF]},
        {"a": [LEAF, [LEAF]], "b": (LEAF, None)},
        {"a": [LEAF, LEAF], "b": Pair(LEAF, None)},
    ],
    ids=["leaf", "tuple", "other order", "deeper", "namedtuple"],
)
def test_a_different_batch_isn_t_written(other):
    """The properties above have other differences."""
    again({"a": [LEAF, LEAF], "b": (LEAF, None)})
    assert_same(other, again(other), copied=False)


def test_a_class_registered_later_becomes_a_container():
    class Late:
        __slots__ = ("tensor",)

    late = Late()
    late.tensor = 1
    for _ in range(OFTEN):
        assert walk([late])[0] == [late]
    register_node(Late)
    assert walk([late])[0] == [1]


def test_self_referring_batches_are_refused_after_similar_ones():
    for _ in range(OFTEN):
        again({"a": {"a": 1}})
    batch = {}
    batch["a"] = batch
    with pytest.raises(LayoutError, match="refers to itself"):
        walk(batch)


@pytest.mark.parametrize(
    "make", [list, tuple, lambda items: dict.fromkeys(map(str, range(len(items))), items[0])]
)
def test_a_structure_checks_its_number_of_leaves(make):
    _, structure = walk(make([1, 2, 3]))
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match="leaves"):
            structure.rebuild([0] * count)


def test_nothing_keeps_leaves_after_their_batch():
    class Leaf:
        gone = 0

        def __del__(self):
            Leaf.gone += 1

    for size in (3, 3, 5):
        again({"a": [Leaf() for _ in range(size)], "b": Record(Leaf())})
    assert Leaf.gone == 3 + 3 + 5 + 3
