"""`DataLoader` on the device: torch's batches, copies during kernels, no slab written too early,
bounded memory.
"""

import gc
import multiprocessing

import loader_data as data
import pytest
import torch
from doubles import PATIENCE_SECONDS, wait_until
from profiled import events_of
from torch.utils._pytree import tree_map

import pinstage as ps
from pinstage._loader._broker import SlabBroker
from pinstage._stage._run_ahead import RUN_AHEAD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

MIB = 1 << 20
SLAB = 212_992
"""Size class of a batch of two `data.large`."""


class Large(torch.utils.data.Dataset):
    """Samples of a size in MiB, each filled with its number."""

    def __init__(self, size, mebibytes):
        self.size = size
        self.mebibytes = mebibytes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((self.mebibytes * MIB // 4,), float(index))


def make(cuda_device, sample=data.large, size=40, batch_size=2, num_workers=2, **options):
    options = {"max_bytes": "64MiB"} | options
    return ps.DataLoader(
        data.Mapped(sample, size),
        batch_size,
        num_workers=num_workers,
        device=cuda_device,
        **options,
    )


def brought_back(tree, device):
    """Return a batch with its tensors on the CPU; check that each was on the device."""

    def back(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        assert leaf.device == device
        return leaf.cpu()

    return tree_map(back, tree)


def numbers(batches):
    return [int(number) for batch in batches for number in batch[:, 0]]


def assert_all_back(loader):
    wait_until(lambda: loader.stats().pool.leased_slabs == 0)  # the iterator ends in its own thread
    torch.cuda.synchronize()
    assert loader.stats().pool.in_flight_slabs == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapped_loader_yields_on_the_device(cuda_device, workers):
    plain = torch.utils.data.DataLoader(data.Mapped(data.large, 40), 2, num_workers=workers)
    loader = ps.wrap_loader(plain, device=cuda_device)
    for _ in range(2):
        batches = list(loader)
        assert all(batch.device == cuda_device for batch in batches)
        assert numbers(batches) == list(range(40))
    assert loader.stats().copies == 40
    del batches
    assert_all_back(loader)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("sample", [data.mixed, data.random_numbers])
def test_batches_are_those_of_torch_on_the_device(cuda_device, method, sample):
    options = {
        "batch_size": 4,
        "num_workers": 2,
        "multiprocessing_context": method,
        "worker_init_fn": data.seed_again,
        "shuffle": True,
    }
    torch.manual_seed(5)
    expected = list(torch.utils.data.DataLoader(data.Mapped(sample), **options))
    torch.manual_seed(5)
    loader = ps.DataLoader(data.Mapped(sample), **options, device=cuda_device, max_bytes="64MiB")
    found = [brought_back(batch, cuda_device) for batch in loader]
    assert data.same(found, expected)
    stats = loader.stats()
    assert (stats.batches, stats.fallback_batches) == (6, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "collate", [data.to_graph, data.with_strided, data.with_arrays, data.nothing_to_pack]
)
def test_collated_batches_arrive_on_the_device(cuda_device, collate, workers):
    dataset = data.Mapped(data.tensors)
    expected = list(torch.utils.data.DataLoader(dataset, 4, collate_fn=collate))
    loader = ps.DataLoader(
        dataset, 4, collate_fn=collate, num_workers=workers, device=cuda_device, max_bytes="64MiB"
    )
    found = []
    for batch in loader:
        if isinstance(batch, data.Graph):
            batch.nodes = brought_back(batch.nodes, cuda_device)
        found.append(brought_back(batch, cuda_device))
    assert data.same(found, expected)


@pytest.mark.parametrize("nbytes", [1001, 50_001, 1_000_003, 12_000_001])
def test_samples_may_be_overwritten_after_next(cuda_device, nbytes):
    buffers = torch.zeros(4, nbytes, dtype=torch.uint8)
    dataset = data.Mapped(lambda index: buffers[index % 4].fill_(index), 12)
    found = []
    for batch in ps.DataLoader(dataset, 4, device=cuda_device, max_bytes="256MiB"):
        buffers.fill_(0xEE)
        found.append(batch)
    for number, batch in enumerate(found):
        expected = torch.arange(4 * number, 4 * number + 4, dtype=torch.uint8)
        assert torch.equal(batch.cpu(), expected[:, None].expand(4, nbytes))


def test_a_batch_is_one_copy_from_pinned_memory(cuda_device):
    loader = make(cuda_device, depth=0)  # so that none is sent before the profiler starts
    iterator = iter(loader)  # and its workers, before the profiler is in this process
    next(iterator)
    torch.cuda.synchronize()
    before = loader.stats().copies
    copies, _ = device_work(lambda: numbers(iterator))
    assert len(copies) == 20 - before
    assert {name for name, _, _ in copies} == {"Memcpy HtoD (Pinned -> Device)"}


def test_copies_run_beside_earlier_kernels(cuda_device):
    weight = torch.randn(4096, 4096, device=cuda_device) / 64
    (weight @ weight).sum().item()
    loader = ps.DataLoader(Large(24, 32), 2, num_workers=4, device=cuda_device, max_bytes="2GiB")

    iterator = iter(loader)  # and its workers, before the profiler is in this process
    next(iterator)
    torch.cuda.synchronize()

    def train():
        product = weight
        for batch in iterator:
            product = product + batch[0, :1]
            # Some 70 ms per batch, so that workers are ahead on a slow machine too.
            for _ in range(30):
                product = product @ weight
        torch.cuda.synchronize()

    copies, kernels = device_work(train)
    assert len(copies) >= 9
    beside = [
        any(began < copy_ended and copy_began < ended for _, began, ended in kernels)
        for _, copy_began, copy_ended in copies
    ]
    assert sum(beside) >= 6, f"{sum(beside)} of {len(copies)} copies ran while a kernel did"


def test_device_memory_is_bounded_without_waiting(cuda_device):
    loader = ps.DataLoader(
        Large(120, 16), 1, num_workers=4, device=cuda_device, max_bytes="1GiB", depth=1
    )
    total = torch.zeros(1, device=cuda_device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for batch in loader:
        torch.cuda._sleep(20_000_000)  # about 10 ms, three times as long as the next batch takes
        total += batch[0, 0]
    assert total.item() == sum(range(120))
    slabs = (torch.cuda.max_memory_reserved() - before) / (16 * MIB)
    assert slabs <= RUN_AHEAD + loader.depth + 4, f"{slabs:.1f} batches on the device"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_no_part_in_cuda(cuda_device, method):
    dataset = data.KnowsItsLoader(None)
    loader = dataset.loader = ps.DataLoader(
        dataset,
        4,
        num_workers=2,
        multiprocessing_context=method,
        device=cuda_device,
        max_bytes="64MiB",
    )
    reached, asked, contexts, _ = torch.cat([batch.cpu() for batch in loader]).unbind(1)
    assert method == "fork" or not reached.any()
    assert (int(asked.sum()), int(contexts.sum())) == (0, 0)


def test_a_worker_that_is_killed_loses_nothing(cuda_device):
    loader = make(cuda_device, data.dies_at_seven)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="worker"):
            list(loader)
        gc.collect()
        assert_all_back(loader)
    loader.dataset.sample = data.large
    assert numbers(loader) == list(range(40))
    del loader
    gc.collect()
    assert torch.empty(MIB).pin_memory().is_pinned()  # nothing stayed registered


def test_leaving_early_gives_every_slab_back(cuda_device):
    loader = make(cuda_device, max_bytes=4 * SLAB)
    for stop in (0, 1, 5, 19):
        for number, batch in enumerate(loader):
            assert int(batch[0, 0]) == 2 * number
            if number == stop:
                break
        assert_all_back(loader)
    assert loader.stats().pool.peak_held_bytes <= 4 * SLAB


def of_one_slab(cuda_device):
    """Return a loader with its memory and kernels loaded, since loading would wait for the
    device.
    """
    loader = make(cuda_device, size=12, num_workers=1, max_bytes=SLAB, depth=0)
    assert numbers(loader) == list(range(12))
    return loader


def held_at_the_first_copy(loader, latch):
    """Return an iterator that has yielded its first batch, whose copy has not started."""
    latch.hold(loader._slabs.target.stream)
    iterator = iter(loader)
    return iterator, next(iterator)


def test_slabs_are_not_written_during_their_copy(cuda_device, latch):
    loader = of_one_slab(cuda_device)
    with latch:
        iterator, first = held_at_the_first_copy(loader, latch)
        starved = iterator._broker.loans.starved
        wait_until(lambda: starved)  # the worker has the next batch, but no slab for it
        assert 1 not in iterator._data_queue._held
        latch.open()
        assert numbers([first]) == [0, 1]
        assert numbers(iterator) == list(range(2, 12))


def test_batches_are_corrupted_without_the_event_gate(cuda_device, latch, monkeypatch):
    loader, give_back = of_one_slab(cuda_device), SlabBroker.give_back
    monkeypatch.setattr(
        SlabBroker, "give_back", lambda broker, number, event: give_back(broker, number, None)
    )
    with latch:
        iterator, first = held_at_the_first_copy(loader, latch)
        wait_until(lambda: 1 in iterator._data_queue._held)
        latch.open()
        assert numbers([first]) == [2, 3]


def test_a_long_run_with_random_sizes_arrives_whole(cuda_device):
    loader = make(cuda_device, data.random_size, 600, None, 4, max_bytes="2MiB")
    for index, batch in enumerate(loader):
        assert batch["index"] == index
        if index % 20 == 0:
            assert torch.equal(batch["data"].cpu(), data.random_size(index)["data"])
    assert index == 599
    assert loader.stats().pool.peak_held_bytes <= 2 * MIB


def device_work(work):
    """Return copies to the device and kernels of some work: name, start and end of each."""
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events_of(work)
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    copies = [event for event in events if event[0].startswith("Memcpy HtoD")]
    return copies, [event for event in events if not event[0].startswith(("Memcpy", "Memset"))]


def test_a_graph_can_be_captured_while_sending(cuda_device):
    """In CUDA's default mode, queries of events and allocations in other threads break a
    capture.
    """
    gate = multiprocessing.Event()

    def sample(index):
        assert index < 4 or gate.wait(PATIENCE_SECONDS)
        return data.large(index)

    loader = make(
        cuda_device,
        sample,
        depth=4,
        prefetch_factor=4,
        multiprocessing_context="fork",
        max_bytes=4 * SLAB,
    )
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    values = torch.zeros(4, device=cuda_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gate.set()
        wait_until(lambda: loader.stats().batches == 6)
        values += 1
    assert numbers([*found, *iterator]) == list(range(40))
    graph.replay()
    assert values.tolist() == [1, 1, 1, 1]


def test_workers_leave_the_main_processs_garbage_alone(cuda_device):
    """A garbage tensor that another stream has used would abort workers, as it does with torch's
    loader.
    """
    gc.disable()
    try:
        tensor = torch.zeros(MIB, device=cuda_device)
        tensor.record_stream(torch.cuda.Stream(cuda_device))
        cycle = [tensor]
        cycle.append(cycle)
        del tensor, cycle
        loader = make(cuda_device, data.collects_garbage, multiprocessing_context="fork")
        assert numbers(loader) == list(range(40))
    finally:
        gc.enable()
