"""Staging into existing tensors (`out=`) on the device: stream order, lifetimes, CUDA graphs,
compiled functions.
"""

import gc
import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from doubles import outcome, stays_blocked

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL, MIDDLE, LARGE = 64, 100_000, MIB
"""Numbers of elements for: a direct copy, one from a slab on the current stream, several on the
stager's stream.
"""


def filled(elements, value, dtype=torch.int32):
    return torch.full((elements,), value, dtype=dtype)


def on(device, elements, value=0, dtype=torch.int32):
    return torch.full((elements,), value, dtype=dtype, device=device)


def places_of(kind, device, sources):
    """Make destinations: separate, adjacent, strided, or of another dtype."""
    if kind == "neighbours":
        sizes = [source.numel() for source in sources]
        return list(torch.zeros(sum(sizes), dtype=sources[0].dtype, device=device).split(sizes))
    if kind == "strided":
        return [
            torch.zeros(source.numel(), 2, dtype=source.dtype, device=device)[:, 1]
            for source in sources
        ]
    dtype = torch.float64 if kind == "cast" else sources[0].dtype
    return [torch.zeros(source.numel(), dtype=dtype, device=device) for source in sources]


@pytest.mark.parametrize("elements", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("kind", ["separate", "neighbours", "strided", "cast"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_every_kind_of_destination_has_the_bytes(cuda_device, kind, count, elements, side):
    sources = [torch.arange(elements, dtype=torch.int32) + number for number in range(count)]
    places = places_of(kind, cuda_device, sources)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(cuda_device) if side else torch.cuda.current_stream(cuda_device)
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager, torch.cuda.stream(stream):
        for _ in range(2):
            returned = stager.to_device(sources, out=places)
        assert all(one is two for one, two in zip(returned, places, strict=True))
        for place, source in zip(places, sources, strict=True):
            assert torch.equal(place.cpu(), source.to(place.dtype))


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("method", ["to_device", "to_host"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.bool,
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 40])
def test_all_bits_arrive(cuda_device, stager, method, dtype, count):
    integers = INTEGERS[dtype.itemsize]
    bits = (torch.iinfo(integers).max - torch.arange(200)).to(integers)
    there, here = (cuda_device, "cpu") if method == "to_device" else ("cpu", cuda_device)
    sources = [bits.to(here).view(dtype) for _ in range(count)]
    places = [torch.zeros(200, dtype=dtype, device=there) for _ in sources]
    places[-1] = torch.zeros(200, 2, dtype=dtype, device=there)[:, 1]
    getattr(stager, method)(sources, out=places)
    assert all(torch.equal(place.view(integers).cpu(), bits) for place in places[:-1])
    if dtype.is_floating_point:  # a strided bool is copied by its value
        assert torch.equal(places[-1].contiguous().view(integers).cpu(), bits)
    assert {place._version for place in places} == {1}


def test_replays_take_the_memory_of_four_batches(cuda_device):
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager:
        batches = [[torch.full((4, LARGE), float(value))] for value in range(4)]
        static = stager.to_device(batches[0])
        work = torch.rand(2048, 2048, device=cuda_device)

        def step():
            total = static[0].sum()
            for _ in range(20):
                torch.mm(work, work)
            return total

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(cuda_device)
        before = torch.cuda.memory_allocated(cuda_device)
        for number in range(40):
            stager.to_device(batches[number % 4], out=static)
            graph.replay()
            if number > 30:
                assert total.item() == 4 * LARGE * (number % 4)
        peak = torch.cuda.max_memory_allocated(cuda_device) - before
        assert peak <= 4 * static[0].nbytes


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=["direct", "through scratch"])
def test_earlier_work_reads_old_values_later_work_new(cuda_device, stager, latch, elements, dtype):
    consumer = torch.cuda.Stream(cuda_device)
    with torch.cuda.stream(consumer):
        place = on(cuda_device, elements, 1, dtype)
        stager.to_device([filled(elements, 1)], out=[place])  # loads kernels and makes slabs
        place.clone()
        torch.cuda.synchronize()
        latch.hold(consumer)
        before = place.clone()
        stager.to_device([filled(elements, 2)], out=[place])  # the host does not wait
        after = place.clone()
        assert not consumer.query()
        latch.open()
        consumer.synchronize()
        assert (before == 1).all()
        assert (after == 2).all()


def test_a_batch_crosses_the_bus_behind_a_replay(cuda_device, stager, latch):
    consumer = torch.cuda.Stream(cuda_device)
    with torch.cuda.stream(consumer):
        place = on(cuda_device, LARGE, 1)
        stager.to_device([filled(LARGE, 1)], out=[place])
        place.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=consumer):
            seen = place * 1
        graph.replay()
        torch.cuda.synchronize()
        latch.hold(consumer)
        graph.replay()
        stager.to_device([filled(LARGE, 2)], out=[place])
        stager._target.stream.synchronize()  # the bytes are on the device
        assert not consumer.query()
        latch.open()
        consumer.synchronize()
        assert (seen == 1).all()
        assert (place == 2).all()


def half_registered(stack, elements):
    """Make a tensor whose first half is page-locked."""
    memory = filled(elements + 2048, 0)
    begin = -(-memory.data_ptr() // 4096) * 4096
    tensor = memory[(begin - memory.data_ptr()) // 4 :][:elements]
    runtime = torch.cuda.cudart()
    assert (
        int(runtime.cudaHostRegister(begin, max(4096, tensor.nbytes // 2 // 4096 * 4096), 0)) == 0
    )
    stack.callback(runtime.cudaHostUnregister, begin)
    return tensor


def lent(stack, elements):
    pool = stack.enter_context(ps.SlabPool("64MiB", memory=ps.memory.RegisteredMemory("cuda")))
    return stack.enter_context(pool.acquire(4 * elements)).tensor((elements,), torch.int32)


SOURCES = {
    "pageable": lambda stack, elements: filled(elements, 0),
    "page-locked": lambda stack, elements: filled(elements, 0).pin_memory(),
    "half registered": half_registered,
    "a lease": lent,
    "a parameter": lambda stack, elements: torch.nn.Parameter(
        filled(elements, 0), requires_grad=False
    ),
    "on the device": lambda stack, elements: on(torch.device("cuda"), elements),
}


@pytest.mark.parametrize("elements", [1024, SMALL * 200, MIDDLE, LARGE])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_may_be_overwritten_after_the_call(cuda_device, stager, latch, kind, elements):
    consumer = torch.cuda.Stream(cuda_device)
    with ExitStack() as stack:
        source, place = SOURCES[kind](stack, elements), on(cuda_device, elements)
        stack.callback(torch.cuda.synchronize)
        stack.enter_context(latch)
        stack.enter_context(torch.cuda.stream(consumer))
        stager.to_device([source], out=[place])
        source.add_(0)
        source.data.fill_(5)
        torch.cuda.synchronize()
        if kind == "on the device":
            latch.hold(stager._target.stream)  # the call copies it on the current stream
        else:
            latch.hold(consumer)
            latch.hold(stager._target.stream)
        stager.to_device([source], out=[place])
        source.data.fill_(9)
        latch.open()
        torch.cuda.synchronize()
        assert (place == 5).all()


def test_a_borrowed_source_is_read_late_and_kept(cuda_device, borrowing, latch):
    place = on(cuda_device, LARGE)
    borrowing.to_device([filled(LARGE, 1).pin_memory()], out=[place])
    torch.cuda.synchronize()
    source = filled(LARGE, 2).pin_memory()
    address = source.data_ptr()
    latch.hold(borrowing._target.stream)
    borrowing.to_device([source], out=[place])
    assert borrowing.stats().pool.held_bytes == 0
    del source
    gc.collect()
    others = [filled(LARGE, 9).pin_memory() for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    latch.open()
    assert (place == 2).all()


def test_no_warm_call_waits_for_the_device(cuda_device, stager, latch):
    places = [on(cuda_device, LARGE) for _ in range(3)]
    stager.pool.reserve(4 * LARGE, count=8)
    stager.to_device(filled(LARGE, 1), out=places[0])
    torch.cuda.synchronize()
    latch.hold(torch.cuda.current_stream(cuda_device))
    for value, place in enumerate(places):
        stager.to_device(filled(LARGE, value), out=place)
    latch.open()
    torch.cuda.synchronize()
    assert [int(place[-1]) for place in places] == list(range(3))


# -- graphs ----------------------------------------------------------------------------------------


def test_replayed_training_steps_equal_the_eager_loop(cuda_device):
    path = Path(__file__).parents[2] / "examples" / "cuda_graph.py"
    spec = importlib.util.spec_from_file_location("cuda_graph_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    expected, one = example.eager(cuda_device, 30, 3)
    losses, other = example.replayed(cuda_device, 30, 3)
    assert len(losses) == 30
    assert all(map(torch.equal, expected, losses))
    assert len({loss.item() for loss in losses}) > 10, "the batches are alike, so nothing is shown"
    assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_captured_inference_step_sees_each_new_batch(cuda_device, elements):
    def batch(value):
        return [filled(elements, value) for _ in range(12)]

    with ps.Stager(cuda_device, max_bytes="256MiB") as stager, torch.inference_mode():
        static = stager.to_device(batch(0))
        sum(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = sum(static)
        for value in range(1, 20):
            assert stager.to_device(batch(value), out=static)[0] is static[0]
            graph.replay()
            result = total.clone()
            assert (result == 12 * value).all()


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of its compiler
def test_a_compiled_function_s_static_inputs_take_batches(stager):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: (x * 2 + y).sum(), mode="reduce-overhead")
    with torch.no_grad():
        static = stager.to_device([torch.zeros(1000), torch.zeros(1000)])
        for tensor in static:
            torch._dynamo.mark_static_address(tensor)
        for value in range(8):
            stager.to_device(
                [torch.full((1000,), float(value)), torch.full((1000,), 1.0)], out=static
            )
            assert compiled(*static).item() == 1000 * (2 * value + 1)


# -- to the host -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("elements", [SMALL, MIDDLE, LARGE])
def test_host_tensors_have_the_values(cuda_device, stager, latch, background, pinned, elements):
    place = torch.zeros(elements, dtype=torch.int32)
    place = place.pin_memory() if pinned else place
    source = on(cuda_device, elements, 1)
    assert stager.to_host([source], out=[place])[0] is place
    assert (place == 1).all()
    source.fill_(2)
    torch.cuda.synchronize()
    latch.hold(stager._fetcher.targets.of(cuda_device).out_stream)
    written = background(stager.to_host, [source], out=[place])
    assert stays_blocked(written)
    assert (place == 1).all()
    latch.open()
    assert (outcome(written)[0] == 2).all()
    held = stager.stats().pool.held_bytes
    assert (held == 0) == (pinned and elements != SMALL)


def test_values_are_cast_on_the_way_back(cuda_device, stager):
    places = [
        torch.zeros(SMALL, dtype=torch.float64),
        torch.zeros(LARGE, 2, dtype=torch.int32)[:, 1],
    ]
    stager.to_host([on(cuda_device, SMALL, 3), on(cuda_device, LARGE, 4)], out=places)
    assert (places[0] == 3).all()
    assert (places[1] == 4).all()


def test_only_page_locked_destinations_may_exceed_the_cap(cuda_device):
    sources = [torch.randn(4 * MIB), torch.arange(5 * MIB + 3, dtype=torch.uint8)]
    there = [source.to(cuda_device) for source in sources]
    with ps.Stager(cuda_device, max_bytes="8MiB") as stager:
        places = [torch.zeros_like(source).pin_memory() for source in sources]
        stager.to_host(there, out=places)
        assert all(map(torch.equal, places, sources))
        with pytest.raises(ps.errors.BudgetExceededError):
            stager.to_host(there, out=[torch.zeros_like(source) for source in sources])
