"""Staging into existing tensors (`out=`) on the CPU, compared with a loop of ``dst.copy_(src)``."""

import itertools
import warnings
import weakref

import numpy as np
import pytest
import torch
from doubles import Interrupts, ManualEvent, record_work, use_target, wait_until
from hypothesis import given
from hypothesis import strategies as st
from strategies import TensorSubclass, bits

import pinstage as ps
from pinstage._stage import _out, _to_host, _writer
from pinstage._stage._device import Target
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    LayoutError,
    PinstageError,
    PoolFrozenError,
    StagingWarning,
)

MIB = 1 << 20
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(scope="module")
def shared_stager():
    with ps.Stager("cpu", max_bytes="64MiB", pack_threads=2) as stager:
        yield stager


def numbers(dtype, shape, seed=0):
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


# -- as a loop of copy_ ----------------------------------------------------------------------------

SOURCES = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "array": lambda x: x.numpy() if x.dtype is not torch.bfloat16 else x,
    "requires grad": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "conjugate": lambda x: torch.complex(x, x).conj() if x.dtype is torch.float32 else x,
}


class Places:
    """Destinations in separate memory, or adjacent in one buffer, and all that memory."""

    def __init__(self):
        self.memory = [torch.full((4096,), 0xEE, dtype=torch.uint8)]
        self._end = 0

    def take(self, kind, dtype, shape):
        count = int(np.prod(shape, dtype=int))
        if kind == "neighbour" and self._end + count * dtype.itemsize <= 4096:
            place = (
                self.memory[0][self._end : self._end + count * dtype.itemsize]
                .view(dtype)
                .view(shape)
            )
            self._end += -(-count * dtype.itemsize // 16) * 16
            return place
        if kind == "strided":
            base = torch.zeros((*shape, 2), dtype=dtype)
            self.memory.append(base)
            return base[..., 1]
        if kind == "transposed" and len(shape) > 1:
            base = torch.zeros((shape[-1], *shape[1:-1], shape[0]), dtype=dtype)
            self.memory.append(base)
            return base.transpose(0, -1)
        self.memory.append(torch.zeros(shape, dtype=dtype))
        return self.memory[-1]


@st.composite
def writes(draw):
    """Draw sources and their destinations, twice, in separate memory."""
    one, other = Places(), Places()
    sources, places = [], ([], [])
    for seed in range(draw(st.integers(1, 14))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        dtype = draw(st.sampled_from(DTYPES))
        source = SOURCES[draw(st.sampled_from(sorted(SOURCES)))](numbers(dtype, shape, seed))
        its = source.dtype if isinstance(source, torch.Tensor) else dtype
        kind = draw(st.sampled_from(["own", "neighbour", "strided", "transposed"]))
        target = its if its.is_complex else draw(st.sampled_from([its, its, *DTYPES]))
        sources.append(source)
        for made, found in zip((one, other), places, strict=True):
            found.append(made.take(kind, target, shape))
    return sources, places, (one.memory, other.memory)


def nested(leaves):
    return {
        "a": leaves[::3],
        "b": {"c": tuple(leaves[1::3]), "text": "x"},
        "d": [None, leaves[2::3]],
    }


def to_device(stager, batch, out):
    return stager.to_device(batch, out=out)


def staged(stager, batch, out):
    return stager.stage(batch, out=out).wait()


def to_host(stager, batch, out):
    return stager.to_host(batch, out=out)


def page_locked(stager, batch, out):
    """Fetch as if all destinations were page-locked, in two ranges each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            _to_host, "pieces_of", lambda x: [(0, x.nbytes // 2), (x.nbytes // 2, x.nbytes)]
        )
        patched.setattr(_to_host, "DIRECT_FROM_BYTES", 4)
        return stager.fetch(batch, out=out).wait()


@pytest.mark.filterwarnings("ignore:Casting complex")
@given(
    drawn=writes(),
    way=st.sampled_from([to_device, staged, to_host, page_locked]),
    group_bytes=st.sampled_from([16, 100, _writer.GROUP_BYTES]),
)
def test_destinations_equal_those_of_a_copy_loop(shared_stager, drawn, way, group_bytes):
    sources, (expected, places), (wanted, memory) = drawn
    if way in (to_host, page_locked):  # arrays are on the host already
        sources = [
            torch.from_numpy(source) if isinstance(source, np.ndarray) else source
            for source in sources
        ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_writer, "GROUP_BYTES", group_bytes)
        returned = way(shared_stager, nested(sources), nested(places))
    for place, source in zip(expected, sources, strict=True):
        place.copy_(
            source.detach() if isinstance(source, torch.Tensor) else torch.from_numpy(source)
        )
    for base, changed in zip(wanted, memory, strict=True):
        assert torch.equal(bits(base), bits(changed))  # including the bytes between destinations
    assert all(map(lambda one, two: one is two, returned["a"], places[::3]))
    assert returned["b"]["text"] == "x"


@pytest.mark.parametrize(
    ("elements", "group_bytes"),
    [(3, _writer.GROUP_BYTES), (300_000, 4096), (600_000, _writer.GROUP_BYTES)],
)
@pytest.mark.parametrize("way", [to_device, staged, to_host, page_locked])
def test_sources_are_read_before_any_destination_is_written(
    shared_stager, monkeypatch, way, elements, group_bytes
):
    monkeypatch.setattr(_writer, "GROUP_BYTES", group_bytes)
    x, y = numbers(torch.int32, (elements,)), numbers(torch.int32, (elements,), 1)
    expected = [y.clone(), x.clone()]
    way(shared_stager, [x, y], [y, x])
    assert [x.tolist(), y.tolist()] == [one.tolist() for one in expected]
    row = torch.arange(elements)
    way(shared_stager, [row[:-1]], [row[1:]])
    assert row.tolist() == [0, *range(elements - 1)]
    wrapped = [
        numbers(torch.float32, (elements,)).as_subclass(TensorSubclass),
        torch.zeros(elements),
    ]
    expected = wrapped[0].clone()
    way(shared_stager, wrapped, wrapped[::-1])
    assert not wrapped[0].any()
    assert torch.equal(wrapped[1], expected.as_subclass(torch.Tensor))


@pytest.mark.parametrize("method", ["to_device", "stage"])
@pytest.mark.parametrize("nbytes", [16, 100_000, 3 * MIB])
def test_versions_count_up(stager, method, nbytes):
    places = [torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(40, dtype=torch.int64)[::2]]
    before = [place._version for place in places]
    written = getattr(stager, method)(
        [torch.ones(nbytes, dtype=torch.uint8), torch.ones(20)], out=places
    )
    if method == "stage":
        assert written.wait() is written.wait()
    assert all(place._version > version for place, version in zip(places, before, strict=True))
    assert all(bool((place == 1).all()) for place in places)


def test_autograd_sees_that_a_saved_tensor_was_written(stager):
    weight, place = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * place).sum()
    stager.to_device(torch.zeros(3), out=place)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_batch_above_the_cap_goes_in_groups(make_stager):
    stager = make_stager("1MiB")
    sources = [
        numbers(torch.uint8, (5 * MIB + 3,)),
        numbers(torch.float32, (MIB, 2)).t(),
        torch.arange(5),
    ]
    places = [torch.empty_like(source) for source in sources[:1]] + [
        torch.empty(2, MIB),
        torch.empty(5),
    ]
    stager.to_device(sources, out=places)
    assert all(bool((place == source).all()) for place, source in zip(places, sources, strict=True))
    stats = stager.stats()
    assert stats.pool.peak_held_bytes <= MIB
    assert stats.batches > 5
    with pytest.raises(BudgetExceededError):
        stager.stage(sources, out=places)
    with pytest.raises(BudgetExceededError):
        stager.to_device(sources)


def test_a_tensor_of_many_caps_is_cut(make_stager):
    source = numbers(torch.int16, (4, 1, 300, 7)).transpose(0, 2)
    place = torch.zeros(7, 4, 1, 300).permute(3, 2, 1, 0)
    make_stager(source.nbytes // 16).to_device({"x": source}, out={"x": place})
    assert torch.equal(place, source.float())


def test_at_most_two_groups_are_on_the_device(make_stager, monkeypatch):
    monkeypatch.setattr(_writer, "GROUP_BYTES", 1000)
    alive = weakref.WeakSet()
    most = []
    blocks = Target.blocks

    def counted(self, table, *more):
        made = blocks(self, table, *more)
        alive.update(made.tensors)
        most.append(sum(tensor.nbytes for tensor in alive))
        return made

    monkeypatch.setattr(Target, "blocks", counted)
    sources = [numbers(torch.float32, (7, 300, 2), seed) for seed in range(8)] + [torch.ones(3)]
    places = [torch.empty(source.shape, dtype=torch.float64) for source in sources]
    make_stager("1MiB").to_device(sources, out=places)
    assert all(bool((place == source).all()) for place, source in zip(places, sources, strict=True))
    assert len(most) > 10
    assert max(most) <= 2 * 1024


def test_neighbours_are_copied_together(make_stager, monkeypatch):
    copied = []
    monkeypatch.setattr(_out, "copy_each", lambda places, sources: copied.append(len(places)))
    stager = make_stager("8MiB")
    batch = [numbers(torch.float32, (64,), seed) for seed in range(1000)] + [torch.arange(3)]
    static = stager.to_device(batch)
    stager.to_device(batch, out=static)
    assert copied == [2]
    stager.to_device(batch, out=[torch.empty_like(leaf) for leaf in static])
    assert sorted(copied) == [1, 2, 1000]


@given(
    sizes=st.lists(st.sampled_from([0, 16, 16, 48, 20]), min_size=4, max_size=30),
    order=st.randoms(),
)
def test_ranges_of_neighbours_have_the_bytes(shared_stager, sizes, order):
    buffer = torch.full((sum(sizes) + 64,), 0xEE, dtype=torch.uint8)
    starts = list(itertools.accumulate(sizes, initial=16))
    places = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    if order.random() < 0.3:
        order.shuffle(places)
    sources = [torch.randint(200, place.shape, dtype=torch.uint8) for place in places]
    expected = buffer.clone()
    for place, source in zip(places, sources, strict=True):
        expected[place.storage_offset() : place.storage_offset() + place.numel()] = source
    before = buffer._version
    shared_stager.to_device(sources, out=places)
    assert torch.equal(buffer, expected)
    assert buffer._version > before


# -- what is returned ------------------------------------------------------------------------------


def test_other_leaves_are_the_batch_s(stager):
    out = {"x": torch.zeros(3), "id": "old", "note": [1, 3.5]}
    batch = {"x": torch.ones(3), "id": "new", "note": [2, b"raw"]}
    staged = stager.to_device(batch, out=out)
    assert staged["x"] is out["x"]
    assert (staged["id"], staged["note"], out["id"], out["note"]) == (
        "new",
        [2, b"raw"],
        "old",
        [1, 3.5],
    )


def test_keys_in_another_order_find_their_tensors(stager):
    out = {"b": torch.zeros(2), "a": torch.zeros(2)}
    staged = stager.to_device({"a": torch.ones(2), "b": torch.full((2,), 2.0)}, out=out)
    assert (out["a"].tolist(), out["b"].tolist(), list(staged)) == ([1, 1], [2, 2], ["a", "b"])


def test_what_stays_on_the_host_is_not_written(make_stager):
    stager = make_stager(keep_on_host=["['lengths']"])
    lengths, place = torch.ones(2), torch.zeros(2)
    staged = stager.to_device(
        {"x": torch.ones(2), "lengths": lengths}, out={"x": torch.zeros(2), "lengths": place}
    )
    assert staged["lengths"] is lengths
    assert place.tolist() == [0, 0]


def test_unpackable_tensors_are_copied_by_torch(stager):
    sparse, place = torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()
    transfer = stager.stage([sparse, torch.ones(2)], out=[place, torch.zeros(2)])
    assert transfer.passthrough_leaves == stager.stats().passthrough_leaves == 1
    assert torch.equal(transfer.wait()[0].to_dense(), torch.eye(3))


def test_a_repeated_source_is_written_to_both_places(stager):
    source, places = torch.ones(3), [torch.zeros(3), torch.zeros(3)]
    stager.to_device([source, source], out=places)
    assert [place.tolist() for place in places] == [[1, 1, 1]] * 2
    array = np.ones(3)
    stager.to_device([array, array], out=[torch.zeros(3, dtype=torch.float64) for _ in range(2)])


@pytest.mark.parametrize("same", [lambda x: x, lambda x: x.view(3)], ids=["object", "view"])
def test_tied_weights_are_written_once(stager, same):
    source, place = torch.ones(3), torch.zeros(3)
    stager.to_device([source, source], out=[place, same(place)])
    assert place.tolist() == [1, 1, 1]
    assert stager.stats().packed_leaves == 1


def test_parameters_are_written_without_grad_mode(stager):
    linear = torch.nn.Linear(4, 3)
    weights = {name: torch.full_like(value, 2.0) for name, value in linear.state_dict().items()}
    with torch.no_grad():
        stager.to_device(weights, out=dict(linear.named_parameters()))
    assert bool((linear.weight == 2).all())
    assert linear.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inference_tensors_are_writable_outside_inference_mode(stager, dtype):
    with torch.inference_mode():
        static = [torch.zeros(3), torch.zeros(3)]
    stager.to_device([torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)], out=static)
    assert [place.tolist() for place in static] == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    "way", [lambda leaf: leaf, lambda leaf: leaf[::2]], ids=["dense", "strided"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16, torch.complex64])
def test_versions_count_up_beside_inference_tensors(stager, dtype, way):
    first, last = (way(torch.zeros(20, dtype=dtype)) for _ in range(2))
    with torch.inference_mode():
        middle = way(torch.zeros(20, dtype=dtype))
    places = [first, middle, last]
    stager.to_device([torch.ones(place.shape, dtype=dtype) for place in places], out=places)
    assert all(bool((place == 1).all()) for place in places)
    assert min(first._version, last._version) >= 1


# -- refusals --------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(3)])
BUFFER = torch.zeros(12)
LEAF = torch.zeros(3, requires_grad=True)
REFUSED = {
    "a missing key": ({"y": 0}, r"structure differs .* batch\['x'\] is not in out"),
    "another container": ([0], "structure differs"),
    "no tensor": ({"x": "text"}, "is a str"),
    "an array": ({"x": np.zeros(3)}, "is a ndarray"),
    "another shape": ({"x": torch.zeros(4)}, r"has shape \[4\], but the batch has \[3\]"),
    "more dimensions": ({"x": torch.zeros(3, 1)}, r"has shape \[3, 1\]"),
    "another device": (
        {"x": torch.zeros(3, device="meta")},
        "is on meta, but the call writes to cpu",
    ),
    "an expanded one": ({"x": torch.zeros(1).expand(3)}, r"is expanded: shape \[3\], stride \[0\]"),
    "one that requires grad": (
        {"x": LEAF},
        r"requires grad, and grad mode is on; call under torch.no_grad",
    ),
    "a non-leaf": ({"x": LEAF * 2}, "requires grad"),
    "another layout": ({"x": torch.zeros(3).to_sparse()}, "has layout torch.sparse_coo"),
    "no cast": (
        {"x": torch.zeros(3, dtype=torch.uint8).view(torch.bits8)},
        "can't cast the batch's torch.float32",
    ),
    "a nested tensor": ({"x": NESTED}, "nested tensor"),
}


@pytest.mark.parametrize(("out", "says"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("method", ["to_device", "stage", "fetch", "to_host"])
def test_an_unwritable_destination_is_refused_by_path(stager, method, out, says):
    with pytest.raises(LayoutError, match=says) as caught:
        getattr(stager, method)({"x": torch.ones(3)}, out=out)
    assert caught.value.path == "['x']" or "structure" in says
    assert stager.stats().batches == stager.stats().fetches == 0


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_a_nested_source_is_refused_by_path(stager, method):
    with pytest.raises(LayoutError, match="nested tensor") as caught:
        getattr(stager, method)({"x": NESTED}, out={"x": torch.zeros(1, 3)})
    assert caught.value.path == "['x']"


COMPLEX = torch.zeros(6, dtype=torch.complex64)
OVERLAPS = {
    "shifted": ([BUFFER[:3], BUFFER[2:5]], r"out\[1\] overlaps out\[0\], and their sources differ"),
    "one inside": ([BUFFER[:6], BUFFER[2:4]], r"out\[1\] overlaps out\[0\]"),
    "the same object": ([LEAF.detach()] * 2, r"out\[1\] is the same memory as out\[0\]"),
    "the same view": ([BUFFER[:3], BUFFER[:3]], r"out\[1\] is the same memory as out\[0\]"),
    "the same strided view": (
        [BUFFER[::4], BUFFER[::4]],
        r"out\[1\] is the same memory as out\[0\]",
    ),
    "its conjugate": ([COMPLEX, COMPLEX.conj()], r"out\[1\] is the same memory as out\[0\]"),
    "a part of its conjugate": ([COMPLEX, COMPLEX.conj()[:2]], r"out\[1\] overlaps out\[0\]"),
    "its negation": ([BUFFER, torch._neg_view(BUFFER)], r"out\[1\] is the same memory as out\[0\]"),
}


@pytest.mark.parametrize(("places", "says"), OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_destinations_that_overlap_are_refused_by_both_paths(stager, places, says, method):
    with pytest.raises(LayoutError, match=says):
        getattr(stager, method)([torch.ones(place.shape) for place in places], out=places)
    assert not BUFFER.any()
    assert not COMPLEX.any()


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_frozen_parameters_are_packed(stager, method):
    places = [torch.nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(40)]
    getattr(stager, method)([torch.ones(3) for _ in places], out=places)
    assert all(bool((place == 1).all()) for place in places)
    assert stager.stats().passthrough_leaves == 0


@pytest.mark.parametrize("group_bytes", [16, _writer.GROUP_BYTES])
@pytest.mark.parametrize("count", [2, 300])
def test_columns_of_one_tensor_are_separate(stager, monkeypatch, count, group_bytes):
    monkeypatch.setattr(_writer, "GROUP_BYTES", group_bytes)
    fused, sources = torch.zeros(4, count), [torch.full((4,), number) for number in range(count)]
    stager.to_device(sources, out=list(fused.unbind(1)))
    assert torch.equal(fused, torch.stack(sources, 1).float())


@pytest.mark.parametrize("group_bytes", [16, _writer.GROUP_BYTES])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_strided_views_of_one_storage_keep_order(stager, monkeypatch, order, group_bytes):
    found, expected = torch.zeros(6), torch.zeros(6)
    views = [lambda x: x[::2], lambda x: x, lambda x: x[1::2]]
    sources = [torch.full((3,), 1.0), torch.full((6,), 2.0), torch.full((3,), 3.0)]
    monkeypatch.setattr(_writer, "GROUP_BYTES", group_bytes)
    stager.to_device([sources[i] for i in order], out=[views[i](found) for i in order])
    for i in order:
        views[i](expected).copy_(sources[i])
    assert torch.equal(found, expected)


def test_a_call_that_is_refused_has_written_nothing(stager):
    places = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(LayoutError):
        stager.to_device([torch.ones(3), torch.ones(3)], out=places)
    assert not places[0].any()
    assert [place._version for place in places] == [0, 0]


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
def test_a_self_moving_object_has_no_destination(stager):
    class Movable:
        def __init__(self):
            self.x = torch.ones(3)

        def to(self, device):
            return self

    with pytest.raises(LayoutError, match=r"out\['x'\] cannot take a Movable"):
        stager.to_device({"x": Movable()}, out={"x": torch.zeros(3)})


def test_a_captured_stream_is_refused(stager, monkeypatch):
    transfer = stager.stage(torch.ones(3), out=torch.zeros(3))
    monkeypatch.setattr(Target, "is_capturing", lambda _: True)
    calls = [
        lambda: stager.to_device(torch.ones(3), out=torch.zeros(3)),
        lambda: stager.stage(torch.ones(3), out=torch.zeros(3)),
        lambda: stager.to_host(torch.ones(3), out=torch.zeros(3)),
        transfer.wait,
    ]
    for call in calls:
        with pytest.raises(
            PinstageError,
            match=r"while a CUDA graph is captured: .*; call it before or after graph.replay\(\)",
        ):
            call()
    monkeypatch.undo()
    assert transfer.wait().all()


def test_a_closed_pool_refuses_before_anything_is_written():
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        pass
    place = torch.zeros(3)
    with pytest.raises(ps.errors.PoolClosedError):
        stager.to_device(torch.ones(3), out=place)
    assert not place.any()


# -- calls that fail later -------------------------------------------------------------------------


def test_without_a_slab_no_host_tensor_is_written(make_stager):
    stager = make_stager("1MiB")
    stager.pool.freeze()
    sources = [torch.ones(4).as_subclass(TensorSubclass), torch.ones(4)]
    places = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(PoolFrozenError) as caught:
        stager.to_host(sources, out=places)
    assert not hasattr(caught.value, "__notes__")
    assert not any(place.any() for place in places)
    assert stager.to_host(sources[:1], out=places[:1])[0].all()


def test_slabs_for_destinations_fit_the_cap(make_stager, monkeypatch):
    stager = make_stager("64KiB")
    sources = [torch.ones(50_000), torch.ones(3), torch.full((50_000,), 3.0)]
    places = [torch.zeros(50_000), torch.zeros(3), torch.zeros(50_000).as_subclass(TensorSubclass)]
    with pytest.raises(BudgetExceededError) as caught:
        stager.to_host(sources, out=places)
    assert caught.value.requested_bytes == 200_000 + 16
    assert not any(place.any() for place in places)
    # Only copy_ can write the second one, which takes no slab.
    stager.to_host(sources[1:], out=places[1:])
    assert bool((places[2] == 3).all())
    monkeypatch.setattr(_to_host, "pieces_of", lambda tensor: [(0, tensor.nbytes)])
    stager.to_host(sources, out=places)
    assert places[0].all()


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_torch_copies_large_opaque_destinations(make_stager, method):
    place = torch.zeros(50_000).as_subclass(TensorSubclass)
    getattr(make_stager("64KiB"), method)([torch.ones(50_000)], out=[place])
    assert place.all()


def test_a_timeout_between_groups_names_written_destinations(make_stager, monkeypatch):
    stager = make_stager("4MiB", timeout=0.01)
    monkeypatch.setattr(_writer, "GROUP_BYTES", 1 << 20)
    batch = {"a": torch.ones(MIB // 4), "b": torch.ones(MIB)}
    out = {name: torch.zeros_like(tensor) for name, tensor in batch.items()}
    acquire = stager.pool.acquire
    leases = itertools.count()

    def fail_later(nbytes, **options):
        if next(leases) == 3:
            stager.pool.trim()
            options["timeout"] = 0
            nbytes += 4 * MIB
        return acquire(nbytes, **options)

    monkeypatch.setattr(stager.pool, "acquire", fail_later)
    with pytest.raises(BudgetExceededError) as caught:
        stager.to_device(batch, out=out)
    assert caught.value.__notes__ == ["may be written in part: out['a'], out['b']"]
    monkeypatch.undo()
    stager.to_device(batch, out=out)
    assert bool((out["b"] == 1).all())


def test_without_a_slab_nothing_is_written(make_stager):
    stager = make_stager("4MiB", timeout=0.01)
    held = stager.pool.acquire("3MiB")
    places = [torch.zeros(3, dtype=torch.float64), torch.zeros(MIB // 3)]
    with pytest.raises(AcquireTimeoutError) as caught:
        stager.to_device([torch.ones(3), torch.ones(MIB // 3)], out=places)
    assert not any("written" in note for note in caught.value.__notes__)
    assert not any(place.any() for place in places)
    held.release()


@pytest.mark.filterwarnings(
    "ignore::pinstage.errors.UnreleasedLeaseWarning", "ignore:out= was not written"
)
@pytest.mark.parametrize("size", [100, MIB])
def test_an_interrupt_anywhere_leaves_no_slab_busy(make_stager, size):
    stager = make_stager("16MiB")
    for number in itertools.count(1):
        places = [torch.zeros(size), torch.zeros(40)[::2]]

        def work(places=places):
            stager.to_device([torch.ones(size), torch.ones(20)], out=places)

        interrupted = Interrupts(
            number, "_out.py", "_stager.py", "_sender.py", "_transfer.py"
        ).during(work)
        stats = stager.pool.stats()
        assert (stats.leased_slabs, stats.in_flight_slabs) == (0, 0)
        if not interrupted:
            break
    assert number > 20
    assert all(bool((place == 1).all()) for place in places)


# -- order and lifetime ----------------------------------------------------------------------------


class Queue(Target):
    """Named streams whose order is recorded."""

    stream = "for copies"

    def __init__(self):
        self.log, self.events = [], []

    def consumer(self, stream):
        return stream or "current"

    def on(self, stream):
        self.log.append(("on", stream))
        return super().on(stream)

    def record(self, stream):
        self.log.append(("event", stream))
        self.events.append(ManualEvent())
        return self.events[-1]

    def hand_over(self, event, tensors, consumer):
        self.log.append((consumer, "waits for", self.events.index(event)))

    def finish(self):
        for event in self.events:
            event.finish()


@pytest.fixture
def queue(make_stager):
    """A stager whose events the test finishes."""
    stager = make_stager("64MiB")
    target = use_target(stager, Queue())
    yield stager
    target.finish()


@pytest.mark.parametrize("elements", [100, MIB])
def test_the_waiting_stream_copies_behind_the_staged_bytes(queue, elements):
    place = torch.zeros(elements)
    transfer = queue.stage(torch.ones(elements), out=place)
    staged, log = len(queue._target.events) - 1, queue._target.log
    assert not place.any()
    assert not any("waits for" in entry for entry in log)
    del log[:]
    assert transfer.wait("another") is place
    assert place.all()
    assert log == [("on", "another"), ("another", "waits for", staged), ("event", "another")]


def test_later_waits_only_wait_for_the_copy(queue):
    place = torch.zeros(3)
    transfer = queue.stage(torch.ones(3), out=place)
    transfer.wait("another")
    place.fill_(7)
    del queue._target.log[:]
    assert transfer.wait("third") is place
    assert queue._target.log[1:] == [("third", "waits for", len(queue._target.events) - 1)]
    assert place.tolist() == [7, 7, 7]


def test_a_transfer_reports_staged_bytes_then_the_copy(queue):
    transfer = queue.stage(torch.ones(MIB), out=torch.zeros(MIB))
    assert not transfer.query()
    queue._target.finish()
    assert transfer.query()
    transfer.wait()
    assert not transfer.query()
    queue._target.finish()
    transfer.synchronize()


def test_a_forgotten_transfer_writes_nothing_and_warns(stager):
    place = torch.zeros(3)
    transfer = stager.stage(torch.ones(3), out=place)
    with pytest.warns(StagingWarning, match=r"out= was not written: .*16 B .*wait\(\)"):
        del transfer
    assert not place.any()


def test_the_last_of_two_waits_counts(stager):
    place = torch.zeros(3)
    first, second = (stager.stage(torch.full((3,), float(value)), out=place) for value in (1, 2))
    second.wait()
    assert place.tolist() == [2, 2, 2]
    first.wait()
    assert place.tolist() == [1, 1, 1]


def test_sources_can_change_before_the_copy(stager):
    sources = [
        torch.ones(3),
        np.ones(3),
        torch.ones(3, requires_grad=True),
        torch.ones(3).as_subclass(TensorSubclass),
    ]
    places = [torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(3), torch.zeros(3)]
    transfer = stager.stage(sources, out=places)
    with torch.no_grad():
        for source in sources:
            source[:] = 9
    transfer.wait()
    assert all(bool((place == 1).all()) for place in places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("method", ["stage", "fetch"])
def test_destinations_that_changed_shape_are_refused(stager, method, dtype):
    place = torch.zeros(3, dtype=dtype)
    before = place.detach()
    transfer = getattr(stager, method)({"x": torch.ones(3)}, out={"x": place})
    place.data = torch.zeros(2, 3, dtype=dtype)  # to which torch would broadcast
    with pytest.raises(LayoutError, match="changed its shape or memory") as caught:
        transfer.wait()
    assert caught.value.path == "['x']"
    assert not place.any()
    place.data = before
    assert transfer.wait()["x"].all()


@pytest.mark.filterwarnings("ignore:out= was not written")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_interrupted_wait_can_be_repeated(make_stager, dtype):
    stager = make_stager("16MiB")
    for number in itertools.count(1):
        places = [torch.zeros(3), torch.zeros(40, dtype=dtype)]
        transfer = stager.stage([torch.ones(3), torch.ones(40)], out=places)
        interrupted = Interrupts(number, "_out.py", "_transfer.py").during(transfer.wait)
        assert transfer.wait() == places
        assert all(bool((place == 1).all()) for place in places)
        if not interrupted:
            break
    assert number > 10


@pytest.mark.parametrize("own_storage", [True, False, "auto"])
@pytest.mark.parametrize("count", [2, 40])
def test_destinations_have_one_block_whatever_is_their_own(make_stager, own_storage, count):
    stager = make_stager(own_storage=own_storage)
    places = [torch.zeros(3) for _ in range(count)]
    transfer = stager.stage([torch.full((3,), float(n)) for n in range(count)], out=places)
    assert transfer.blocks == 1
    assert [place[0].item() for place in transfer.wait()] == list(range(count))


def test_batches_with_destinations_count_for_running_ahead(monkeypatch):
    _, waited = record_work(monkeypatch)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=2) as stager:
        for _ in range(5):
            stager.to_device(torch.ones(MIB // 2), out=torch.zeros(MIB // 2))
    assert len(waited) == 3


def test_destinations_are_kept_until_the_copy_is_done(queue):
    place = torch.zeros(MIB)
    gone = weakref.ref(place)
    transfer = queue.stage(torch.ones(MIB), out=place)
    transfer.wait()
    del place, transfer
    assert gone() is not None
    queue._target.finish()
    wait_until(lambda: gone() is None)


def test_the_staged_memory_is_dropped_by_wait(stager, monkeypatch):
    made = []
    blocks = Target.blocks
    monkeypatch.setattr(Target, "blocks", lambda *args: made.append(blocks(*args)) or made[-1])
    transfer = stager.stage(
        [torch.ones(3), torch.ones(3)], out=[torch.zeros(3), torch.zeros(6)[::2]]
    )
    gone = weakref.ref(made.pop().tensors[0])
    assert gone() is not None
    transfer.wait()
    assert gone() is None


# -- to the host -----------------------------------------------------------------------------------


class HeldOut(Target):
    """A device whose copies the test makes."""

    def __init__(self):
        self.out_stream = self.event = ManualEvent()
        self.pieces = []

    def to_host(self, pieces, *, hold=True, after=None):
        self.pieces += pieces
        return self.event

    def finish(self):
        super().to_host(self.pieces)
        self.pieces.clear()
        self.event.finish()


@pytest.fixture
def held(stager):
    source = stager._fetcher.targets._made[torch.device("cpu")] = HeldOut()
    yield source
    source.finish()


def test_wait_fills_destinations_from_the_slab(stager, held):
    place = torch.zeros(3)
    transfer = stager.fetch([torch.ones(3)], out=[place])
    assert not place.any()
    assert not transfer.query()
    held.finish()
    assert transfer.wait() is transfer.wait()
    assert transfer.wait()[0] is place
    assert place.tolist() == [1, 1, 1]
    assert stager.pool.stats().free_slabs == 1


def test_a_failed_fetch_names_its_destinations(stager, monkeypatch):
    def fail(*copies, **_):
        del copies  # frames outside pinstage keep their locals: views of the slab
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(_to_host, "pieces_of", lambda tensor: [(0, tensor.nbytes)])
    monkeypatch.setattr(Target, "to_host", fail)
    tree = {"large": torch.ones(1 << 17), "small": torch.ones(3)}
    with pytest.raises(RuntimeError, match="the copy failed") as caught:
        stager.fetch(tree, out={name: torch.zeros_like(tensor) for name, tensor in tree.items()})
    assert caught.value.__notes__ == ["may be written in part: out['large']"]
    assert stager.pool.stats().free_slabs == 1


def test_page_locked_destinations_need_no_slab(stager, held, monkeypatch):
    monkeypatch.setattr(_to_host, "pieces_of", lambda tensor: [(0, tensor.nbytes)])
    place = torch.zeros(100_000)
    gone = weakref.ref(place)
    transfer = stager.fetch(torch.ones(100_000), out=place)
    assert stager.pool.stats().held_slabs == 0
    assert (transfer.copies, place._version) == (1, 1)
    del place, transfer
    held.pieces[:] = [piece._replace(here=piece.here.clone()) for piece in held.pieces]
    assert gone() is not None
    held.finish()
    wait_until(lambda: gone() is None)


def test_a_copy_and_destinations_exclude_each_other(stager):
    with pytest.raises(
        ValueError, match="copy=False returns views of a slab, and out= names tensors that exist"
    ):
        stager.fetch([torch.ones(3)], out=[torch.zeros(3)], copy=False)


def test_unpackable_leaves_are_copied_into_place(stager):
    place = torch.zeros(2, 2).to_sparse()
    fetched = stager.to_host([torch.eye(2).to_sparse(), "text"], out=[place, "other"])
    assert fetched[0] is place
    assert torch.equal(place.to_dense(), torch.eye(2))
    assert fetched[1] == "text"


@pytest.mark.parametrize("method", ["to_device", "to_host"])
@pytest.mark.parametrize(
    "lazy",
    [
        lambda: torch.zeros(8, dtype=torch.complex64).conj(),
        lambda: torch.full((1 << 17,), 7 + 0j).conj().imag,
        lambda: torch._neg_view(torch.zeros(8)),
    ],
    ids=["conjugated", "its imaginary part", "negated"],
)
def test_lazily_computed_destinations_take_values(make_stager, method, lazy):
    place = lazy()
    around = place._base.clone()
    source = torch.arange(1, place.numel() + 1).to(place.dtype)
    getattr(make_stager(max_bytes="64MiB"), method)([source], out=[place])
    expected = lazy()
    expected.copy_(source)
    assert torch.equal(place, expected)
    assert torch.equal(place._base, expected._base)
    assert not torch.equal(place._base, around)


def test_unused_strides_don_t_change_the_order(make_stager):
    image = (
        torch.arange(512 * 512 * 8, dtype=torch.float32)
        .view(512, 512, 8)
        .permute(2, 0, 1)
        .unsqueeze(0)
    )
    place = torch.empty_strided((1, 8, 512, 512), (8 * 512 * 512, 1, 4096, 8))
    make_stager(max_bytes="1MiB").to_device([image], out=[place])
    assert torch.equal(place, image)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16])
def test_changes_of_any_dtype_are_counted(make_stager, dtype):
    place = torch.zeros(4, dtype=dtype)
    before = place._version
    make_stager(max_bytes="1MiB").to_host([torch.ones(4, dtype=dtype)], out=[place])
    assert place._version > before


@pytest.mark.parametrize("dtype", [torch.bool, torch.int1])
def test_strided_bytes_go_in_parts_as_they_are(make_stager, dtype):
    bytes_ = torch.randint(256, (2048, 1024), dtype=torch.uint8)
    source, place = (
        bytes_.view(dtype)[:, ::2],
        torch.zeros((2048, 512), dtype=torch.uint8).view(dtype),
    )
    make_stager(max_bytes="256KiB").to_device([source], out=[place])
    assert torch.equal(place.view(torch.uint8), bytes_[:, ::2])
