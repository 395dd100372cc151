"""Tensors with misleading metadata, in every way of a batch: none ends the process or is read out
of bounds.

Each tensor replaces a plain one, after some batches of that structure.
"""

import pytest
import torch
from loader_data import Mapped
from strategies import assert_same, raises_at, through_slab
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import pinstage as ps
from pinstage.errors import PinstageError

pytestmark = [
    pytest.mark.usefixtures("both_paths"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested",
        "ignore:.*torch.jit",
        "ignore:Sparse CSR",
        "ignore:.*quantize",
        "ignore:.*deprecated",
    ),
]


def plain(seed=0):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["layout", "to_device", "to_host"])
def way(request, stager):
    """Every way of a batch on a machine without a GPU."""
    yield through_slab if request.param == "layout" else getattr(stager, request.param)
    assert stager.pool.stats().leased_slabs == 0


through_a_stager = pytest.mark.parametrize("way", ["to_device", "to_host"], indirect=True)


def after_plain_ones(way, leaf):
    """Stage a leaf in place of earlier plain ones; check that plain leaves are staged
    afterwards.
    """
    for seed in range(4):
        assert_same([plain(seed), plain(9)], way([plain(seed), plain(9)]))
    try:
        staged = way([leaf, plain(9)])
        assert torch.equal(staged[1], plain(9))
        return staged[0]
    finally:
        assert_same([plain(5), plain(9)], way([plain(5), plain(9)]))


class Reticent(torch.Tensor):
    """Has no usable strides."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func not in (
            torch.Tensor.is_contiguous,
            torch.Tensor.stride,
            torch.Tensor.is_conj,
            torch.Tensor.is_neg,
        )
        return super().__torch_function__(func, types, args, kwargs or {})


UNUSUAL = {
    "parameter": lambda: torch.nn.Parameter(plain()),
    "subclass without strides": lambda: plain().as_subclass(Reticent),
    "sparse": lambda: plain().to_sparse(),
    "sparse rows": lambda: plain().to_sparse_csr(),
    "mkldnn": lambda: plain().to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8),
    "nested, strided": lambda: torch.nested.nested_tensor(
        [torch.randn(2, 3), torch.randn(4, 3)]
    ).transpose(1, 2),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.randn(2), torch.randn(3)], layout=torch.jagged
    ),
    "fake": lambda: FakeTensorMode().from_tensor(plain()),
    "functional": lambda: torch._to_functional_tensor(plain()),
    "of zeros without memory": lambda: torch._efficientzerotensor(3, 2),
    "that requires grad": lambda: plain().requires_grad_(),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_tensor_moves_by_its_own_to(way, kind):
    leaf = UNUSUAL[kind]()
    assert after_plain_ones(way, leaf) is leaf


def test_a_dual_tensor_keeps_its_tangent(way):
    with forward_ad.dual_level():
        staged = after_plain_ones(way, forward_ad.make_dual(plain(), torch.full((3, 2), 2.0)))
        primal, tangent = forward_ad.unpack_dual(staged)
        assert torch.equal(primal, plain())
        assert torch.equal(tangent, torch.full((3, 2), 2.0))


@through_a_stager
def test_an_error_in_to_names_the_path(way):
    leaf = torch.ones(3, 2, device="meta")
    assert after_plain_ones(through_slab, leaf) is leaf
    with pytest.raises(NotImplementedError, match="meta") as raised:
        after_plain_ones(way, leaf)
    assert raised.value.__notes__ == ["batch[0] cannot be packed; its own .to('cpu') raised this"]


def test_a_leaf_of_maximal_dimensions_is_packed(way):
    leaf = torch.arange(2.0).view([1] * 63 + [2])
    assert_same([leaf], way([leaf]))


@through_a_stager
def test_a_leaf_beyond_maximal_dimensions_moves_by_to(way):
    leaf = torch.arange(2.0).view([1] * 64 + [2])
    staged = after_plain_ones(way, leaf)
    assert (staged.shape, staged.flatten().tolist()) == (leaf.shape, [0.0, 1.0])


@pytest.mark.parametrize(
    ("nbytes", "change"),
    [(0, lambda t: t), (4, lambda t: t.t()), (23, lambda t: t), (23, lambda t: t[1:])],
    ids=["freed", "transposed and cut", "one byte short", "part"],
)
def test_a_tensor_lacking_memory_is_an_error(way, nbytes, change):
    leaf = change(plain())
    leaf.untyped_storage().resize_(nbytes)
    with raises_at(
        "[0]", match=rf"batch\[0\] lacks the memory .* in a storage of {nbytes}; it was freed"
    ):
        after_plain_ones(way, leaf)


def test_an_empty_tensor_can_lack_memory(way):
    leaf = torch.empty(0, 5)
    leaf.untyped_storage().resize_(0)
    assert after_plain_ones(way, leaf).shape == (0, 5)


@through_a_stager
@pytest.mark.parametrize("allow", [False, True], ids=["strict", "lenient"])
def test_fake_tensors_pass_and_real_ones_fail(way, allow):
    for seed in range(3):
        assert_same([plain(seed)], way([plain(seed)]))
    real, fake = plain(), FakeTensorMode().from_tensor(plain())
    with FakeTensorMode(allow_non_fake_inputs=allow):
        made = torch.empty(3, 2)
        for leaf in (fake, made):
            assert way([leaf, "text"])[0] is leaf
        with pytest.raises(
            (PinstageError, AssertionError),
            match=r"leave the mode|convert all Tensors to FakeTensors",
        ):
            way([real, made])
    assert way([made])[0] is made
    assert_same([real], way([real]))


def nested_at_last(index):
    """Plain samples, then a nested, strided one."""
    if index < 6:
        return {"x": torch.full((2, 3), float(index))}
    return {"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]).transpose(1, 2)}


def taken_from(loader):
    """Return the batches of a loader as plain values, and its final error."""
    found, iterator = [], iter(loader)
    try:
        found.extend(repr(batch) for batch in iterator)
    except Exception as error:  # noqa: BLE001 - whatever torch says
        return found, type(error)
    finally:
        # It may wait five seconds for a worker after an error.
        if type(loader) is torch.utils.data.DataLoader:
            for worker in getattr(iterator, "_workers", ()):
                worker.terminate()
    return found, None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 1, 2, 4])
def test_a_loader_survives_a_strided_nested_sample(batch_size, workers):
    source, options = (Mapped(nested_at_last, 8), batch_size), {"num_workers": workers}
    expected = taken_from(torch.utils.data.DataLoader(*source, **options))
    found = taken_from(ps.DataLoader(*source, **options, device="cpu", max_bytes="1MiB"))
    assert found == expected
    assert len(expected[0]) >= 6 // (batch_size or 1) - 1
