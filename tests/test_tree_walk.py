"""A batch comes apart in the same way whether or not others like it came before."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pinstage._layout._walk import walk
from strategies import assert_same, batches, through_slab

from pinstage import LayoutError, register_node
from pinstage._layout import _walk

OFTEN = 8

Pair = namedtuple("Pair", "a b")


class Items(list):
    """Nothing but another type."""


class Named(str):
    """Nothing but another type."""

    __slots__ = ()


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is remembered from other tests."""
    _walk._remembered.clear()


def again(batch):
    leaves, treespec, types = walk(batch)
    assert types.issuperset(map(type, leaves))
    return optree.tree_unflatten(treespec, leaves)


def dicts_of(child, make=dict):
    return st.lists(st.tuples(st.sampled_from("ab"), child), max_size=2, unique_by=lambda item: item[0]).map(make)


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
        child.map(lambda one: {"same": one, "again": [one]}),
    )


LEAVES = st.sampled_from([torch.tensor(1), torch.tensor([2.0]), 3, "four", None])
alike = st.recursive(LEAVES, containers_of, max_leaves=6)
"""So small that two are often alike but for a detail."""


@settings(max_examples=500, deadline=None)
@given(alike, alike)
@example({"a": 1, "b": 2}, {"b": 1, "a": 2})
@example([{"a": {"a": 1, "b": 2}}], [{"a": {"b": 2, "a": 1}}])
@example([{"a": 1}], [OrderedDict(a=1)])
@example([{"a": 1}], [defaultdict(list, a=1)])
@example({"a": [1]}, {"a": [None]})
@example({"a": [1]}, {"a": [[1]]})
@example([1, 2], Items([1, 2]))
@example((1, 2), Pair(1, 2))
def test_what_came_before_does_not_show(before, batch):
    _walk._remembered.clear()
    for _ in range(OFTEN):
        assert_same(before, again(before), "cpu", copied=False)
    assert_same(batch, again(batch), "cpu", copied=False)
    assert_same(before, again(before), "cpu", copied=False)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_however_nested_a_batch_is_staged_the_same_each_time(batch):
    for _ in range(OFTEN):
        assert_same(batch, through_slab(batch), "cpu")


def refuse(*arguments, **keywords):
    pytest.fail("walked as if nothing like it had come before")


@pytest.mark.parametrize(
    "batch",
    [
        {"a": torch.ones(1), "b": {"d": torch.ones(2), "c": [1, {"e": "x"}]}, "f": ({}, Pair(1, None))},
        [torch.ones(1)] * 3,
        (torch.ones(1), 2),
        torch.ones(1),
        {},
    ],
    ids=["nested", "list", "tuple", "leaf", "empty"],
)
def test_one_like_the_last_ones_is_held_against_them(batch, monkeypatch):
    for _ in range(OFTEN):
        again(batch)
    monkeypatch.setattr(_walk, "flatten", refuse)
    assert_same(batch, again(batch), "cpu", copied=False)


@pytest.mark.parametrize("batch", [{1: 2}, {True: 2}, {Named("a"): 2}, {(1, "a"): 2}], ids=repr)
def test_dicts_whose_keys_may_be_equal_but_not_the_same_are_not_prepared_for(batch):
    for _ in range(OFTEN):
        again(batch)
    (memory,) = _walk._remembered.values()
    assert memory.prepared is None


def test_a_dict_that_is_in_two_places_is_told_from_two_dicts():
    shared = {"a": 1, "b": 2}
    for _ in range(OFTEN):
        again([shared, {"c": shared}])
    other = [{"a": 1, "b": 2}, {"c": {"b": 2, "a": 1}}]
    assert list(again(other)[1]["c"]) == ["b", "a"]


class Unspeakable:
    """Stands for a tensor on a device: writing it out would wait for the device."""

    def __repr__(self):
        pytest.fail("the batch was written out")


LEAF = Unspeakable()


@pytest.mark.parametrize(
    "other",
    [
        {"a": LEAF, "b": LEAF},
        {"a": [LEAF], "b": (LEAF, None)},
        {"a": (LEAF, LEAF), "b": (LEAF, None)},
        {"a": [LEAF, LEAF], "c": (LEAF, None)},
        {"b": (LEAF, None), "a": [LEAF, LEAF]},
        {"a": [LEAF, LEAF], "b": (LEAF, LEAF)},
        {"a": [LEAF, [LEAF]], "b": (LEAF, None)},
        {"a": [LEAF, LEAF], "b": Pair(LEAF, None)},
    ],
    ids=["leaf", "shorter", "tuple", "other key", "other order", "no None", "deeper", "namedtuple"],
)
def test_a_batch_that_is_not_like_the_last_ones_is_not_written_out(other):
    for _ in range(OFTEN):
        again({"a": [LEAF, LEAF], "b": (LEAF, None)})
    assert next(iter(_walk._remembered.values())).prepared is not None
    assert_same_structure(other, again(other))


def assert_same_structure(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = one.values(), other.values()
    elif not isinstance(one, list | tuple):
        assert one is other
        return
    for mine, theirs in zip(one, other, strict=True):
        assert_same_structure(mine, theirs)


def test_structures_that_keep_changing_are_prepared_for_less_and_less_often(monkeypatch):
    prepared = []
    prepare = _walk._prepare
    monkeypatch.setattr(_walk, "_prepare", lambda *arguments: prepared.append(1) or prepare(*arguments))
    for round_ in range(300):
        for _ in range(5):
            again({"a": [round_] * (1 + round_ % 2)})
    assert 1 <= len(prepared) <= 3


def test_structures_that_take_turns_with_others_of_another_size_are_both_prepared_for(monkeypatch):
    train, validation = {"a": 1, "b": [2]}, {"a": 1}
    for _ in range(OFTEN):
        again(train)
        again(validation)
    monkeypatch.setattr(_walk, "flatten", refuse)
    assert again(train) == train
    assert again(validation) == validation


def test_no_more_structures_are_remembered_than_are_useful():
    for size in range(200):
        again([1] * size)
    assert len(_walk._remembered) <= 32


def test_a_class_made_known_after_it_was_met_as_a_leaf_is_a_container_from_then_on():
    class Late:
        __slots__ = ("tensor",)

    late = Late()
    late.tensor = 1
    for _ in range(OFTEN):
        assert walk([late])[0] == [late]
    register_node(Late)
    assert walk([late])[0] == [1]


def test_a_batch_that_refers_to_itself_is_refused_after_others_like_it_too():
    for _ in range(OFTEN):
        again({"a": {"a": 1}})
    batch = {}
    batch["a"] = batch
    with pytest.raises(LayoutError, match="refers to itself"):
        walk(batch)
