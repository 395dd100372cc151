"""The offset table: the fields of a slot, which leaves are packed and how, and mismatches."""

import gc
import weakref

import numpy as np
import pytest
import torch
from strategies import (
    DTYPES,
    EXPERIMENTAL,
    TensorSubclass,
    assert_round_trip,
    packed,
    raises_at,
    slab_for,
    tensor_of,
    through_slab,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from pinstage import Layout, Slot
from pinstage.errors import LayoutError, PinstageError

ALIGNMENT = 16

pytestmark = pytest.mark.usefixtures("both_paths")


def ids(dtype):
    return str(dtype).removeprefix("torch.")


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    return {
        "image": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
        "weight": 1.5,
        "more": [torch.zeros(3, dtype=torch.float64), torch.tensor(7), None, "text"],
    }


def test_slots_follow_the_batch_s_order(batch):
    slots = Layout.of(batch).slots
    assert [(slot.path, slot.nbytes, slot.dtype, slot.shape, slot.stride) for slot in slots] == [
        ("['image']", 24, torch.uint8, (2, 3, 4), (12, 4, 1)),
        ("['more'][0]", 24, torch.float64, (3,), (1,)),
        ("['more'][1]", 8, torch.int64, (), ()),
    ]
    assert all(type(slot) is Slot for slot in slots)


def test_layouts_are_equal_by_structure_and_shapes(batch):
    layouts = Layout.of(batch), Layout.of({**batch, "image": batch["image"] + 1, "weight": 2.5})
    assert layouts[0] == layouts[1]
    assert len(set(layouts)) == 1
    assert layouts[0] != batch


ONE, OTHER = torch.zeros(2, 3), torch.zeros(2, 3)


def test_the_offset_table_is_printed(batch):
    assert [" ".join(line.split()) for line in str(Layout.of(batch)).splitlines()] == [
        "path offset bytes dtype shape",
        "['image'] 0 24 uint8 [2, 3, 4]",
        "['more'][0] 48 24 float64 [3]",
        "['more'][1] 32 8 int64 []",
        "3 slots, 80 bytes, 24 of them padding",
    ]


def test_a_single_tensor_batch_is_named_the_batch():
    layout = Layout.of(torch.zeros(2))
    assert "(batch)" in str(layout)
    assert layout.slots[0].path == ""


def test_repr_says_how_large_it_is(batch):
    assert "nbytes=80 slots=3" in repr(Layout.of(batch))


# -- leaves that are tensors -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_every_dtype_survives_dense_or_strided(dtype):
    """`strategies.tensors` draws other forms."""
    tensor = tensor_of(dtype, (3, 4, 6))
    assert_round_trip([tensor, tensor[0, 0, 0], tensor[:, :, ::2]])


@pytest.mark.skipif(EXPERIMENTAL is None, reason="this torch has no bcomplex32")
@pytest.mark.filterwarnings("ignore:BComplex32")
def test_a_dtype_without_a_code_moves_by_to(stager):
    tensor = torch.arange(12, dtype=torch.int16).view(EXPERIMENTAL)
    assert Layout.of({"x": tensor}).nbytes == 0
    staged = stager.to_device({"x": tensor, "y": torch.ones(2)})
    assert staged["x"].dtype is EXPERIMENTAL
    assert torch.equal(staged["x"].view(torch.int16), tensor.view(torch.int16))
    assert stager.stats().passthrough_leaves == 1


def test_all_dtypes_that_torch_stores_densely_are_tried():
    named = (
        "bool bfloat16 float16 complex32 complex64 complex128 uint16 uint32 uint64 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    )
    present = {getattr(torch, name) for name in named.split() if hasattr(torch, name)}
    assert present <= set(DTYPES)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(1).byte().expand(2**60) for _ in range(3)],
        [torch.zeros(0).as_strided((0, 2**40, 2**40), (0, 0, 0))],
    ],
    ids=["bytes", "steps of nothing"],
)
def test_an_uncountable_batch_is_an_error(tensors):
    with pytest.raises(OverflowError):
        Layout.of(tensors)


@pytest.mark.parametrize("size", [2**59, 2**60, 2**61, 2**62, 2**63 - 1])
def test_a_tensor_repeated_too_often_is_an_error(size):
    with pytest.raises(LayoutError, match=rf"batch\['a'\] is too large: {4 * size} bytes of"):
        Layout.of({"a": torch.ones(1).expand(size)})


def test_a_layout_from_a_damaged_pickle_fails():
    batch = {"a": torch.ones(3), "b": torch.ones(2)}
    restore, (structure, table) = Layout.of(batch).__reduce__()
    for contents in ((table, structure), (structure, table.data), (structure, tuple(table))):
        with pytest.raises(LayoutError, match=r"not a layout: .*; compute the layout again"):
            restore(*contents)
    rows = table.rows.copy()
    rows["offset"][1] = 0  # the offset of the other leaf
    moved = restore(structure, table.moved_to(rows, table.nbytes))
    with pytest.raises(LayoutError, match="have other places in the slab; make a layout with"):
        moved.others(batch)


def test_lazily_conjugated_tensors_are_leaves_like_any_other():
    z = torch.randn(3, 4, dtype=torch.complex64)
    lazy = z.conj()
    batch = {"a": lazy, "b": [z, lazy, z.conj()[:, ::2]]}
    other = z.clone()
    plain = {"a": other, "b": [z, other, z[:, :2].contiguous()]}
    assert Layout.of(batch) == Layout.of(plain)
    assert_round_trip(batch)


@pytest.mark.parametrize(
    "transform", [torch.vmap, torch.func.grad, torch.func.functionalize], ids=lambda f: f.__name__
)
def test_tensors_of_torchs_transforms_go_through_them(transform):
    x = torch.randn(3, 4)
    staged = transform(lambda x: through_slab([x * 2])[0].sum())
    assert torch.equal(staged(x), transform(lambda x: (x * 2).sum())(x))


# -- modes in which torch makes no memory ----------------------------------------------------------


@pytest.mark.parametrize("allow", [False, True])
def test_without_memory_from_torch_nothing_is_silently_read(allow):
    real, lazy = (
        [torch.randn(4), torch.randn(3, 5)[:, ::2]],
        torch.randn(3, dtype=torch.complex64).conj(),
    )
    layout, of_lazy = Layout.of(real), Layout.of(lazy)
    slab = slab_for(layout)
    with FakeTensorMode(allow_non_fake_inputs=allow):
        assert Layout.of(real) == layout
        fake = slab_for(layout)
        with pytest.raises(ValueError, match=r"dst must be .*: FakeTensor"):
            layout.pack(real, fake)
        with pytest.raises(ValueError, match=r"src must be .*: FakeTensor"):
            layout.unpack(fake)
        message = "leave the mode" if allow else "convert all Tensors to FakeTensors"
        error = PinstageError if allow else AssertionError  # torch's own
        # Torch would have to compute it.
        for read in (
            Layout.of,
            lambda leaf: of_lazy.pack(leaf, slab),
        ):
            with pytest.raises(error, match=message):
                read(lazy)
        with pytest.raises(PinstageError, match="leave the mode"):
            layout.unpack(slab)
        with pytest.raises(PinstageError, match="leave the mode"):
            Layout.of(np.ones(3)[::-1])  # torch would have to copy it


# -- leaves that are arrays ------------------------------------------------------------------------

# `strategies.arrays` and `strided_arrays` of the tests of tables draw the others.
ARRAYS = {
    "negative stride of one element": lambda a: a[:1, ::-1][::-1, :1],
    "not aligned, broadcast": lambda a: np.broadcast_to(
        np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1)[:1], (3, *a.shape, 1)
    ),
    "field of records": lambda a: np.rec.fromarrays([a, np.ones(a.shape, "i1")], names="x,y").x,
}


@pytest.mark.parametrize("writeable", [True, False], ids=["writeable", "read-only"])
@pytest.mark.parametrize("form", ARRAYS)
def test_numeric_arrays_arrive_as_tensors_without_a_warning(form, writeable):
    values = np.random.default_rng(0).integers(0, 2, (4, 6))
    batch = {code: ARRAYS[form](values.astype(code)) for code in "?bBhHiIlLqQefdFD"}
    for array in batch.values():
        array.flags.writeable = array.flags.writeable and writeable
    assert_round_trip(batch)  # warnings are errors


def test_a_read_only_array_is_freed_early():
    array = np.arange(1000.0)
    array.flags.writeable = False
    gone = weakref.ref(array)
    through_slab([array])
    del array
    gc.collect()
    assert gone() is None


# `strategies.atoms` draws the others.
@pytest.mark.parametrize(
    "array",
    [np.array([b"a", b"bc"]), np.array([3], dtype="m8[s]"), np.array([b"raw"], dtype="V3")],
    ids=lambda array: str(array.dtype),
)
def test_non_numeric_arrays_are_returned_unchanged(array):
    batch = [torch.zeros(2), array]
    assert through_slab(batch)[1] is array
    assert len(Layout.of(batch).slots) == 1


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), "mask"),
        (np.zeros(2, dtype=np.longdouble), "longdouble|float128"),
        (np.zeros(2, dtype=np.clongdouble), "longdouble|complex256"),
    ],
    ids=["masked", "long double", "complex long double"],
)
def test_an_array_no_tensor_can_hold_is_named(array, reason):
    with raises_at("['a'][1]", match=rf"batch\['a'\]\[1\] .*({reason})"):
        Layout.of({"a": [1, array]})


# -- packing by hand -------------------------------------------------------------------------------


def test_unpack_copies_nothing_and_keeps_the_slab_alive(batch):
    layout, slab = packed(batch)
    unpacked = layout.unpack(slab, layout.others(batch))
    assert unpacked["image"].untyped_storage().data_ptr() == slab.data_ptr()
    slab.zero_()
    assert not unpacked["image"].any()
    del slab
    assert not unpacked["image"].any()


def _aligned_part_of_an_unaligned_buffer(nbytes):
    buffer = np.zeros(nbytes + 4 * ALIGNMENT, dtype=np.uint8)
    skipped = 1 - buffer.ctypes.data % ALIGNMENT + ALIGNMENT
    return torch.from_numpy(buffer[skipped:])[ALIGNMENT - 1 :]


# From a larger slab, and the right size.
WRONG_SLABS = {
    "too small": (lambda slab, n: slab[: n - 1], "too small: 79 bytes for a layout of 80"),
    "another dtype": (lambda slab, n: slab[:n].view(torch.int8), "uint8"),
    "a subclass": (lambda slab, n: slab[:n].as_subclass(TensorSubclass), "TensorSubclass"),
    "two dimensions": (lambda slab, n: slab[:n, None], "one dimension"),
    "with gaps": (lambda slab, n: slab[::2], "contiguous"),
    "not aligned": (lambda slab, n: slab[1 : n + 1], f"multiple of {ALIGNMENT} bytes: offset 1"),
    "not aligned in its storage": (
        lambda slab, n: _aligned_part_of_an_unaligned_buffer(n),
        f"multiple of {ALIGNMENT} bytes: offset {ALIGNMENT - 1}, address 0x[0-9a-f]+0",
    ),
    "not aligned in memory": (
        lambda slab, n: torch.frombuffer(bytearray(n + 17), dtype=torch.uint8, offset=1),
        f"multiple of {ALIGNMENT} bytes",
    ),
}


@pytest.mark.parametrize(("make", "reason"), WRONG_SLABS.values(), ids=WRONG_SLABS)
def test_an_unsuitable_slab_is_refused_and_not_written(batch, make, reason):
    layout = Layout.of(batch)
    slab = make(torch.zeros(2 * layout.nbytes, dtype=torch.uint8), layout.nbytes)
    with pytest.raises(ValueError, match=f"dst .*{reason}.*; pass"):
        layout.pack(batch, slab)
    assert not slab.any()
    with pytest.raises(ValueError, match=f"src .*{reason}.*; pass"):
        layout.unpack(slab)


def test_a_lease_is_not_a_slab(batch, pool):
    layout = Layout.of(batch)
    with pool.acquire(layout.nbytes) as lease:
        with pytest.raises(ValueError, match=r"dst must be .*: Lease; pass lease.tensor\(\)"):
            layout.pack(batch, lease)
        with pytest.raises(ValueError, match=r"src must be .*: Lease; pass lease.tensor\(\)"):
            layout.unpack(lease)


@pytest.mark.parametrize("nbytes", [0, 12], ids=["freed", "shorter than the shape"])
def test_a_slab_without_its_storage_is_refused(batch, nbytes):
    layout = Layout.of(batch)
    slab = slab_for(layout)
    slab.untyped_storage().resize_(nbytes)
    with pytest.raises(
        ValueError,
        match=rf"dst lacks the memory .*: 80 bytes in a storage of {nbytes}; .* pass another",
    ):
        layout.pack(batch, slab)
    with pytest.raises(ValueError, match="src lacks the memory"):
        layout.unpack(slab, layout.others(batch))


def test_packing_into_a_device_is_refused(batch):
    layout = Layout.of(batch)
    with pytest.raises(ValueError, match="dst must be on the CPU: it is on meta"):
        layout.pack(batch, torch.empty(layout.nbytes, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize(
    ("ours", "theirs", "path", "reason"),
    [
        ([ONE, OTHER], [ONE, ONE.double()], "[1]", r"float64 \[2, 3\] instead of float32 \[2, 3\]"),
        ([ONE, OTHER], [ONE, ONE[:1]], "[1]", r"float32 \[1, 3\] instead of .*; make a layout"),
        ([ONE, ONE.t()], [ONE, ONE.t().contiguous()], "[1]", "float32 .* instead of .* with stride"),
        ([ONE, "text"], [ONE, OTHER], "[1]", "float32 .* instead of a leaf that isn't a tensor"),
        ([ONE, OTHER], [ONE, "text"], "[1]", "a leaf that isn't a tensor instead of float32"),
        ([ONE, OTHER], [ONE, ONE.to_sparse()], "[1]", "a tensor that cannot be packed instead of"),
        ([ONE, ONE], [ONE, OTHER], "[1]", r"float32 \[2, 3\] instead of the same object as leaf"),
        ([ONE, OTHER], [ONE, ONE], "[1]", "the same object as leaf number 0 instead of float32"),
        ([ONE, None], [ONE, ONE], "", "another structure"),
        ([ONE, OTHER], (ONE, OTHER), "", "another structure"),
        ({"a": ONE}, {"b": ONE}, "", "another structure"),
    ],
)  # fmt: skip
def test_a_mismatched_batch_is_refused_with_its_path(ours, theirs, path, reason):
    layout = Layout.of(ours)
    assert layout != Layout.of(theirs)
    slab = slab_for(layout).fill_(1)
    with raises_at(path, match=reason):
        layout.pack(theirs, slab)
    assert slab.eq(1).all(), "something was written"


def test_unpack_requires_each_leaf_outside_the_slab():
    layout = Layout.of([torch.eye(2).to_sparse(), torch.ones(3)])
    slab = slab_for(layout)
    for others in ([], [torch.ones(1), torch.ones(1)]):
        with pytest.raises(
            ValueError,
            match=rf"wrong length: {len(others)} for 1 leaves .*; pass layout.others\(batch\)",
        ):
            layout.unpack(slab, others)
    stand_in = torch.ones(1)
    assert layout.unpack(slab, [stand_in])[0] is stand_in
