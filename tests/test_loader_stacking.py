"""Which samples a worker stacks by itself, and that a quick look at all of them decides as a look at each would."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from pinstage._loader import _stacking

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
    "on meta": lambda: torch.empty(4, 3, device="meta"),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "a number": lambda: 1.0,
}
SOME = st.sampled_from(sorted(KINDS))


def one_by_one(batch):
    """What `_stacks_plainly` says of plain tensors, without torch's guard."""
    first = batch[0]
    return all(
        type(sample) is torch.Tensor
        and (sample.dtype, sample.shape, sample.layout) == (first.dtype, first.shape, torch.strided)
        and sample.is_cpu
        and not sample.requires_grad
        for sample in batch
    )


@given(first=SOME.filter(lambda kind: kind != "a number"), others=st.lists(SOME, max_size=5), twice=st.booleans())
def test_a_quick_look_decides_as_a_look_at_each_would(first, others, twice):
    batch = [KINDS[kind]() for kind in (first, *others)]
    batch += batch if twice else []
    assert _stacking._stacks_plainly(batch) == one_by_one(batch)


@pytest.mark.parametrize("twice", [False, True], ids=["each once", "some twice"])
def test_samples_that_look_alike_are_not_looked_at_one_by_one(twice):
    batch = [torch.randn(4, 3) for _ in range(8)]
    assert _stacking._look_alike(batch + batch if twice else batch)


@given(st.lists(SOME.filter(lambda kind: kind not in {"sparse", "on meta", "a number"}), min_size=1, max_size=4))
def test_what_is_stacked_later_is_what_torch_stacks_or_refuses(kinds):
    samples = [{"x": KINDS[kind]()} for kind in kinds]
    try:
        expected = default_collate(samples)["x"]
    except Exception as error:  # noqa: BLE001 - whatever torch says
        with pytest.raises(type(error)):
            _stacking.collate_lazily(samples, {})
        return
    stacks = {}
    found = _stacking.stacked(_stacking.collate_lazily(samples, stacks)["x"], stacks)
    assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
    assert torch.equal(found.detach().resolve_conj(), expected.detach().resolve_conj())


def test_fields_of_ever_new_shapes_leave_no_more_behind_than_some():
    for size in (*range(_stacking.GUARDS_KEPT + 10), 0):
        assert _stacking._look_alike([torch.ones(size), torch.zeros(size)])
    assert len(_stacking._guards) <= _stacking.GUARDS_KEPT


def test_a_guard_keeps_no_sample():
    batch = [torch.ones(17, 3), torch.zeros(17, 3)]
    seen = weakref.ref(batch[0])
    assert _stacking._look_alike(batch)
    batch.clear()
    assert seen() is None
