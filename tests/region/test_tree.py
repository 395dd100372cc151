"""`HostRegion.empty_like`: places of tensors, and chunks that end with them."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from doubles import wait_until
from hypothesis import given
from hypothesis import strategies as st

import pinstage as ps
from pinstage._region._places import ends_of_chunks
from pinstage.errors import LayoutError

KIB = 1024
Pair = namedtuple("Pair", "first second")


def make(tree, **options):
    options = {"chunk_bytes": "64KiB", "device": "cpu"} | options
    return ps.HostRegion.empty_like(tree, **options)


def test_views_have_the_tree_s_shapes_and_strides():
    tree = {
        "weight": torch.empty(30, 50, dtype=torch.bfloat16),
        "pair": Pair(torch.tensor(True), np.zeros((3, 4), np.int16)),
        "meta": torch.empty(1000, 40, device="meta"),
        "last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.empty(8, 8)[:, ::2],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.empty(0, 7),
        "others": ["name", 5, None],
    }
    with make(tree) as region:
        views = region.tree()
    assert views["pair"]._fields == ("first", "second")
    assert views["others"] == ["name", 5, None]
    assert views["strided"].is_contiguous()
    assert views["last"].is_contiguous(memory_format=torch.channels_last)
    assert not views["parameter"].requires_grad
    assert views["pair"].second.dtype is torch.int16
    for key in ("weight", "meta", "last", "strided", "parameter", "empty"):
        assert type(views[key]) is torch.Tensor
        assert (views[key].shape, views[key].dtype) == (tree[key].shape, tree[key].dtype)
        assert not views[key].any()


def test_tensors_that_appear_twice_get_one_view():
    tied = torch.empty(100)
    region = make([tied, tied, torch.empty(100)])
    first, again, other = region.tree()
    assert first is again
    assert other.data_ptr() != first.data_ptr()
    assert region.nbytes == 800
    region.close()


def test_views_do_not_overlap():
    with make([torch.empty(n, dtype=torch.uint8) for n in (3, 70_000, 1, 16, 5)]) as region:
        views = region.tree()
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[number] for number in range(5)]


@pytest.fixture
def borders(cuda):
    """Return a function that tells where in a region the later chunks and the tensors begin."""

    def borders(tree, **options):
        with make(tree, device=0, **options) as region:
            region.synchronize()
            start, *chunks = sorted(cuda.registered)
            offsets = [leaf.data_ptr() - start for leaf in region.tree()]
        wait_until(lambda: not cuda.registered)
        return [chunk - start for chunk in chunks], offsets

    return borders


def test_chunks_end_where_tensors_end(borders):
    ends, offsets = borders([torch.empty(20 * KIB, dtype=torch.uint8) for _ in range(7)])
    assert ends == [offsets[3], offsets[6]]


@pytest.mark.parametrize(
    ("row_bytes", "cuts"),
    [(None, (0, 200)), (3 * KIB, (0, 200)), (KIB, (0, 64, 128, 192))],
    ids=["no rows", "other rows", "its rows"],
)
def test_large_tensors_are_cut_between_their_rows(borders, row_bytes, cuts):
    tree = [torch.empty(10), torch.empty(200, 1024, dtype=torch.uint8), torch.empty(10)]
    ends, offsets = borders(tree, row_bytes=row_bytes)
    assert ends == [offsets[1] + row * KIB for row in cuts]


def test_a_tensor_with_inner_rows_isn_t_cut(borders):
    tree = [torch.empty(200, 1024, dtype=torch.uint8).t()]
    assert borders(tree, row_bytes=KIB)[0] == []


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    units=st.lists(st.sampled_from([0, 1, 7, 50]), min_size=20, max_size=20),
    chunk=st.integers(1, 120),
)
def test_chunks_hold_whole_pieces_or_whole_units(sizes, units, chunk):
    pieces, end = [], 0
    for size, unit in zip(sizes, units, strict=False):
        pieces.append((end, size, unit))
        end += size + end % 3
    ends = ends_of_chunks(pieces, end + 5, chunk)
    assert list(ends) == sorted(set(ends))
    for offset, size, unit in pieces:
        inside = [border - offset for border in ends if offset < border < offset + size]
        assert not inside or (unit and size > chunk and not any(border % unit for border in inside))
    for start, border in zip((0, *ends), ends[:-1], strict=False):
        whole = [
            size
            for offset, size, unit in pieces
            if offset >= start and offset + size <= border and not unit
        ]
        assert border - start <= max(chunk, *units, *whole) + 3


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (torch.eye(3).to_sparse(), "Tensor, torch.sparse_coo"),
        (torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine, torch.strided"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_what_has_no_place_is_refused(leaf, text):
    with pytest.raises(
        LayoutError, match=rf"tree\['a'\]\[1\] has no place in a region: {text}"
    ) as caught:
        make({"a": [torch.ones(2), leaf]})
    assert caught.value.path == "['a'][1]"


def test_a_tree_without_elements_is_refused():
    with pytest.raises(ValueError, match="the tree has no tensor with elements"):
        make({"a": 1, "b": torch.empty(0)})
