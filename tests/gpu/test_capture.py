"""In a thread that captures a graph, staging is refused in every mode, and the capture ends well."""

import contextlib
import threading

import loader_data as data
import pytest
import torch
from doubles import PATIENCE_SECONDS, wait_until

import pinstage as ps
from pinstage._memory import capturing_device
from pinstage._stage import landings
from pinstage.checkpoint import CheckpointStager, _staged
from pinstage.errors import PinstageError
from pinstage.offload import frozen_module, optimizer_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

MIB = 1 << 20
MODES = ["global", "thread_local", "relaxed"]


@pytest.fixture
def capture(cuda_device):
    """Make blocks in which a graph is captured, and is replayed afterwards with the right result.
    ``global`` is the default mode.
    """
    return lambda mode="global": captured(cuda_device, mode)


@contextlib.contextmanager
def captured(device, mode="global", stream=None):
    static = torch.ones(8, device=device)
    assert (static * 2 + static * 3).eq(5).all()  # kernels are loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode, stream=stream):
        doubled = static * 2
        yield
        tripled = static * 3
    graph.replay()
    assert doubled.eq(2).all()
    assert tripled.eq(3).all()


def refuse(call, *args, **options):
    with pytest.raises(PinstageError, match="captures a graph"):
        call(*args, **options)


def filled(leaves, value=5.0, device="cpu"):
    return [torch.full((40_000,), value, device=device) for _ in range(leaves)]


# -- a stager --------------------------------------------------------------------------------------

CALLS = {
    "stage": lambda stager, here, there: stager.stage(here),
    "to_device": lambda stager, here, there: stager.to_device(here),
    "to_device, out": lambda stager, here, there: stager.to_device(here, out=there),
    "fetch": lambda stager, here, there: stager.fetch(there),
    "to_host": lambda stager, here, there: stager.to_host(there),
    "load_weights": lambda stager, here, there: stager.load_weights(
        dict(zip("ab", there[:2], strict=True)), dict(zip("ab", here[:2], strict=True))
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("leaves", [2, 12])
def test_all_calls_are_refused_in_one_capture(cuda_device, capture, leaves, is_warm, mode):
    here, there = filled(leaves), filled(leaves, 1.0, cuda_device)
    with ps.Stager(cuda_device, max_bytes="64MiB") as stager:
        if is_warm:
            for call in (stager.to_device, stager.stage):
                call(here)
            stager.to_host(there)
        before = stager.stats()
        with capture(mode):
            for call in CALLS.values():
                refuse(call, stager, here, there)
        assert all(tensor.eq(1).all() for tensor in there)
        assert stager.stats().batches == before.batches
        assert all(tensor.eq(5).all() for tensor in stager.to_device(here))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("nbytes", [8, 60_000, 2 * MIB])
def test_no_call_of_any_size_breaks_it(cuda_device, stager, capture, call, nbytes):
    def of(value, device="cpu"):
        return [torch.full((nbytes,), value, dtype=torch.uint8, device=device) for _ in range(3)]

    here, there = of(5), of(1, cuda_device)
    call(stager, here, there)
    with capture():
        refuse(call, stager, here, there)
    call(stager, here, there)
    assert all(tensor.eq(5).all() for tensor in stager.to_device(here))


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_lease_can_be_staged_afterwards(stager, capture, mode):
    batch = filled(3)
    layout = ps.Layout.of(batch)
    lease = stager.pool.acquire(layout.nbytes)
    layout.pack(batch, lease.tensor())
    with capture(mode):
        refuse(stager.stage_lease, lease, layout)
    assert all(tensor.eq(5).all() for tensor in stager.stage_lease(lease, layout).wait())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["stage", "fetch"])
def test_transfers_are_refused_and_go_on(cuda_device, stager, capture, way, mode):
    batch = filled(12, device=cuda_device if way == "fetch" else "cpu")
    transfer = getattr(stager, way)(batch)
    with capture(mode):
        for method in (transfer.wait, transfer.query, transfer.synchronize):
            refuse(method)
        assert "done" not in repr(transfer)
    transfer.synchronize()
    assert transfer.query()
    assert all(tensor.eq(5).all() for tensor in transfer.wait())


def test_the_current_streams_of_both_devices_count(two_devices):
    here, there = two_devices
    with ps.Stager(here, max_bytes="64MiB") as one, ps.Stager(there, max_bytes="64MiB") as other:
        for stager in (one, other):
            stager.to_device(filled(12))
        with captured(there, stream=torch.cuda.Stream(there)):
            refuse(one.to_device, filled(12))
            with torch.cuda.device(here):
                refuse(other.to_device, filled(12))
                assert torch.cuda.current_device() == here.index
        for stager in (one, other):
            assert stager.to_device(filled(12))[0].eq(5).all()


def test_the_null_stream_is_never_asked(cuda_device):
    """CUDA refuses to say whether it captures, while a stream that waits for it does."""
    from cuda.bindings import runtime

    static = torch.zeros(8, device=cuda_device)
    static += 1
    error, handle = runtime.cudaStreamCreate()
    assert not int(error)
    waiting = torch.cuda.ExternalStream(int(handle), device=cuda_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=waiting):
        assert capturing_device() == cuda_device.index
        static += 1
        with torch.cuda.stream(torch.cuda.default_stream(cuda_device)):
            assert capturing_device() is None
    graph.replay()
    torch.cuda.synchronize(cuda_device)
    assert static.eq(2).all()
    del graph
    runtime.cudaStreamDestroy(handle)


# -- passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("leaves", [2, 12])
def test_a_refused_prefetcher_loses_no_batch(stager, capture, leaves, background, mode):
    source = (filled(leaves, float(number)) for number in range(8))
    batches = iter(stager.prefetch(source, depth=2, background=background))
    found = []
    for number in range(8):
        if number % 3 == 0:
            with capture(mode):
                refuse(next, batches)
                refuse(next, batches)
        batch = next(batches)
        assert all(tensor.eq(number).all() for tensor in batch)
        found.append(number)
    assert found == list(range(8))
    assert next(batches, None) is None


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_refused_loader_loses_no_batch(cuda_device, capture, workers, mode):
    dataset = data.Mapped(data.large, 16)
    expected = list(torch.utils.data.DataLoader(dataset, 2))
    context = "fork" if workers else None
    loader = ps.DataLoader(
        dataset,
        2,
        num_workers=workers,
        multiprocessing_context=context,
        device=cuda_device,
        max_bytes="64MiB",
    )
    with capture(mode):
        refuse(iter, loader)
    batches = iter(loader)
    for number, batch in enumerate(expected):
        if number % 3 == 0:
            with capture(mode):
                refuse(next, batches)
        assert torch.equal(next(batches).cpu(), batch)
    assert next(batches, None) is None
    loader.close()


# -- the pool --------------------------------------------------------------------------------------


@pytest.fixture
def pool(cuda_device):
    with ps.SlabPool("64MiB", memory=ps.memory.default_memory(cuda_device)) as pool:
        yield pool


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_the_pool_neither_grows_nor_asks(cuda_device, pool, capture, is_warm, mode):
    if is_warm:
        with pool.acquire(MIB) as lease:
            lease.tensor().to(cuda_device, non_blocking=True)
    with capture(mode):
        refuse(pool.acquire, MIB, timeout=0)
        refuse(pool.acquire, 2 * MIB)
        refuse(pool.reserve, MIB, count=2)
        for call in (pool.trim, pool.stats) if is_warm else ():
            refuse(call)
    assert pool.stats().held_slabs == is_warm
    with pool.acquire(MIB):
        assert pool.stats().held_slabs == 1


@pytest.mark.parametrize("mode", MODES)
def test_an_idle_slab_is_leased_in_a_capture(pool, capture, mode):
    pool.reserve(MIB)
    with capture(mode):
        lease = pool.acquire(MIB, timeout=0)
        assert pool.stats().leased_slabs == 1
        refuse(pool.acquire, MIB)
    lease.release()


@pytest.mark.parametrize("mode", MODES)
def test_leases_are_guarded_and_released_in_a_capture(pool, capture, mode):
    lease = pool.acquire(MIB)
    events = [torch.cuda.Event() for _ in range(3)]
    for event in events:
        event.record()
    lease.guard(events[0])
    with capture(mode):
        lease.guard(events[1])
        lease.release(after=events[2])
    assert pool.stats().free_slabs == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_closed_in_a_capture_is_freed(pool, capture, mode):
    with pool.acquire(MIB):
        pass
    with capture(mode):
        pool.close()
    wait_until(lambda: not pool.stats().held_slabs)


# -- checkpoints and offloading --------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hold", ["stream", "step"])
def test_a_refused_checkpoint_is_complete_afterwards(cuda_device, capture, hold, mode):
    state = {"large": torch.ones(MIB, device=cuda_device), "small": filled(2, 5.0, cuda_device)}
    parameter = torch.nn.Parameter(torch.zeros(3, device=cuda_device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with CheckpointStager(max_bytes="64MiB", hold=hold) as stager:
        with capture(mode):
            refuse(stager.stage, state)
        saving = stager.stage(state)
        with capture(mode):
            refuse(stager.stage, state)
            if hold == "step":
                refuse(optimizer.step)
        optimizer.step()
        assert parameter.eq(-1).all()
        saved = saving.result()
        assert saved["large"].eq(1).all()
        assert all(tensor.eq(5).all() for tensor in saved["small"])
        del saved, saving


def test_a_graph_is_captured_while_saving(cuda_device, capture, monkeypatch):
    begun = threading.Event()

    def late(transfer):
        assert begun.wait(PATIENCE_SECONDS)
        return landings(transfer)

    monkeypatch.setattr(_staged, "landings", late)
    state = {"weight": torch.ones(MIB, device=cuda_device)}
    with CheckpointStager(max_bytes="64MiB") as stager:
        saving = stager.stage(state)
        with capture():
            begun.set()
            stager.synchronize_staging()
        assert saving.result()["weight"].eq(1).all()
        del saving


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_module_stays_where_it_is(cuda_device, pool, capture, mode):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    module.requires_grad_(False)
    x = torch.randn(16, 64, device=cuda_device)
    with capture(mode):
        refuse(frozen_module, module, pool, device=cuda_device)
    handle = frozen_module(module, pool, device=cuda_device)

    def enter():
        with handle:
            raise AssertionError("the block began")

    with capture(mode):
        for call in (handle.onload, enter, handle.offload):
            refuse(call)
    with handle:
        expected = module(x)
        with capture(mode):
            refuse(handle.offload)
        module[1].eval()
        assert module(x).shape == expected.shape
        mean = module[1].running_mean.cpu()
    assert module[1].running_mean.device.type == "cpu"
    assert torch.equal(module[1].running_mean, mean)
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_step_changes_nothing(cuda_device, pool, capture, mode):
    model = torch.nn.Linear(1024, 1024, device=cuda_device)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    model(torch.ones(1024, device=cuda_device)).sum().backward()
    optimizer.step()
    offloaded = optimizer_state(optimizer, pool)
    before = model.weight.clone()
    with capture(mode):
        for call in (offloaded.onload, offloaded.offload, optimizer.step):
            refuse(call)
    assert torch.equal(model.weight, before)
    assert offloaded.stats().host_bytes > 0
    optimizer.step()
    assert not torch.equal(model.weight, before)
    offloaded.close()
    torch.cuda.synchronize(cuda_device)
