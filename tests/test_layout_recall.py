"""Recognising a batch gives what taking it apart anew gives, and what differs in anything is not recognised."""

import gc
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from strategies import assert_same, batches

from pinstage import register_node
from pinstage._layout import Recall, plan, table_of, take_apart


def recall_of(tree):
    """Return a recall that has met a tree for the second time."""
    recall = Recall()

    def describe(parts):
        table = table_of(parts.tensors, "cpu")
        table.met = 1
        return "known", table

    take_apart(tree, recall, describe)
    return recall


def find(recall, tree):
    """Return the parts of a tree that a recall recognises, else None."""

    def describe(_):
        return None, None

    parts, known = take_apart(tree, recall, describe)
    return None if known is None else parts


def recognised(first, then):
    return find(recall_of(first), then)


def taken_apart(tree):
    return take_apart(tree, Recall(), lambda _: (None, None))[0]


def batch(**changes):
    plain = {
        "x": torch.ones(2, 3),
        "nested": [torch.zeros(4, dtype=torch.int64), (torch.ones(5), None)],
        "other": OrderedDict(b="text", a=torch.ones(1)),
        "number": 3,
    }
    return plain | changes


def test_a_batch_that_looks_alike_is_recognised_with_its_own_tensors_and_values():
    again = batch(number=4)
    parts = recognised(batch(), again)
    expected = taken_apart(again)
    assert all(one is other for one, other in zip(parts.tensors, expected.tensors, strict=True))
    assert parts.rest == expected.rest == [4, "text"]
    assert (parts.treespec, parts.order) == (expected.treespec, expected.order)
    assert_same(again, parts.together(parts.tensors), "cpu", copied=False)


DIFFERENT = {
    "another shape": batch(x=torch.ones(3, 2)),
    "another dtype": batch(x=torch.ones(2, 3, dtype=torch.float64)),
    "another stride": batch(x=torch.ones(3, 2).t()),
    "another number of dimensions": batch(x=torch.ones(6)),
    "grad": batch(x=torch.ones(2, 3, requires_grad=True)),
    "a parameter": batch(x=torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)),
    "sparse": batch(x=torch.ones(2, 3).to_sparse()),
    "lazily negated": batch(x=torch._neg_view(torch.ones(2, 3))),
    "elsewhere": batch(x=torch.ones(2, 3, device="meta")),
    "an array": batch(x=np.ones((2, 3), dtype=np.float32)),
    "no tensor": batch(x=3),
    "another type of value": batch(number="3"),
    "a key more": batch(more=torch.ones(1)),
    "a key less": {key: value for key, value in batch().items() if key != "x"},
    "a longer list": batch(nested=[*batch()["nested"], torch.ones(1)]),
    "a tensor for None": batch(nested=[torch.zeros(4, dtype=torch.int64), (torch.ones(5), torch.ones(1))]),
    "nothing": None,
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT)
def test_leaves_that_differ_are_not_recognised(other):
    assert recognised(batch(), batch()) is not None
    assert recognised(batch(), other) is None


OTHERWISE_NESTED = {
    "a list": batch(x=[torch.ones(2, 3)]),
    "other keys": {("y" if key == "x" else key): value for key, value in batch().items()},
    "another order of keys": dict(reversed(batch().items())),
    "another type of dict": OrderedDict(batch()),
    "a tuple for a list": batch(nested=tuple(batch()["nested"])),
}


@pytest.mark.parametrize("other", OTHERWISE_NESTED.values(), ids=OTHERWISE_NESTED)
def test_the_same_leaves_in_another_structure_come_back_in_that_structure(other):
    recall = recall_of(batch())
    parts = find(recall, other) or taken_apart(other)
    assert parts.treespec == taken_apart(other).treespec
    assert_same(other, parts.together(parts.tensors), "cpu", copied=False)


def test_a_tensor_met_twice_is_not_recognised_as_two():
    one = torch.ones(3)
    pair = [torch.ones(3), torch.ones(3)]
    assert recognised(pair, [one, torch.ones(3)]) is not None
    assert recognised(pair, [one, one]) is None
    assert recognised([one, one], [one, one]) is None


class Marked(str):
    """A value that holds no tensor, until it is made known as a container."""

    __slots__ = ()


def test_a_class_that_became_known_as_a_container_is_taken_apart():
    value = [torch.ones(1), Marked("a")]
    recall = recall_of(value)
    assert find(recall, value) is not None
    register_node(Marked, lambda marked: ((str(marked),), None), lambda _, children: Marked(*children))
    assert find(recall, value) is None


def test_a_recall_keeps_no_tensor_alive():
    tree = [torch.ones(3), torch.ones(2)]
    recall = recall_of(tree)
    assert find(recall, tree) is not None
    gone = weakref.ref(tree[0])
    del tree
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=150, deadline=None)
@given(tree=batches())
def test_planning_a_batch_again_gives_the_same_plan(tree):
    first = plan(tree)
    for _ in range(4):
        again = plan(tree)
        assert again.table.columns == first.table.columns
        assert (again.treespec, again.order) == (first.treespec, first.order)
        assert len(again.tensors) == len(first.tensors)
        assert all(one is other for one, other in zip(again.rest, first.rest, strict=True))
