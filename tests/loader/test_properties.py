"""A batch equals the collated samples bit for bit, for samples of any structure."""

from collections import OrderedDict, defaultdict

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_data import Point, mixed, same
from strategies import PlainDict, TypedPair, tensor_of
from torch.utils.data import default_collate

import pinstage as ps

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex32,
)
DTYPES += (
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
)
FORMS = (
    lambda tensor: tensor,
    lambda tensor: tensor.mT if tensor.ndim > 1 else tensor,
    lambda tensor: tensor[..., ::2] if tensor.ndim else tensor,
    lambda tensor: tensor.expand(2, *tensor.shape),
)


@st.composite
def leaves(draw):
    """Return a function from a sample's index to a leaf; leaves differ only in their values."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        field = draw(st.sampled_from(sorted(mixed(0))))
        return lambda index: mixed(index)[field]
    # With four, torch makes different strides in workers.
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if kind == 1:
        dtype = draw(st.sampled_from("?bBhHiIqfdFD"))
        return lambda index: np.full(shape, index % 2, dtype)
    dtype, form = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(FORMS))
    return lambda index: form(tensor_of(dtype, shape, index))


@st.composite
def containers(draw, children):
    """Return a function from a sample's index to its container."""
    makers = draw(st.lists(children, max_size=3))
    keys = draw(st.permutations(["a", "b", "z"]))
    if len(makers) == 2 and draw(st.booleans()):
        pair = draw(st.sampled_from([Point, TypedPair]))
        return lambda index: pair(*[make(index) for make in makers])
    if makers and draw(st.booleans()):
        makers.append(makers[0])  # looks like the first
    kind = draw(
        st.sampled_from(
            [list, tuple, dict, OrderedDict, PlainDict, lambda items: defaultdict(int, items)]
        )
    )
    if kind in (list, tuple):
        return lambda index: kind([make(index) for make in makers])
    return lambda index: kind([(key, make(index)) for key, make in zip(keys, makers, strict=False)])


@st.composite
def alias(draw, children):
    """Return a function that puts one object into a sample twice."""
    make = draw(children)

    def twice(index):
        found = make(index)
        return [found, (found, index)]

    return twice


samples = st.recursive(
    leaves(), lambda children: containers(children) | alias(children), max_leaves=8
)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    samples, st.integers(1, 3), st.sampled_from([0, 1, 1]), st.sampled_from([default_collate, list])
)
def test_a_batch_is_its_collate_fn_s_result(make, size, workers, collate):
    dataset = [make(index) for index in range(5)]
    loader = ps.DataLoader(
        dataset,
        size,
        num_workers=workers,
        collate_fn=collate,
        device="cpu",
        max_bytes="64KiB",
        depth=2,
    )
    expected = [collate(dataset[start : start + size]) for start in range(0, 5, size)]
    assert same(list(loader), expected)
