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
    ManualEvent,
    assert_idle,
    outcome,
    record_work,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import TensorSubclass, bits, raises_at
from torch.nn.utils.rnn import pack_sequence

import pinstage as ps
from pinstage._stage import _to_host
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    LayoutError,
    PoolFrozenError,
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


@pytest.fixture(params=["to_device", "to_host"])
def write(request, stager):
    """Either call that takes `out`."""
    return getattr(stager, request.param)


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
            self._end += -(-nbytes // 16) * 16
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


def lock_all(monkeypatch):
    """Let all tensors count as page-locked."""
    monkeypatch.setattr("torch.Tensor.is_pinned", lambda _: True)


def to_device(stager, batch, out):
    return stager.to_device(batch, out=out)


def to_host(stager, batch, out):
    return stager.to_host(batch, out=out)


def page_locked(stager, batch, out):
    """Fetch as if all destinations were page-locked."""
    with pytest.MonkeyPatch.context() as patched:
        lock_all(patched)
        patched.setattr(_to_host, "DIRECT_FROM_BYTES", 4)
        return stager.to_host(batch, out=out)


@pytest.mark.filterwarnings("ignore:Casting complex")
@given(
    drawn=writes(),
    way=st.sampled_from([to_device, to_host, page_locked]),
    order=st.sampled_from([list, reversed]),
)
def test_destinations_equal_those_of_a_copy_loop(shared_stager, drawn, way, order):
    sources, (expected, places), (wanted, memory) = drawn
    tensors = [
        torch.from_numpy(source) if isinstance(source, np.ndarray) else source for source in sources
    ]
    if way in (to_host, page_locked):  # arrays are on the host already
        sources = tensors
    versions = [place._version for place in places]
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


@pytest.mark.parametrize("elements", [3, 300_000])
@pytest.mark.parametrize("way", [to_device, to_host])
def test_sources_are_read_before_any_destination_is_written(shared_stager, way, elements):
    for kind in (torch.Tensor, TensorSubclass):
        x = numbers(torch.int32, (elements,))
        y = numbers(torch.int32, (elements,), 1).as_subclass(kind)
        expected = [y.tolist(), x.tolist()]
        way(shared_stager, [x, y], [y, x])
        assert [x.tolist(), y.tolist()] == expected
    row = torch.arange(elements)
    way(shared_stager, [row[:-1]], [row[1:]])
    assert row.tolist() == [0, *range(elements - 1)]


def test_each_pair_of_dtypes_is_one_call(write):
    sources = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.int64) * 20]
    places = [torch.zeros(3) for _ in sources]
    with torch.profiler.profile() as profiled:
        write(sources, out=places)
    assert are_ones(places)
    assert [event.count for event in profiled.key_averages() if "_foreach_copy_" in event.key] == [
        2
    ]


@pytest.mark.parametrize(
    "kind", [lambda x: x, lambda x: x.repeat(2)[::2]], ids=["dense", "strided"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_of_nans_arrive(write, kind, dtype):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    source = (torch.iinfo(integers).max - torch.arange(40)).to(integers)
    place = kind(torch.zeros(40, dtype=dtype))
    write([source.view(dtype)], out=[place])
    assert torch.equal(place.clone().view(integers), source)
    assert place.isnan().all()


def test_a_few_leaves_need_no_slab(stager):
    stager.to_device("text")  # looks the type up
    batch = {"x": torch.ones(50_000), "y": np.ones(50_000), "text": "new"}
    out = {"x": torch.zeros(50_000), "y": torch.zeros(50_000), "text": "old"}
    staged = stager.to_device(batch, out=out)
    assert stager.pool.stats().held_slabs == 0
    assert (staged["text"], out["text"]) == ("new", "old")
    assert are_ones([staged["x"], out["y"]])


def test_an_empty_batch_copies_nothing(write):
    empty = torch.zeros(0, 3)
    assert write({}, out={}) == {}
    assert write([empty, "x"], out=[empty, "y"]) == [empty, "x"]


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.ones(3, requires_grad=True) * 1,
        lambda: torch.ones(3, requires_grad=True).as_subclass(TensorSubclass),
        lambda: torch.ones(3, requires_grad=True).to_sparse(),
    ],
    ids=["leaf", "result", "subclass", "sparse"],
)
def test_sources_are_read_detached(write, make):
    place = torch.zeros(3).to_sparse() if make().is_sparse else torch.zeros(3)
    write([make()], out=[place])
    assert place.to_dense().tolist() == [1, 1, 1]
    assert not place.requires_grad


@pytest.mark.parametrize(
    "way", [lambda leaf: leaf, lambda leaf: leaf[::2]], ids=["dense", "strided"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16, torch.complex64])
def test_each_version_counts_up_by_one(write, way, dtype):
    places = [way(torch.zeros(20, dtype=dtype)) for _ in range(3)]
    write([torch.ones_like(place) for place in places], out=places)
    assert are_ones(places)
    assert [place._version for place in places] == [1, 1, 1]


# -- refusals --------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(3)])
FREED, CUT = torch.zeros(3), torch.zeros(5)[::2]
FREED.untyped_storage().resize_(0)
CUT.untyped_storage().resize_(16)
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
    "one without memory": (
        {"x": FREED},
        r"out\['x'\] lacks the memory for its shape: 12 bytes of \[3\] in a storage of 0",
    ),
    "a subclass without memory": ({"x": FREED.as_subclass(TensorSubclass)}, "lacks the memory"),
    "a strided one that was cut": ({"x": CUT}, "lacks the memory .*: 20 bytes"),
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
    "a source without memory": (
        FREED.as_subclass(TensorSubclass),
        {"x": torch.zeros(3)},
        "cannot take a tensor that lacks the memory",
    ),
    "a source that moves itself": (Movable(), {"x": torch.zeros(3)}, "cannot take a Movable"),
}


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
@pytest.mark.parametrize(("source", "out", "says"), REFUSED.values(), ids=REFUSED)
def test_an_unwritable_destination_is_refused_by_path(stager, write, source, out, says):
    place = torch.zeros(3)
    with pytest.raises(LayoutError, match=says) as caught:
        write({"a": torch.ones(3), "x": source}, out=out if out == [0] else {"a": place, **out})
    assert caught.value.path == "['x']" or "structure" in says
    assert not place.any()
    assert stager.stats().batches == stager.stats().fetches == 0


@pytest.mark.parametrize(
    ("batch", "out"),
    [
        (OrderedDict(a=torch.ones(1), b=torch.ones(1)), OrderedDict(b=FREED, a=FREED)),
        (pack_sequence([torch.ones(2)]), pack_sequence([torch.ones(1), torch.ones(1)])),
    ],
    ids=["order", "context"],
)
def test_structures_that_look_alike_have_their_difference_named(stager, batch, out):
    says = "keys of a container are in another order, or its context differs; pass a nest"
    with raises_at("", match=says):
        stager.to_device(batch, out=out)


LEAF = torch.zeros(3, requires_grad=True)
TORCHS = {
    "an expanded one": (torch.zeros(1).expand(3), RuntimeError, "a single memory location"),
    "one that requires grad": (LEAF, RuntimeError, "leaf Variable that requires grad"),
    "another layout": (torch.zeros(3).to_sparse(), RuntimeError, "dense and sparse"),
    "no cast": (
        torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
        NotImplementedError,
        "not implemented for 'Bits8'",
    ),
}


@pytest.mark.parametrize(("place", "error", "says"), TORCHS.values(), ids=TORCHS)
def test_torch_s_errors_are_raised_as_they_are(stager, write, place, error, says):
    with pytest.raises(error, match=says) as caught:
        write([torch.ones(3)], out=[place])
    assert not hasattr(caught.value, "__notes__")
    assert not LEAF.any()
    assert_idle(stager.pool)


@pytest.mark.parametrize("way", [to_device, to_host, page_locked])
@pytest.mark.parametrize("size", [3, 30_000])
def test_inference_tensors_are_written_in_their_mode_only(shared_stager, way, size):
    with torch.inference_mode():
        place = torch.zeros(size)
        assert way(shared_stager, [torch.ones(size)], [place]) == [place]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        way(shared_stager, [torch.ones(size)], [place])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_are_packed(stager, write, requires_grad):
    places = [torch.nn.Parameter(torch.zeros(3), requires_grad) for _ in range(40)]
    with torch.set_grad_enabled(not requires_grad):
        write([torch.ones(3) for _ in places], out=places)
    assert are_ones(places)
    assert {place.requires_grad for place in places} == {requires_grad}
    assert stager.stats().passthrough_leaves == 0


# -- calls that fail later -------------------------------------------------------------------------


def test_slabs_for_destinations_fit_the_cap(make_stager, monkeypatch):
    stager = make_stager("64KiB")
    sources, places = ([make(MIB), make(3)] for make in (torch.ones, torch.zeros))
    for method in (stager.to_device, stager.to_host):
        with pytest.raises(BudgetExceededError) as caught:
            method(sources, out=places)
        assert caught.value.requested_bytes == 4 * MIB + 16
        assert not any(place.any() for place in places)
    lock_all(monkeypatch)
    stager.to_host(sources, out=places)
    assert are_ones(places)


@pytest.mark.parametrize("call", ["to_device", "to_host"])
@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (ps.SlabPool.close, ps.errors.PoolClosedError),
        (ps.SlabPool.freeze, PoolFrozenError),
        (lambda pool: pool.acquire("3MiB"), AcquireTimeoutError),
    ],
    ids=["closed", "frozen", "full"],
)
def test_without_a_slab_nothing_is_written(make_stager, call, stop, error):
    stager = make_stager("4MiB", timeout=0.01)
    lease, write = stop(stager.pool), getattr(stager, call)
    sources = [torch.ones(3).as_subclass(TensorSubclass), torch.ones(3), torch.ones(MIB // 3)]
    places = [torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(MIB // 3)]
    with pytest.raises(error):
        write(sources, out=places)
    assert not any(place.any() for place in places)
    if lease is not None:
        assert write(sources[:1], out=places[:1])[0].all()
        lease.release()


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
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


def test_the_current_stream_copies_behind_the_staged_bytes(queue, device):
    place = torch.zeros(MIB)
    queue.to_device(torch.ones(MIB), out=place)
    last = len(device.events) - 1
    assert device.log[-1] == ("current", "waits for", last, 1)
    assert are_ones([place])


def test_sources_can_change_after_the_call(queue, device):
    sources = [torch.ones(MIB), np.ones(3, np.float32), torch.ones(3, requires_grad=True)]
    places = [torch.zeros(MIB), torch.zeros(3), torch.zeros(3)]
    queue.to_device(sources, out=places)
    device.finish()
    assert are_ones(places)


def test_batches_with_destinations_count_for_running_ahead(monkeypatch):
    _, waited = record_work(monkeypatch)
    with ps.Stager("cpu", max_bytes="64MiB", run_ahead=2) as stager:
        for _ in range(5):
            stager.to_device(torch.ones(MIB // 2), out=torch.zeros(MIB // 2))
    assert len(waited) == 3


# -- to the host -----------------------------------------------------------------------------------


def test_destinations_are_filled_from_the_slab(stager, held, background):
    place = torch.zeros(3)
    written = background(stager.to_host, [torch.ones(3)], out=[place])
    wait_until(lambda: held.copies)
    assert not place.any()
    held.finish()
    assert outcome(written)[0] is place
    assert place.tolist() == [1, 1, 1]
    assert stager.pool.stats().free_slabs == 1


def test_page_locked_destinations_need_no_slab(stager, monkeypatch):
    lock_all(monkeypatch)
    place = torch.zeros(100_000)
    stager.to_host(torch.ones(100_000), out=place)
    assert are_ones([place])
    assert stager.pool.stats().held_slabs == 0
    assert (stager.stats().fetch_copies, place._version) == (1, 1)


def test_page_locked_destinations_are_kept_after_an_interrupt(stager, held, monkeypatch):
    lock_all(monkeypatch)
    source, kept = torch.ones(30_000), 0
    for number in itertools.count(1):
        held.event = held.out_stream = ManualEvent()
        held.event.synchronize = held.finish
        place = torch.zeros(30_000)
        gone = weakref.ref(place)
        interrupts = Interrupts(number, "_to_host.py")
        interrupts.during(lambda place=place: stager.to_host(source, out=place))
        if interrupts.countdown > 0:  # numpy swallows interrupts in its look-ups
            break
        is_being_written = bool(held.copies)
        held.copies.clear()
        del place, interrupts
        assert gone() is not None or not is_being_written
        kept += is_being_written
        held.event.finish()
        wait_until(lambda gone=gone: gone() is None)
    assert kept > 3


@pytest.mark.parametrize(
    "lazy",
    [
        lambda: torch.zeros(8, dtype=torch.complex64).conj(),
        lambda: torch.full((1 << 17,), 7 + 0j).conj().imag,
        lambda: torch._neg_view(torch.zeros(8)),
    ],
    ids=["conjugated", "its imaginary part", "negated"],
)
def test_lazily_computed_destinations_take_values(write, lazy):
    place, expected = lazy(), lazy()
    source = torch.arange(1, place.numel() + 1).to(place.dtype)
    write([source], out=[place])
    expected.copy_(source)
    assert torch.equal(place._base, expected._base)
