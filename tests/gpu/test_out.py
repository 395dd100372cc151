"""Staging into existing tensors (`out=`) on the device: stream order, lifetimes, CUDA graphs, compiled functions."""

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from latch import Latch

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL, MIDDLE, LARGE = 64, 100_000, MIB
"""Numbers of elements for: a direct copy, one from a slab on the current stream, several on the stager's stream."""


def filled(elements: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full((elements,), value, dtype=dtype)


def on(device: torch.device, elements: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full((elements,), value, dtype=dtype, device=device)


def places_of(kind: str, device: torch.device, sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make destinations: separate, adjacent, strided, or of another dtype."""
    if kind == "neighbours":
        sizes = [source.numel() for source in sources]
        return list(torch.zeros(sum(sizes), dtype=sources[0].dtype, device=device).split(sizes))
    if kind == "strided":
        return [torch.zeros(source.numel(), 2, dtype=source.dtype, device=device)[:, 1] for source in sources]
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


def test_a_batch_above_the_cap_goes_in_parts(cuda_device):
    sources = [torch.randn(4 * MIB), torch.randn(1000, 3000).t(), torch.arange(5 * MIB + 3, dtype=torch.uint8)]
    places = [torch.empty(source.shape, dtype=source.dtype, device=cuda_device) for source in sources]
    with ps.Stager(cuda_device, max_bytes="8MiB") as stager:
        stager.to_device(sources, out=places)
        assert stager.stats().pool.peak_held_bytes <= 8 * MIB
        assert all(torch.equal(place.cpu(), source) for place, source in zip(places, sources, strict=True))


def test_neighbours_are_one_copy(cuda_device):
    sources = [filled(64, value) for value in range(1000)]
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        static = stager.to_device(sources)
        before = stager.stats()
        stager.to_device(sources, out=static)
        assert stager.stats().copies - before.copies == before.copies == 1


def test_the_steady_state_allocates_nothing(cuda_device):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        sources = [filled(LARGE, 1), filled(SMALL, 2)]
        static = stager.to_device(sources)
        for _ in range(5):
            stager.to_device(sources, out=static)
        torch.cuda.synchronize()
        stager.pool.freeze()
        before = torch.cuda.memory_stats(cuda_device)["allocation.all.allocated"]
        for _ in range(50):
            stager.to_device(sources, out=static)
        assert torch.cuda.memory_stats(cuda_device)["allocation.all.allocated"] == before


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64], ids=["direct", "through scratch"])
def test_earlier_work_reads_old_values_later_work_new(cuda_device, latch: Latch, elements, dtype):
    consumer = torch.cuda.Stream(cuda_device)
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch, torch.cuda.stream(consumer):
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
        assert bool((before == 1).all())
        assert bool((after == 2).all())


def test_earlier_work_is_spoiled_without_the_wait(cuda_device, latch: Latch, monkeypatch):
    consumer = torch.cuda.Stream(cuda_device)
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch, torch.cuda.stream(consumer):
        place = on(cuda_device, LARGE, 1)
        stager.to_device([filled(LARGE, 1)], out=[place])
        place.clone()
        torch.cuda.synchronize()
        monkeypatch.setattr(type(stager._target), "wait", lambda *_: None)
        latch.hold(consumer)
        before = place.clone()
        transfer = stager.stage([filled(LARGE, 2)], out=[place])
        transfer.synchronize()
        latch.open()
        consumer.synchronize()
        assert bool((before == 2).all())


@pytest.mark.parametrize("elements", [MIDDLE, LARGE])
def test_packed_sources_can_be_overwritten_after_the_call(cuda_device, latch: Latch, elements):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        source, place = filled(elements, 3), on(cuda_device, elements)
        stager.to_device([source], out=[place])
        torch.cuda.synchronize()
        held = stager._target.stream if elements == LARGE else torch.cuda.current_stream(cuda_device)
        latch.hold(held)
        source.fill_(5)
        transfer = stager.stage([source], out=[place])
        source.fill_(9)
        assert not transfer.query()
        latch.open()
        transfer.synchronize()
        assert bool((transfer.wait()[0] == 5).all())


def test_a_borrowed_source_is_read_late_and_kept(cuda_device, latch: Latch):
    with ps.Stager(cuda_device, max_bytes="64MiB", borrow_pinned=True) as stager, latch:
        place = on(cuda_device, LARGE)
        stager.to_device([filled(LARGE, 1).pin_memory()], out=[place])
        torch.cuda.synchronize()
        source = filled(LARGE, 2).pin_memory()
        address = source.data_ptr()
        latch.hold(stager._target.stream)
        transfer = stager.stage([source], out=[place])
        assert stager.stats().pool.held_bytes == 0
        del source
        gc.collect()
        others = [filled(LARGE, 9).pin_memory() for _ in range(4)]
        assert address not in [other.data_ptr() for other in others]
        latch.open()
        transfer.synchronize()
        assert bool((place == 2).all())


def test_dropped_destinations_are_kept_until_the_copy(cuda_device, latch: Latch):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        stager.to_device([filled(LARGE, 1)], out=[on(cuda_device, LARGE)])
        on(cuda_device, LARGE, 7)
        torch.cuda.synchronize()
        place = on(cuda_device, LARGE)
        gone = weakref.ref(place)
        torch.cuda.synchronize()
        latch.hold(stager._target.stream)
        stager.stage([filled(LARGE, 2)], out=[place])
        del place
        gc.collect()
        assert gone() is not None
        others = [on(cuda_device, LARGE, 7) for _ in range(4)]
        latch.open()
        torch.cuda.synchronize()
        assert all(bool((other == 7).all()) for other in others)


def test_another_stream_sees_the_values_after_wait(cuda_device, latch: Latch):
    consumer = torch.cuda.Stream(cuda_device)
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        place = on(cuda_device, LARGE)
        stager.stage([filled(LARGE, 1)], out=[place]).wait(consumer)[0].clone()
        torch.cuda.synchronize()
        latch.hold(stager._target.stream)
        transfer = stager.stage([filled(LARGE, 2)], out=[place])
        with torch.cuda.stream(consumer):
            seen = transfer.wait(consumer)[0].clone()
        assert not consumer.query()
        latch.open()
        consumer.synchronize()
        assert bool((seen == 2).all())


def test_no_warm_call_waits_for_a_busy_device(cuda_device, latch: Latch):
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager, latch:
        places = [on(cuda_device, LARGE) for _ in range(8)]
        stager.pool.reserve(4 * LARGE, count=8)
        stager.to_device(filled(LARGE, 1), out=places[0])
        torch.cuda.synchronize()
        latch.hold(torch.cuda.current_stream(cuda_device))
        for value, place in enumerate(places):  # more than run_ahead
            stager.to_device(filled(LARGE, value), out=place)
        latch.open()
        torch.cuda.synchronize()
        assert [int(place[-1]) for place in places] == list(range(8))


# -- graphs ------------------------------------------------------------------------------------------------------------


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
    def batch(value: int) -> list[torch.Tensor]:
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
            assert bool((result == 12 * value).all())


def test_a_capture_is_refused_and_goes_on(cuda_device):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        place = on(cuda_device, SMALL)
        stager.to_device(filled(SMALL, 1), out=place)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(ps.errors.PinstageError, match="while a CUDA graph is captured"):
                stager.to_device(filled(SMALL, 2), out=place)
            doubled = place * 2
        graph.replay()
        assert bool((doubled == 2).all())


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of its compiler
def test_a_compiled_function_s_static_inputs_take_batches(cuda_device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: (x * 2 + y).sum(), mode="reduce-overhead")
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, torch.no_grad():
        static = stager.to_device([torch.zeros(1000), torch.zeros(1000)])
        for tensor in static:
            torch._dynamo.mark_static_address(tensor)
        for value in range(8):
            stager.to_device([torch.full((1000,), float(value)), torch.full((1000,), 1.0)], out=static)
            assert compiled(*static).item() == 1000 * (2 * value + 1)


# -- to the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("elements", [SMALL, MIDDLE, LARGE])
def test_host_tensors_have_the_values_after_wait(cuda_device, latch: Latch, pinned, elements):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        place = torch.zeros(elements, dtype=torch.int32)
        place = place.pin_memory() if pinned else place
        source = on(cuda_device, elements, 1)
        assert stager.to_host([source], out=[place])[0] is place
        assert bool((place == 1).all())
        source.fill_(2)
        torch.cuda.synchronize()
        latch.hold(stager._fetcher.targets.of(cuda_device).out_stream)
        transfer = stager.fetch([source], out=[place])
        assert not transfer.query()
        assert bool((place == 1).all())
        latch.open()
        assert bool((transfer.wait()[0] == 2).all())
        held = stager.stats().pool.held_bytes
        assert (held == 0) == (pinned and elements != SMALL)


def test_a_source_may_be_changed_after_fetch(cuda_device, latch: Latch):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager, latch:
        place, source = torch.zeros(LARGE, dtype=torch.int32).pin_memory(), on(cuda_device, LARGE, 1)
        stager.to_host([source], out=[place])
        source.fill_(2)
        torch.cuda.synchronize()
        latch.hold(stager._fetcher.targets.of(cuda_device).out_stream)
        transfer = stager.fetch([source], out=[place])
        source.fill_(9)  # after the copy
        latch.open()
        assert bool((transfer.wait()[0] == 2).all())


def test_values_are_cast_on_the_way_back(cuda_device):
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        places = [torch.zeros(SMALL, dtype=torch.float64), torch.zeros(LARGE, 2, dtype=torch.int32)[:, 1]]
        stager.to_host([on(cuda_device, SMALL, 3), on(cuda_device, LARGE, 4)], out=places)
        assert bool((places[0] == 3).all())
        assert bool((places[1] == 4).all())


@pytest.mark.parametrize("pinned", [False, True])
def test_trees_above_the_cap_come_in_parts(cuda_device, pinned):
    sources = [torch.randn(4 * MIB), torch.randn(1000, 3000).t(), torch.arange(5 * MIB + 3, dtype=torch.uint8)]
    places = [torch.zeros(source.shape, dtype=source.dtype, pin_memory=pinned) for source in sources]
    with ps.Stager(cuda_device, max_bytes="8MiB") as stager:
        stager.to_host([source.to(cuda_device) for source in sources], out=places)
        assert stager.stats().pool.peak_held_bytes <= 8 * MIB
        assert all(map(torch.equal, places, sources))
