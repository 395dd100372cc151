"""`Stager.prefetch` on a device: the stream of its work, and the work that its thread must not
disturb.
"""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from doubles import PATIENCE_SECONDS, wait_until
from torch.utils.data import DataLoader, TensorDataset

import pinstage as ps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

MIB = 1 << 20
SIZES = {"small": 8, "one copy": 100_000, "chunks": 4 * MIB}


def has_thread():
    return any(thread.name == "pinstage.prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    gc.collect()
    wait_until(lambda: not has_thread())


def numbered(count, size):
    return (
        {"x": torch.full((size,), float(number)), "n": torch.tensor(number)}
        for number in range(count)
    )


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_batches_arrive_in_order_on_the_consumer_stream(cuda_device, size, depth, background):
    with (
        ps.Stager(cuda_device, max_bytes="256MiB") as stager,
        torch.cuda.stream(torch.cuda.Stream(cuda_device)),
    ):
        for number, batch in enumerate(
            stager.prefetch(numbered(20, size), depth=depth, background=background)
        ):
            assert (batch["x"] == number).all()
            assert int(batch["n"]) == number
        assert number == 19
        assert stager.pool.stats().leased_bytes == 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_sent_batches_arrive_while_the_consumer_is_held(cuda_device, latch, size, background):
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager, latch:
        (torch.ones(8, device=cuda_device) * 2).cpu()
        consumer = torch.cuda.Stream(cuda_device)
        with torch.cuda.stream(consumer):
            batches = iter(stager.prefetch(numbered(6, size), depth=2, background=background))
            first = next(batches)
            latch.hold(consumer)
            doubled = first["x"] * 2
            wait_until(lambda: stager.stats().batches == 3)
            stager._target.stream.synchronize()
            assert not consumer.query()
            latch.open()
            assert (doubled == 0).all()
            assert [int(batch["n"]) for batch in batches] == [1, 2, 3, 4, 5]


def test_a_batch_is_not_read_before_its_copy(stager, latch):
    assert [int(batch["n"] + 0) for batch in stager.prefetch(numbered(3, 8), background=True)] == [
        0,
        1,
        2,
    ]
    batches = iter(stager.prefetch(numbered(4, 400_000), depth=1, background=True))
    next(batches)
    wait_until(lambda: stager.stats().batches == 5)
    latch.hold(stager._target.stream)
    next(batches)  # its copy was issued before; the next copy is held
    wait_until(lambda: stager.stats().batches == 6)
    third = next(batches)["n"] + 0
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    latch.open()
    assert int(third) == 2
    batches.close()


def test_source_sees_device_and_its_own_stream(cuda_device, stager):
    seen = []

    def read():
        while True:
            seen.append((torch.cuda.current_device(), torch.cuda.current_stream()))
            yield {"x": torch.ones(8, device=cuda_device) * len(seen)}

    batches = iter(stager.prefetch(read(), background=True))
    # Made on the device by the thread: the consumer's stream waits for that.
    for number in range(1, 50):
        assert (next(batches)["x"] == number).all()
    assert seen[0] == (cuda_device.index, torch.cuda.current_stream())
    streams = {stream for _, stream in seen[1:]}
    assert {device for device, _ in seen} == {cuda_device.index}
    assert len(streams) == 1
    assert streams.isdisjoint({torch.cuda.current_stream(), stager._target.stream})
    batches.close()


def test_the_thread_on_another_device_than_the_loops(two_devices):
    here, there = two_devices
    seen = []

    def read():
        for batch in numbered(10, 100_000):
            seen.append(torch.cuda.current_device())
            yield batch

    with torch.cuda.device(here), ps.Stager(there, max_bytes="64MiB") as stager:
        for number, batch in enumerate(stager.prefetch(read(), background=True)):
            assert batch["x"].device == there
            assert (batch["x"] == number).all()
    assert set(seen) == {here.index}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_graph_can_be_captured_while_staging(cuda_device, size):
    go_on, has_staged_two = threading.Event(), threading.Event()

    def read():
        for number, batch in enumerate(numbered(4, size)):
            if number == 1:
                assert go_on.wait(PATIENCE_SECONDS)
            if number == 3:
                has_staged_two.set()
            yield batch

    static = torch.ones(8, device=cuda_device)
    (static * 2).cpu()
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager:
        batches = iter(stager.prefetch(read(), depth=3, background=True))
        next(batches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = static * 2
            go_on.set()
            assert has_staged_two.wait(PATIENCE_SECONDS)
        graph.replay()
        assert (doubled == 2).all()
        assert [int(batch["n"]) for batch in batches] == [1, 2, 3]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((MIB,), float(index)), torch.tensor(index)


@pytest.mark.parametrize("background", [False, "auto"])
def test_batches_page_locked_by_torch_are_sent_directly(stager, background):
    loader = DataLoader(Images(), 2, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    for number, (images, labels) in enumerate(stager.prefetch(loader, background=background)):
        assert labels.tolist() == [2 * number, 2 * number + 1]
        assert (images == labels[:, None]).all()
    assert stager.stats().pool.peak_held_bytes < 2 * MIB  # the labels


@pytest.mark.parametrize("background", [False, True])
def test_small_page_locked_batches_pass_a_busy_stream(stager, background):
    rows = torch.arange(100)[:, None].expand(100, 8192)
    loader, right = DataLoader(TensorDataset(rows), 1, pin_memory=True), []
    for number, (row,) in enumerate(stager.prefetch(loader, background=background)):
        torch.cuda._sleep(2_000_000)
        right.append((row == number).all())
    assert torch.stack(right).sum().item() == 100
    assert stager.stats().pool.peak_held_bytes == 0


def test_a_page_locked_batch_lives_until_its_copy(stager, latch):
    loader = DataLoader(Images(), 1, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    list(stager.prefetch(loader))
    torch.cuda.synchronize()
    before = stager.stats().batches
    latch.hold(stager._target.stream)
    batches = iter(stager.prefetch(loader, depth=3))
    first = next(batches)
    wait_until(lambda: stager.stats().batches == before + 4)
    overwriting = [torch.full((1, MIB), 99.0).pin_memory() for _ in range(8)]
    latch.open()
    assert (first[0] == 0).all()
    for number, (images, _) in enumerate(batches, 1):
        assert (images == number).all()
    assert len(overwriting) == 8


def test_leaving_a_pass_frees_its_device_memory(cuda_device):
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager:
        list(stager.prefetch(numbered(4, 4 * MIB), background=True))
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in stager.prefetch(numbered(100, 4 * MIB), depth=3, background=True):
            break
        del _
        wait_until(lambda: not has_thread())
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


PROGRAM = """
import time, torch, pinstage as ps

def read():
    while True:
        yield [torch.ones(1 << 22), torch.ones(3, device="cuda") * 2]
        {pause}

stager = ps.Stager("cuda", max_bytes="256MiB")
batches = iter(stager.prefetch(read(), background=True))
for _ in range(20):
    next(batches)
print("end", flush=True)
"""


@pytest.mark.usefixtures("cuda_device")
@pytest.mark.parametrize("pause", ["pass", "time.sleep(0.01)", "torch.cuda._sleep(10_000_000)"])
def test_a_program_can_end_during_background_work(pause):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = PROGRAM.format(pause=pause)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
