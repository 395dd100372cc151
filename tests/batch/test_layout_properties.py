"""Properties of every batch, however nested, on both paths."""

import pickle

import strategies as known
import torch
from hypothesis import given
from paths import on_both_paths
from strategies import assert_same, batches, bits, packed

from pinstage import Layout

ALIGNMENT = 16


@given(batches())
@on_both_paths
def test_slots_are_aligned_disjoint_and_inside_the_layout(batch):
    layout = Layout.of(batch)
    end = 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.offset, slot.nbytes)):
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end or slot.nbytes == 0
        end = max(end, slot.offset + slot.nbytes)
    assert end <= layout.nbytes
    assert layout.nbytes % ALIGNMENT == 0
    assert layout.nbytes <= sum(slot.nbytes + ALIGNMENT - 1 for slot in layout.slots)


@given(batches())
@on_both_paths
def test_a_path_leads_to_its_slot_s_tensor(batch):
    layout, slab = packed(batch)
    unpacked = layout.unpack(slab, layout.others(batch))
    for slot in layout.slots:
        # An enum as a key, or a node that gives no names.
        if not any(odd in slot.path for odd in ("<", "self")):
            tensor = eval(f"batch{slot.path}", {"batch": unpacked})
            assert tensor.dtype == slot.dtype
            assert tensor.shape == slot.shape
            assert tensor.numel() == 0 or tensor.data_ptr() == slab.data_ptr() + slot.offset


@given(batches(passthrough=False))
@on_both_paths
def test_a_layout_travels_by_pickle(batch):
    layout, slab = packed(batch)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.slots == layout.slots
    ours, theirs = known.leaves_of(batch), known.leaves_of(copy.unpack(slab, layout.others(batch)))
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(bits(one), bits(other))
    assert str(copy) == str(layout)


@given(batches(passthrough=False))
@on_both_paths
def test_a_layout_packs_every_matching_batch(batch):
    layout, slab = packed(batch)
    other = layout.unpack(slab ^ 0xFF, layout.others(batch))  # the same batch with all bits turned
    if Layout.of(other) == layout:  # no strides that the slab does not have
        layout.pack(other, slab)
        assert_same(other, layout.unpack(slab, layout.others(other)))
