"""Samples are stacked in the slab, and the batch equals the result of torch's default collation."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loader_data import same
from torch.utils.data import default_collate

from pinstage._batch import cut, pack, take_apart
from pinstage._loader import _collate

KINDS = {
    "plain": lambda: torch.randn(4, 3),
    "other values": lambda: torch.zeros(4, 3),
    "other dtype": lambda: torch.randn(4, 3).double(),
    "other shape": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).T,
    "expanded": lambda: torch.randn(3).expand(4, 3),
    "requires grad": lambda: torch.randn(4, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 3), requires_grad=False),
    "sparse": lambda: torch.randn(4, 3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "on meta": lambda: torch.empty(4, 3, device="meta"),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(4, 0),
    "a number": lambda: 1.0,
}
ALIKE = ["plain", "other values", "transposed", "expanded"]


def in_slab(samples):
    """Return the batch as a worker writes it into a slab, and the number of stacks."""
    parts = take_apart(_collate.collate_lazily(samples, inline=False))
    slab = torch.full((parts.table.nbytes + 64,), 0xDD, dtype=torch.uint8)
    pack(parts, slab)
    assert slab[parts.table.nbytes :].eq(0xDD).all()
    return parts.structure.rebuild(cut(parts.table, slab, parts.others())), len(parts.stacks)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
)
@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4), st.booleans())
@example(["plain", "plain", "nested"], False)
@example(["nested", "plain"], False)
def test_a_batch_is_what_torch_stacks_or_refuses(kinds, twice):
    samples = [{"x": KINDS[kind](), "y": torch.tensor(index)} for index, kind in enumerate(kinds)]
    samples += samples if twice else []
    try:
        expected = default_collate(samples)
    except Exception as error:  # noqa: BLE001 - whatever torch says
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            in_slab(samples)
        return
    found, _ = in_slab(samples)
    if expected["x"].is_meta or expected["x"].is_nested:
        assert repr(found) == repr(expected)
    else:
        assert same(found, expected | {"x": expected["x"].resolve_conj()})


class Remade(list):
    """Makes a sample each time that it is read by its index."""

    def __getitem__(self, index):
        return super().__getitem__(index) + 1


@pytest.mark.parametrize("inline", [False, True])
def test_torch_stacks_what_a_sequence_remakes(inline):
    samples = Remade(torch.full((50_000,), float(index)) for index in range(4))
    batch = _collate.collate_lazily(samples, inline=inline)
    assert type(batch) is torch.Tensor
    assert same(batch, default_collate(samples))


@pytest.mark.parametrize("twice", [False, True], ids=["each once", "some twice"])
def test_similar_samples_are_stacked_in_the_slab_only(twice):
    samples = [(KINDS[kind](), index) for index, kind in enumerate(ALIKE)]
    samples += samples if twice else []
    found, stacks = in_slab(samples)
    assert stacks == 1
    assert same(found, default_collate(samples))
