"""What holds for every batch, however nested."""

import itertools
import pickle

import numpy as np
import pytest
import strategies as known
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pinstage._layout._fragments import (
    LARGE_FRAGMENT_BYTES,
    PIECE_BYTES,
    VECTOR_LENGTH,
    Fragments,
    Part,
)
from pinstage._packing import Packer
from strategies import assert_same, batches, bits, tensors

from pinstage import Layout
from pinstage._layout import ALIGNMENT, Moves, plan

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
moderate = settings(max_examples=250, deadline=None)


@moderate
@given(batches())
def test_what_is_packed_and_unpacked_is_what_it_was_bit_for_bit(batch):
    assert_same(batch, known.through_slab(batch), "cpu")


@moderate
@given(batches())
def test_slots_are_aligned_disjoint_and_inside_the_layout(batch):
    layout = Layout.of(batch)
    spans = sorted((slot.offset, slot.offset + slot.nbytes) for slot in layout.slots)
    end = 0
    for (start, stop), slot in zip(spans, sorted(layout.slots, key=lambda slot: slot.offset), strict=True):
        assert start % ALIGNMENT == 0
        assert start >= end or slot.nbytes == 0
        end = max(end, stop)
    assert end <= layout.nbytes
    assert layout.nbytes % ALIGNMENT == 0


@moderate
@given(batches())
def test_there_is_a_slot_for_each_distinct_tensor_that_can_be_packed_and_for_nothing_else(batch):
    leaves = {id(leaf): leaf for leaf in known.leaves_of(batch)}.values()
    packed = [
        known.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
        for leaf in leaves
        if (isinstance(leaf, torch.Tensor) and known.packable(leaf))
        or (isinstance(leaf, np.ndarray) and known.is_numeric(leaf))
    ]
    slots = Layout.of(batch).slots
    found = sorted((str(slot.dtype), slot.shape, slot.nbytes) for slot in slots)
    assert found == sorted((str(leaf.dtype), tuple(leaf.shape), leaf.numel() * leaf.dtype.itemsize) for leaf in packed)


@moderate
@given(batches())
def test_a_path_leads_to_the_tensor_of_its_slot(batch):
    layout = Layout.of(batch)
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack(batch, slab)
    unpacked = layout.unpack(slab)
    for slot in layout.slots:
        if not any(odd in slot.path for odd in ("<", "self")):  # an enum as a key, or a node that gives no names
            tensor = eval(f"batch{slot.path}", {"batch": unpacked})
            assert tensor.dtype == slot.dtype
            assert tensor.shape == slot.shape
            assert tensor.numel() == 0 or tensor.data_ptr() == slab.data_ptr() + slot.offset


@moderate
@given(batches(passthrough=False))
def test_a_layout_travels_by_pickle(batch):
    layout = Layout.of(batch)
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack(batch, slab)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.slots == layout.slots
    ours, theirs = known.leaves_of(batch), known.leaves_of(copy.unpack(slab))
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(bits(one), bits(other))
    assert str(copy) == str(layout)


@moderate
@given(batches(passthrough=False))
def test_a_layout_packs_every_batch_like_the_one_it_was_made_of(batch):
    layout = Layout.of(batch)
    slab = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(batch, slab)
    other = layout.unpack(slab ^ 0xFF)  # the same batch with all bits turned
    if Layout.of(other) == layout:  # no strides that the slab does not have
        layout.pack(other, slab)
        assert_same(other, layout.unpack(slab), "cpu")


@moderate
@given(batches(), st.sampled_from([1, 2, 3]))
def test_the_packer_writes_the_same_bytes(batch, threads):
    planned = plan(batch)
    slabs = [torch.zeros(planned.table.nbytes, dtype=torch.uint8) for _ in range(2)]
    Layout.of_plan(planned).pack(batch, slabs[0])
    packer = Packer(threads)
    ends = list(packer.pack(planned.table, planned.tensors, slabs[1]))
    packer.close()
    assert ends[-1] == planned.table.nbytes
    assert torch.equal(slabs[0], slabs[1])


@moderate
@given(st.lists(st.one_of(tensors(), known._alike()), min_size=1, max_size=8), st.randoms(), st.booleans())
def test_pieces_of_a_slab_may_be_moved_in_any_order(leaves, random, by_system_call):
    leaves = [leaf for part in leaves for leaf in (part if isinstance(part, list) else [part])]
    table = plan(leaves).table
    whole = torch.zeros(table.nbytes, dtype=torch.uint8)
    Moves(table, leaves, whole).everything()
    slab = torch.full_like(whole, 0xEE)
    moves = Moves(table, leaves, slab)
    if not by_system_call:
        moves.writev = None
    pieces = moves.pieces()
    random.shuffle(pieces)
    for piece in pieces:
        start, stop = piece.offset, piece.offset + piece.nbytes
        before = slab.clone()
        moves.move(piece)
        assert torch.equal(slab[:start], before[:start])
        assert torch.equal(slab[stop:], before[stop:])
        assert torch.equal(slab[start:stop], whole[start:stop])
    assert torch.equal(slab[: table.raw_end], whole[: table.raw_end])


@moderate
@given(
    st.lists(st.one_of(st.integers(1, 99), st.integers(1, 5 * PIECE_BYTES)), max_size=40),
    st.integers(0, 3),
    st.sampled_from([1, 700, 3000]),
)
def test_pieces_cover_each_fragment_once_and_are_of_a_size(sizes, padding, repeats):
    sizes *= repeats if len(sizes) < 5 else 1
    *offsets, end = itertools.accumulate((size + padding for size in sizes), initial=0)
    fragments = Fragments(offsets, sizes, end)
    assert fragments.nbytes.sum() == end
    assert fragments.nbytes[fragments.leaves].tolist() == sizes
    starts = np.cumsum([0, *fragments.nbytes])
    reached = 0
    for piece in fragments.pieces:
        if type(piece) is Part:
            assert piece.offset == reached == starts[fragments.leaves[piece.leaf]] + piece.cut
            assert 0 < piece.nbytes <= PIECE_BYTES
            assert piece.cut + piece.nbytes <= sizes[piece.leaf]
        else:
            assert piece.offset == reached == starts[piece.first]
            assert piece.fragments <= VECTOR_LENGTH
            assert 0 < piece.nbytes < PIECE_BYTES + LARGE_FRAGMENT_BYTES
            assert piece.nbytes == fragments.nbytes[piece.first : piece.first + piece.fragments].sum()
        reached += piece.nbytes
    assert reached == end
