"""Staging into existing tensors (`out=`) on the CPU, compared with a loop of ``dst.copy_(src)``."""

import itertools
import math
import warnings
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from doubles import (
    Interrupts,
    assert_idle,
    record_work,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import TensorSubclass, bits, raises_at
from torch.nn.utils.rnn import pack_sequence

import pinstage as ps
from pinstage._sizes import round_up
from pinstage._stage import _out, _to_host, _writer
from pinstage._stage._device import Target
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    LayoutError,
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
    torch.uint16,
    torch.bool,
]


def numbers(dtype, shape, seed=0):
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def are_ones(places):
    return all(bool((place == 1).all()) for place in places)


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
        nbytes = math.prod(shape) * dtype.itemsize
        if kind == "neighbour" and self._end + nbytes <= 4096:
            place = self.memory[0][self._end : self._end + nbytes].view(dtype).view(shape)
            self._end += round_up(nbytes, 16)
            return place
        sizes = {"strided": (*shape, 2), "transposed": shape[::-1]}.get(kind, shape)
        self.memory.append(torch.zeros(sizes, dtype=dtype))
        if kind == "strided":
            return self.memory[-1][..., 1]
        if kind == "transposed":
            return self.memory[-1].permute(tuple(range(len(shape)))[::-1])
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
    order=st.sampled_from([list, reversed]),
)
def test_destinations_equal_those_of_a_copy_loop(shared_stager, drawn, way, group_bytes, order):
    sources, (expected, places), (wanted, memory) = drawn
    tensors = [
        torch.from_numpy(source) if isinstance(source, np.ndarray) else source for source in sources
    ]
    if way in (to_host, page_locked):  # arrays are on the host already
        sources = tensors
    versions = [place._version for place in places]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_writer, "GROUP_BYTES", group_bytes)
        returned = way(shared_stager, nested(sources), dict(order(nested(places).items())))
    for place, tensor in zip(expected, tensors, strict=True):
        place.copy_(tensor.detach())
    for base, changed in zip(wanted, memory, strict=True):
        assert torch.equal(bits(base), bits(changed))  # including the bytes between destinations
    assert all(map(lambda one, two: one is two, returned["a"], places[::3]))
    assert list(returned) == ["a", "b", "d"]
    assert returned["b"]["text"] == "x"
    for place, version in zip(places, versions, strict=True):
        assert place._version > version or not place.numel()


@pytest.mark.parametrize(
    ("elements", "group_bytes"),
    [(3, _writer.GROUP_BYTES), (300_000, 4096), (600_000, _writer.GROUP_BYTES)],
)
@pytest.mark.parametrize("way", [to_device, staged, to_host, page_locked])
def test_sources_are_read_before_any_destination_is_written(
    shared_stager, monkeypatch, way, elements, group_bytes
):
    monkeypatch.setattr(_writer, "GROUP_BYTES", group_bytes)
    for kind in (torch.Tensor, TensorSubclass):
        x = numbers(torch.int32, (elements,))
        y = numbers(torch.int32, (elements,), 1).as_subclass(kind)
        expected = [y.tolist(), x.tolist()]
        way(shared_stager, [x, y], [y, x])
        assert [x.tolist(), y.tolist()] == expected
    row = torch.arange(elements)
    way(shared_stager, [row[:-1]], [row[1:]])
    assert row.tolist() == [0, *range(elements - 1)]


def test_a_batch_above_the_cap_goes_in_groups(make_stager):
    stager = make_stager("1MiB")
    sources = [
        numbers(torch.uint8, (5 * MIB + 3,)),
        numbers(torch.float32, (MIB, 2)).t(),
        torch.arange(5),
    ]
    places = [torch.empty(5 * MIB + 3, dtype=torch.uint8), torch.empty(2, MIB), torch.empty(5)]
    stager.to_device(sources, out=places)
    torch.testing.assert_close(places, sources, rtol=0, atol=0, check_dtype=False)
    stats = stager.stats()
    assert stats.pool.peak_held_bytes <= MIB
    assert stats.batches > 5
    with pytest.raises(BudgetExceededError):
        stager.stage(sources, out=places)
    with pytest.raises(BudgetExceededError):
        stager.to_device(sources)


OF_MANY_CAPS = {
    "permuted": lambda: (
        numbers(torch.int16, (4, 1, 3000, 7)).transpose(0, 2),
        torch.zeros(7, 4, 1, 3000).permute(3, 2, 1, 0),
    ),
    "unused strides": lambda: (
        torch.arange(1 << 19).view(1, 256, 256, 8).permute(0, 3, 1, 2),
        torch.empty_strided((1, 8, 256, 256), (1 << 19, 1, 2048, 8), dtype=torch.int64),
    ),
    "strided bools": lambda: strided_bytes(torch.bool),
    "strided bits": lambda: strided_bytes(torch.int1),
}


def strided_bytes(dtype):
    bytes_ = torch.randint(256, (2048, 1024), dtype=torch.uint8)
    return bytes_.view(dtype)[:, ::2], torch.zeros((2048, 512), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("kind", OF_MANY_CAPS)
def test_a_tensor_of_many_caps_is_cut(make_stager, kind):
    source, place = OF_MANY_CAPS[kind]()
    make_stager("64KiB").to_device({"x": source}, out={"x": place})
    assert torch.equal(bits(place), bits(source.to(place.dtype)))


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
    torch.testing.assert_close(places, sources, rtol=0, atol=0, check_dtype=False)
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
    expected, before = buffer.clone(), buffer._version
    ends = itertools.accumulate(sizes, initial=16)
    ranges = [slice(start, end) for start, end in itertools.pairwise(ends)]
    if order.random() < 0.3:
        order.shuffle(ranges)
    places = [buffer[bytes_] for bytes_ in ranges]
    sources = [torch.randint(200, place.shape, dtype=torch.uint8) for place in places]
    for bytes_, source in zip(ranges, sources, strict=True):
        expected[bytes_] = source
    shared_stager.to_device(sources, out=places)
    assert torch.equal(buffer, expected)
    assert buffer._version > before


def test_neighbours_in_storages_of_their_own(stager):
    memory = np.zeros((12, 64), np.uint8)
    places = [torch.from_numpy(row) for row in memory]
    stager.to_device(
        [torch.full((64,), value, dtype=torch.uint8) for value in range(12)], out=places
    )
    assert (memory == np.arange(12)[:, None]).all()


# -- what is returned ------------------------------------------------------------------------------


def test_other_leaves_are_the_batch_s(stager):
    out = {"x": torch.zeros(3), "note": ["old", 3.5]}
    staged = stager.to_device({"x": torch.ones(3), "note": ["new", b"raw"]}, out=out)
    assert staged["x"] is out["x"]
    assert (staged["note"], out["note"]) == (["new", b"raw"], ["old", 3.5])


def test_what_stays_on_the_host_is_not_written(make_stager):
    stager = make_stager(keep_on_host=["['lengths']"])
    lengths, place = torch.ones(2), torch.zeros(2)
    staged = stager.to_device(
        {"x": torch.ones(2), "lengths": lengths}, out={"x": torch.zeros(2), "lengths": place}
    )
    assert staged["lengths"] is lengths
    assert place.tolist() == [0, 0]


@pytest.mark.parametrize("make", [torch.ones, np.ones])
def test_a_repeated_source_is_written_to_both_places(stager, make):
    source, places = make(3), [torch.zeros(3), torch.zeros(3)]
    stager.to_device([source, source], out=places)
    assert are_ones(places)


@pytest.mark.parametrize("same", [lambda x: x, lambda x: x.view(3)], ids=["object", "view"])
def test_tied_weights_are_written_once(stager, same):
    source, place = torch.ones(3), torch.zeros(3)
    stager.to_device([source, source], out=[place, same(place)])
    assert place.tolist() == [1, 1, 1]
    assert stager.stats().packed_leaves == 1


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
    assert are_ones(places)
    assert min(first._version, last._version) >= 1


# -- refusals --------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(3)])
BUFFER = torch.zeros(12)
LEAF = torch.zeros(3, requires_grad=True)
UNWRITABLE = {
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


class Movable:
    def __init__(self):
        self.x = torch.ones(3)

    def to(self, device):
        return self


REFUSED = {
    **{name: (torch.ones(3), *row) for name, row in UNWRITABLE.items()},
    "a nested source": (NESTED, {"x": torch.zeros(1, 3)}, "nested tensor"),
    "a source that moves itself": (Movable(), {"x": torch.zeros(3)}, "cannot take a Movable"),
}


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
@pytest.mark.parametrize(("source", "out", "says"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("method", ["to_device", "stage", "fetch", "to_host"])
def test_an_unwritable_destination_is_refused_by_path(stager, method, source, out, says):
    with pytest.raises(LayoutError, match=says) as caught:
        getattr(stager, method)({"x": source}, out=out)
    assert caught.value.path == "['x']" or "structure" in says
    assert stager.stats().batches == stager.stats().fetches == 0


@pytest.mark.parametrize(
    ("batch", "out"),
    [
        (OrderedDict(a=BUFFER, b=BUFFER), OrderedDict(b=torch.zeros(12), a=torch.zeros(12))),
        (pack_sequence([torch.ones(2)]), pack_sequence([torch.ones(1), torch.ones(1)])),
    ],
    ids=["order", "context"],
)
def test_structures_that_look_alike_have_their_difference_named(stager, batch, out):
    says = "keys of a container are in another order, or its context differs; pass a nest"
    with raises_at("", match=says):
        stager.to_device(batch, out=out)


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
@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_are_packed(stager, method, requires_grad):
    places = [torch.nn.Parameter(torch.zeros(3), requires_grad) for _ in range(40)]
    with torch.set_grad_enabled(not requires_grad):
        getattr(stager, method)([torch.ones(3) for _ in places], out=places)
    assert are_ones(places)
    assert {place.requires_grad for place in places} == {requires_grad}
    assert stager.stats().passthrough_leaves == 0


@pytest.mark.parametrize("group_bytes", [16, _writer.GROUP_BYTES])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_strided_views_of_one_storage_keep_order(stager, monkeypatch, order, group_bytes):
    found, expected = torch.zeros(6), torch.zeros(6)
    views = [lambda x: x[::2], lambda x: x, lambda x: x[1::2]]
    sources = [torch.full_like(view(found), value) for value, view in enumerate(views, 1)]
    monkeypatch.setattr(_writer, "GROUP_BYTES", group_bytes)
    stager.to_device([sources[i] for i in order], out=[views[i](found) for i in order])
    for i in order:
        views[i](expected).copy_(sources[i])
    assert torch.equal(found, expected)


# -- calls that fail later -------------------------------------------------------------------------


def test_slabs_for_destinations_fit_the_cap(make_stager, monkeypatch):
    stager = make_stager("64KiB")
    sources = [torch.ones(50_000), torch.ones(3), torch.full((50_000,), 3.0)]
    places = [torch.zeros(50_000), torch.zeros(3), torch.zeros(50_000).as_subclass(TensorSubclass)]
    with pytest.raises(BudgetExceededError) as caught:
        stager.to_host(sources, out=places)
    assert caught.value.requested_bytes == 200_000 + 16
    assert not any(place.any() for place in places)
    monkeypatch.setattr(_to_host, "pieces_of", lambda tensor: [(0, tensor.nbytes)])
    stager.to_host(sources, out=places)
    assert places[0].all()


@pytest.mark.parametrize("method", ["to_device", "to_host"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.ones(50_000), torch.zeros(50_000).as_subclass(TensorSubclass)),
        lambda: (torch.ones(50_000).to_sparse(), torch.zeros(50_000).to_sparse()),
    ],
    ids=["subclass", "sparse"],
)
def test_torch_copies_large_opaque_destinations(make_stager, method, make):
    source, place = make()
    (written,) = getattr(make_stager("64KiB"), method)([source], out=[place])
    assert written is place
    assert place.to_dense().all()


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


@pytest.mark.parametrize("method", ["to_device", "to_host"])
@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (ps.SlabPool.close, ps.errors.PoolClosedError),
        (ps.SlabPool.freeze, PoolFrozenError),
        (lambda pool: pool.acquire("3MiB"), AcquireTimeoutError),
    ],
    ids=["closed", "frozen", "full"],
)
def test_without_a_slab_nothing_is_written(make_stager, method, stop, error):
    stager = make_stager("4MiB", timeout=0.01)
    lease = stop(stager.pool)
    sources = [torch.ones(3).as_subclass(TensorSubclass), torch.ones(3), torch.ones(MIB // 3)]
    places = [torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(MIB // 3)]
    with pytest.raises(error) as caught:
        getattr(stager, method)(sources, out=places)
    assert not any("written" in note for note in getattr(caught.value, "__notes__", ()))
    assert not any(place.any() for place in places)
    if lease is not None:
        assert getattr(stager, method)(sources[:1], out=places[:1])[0].all()
        lease.release()


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
        assert_idle(stager.pool)
        if not interrupted:
            break
    assert number > 20
    assert are_ones(places)


# -- order and lifetime ----------------------------------------------------------------------------


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
    assert log == [("on", "another"), ("another", "waits for", staged, 1), ("event", "another")]


def test_later_waits_only_wait_for_the_copy(queue):
    place = torch.zeros(3)
    transfer = queue.stage(torch.ones(3), out=place)
    transfer.wait("another")
    place.fill_(7)
    del queue._target.log[:]
    assert transfer.wait("third") is place
    assert queue._target.log[1:] == [("third", "waits for", len(queue._target.events) - 1, 0)]
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


def test_sources_can_change_before_the_copy(stager):
    sources = [
        torch.ones(3),
        np.ones(3, np.float32),
        torch.ones(3, requires_grad=True),
        torch.ones(3).as_subclass(TensorSubclass),
    ]
    places = [torch.zeros(3) for _ in sources]
    transfer = stager.stage(sources, out=places)
    with torch.no_grad():
        for source in sources:
            source[:] = 9
    transfer.wait()
    assert are_ones(places)


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
        assert are_ones(places)
        if not interrupted:
            break
    assert number > 10


@pytest.mark.parametrize("own_storage", [True, False, "auto"])
@pytest.mark.parametrize("count", [2, 40])
def test_destinations_have_one_block_whatever_is_their_own(make_stager, own_storage, count):
    places = [torch.zeros(3) for _ in range(count)]
    transfer = make_stager(own_storage=own_storage).stage(
        [torch.ones(3) for _ in places], out=places
    )
    assert transfer.blocks == 1
    assert are_ones(transfer.wait())


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
    place, expected = lazy(), lazy()
    source = torch.arange(1, place.numel() + 1).to(place.dtype)
    getattr(make_stager(max_bytes="64MiB"), method)([source], out=[place])
    expected.copy_(source)
    assert torch.equal(place._base, expected._base)
