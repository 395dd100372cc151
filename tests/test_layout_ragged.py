"""Batches that differ in the length of their tensors alone are recognised, and come apart as if they were not."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_same, batches, tensor_of, through_slab
from torch._subclasses.fake_tensor import FakeTensorMode

from pinstage._layout import plan
from pinstage._layout._cache import TableCache
from pinstage._layout._ragged import Ragged
from pinstage._layout._sorting import sort_out
from pinstage._layout._table import Table, columns_of
from pinstage._layout._walk import walk

OFTEN = 4


def describe(tree):
    """Return a tree's leaves, parts and table, found out anew."""
    leaves, treespec, types = walk(tree)
    parts = sort_out(leaves, treespec, types, arrays=True)
    return leaves, parts, Table(columns_of(parts.tensors))


def patterns_of(*trees):
    """Return what is kept of trees, each of which was met often."""
    ragged = Ragged(TableCache())
    for tree in trees:
        for _ in range(OFTEN):
            ragged.learn(*describe(tree))
    return ragged


def find(ragged, tree):
    leaves, treespec, _ = walk(tree)
    return ragged.find(leaves, treespec)


def assert_found(ragged, tree):
    parts, table = find(ragged, tree)
    _, expected, expected_table = describe(tree)
    assert (parts.treespec, parts.order, parts.rest) == (expected.treespec, expected.order, expected.rest)
    assert [tensor.data_ptr() for tensor in parts.tensors] == [tensor.data_ptr() for tensor in expected.tensors]
    assert_same_table(table, expected_table)


def assert_same_table(table, expected):
    assert table.columns == expected.columns
    assert (table.nbytes, table.payload_bytes, table.offsets) == (
        expected.nbytes,
        expected.payload_bytes,
        expected.offsets,
    )
    assert (table.raw, table.raw_offsets, table.raw_nbytes) == (expected.raw, expected.raw_offsets, expected.raw_nbytes)


def batch(n=3, **changes):
    plain = {
        "values": torch.ones(n, 7),
        "nested": [torch.zeros(n, dtype=torch.int64), (np.ones((n, 2)), None)],
        "more": [tensor_of(torch.float64, (n + more, 2), more) for more in range(5)],
        "name": f"{n} rows",
        "scalar": torch.tensor(float(n)),
        "mask": np.zeros(n, dtype=bool),
    }
    return plain | changes


@pytest.mark.parametrize("n", [0, 1, 2, 5, 64, 1000])
def test_a_batch_of_other_lengths_is_recognised_with_its_own_tensors_and_values(n):
    assert_found(patterns_of(batch()), batch(n))


def test_what_is_in_the_slab_is_the_batch_however_long_it_is():
    for n in (3, 3, 3, 0, 1, 17, 3, 200):
        tree = batch(n)
        assert_same(tree, through_slab(tree), "cpu")


def test_batches_of_several_structures_are_recognised_in_turn():
    ragged = patterns_of(batch(), {"x": torch.ones(3)}, {"x": np.ones(2, dtype=np.float32)}, [np.ones(2)])
    for tree in (batch(9), {"x": torch.ones(8)}, {"x": np.ones(5, dtype=np.float32)}, [np.ones(3)], batch(2)):
        assert_found(ragged, tree)


def test_a_batch_is_not_prepared_for_before_it_came_in_a_row():
    ragged = Ragged(TableCache())
    for tree in [batch(), [torch.ones(3)]] * OFTEN:
        ragged.learn(*describe(tree))
    assert find(ragged, batch()) is None


one = torch.ones(3)
read_only = np.zeros(3, dtype=bool)
read_only.flags.writeable = False

DIFFERENT = {
    "another dtype": {"values": torch.ones(3, 7, dtype=torch.float16)},
    "another dimension behind the first": {"values": torch.ones(3, 8)},
    "another number of dimensions": {"values": torch.ones(3)},
    "a dimension for a scalar": {"scalar": torch.ones(1)},
    "another order in memory": {"values": torch.ones(7, 3).t()},
    "every other row": {"values": torch.ones(6, 7)[::2]},
    "expanded": {"values": torch.ones(1, 7).expand(3, -1)},
    "grad": {"values": torch.ones(3, 7, requires_grad=True)},
    "grad, and empty": {"values": torch.ones(0, 7, requires_grad=True)},
    "a parameter": {"values": torch.nn.Parameter(torch.ones(3, 7), requires_grad=False)},
    "sparse": {"values": torch.ones(3, 7).to_sparse()},
    "lazily negated": {"values": torch._neg_view(torch.ones(3, 7))},
    "elsewhere": {"values": torch.ones(3, 7, device="meta")},
    "an array for a tensor": {"values": np.ones((3, 7), dtype=np.float32)},
    "a tensor for an array": {"mask": torch.zeros(3, dtype=torch.bool)},
    "an array of another dtype": {"mask": np.zeros(3, dtype=np.int8)},
    "an array that is not contiguous": {"mask": np.zeros(6, dtype=bool)[::2]},
    "an array of objects": {"mask": np.array([None, None])},
    "an array of text": {"mask": np.array(["a"])},
    "an array in the other order of bytes": {"mask": np.zeros(3, dtype=">i4")},
    "an array that cannot be written": {"mask": read_only},
    "a subclass of arrays": {"mask": np.zeros(3, dtype=bool).view(np.recarray)},
    "another type of value": {"name": 3},
    "no tensor": {"scalar": 3.0},
    "a key more": {"zzz": torch.ones(1)},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_in_more_than_length_is_not_recognised(changes):
    ragged = patterns_of(batch())
    assert find(ragged, batch(4)) is not None
    assert find(ragged, batch(**changes)) is None


def test_a_tensor_or_array_met_twice_is_not_recognised_as_two():
    ragged = patterns_of([torch.ones(3), torch.ones(2), np.ones(3), np.ones(2)])
    assert find(ragged, [torch.ones(3), torch.ones(3), np.ones(3), np.ones(3)]) is not None
    array = np.ones(3)
    assert find(ragged, [one, one, np.ones(3), np.ones(3)]) is None
    assert find(ragged, [torch.ones(3), torch.ones(3), array, array]) is None
    assert find(patterns_of([one, one]), [one, one]) is None


@pytest.mark.parametrize(("shape", "contiguous"), [((2, 2, 3, 4), False), ((0, 2, 3, 4), True), ((5, 1, 3, 3), True)])
def test_a_tensor_in_channels_last_keeps_its_strides(shape, contiguous):
    ragged = patterns_of([torch.ones(4, *shape[1:])])
    last = torch.ones(shape).to(memory_format=torch.channels_last)
    assert (find(ragged, [last]) is not None) == contiguous
    if contiguous:
        assert_found(ragged, [last])
    assert_same([last], through_slab([last]), "cpu")


def test_a_tensor_with_strides_of_its_own_does_not_lie_among_rows():
    ragged = patterns_of([torch.ones(3, 1, 2, 2) for _ in range(6)])
    tensors = [torch.ones(n, 1, 2, 2) for n in range(6)]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    assert_found(ragged, tensors)
    assert find(ragged, tensors)[1].stride_of(3) == tensors[3].stride()


def test_a_row_with_any_stride_is_told_from_rows_that_are_not_contiguous():
    wide = torch.arange(20.0).view(2, 10)
    ragged = patterns_of([wide[:1, :7]])
    assert_found(ragged, [wide[1:, :7]])
    assert find(ragged, [wide[:, :7]]) is None


def test_a_fake_tensor_is_not_taken_for_a_tensor():
    ragged = patterns_of([torch.ones(3), np.ones(2)])
    with FakeTensorMode():
        fake = torch.ones(3)
        assert find(ragged, [fake, np.ones(2)]) is None
        assert find(ragged, [torch.ones(3), np.ones(2)]) is None
    assert find(ragged, [fake, np.ones(2)]) is None


def test_an_array_that_becomes_a_fake_tensor_is_not_packed():
    real = torch.ones(3)
    with FakeTensorMode():
        planned = plan([real, np.ones(2), "text"])
    assert planned.table.columns.passthrough == (1,)
    assert (planned.tensors[0] is real, planned.rest) == (True, ["text"])


def test_nothing_is_recognised_for_a_batch_that_has_to_be_looked_at_each_time():
    for tree in ([torch.ones(3), object()], [torch.ones(3), np.array(["a"])], ["a"], [torch.ones(2, 3).t()], []):
        assert find(patterns_of(tree), tree) is None


def test_a_pattern_keeps_no_tensor_alive():
    tree = [torch.ones(3), torch.ones(2)]
    ragged = patterns_of(tree)
    gone = weakref.ref(tree[0])
    assert find(ragged, tree) is not None
    del tree
    gc.collect()
    assert gone() is None


LENGTHS = st.integers(0, 40)
ROWS = st.sampled_from([(), (1,), (2,), (7,), (2, 3), (0,), (3, 2, 2)])
DTYPES = st.sampled_from([torch.float32, torch.bool, torch.int64, torch.complex128, torch.bfloat16])


@st.composite
def ragged_trees(draw, count):
    """Some trees of one structure whose leaves have their lengths alone to themselves."""
    rows = draw(st.lists(st.tuples(DTYPES, ROWS), min_size=1, max_size=12))

    def tree():
        tensors = [tensor_of(dtype, (draw(LENGTHS), *row), draw(st.integers(0, 9))) for dtype, row in rows]
        return {"tensors": tensors[1:], "text": "a", "first": [None, {"values": tensors[0]}]}

    return [tree() for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(trees=ragged_trees(OFTEN))
def test_a_layout_is_the_same_whether_or_not_the_batch_is_recognised(trees):
    ragged = patterns_of(trees[0])
    for tree in trees:
        assert_found(ragged, tree)
        assert_same(tree, through_slab(tree), "cpu")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=100, deadline=None)
@given(first=batches(), second=batches())
def test_what_came_before_does_not_show_in_a_plan(first, second):
    for tree in [first] * OFTEN + [second, first, second]:
        _, expected, table = describe(tree)
        planned = plan(tree)
        assert_same_table(planned.table, table)
        assert (planned.treespec, planned.order) == (expected.treespec, expected.order)
