"""Faults in a `DataLoader`: all slabs are returned, nothing is left behind, and the original error
is raised.
"""

import _thread
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path

import loader_data as data
import pytest
import torch
import warm
from doubles import (
    PATIENCE_SECONDS,
    Background,
    Gate,
    Interrupts,
    ManualEvent,
    claim_in_child,
    record_work,
    wait_until,
)
from host_processes import state_of
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps
from pinstage._batch import take_apart
from pinstage._compat import loader as torchs_loader
from pinstage._loader._collate import SlabCollate
from pinstage._loader._messages import BROKERS, Ask, Freed, Unmapped, Waiting
from pinstage._loader._worker import WorkerSlabs
from pinstage._reaper import running
from pinstage._stage._run_ahead import RUN_AHEAD
from pinstage.errors import ClosedError, LayoutError, PinstageError, StagingWarning

SLAB = 212_992
"""Size class of a batch of two `data.large`."""


def resources():
    """Count possible leftovers of a loader in this process: descriptors, mappings of slabs,
    children, threads.
    """
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:pinstage"),
        "children": len([pid for pid in children if not is_helper(pid)]),
        "threads": len(
            [thing for thing in list(running) if type(thing).__name__ in ("SlabBroker", "Ending")]
        ),
    }


def is_helper(pid):
    """Return whether a process is multiprocessing's fork server or resource tracker, which stay."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" in command or b"forkserver" in command
    return False


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """Start it before anything is counted, since it stays."""
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    warm.command()
    # Makes what Python keeps after the first worker.
    list(torch.utils.data.DataLoader([1], num_workers=1))


def left_since(before):
    """Return which resources are more than before."""
    return {name: count for name, count in resources().items() if count > before[name]}


@pytest.fixture(autouse=True)
def nothing_stays():
    # May include threads and descriptors of torch's queues that are about to be closed.
    before = resources()
    yield
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left_since(before))
    left = left_since(before)
    assert not left, f"more than before, {before}"


def make(sample=data.large, size=40, batch_size=2, num_workers=2, **options):
    return ps.DataLoader(
        data.Mapped(sample, size),
        batch_size,
        num_workers=num_workers,
        **{"device": "cpu"} | options,
    )


def begin(**options):
    """Return a loader, and an iterator that has yielded the first batch."""
    loader = make(**options)
    iterator = iter(loader)
    assert next(iterator)[:, 0].tolist() == [0, 1]
    return loader, iterator


def all_back(loader):
    pool = loader.stats().pool
    return (pool.leased_slabs, pool.in_flight_slabs) == (0, 0)


def assert_all_back(loader):
    """Wait, since another thread closes a dropped iterator."""
    wait_until(lambda: all_back(loader))


def numbers(loader):
    return [int(number) for batch in loader for number in batch[:, 0]]


def test_batches_outlive_iterators_and_those_their_loader(workers):
    iterator = iter(make(num_workers=workers))
    gc.collect()
    batches = list(iterator)
    del iterator
    gc.collect()
    wait_until(lambda: resources()["mappings"] == 0)
    assert numbers(batches) == list(range(40))


def test_starting_workers_of_an_abandoned_pass_end_cleanly(monkeypatch):
    # Then they get a signal, in the middle of their imports.
    monkeypatch.setattr(torchs_loader, "_END_SECONDS", 0.1)
    # This thread sees that first.
    monkeypatch.setattr(torchs_loader, "wait", lambda *given: time.sleep(0.2) or wait(*given))
    before = resources()
    batches = iter(make(size=2, batch_size=1, multiprocessing_context="spawn"))
    del batches
    idle = threading.Event()
    # Torch's error would be raised here.
    wait_until(lambda: idle.wait(0.3) or resources() == before)


def test_persistent_workers_end_with_a_self_referring_loader():
    class Module:
        def __init__(self):
            self.loader = make(persistent_workers=True, collate_fn=self.collate)

        def collate(self, samples):
            return torch.stack(samples)

    module = Module()
    assert numbers(module.loader) == list(range(40))
    del module


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_two_threads_may_begin_at_once(method):
    both = threading.Barrier(2)

    class Sampler:
        def __iter__(self):  # torch calls it while it makes an iterator
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # seconds; the other thread may have to wait for this one
            return iter([[0, 1], [2, 3]])

    options = {"num_workers": 1, "multiprocessing_context": method, "device": "cpu"}
    loader = ps.DataLoader(data.Mapped(data.large), batch_sampler=Sampler(), **options)
    threads = [Background(numbers, loader) for _ in range(2)]
    assert [thread.result() for thread in threads] == [[0, 1, 2, 3]] * 2
    assert loader.collate_fn is torch.utils.data.default_collate


@pytest.mark.parametrize("persistent", [False, True])
def test_threads_with_loaders_of_their_own_leave_nothing(persistent):
    expected = [data.random_size(index) for index in range(30)]
    # Once torch.compile has imported filelock, it refuses forks in two threads at once, and torch's
    # loader breaks.
    forking = threading.Lock() if "filelock" in sys.modules else contextlib.nullcontext()

    def begun(loader):
        with forking:
            return iter(loader)

    def use(seed):
        chance = random.Random(seed)
        for _ in range(5):
            loader = make(
                data.random_size,
                30,
                None,
                chance.choice([1, 2]),
                max_bytes=chance.choice(["64KiB", "512KiB"]),
                persistent_workers=persistent,
                timeout=PATIENCE_SECONDS,
                depth=chance.choice([0, 2]),
            )
            for _ in range(2):
                batches = itertools.islice(begun(loader), chance.randrange(32))
                assert all(map(data.same, batches, expected))
            iterator = [begun(loader)]
            del loader
            Background(iterator.clear).result()  # another thread closes it

    for thread in [Background(use, seed) for seed in range(4)]:
        thread.result()


def test_two_iterators_share_one_cap():
    loader = make(max_bytes="512KiB")
    for number, (first, second) in enumerate(zip(loader, loader, strict=True)):
        assert first[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert torch.equal(first, second)
    assert_all_back(loader)
    assert loader.stats().batches == 40
    assert loader.stats().pool.peak_held_bytes <= 512 * 1024


@pytest.mark.parametrize(
    ("workers", "sample", "options", "kind", "text"),
    [
        *[
            (workers, *error)
            for workers in (0, 2)
            for error in (
                (data.fails_at_seven, {}, KeyError, "the seventh is bad"),
                (data.tensors, {"collate_fn": data.fails_in_collate}, RuntimeError, "cannot coll"),
                (data.tensors, {"collate_fn": data.opaque}, LayoutError, "register_node"),
            )
        ],
        (2, data.tensors, {"worker_init_fn": data.fails_to_start}, ValueError, "no start for 0"),
        (2, data.tensors, {"collate_fn": data.unpicklable}, Exception, r"pickle|local object"),
    ],
)
def test_an_error_is_the_original_one(workers, sample, options, kind, text):
    loader = make(sample, num_workers=workers, **options)
    with pytest.raises(kind, match=text) as caught:
        list(loader)
    if workers:
        assert "in DataLoader worker process" in str(caught.value)
        assert "Traceback" in str(caught.value)
    began = time.perf_counter()
    del caught  # frees a cycle of garbage, and the iterator in it
    gc.collect()
    assert time.perf_counter() - began < 4  # seconds; torch's takes 5 for each worker
    if loader.stats().pool is not None:
        assert_all_back(loader)


def test_errors_come_in_order_and_are_survivable():
    iterator = iter(make(data.fails_at_seven, depth=3))
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(KeyError):
        next(iterator)
    assert next(iterator).tolist() == [8, 9]


def test_an_unpickling_error_comes_in_order():
    collate = data.third_cannot_arrive
    iterator = iter(make(data.tensors, 8, 1, 1, prefetch_factor=6, collate_fn=collate))
    found = [next(iterator)]
    wait_until(lambda: 3 in iterator._data_queue._held)
    while len(found) < 3:
        found.append(next(iterator))
    assert [number for number, _ in found] == [0, 1, 2]
    with pytest.raises(ValueError, match="no number"):
        next(iterator)
    assert [number for number, _ in iterator] == [4, 5, 6, 7]  # torch's own would wait forever


def test_an_unpicklable_structure_fails_each_of_its_batches():
    """Its class exists only in the worker."""
    iterator = iter(make(data.tensors, 6, 1, 1, collate_fn=data.class_of_the_workers_own))
    for _ in range(6):
        with pytest.raises(AttributeError, match="OnlyHere"):
            next(iterator)
    assert list(iterator) == []


def test_an_unpicklable_batch_returns_its_slab():
    loader = make(
        num_workers=1,
        prefetch_factor=1,
        persistent_workers=True,
        timeout=PATIENCE_SECONDS,
        depth=0,
        collate_fn=data.first_cannot_arrive,
    )
    for _ in range(6):  # more passes than the worker has slabs
        iterator = iter(loader)
        with pytest.raises(ValueError, match="no number"):
            next(iterator)
        assert len(list(iterator)) == len(loader) - 1


def test_a_worker_killed_mid_message_ends_the_pass():
    """The reading thread would wait for the rest forever, and keep the slabs."""
    loader = make(data.dies_in_the_middle_of_a_message, num_workers=1)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="worker"):
            list(loader)
        gc.collect()
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        assert_all_back(loader)
    loader.dataset.sample = data.large
    assert numbers(loader) == list(range(40))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_the_sending_thread_is_raised(monkeypatch, persistent):
    def no_answer(loans):
        raise OSError("the device is gone")

    loader, iterator = begin(persistent_workers=persistent)
    with monkeypatch.context() as patch:
        patch.setattr("pinstage._loader._loans.Loans.freed", no_answer)
        with pytest.raises(OSError, match="the device is gone"):
            list(iterator)
        with pytest.raises(PinstageError, match="the device is gone"):
            next(iterator)
    assert loader.stats().pool.leased_slabs  # workers may still write
    if persistent:
        assert numbers(loader) == list(range(40))  # by new workers
    loader.close()
    assert_all_back(loader)


def described(*sizes):
    parts = take_apart(list(map(torch.zeros, sizes)))
    return {"structure": pickle.dumps(parts.structure), "table": parts.table.data}


FORGED = {
    "a table beyond the slab": ({"table": described(2**24)["table"]}, "67108864 bytes in"),
    "a table beyond the bytes": ({"slab": None, "raw": bytearray(16)}, "bytes in 16"),
    "a table of bytes that are not there": ({"slab": None}, "bytes in 0"),
    "a slab of nobody": ({"slab": 999}, "isn't lent to worker 0: 999"),
    "a slab of another worker": ({"worker": 1, **described(10)}, r"isn't lent to worker 1: \d"),
    "a structure without a table": ({"table": None}, "not an offset table"),
    "something else for a structure": ({"structure": pickle.dumps(5)}, "not a layout: int"),
    "fewer leaves than rows": (
        {"table": described(1, 1)["table"]},
        "has 1 leaves and the offset table 2",
    ),
    "more leaves than described": ({"pickled": pickle.dumps([1, 2])}, "2 of 0 leaves"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_an_invalid_message_is_an_error(monkeypatch, kind):
    changes, text = FORGED[kind]
    collate, calls = SlabCollate.__call__, itertools.count()

    def forge(self, samples):
        message = collate(self, samples)
        return dataclasses.replace(message, **changes) if next(calls) == 1 else message

    monkeypatch.setattr(SlabCollate, "__call__", forge)
    loader = make(num_workers=1)
    iterator = iter(loader)
    assert next(iterator)[0, 0] == 0
    with pytest.raises(LayoutError, match=f"{text}.*; (begin another pass|compute)"):
        next(iterator)
    del iterator
    assert_all_back(loader)
    monkeypatch.undo()
    assert numbers(loader) == list(range(40))


@pytest.mark.parametrize(
    "message",
    [
        Ask(16, 16, [999]),
        Ask("many", 16, []),
        Unmapped(999, "no"),
        Waiting(16, None),
        Freed(0),
        5,
    ],
)
def test_an_invalid_request_is_an_error(monkeypatch, message):
    take = WorkerSlabs.take
    monkeypatch.setattr(
        WorkerSlabs, "take", lambda slabs, nbytes: slabs._send(message) or take(slabs, nbytes)
    )
    loader = make(num_workers=1)
    with pytest.raises((RuntimeError, LayoutError), match=r"worker.*; begin another pass"):
        list(loader)
    loader.close()
    assert_all_back(loader)


class Garbage:
    """An object that only the garbage collector frees; it then writes to a file."""

    def __init__(self, path):
        self.path, self.me = path, self

    def __del__(self):
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_workers_leave_the_main_processs_garbage_alone(tmp_path):
    """A CUDA tensor in that garbage would abort the workers."""
    ended, frozen = tmp_path / "ended", gc.get_freeze_count()
    gc.disable()
    try:
        Garbage(ended)
        loader = make(data.collects_garbage, multiprocessing_context="fork")
        assert numbers(loader) == list(range(40))
    finally:
        gc.enable()
    assert not ended.exists()
    # Some objects that other code froze may be freed meanwhile.
    assert gc.get_freeze_count() <= frozen
    gc.collect()
    assert ended.read_text() == f"{os.getpid()}\n"


def test_no_thread_is_left_when_the_interpreter_ends():
    """A thread that returns from torch after that aborts the process."""
    result = run_script("""
        import atexit
        atexit.register(lambda: print(names()))
        import torch, pinstage as ps
        from pinstage._reaper import running
        names = lambda: [type(thing).__name__ for thing in running]
        loader = ps.DataLoader(torch.arange(1000), 2, num_workers=2, device="cpu", depth=100)
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        assert "SlabBroker" in names()
    """)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_that_end_are_missed_and_replaced(monkeypatch, persistent_workers):
    torchs = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    # Seconds from one look of torch's at the workers to the next.
    monkeypatch.setattr(torchs, "__defaults__", (60.0,))
    loader = make(data.exits_at_seven, persistent_workers=persistent_workers)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
    assert time.monotonic() - began < 50
    loader.dataset.sample = data.large
    assert numbers(loader) == list(range(40))


def test_workers_killed_between_passes_are_replaced():
    loader = make(persistent_workers=True)
    assert numbers(loader) == list(range(40))
    worker, _ = active_children()
    with contextlib.suppress(RuntimeError):  # torch's handler of the signal may raise anywhere
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(PATIENCE_SECONDS)
    assert numbers(loader) == list(range(40))
    del worker, _


def test_a_worker_that_ended_keeps_no_slab():
    loader, iterator = begin(num_workers=1)
    [worker] = active_children()
    # Otherwise torch's handler may raise here.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)  # as another thread may do when it starts a process
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    del iterator
    assert_all_back(loader)
    worker._popen.returncode = -signal.SIGKILL  # the other thread continues
    worker.join()


@pytest.mark.usefixtures("interruptible")
def test_interrupting_a_persistent_restart_returns_everything(monkeypatch):
    loader = make(persistent_workers=True)
    assert numbers(loader) == list(range(40))
    with monkeypatch.context() as patched:
        patched.setattr(
            loader._iterator._batches, "_get_data", lambda: signal.raise_signal(signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert_all_back(loader)
    for _ in range(2):
        assert numbers(loader) == list(range(40))


def test_a_raising_signal_handler_leaves_nothing(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # from torch's half-made iterator
    loader = make(size=2, num_workers=1)
    assert numbers(loader) == [0, 1]
    wait_until(lambda: not resources()["threads"])
    files = (
        "_loader/_loader.py",
        "_broker.py",
        "_loans.py",
        "_iterator.py",
        "_collate.py",
        "_starting.py",
        "_slabs.py",
    )
    before = resources()
    for number in itertools.count(1):
        interrupted = Interrupts(number, *files).during(lambda: iter(loader))
        wait_until(lambda: not left_since(before) and not BROKERS)
        assert all_back(loader)
        if not interrupted:
            break
    assert number > 50
    assert numbers(loader) == [0, 1]


# -- ahead


def test_batches_are_yielded_before_a_late_next():
    gate = multiprocessing.Event()

    def sample(index):
        assert index < 2 or gate.wait(PATIENCE_SECONDS)
        return torch.tensor(index)

    # Seconds; a wait for it would fail.
    loader = make(sample, size=20, depth=2, timeout=PATIENCE_SECONDS / 2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    gate.set()
    assert torch.cat(list(iterator)).tolist() == list(range(2, 20))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_that_have_arrived_are_sent_ahead(depth):
    loader = make(num_workers=2, prefetch_factor=4, depth=depth)
    iterator = iter(loader)
    for taken in (1, 2):
        next(iterator)
        wait_until(lambda: loader.stats().batches == taken + depth)  # noqa: B023
        wait_until(lambda: taken + depth in iterator._data_queue._held)  # noqa: B023 - it arrived, and is not sent
        assert loader.stats().batches == taken + depth
    assert numbers(iterator) == list(range(4, 40))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loop_runs_few_batches_ahead(monkeypatch, workers):
    made, waited = record_work(monkeypatch)
    for batches, _ in enumerate(make(num_workers=workers), 1):
        assert len(made) == batches
        assert waited == made[: max(0, batches - RUN_AHEAD)]
    assert batches == 20


# -- the cap


@pytest.mark.parametrize(("workers", "size"), [(0, "220KiB"), (2, "1319KiB")])
def test_a_batch_above_the_cap_arrives_with_advice(workers, size):
    loader = make(max_bytes="128KiB", num_workers=workers)
    with pytest.warns(
        StagingWarning, match=f'max_bytes is 128.00 KiB .*pass max_bytes="{size}"'
    ) as told:
        found = [numbers(loader) for _ in range(2)]
    assert found == [list(range(40))] * 2
    assert [warning.category for warning in told].count(StagingWarning) == 1
    assert loader.stats().fallback_batches == 40
    assert loader.stats().bottleneck.startswith(
        "max_bytes is the bottleneck: 40 of 40 batches found no slab"
    )
    loader = make(max_bytes=size, num_workers=workers)
    assert numbers(loader) == list(range(40))
    assert loader.stats().fallback_batches == 0


def test_a_short_slabless_pass_warns_at_its_end():
    loader = make(size=4, max_bytes="128KiB", num_workers=0)
    with pytest.warns(
        StagingWarning, match="no batch of a DataLoader found a slab, and all 2 were sent"
    ):
        assert numbers(loader) == list(range(4))


def test_batches_go_on_while_slabs_are_page_locked(monkeypatch):
    """A worker that has a slab continues with that one."""
    take, taken, gate = ps.memory.SharedMemory._take, [], Gate()

    def take_slowly(memory, nbytes, device):
        taken.append(nbytes)
        if len(taken) > 1:
            gate.pass_through()
        return take(memory, nbytes, device)

    monkeypatch.setattr("pinstage.memory.SharedMemory._take", take_slowly)
    loader = make(num_workers=1, depth=0, timeout=PATIENCE_SECONDS / 2)
    batches = iter(loader)
    # The worker has the second batch; the first stays in its slab until the loop asks for it.
    gate.wait_for_arrival()
    found = numbers(itertools.islice(batches, 15))
    assert loader.stats().pool.held_slabs == 1
    gate.open()
    assert found + numbers(batches) == list(range(40))
    assert loader.stats().fallback_batches == 0


def test_workers_without_file_descriptors_warn_and_go_on():
    loader = make(worker_init_fn=data.opens_no_more_files)
    with pytest.warns(
        StagingWarning, match=r"without a slab of .*cannot map it: .*Too many open files"
    ) as told:
        assert numbers(loader) == list(range(40))
    assert len([warning for warning in told if warning.category is StagingWarning]) == 1
    assert loader.stats().fallback_batches == 20


def test_a_default_timeout_of_sockets_does_no_harm():
    """Python then makes each socket non-blocking, and everything that shares its file."""
    kept = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1.0)
    try:
        loader = make()
        assert numbers(loader) == list(range(40))
    finally:
        socket.setdefaulttimeout(kept)
    assert loader.stats().fallback_batches == 0


def test_an_interrupt_while_workers_are_ended_leaves_nothing():
    loader, iterator = begin()
    interrupts = Interrupts(2, "_iterator.py", "_ending.py")
    assert interrupts.during(loader.close)
    del iterator
    assert_all_back(loader)


def refuse_threads(monkeypatch, reason):
    def refuse(*given):
        del given  # a kept error would keep the thread's function too
        raise RuntimeError(reason)

    # Not of `threading`, which has it already.
    monkeypatch.setattr(_thread, "start_new_thread", refuse)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.filterwarnings(
    "ignore:a DataLoader goes on without a slab:pinstage.errors.StagingWarning"
)
def test_a_pass_ends_without_any_new_thread(monkeypatch, is_left):
    loader = make()
    iterator = iter(loader)
    refuse_threads(monkeypatch, "can't start new thread")
    if is_left:
        next(iterator)
        loader.close()
    else:
        assert numbers(iterator) == list(range(40))
    assert all_back(loader)
    with pytest.raises(RuntimeError, match="new thread"):
        iter(loader)
    monkeypatch.undo()
    assert numbers(loader) == list(range(40))


@pytest.mark.parametrize(
    "reason", ["can't start new thread", "can't create new thread at interpreter shutdown"]
)
def test_the_end_of_the_program_is_no_fault(monkeypatch, reason):
    iterator = iter(make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refuse_threads(monkeypatch, reason)
        assert len(list(iterator)) == 20
        monkeypatch.undo()
    warned = [
        str(warning.message)
        for warning in caught
        if "goes on without a slab" in str(warning.message)
    ]
    assert len(warned) == ("shutdown" not in reason)


@pytest.mark.parametrize("cap", ["128KiB", "8MiB"])
@pytest.mark.filterwarnings(
    "ignore:no batch of a DataLoader found a slab:pinstage.errors.StagingWarning"
)
def test_the_default_device_does_not_matter(workers, cap):
    samples = [data.large(index) for index in range(40)]
    iterator = iter(make(samples.__getitem__, max_bytes=cap, num_workers=workers))
    with torch.device("meta"):
        assert numbers(iterator) == list(range(40))


@pytest.mark.parametrize("slabs", [1, 2, 3, 5, 8])
def test_workers_wait_under_a_small_cap_without_hanging(slabs):
    loader = make(size=120, num_workers=4, max_bytes=slabs * SLAB, depth=3)
    assert numbers(loader) == list(range(120))
    stats = loader.stats()
    assert stats.pool.peak_held_bytes <= slabs * SLAB
    if slabs >= 4:
        assert stats.fallback_batches == 0


def starving():
    """Return a loader and its iterator, of which both workers wait for a slab after a batch."""
    loader, iterator = begin(size=60, max_bytes=2 * SLAB, depth=0)
    wait_until(lambda: len(iterator._broker.loans.starved) == 2)  # both have filled their slabs
    return loader, iterator


def test_a_slow_consumer_makes_workers_wait():
    loader, iterator = starving()
    assert "0 are being copied" in iterator._broker.loans.waiting([0])
    assert numbers(iterator) == list(range(2, 60))
    assert loader.stats().fallback_batches == 0
    assert loader.stats().slab_wait_seconds > 0


@pytest.fixture
def copies(monkeypatch):
    """The events of all copies, which the test finishes."""
    found = []

    def record(_, stream):
        if stream != "copies":
            return None
        found.append(ManualEvent())
        return found[-1]

    monkeypatch.setattr("pinstage._stage._target.Target.stream", "copies")
    monkeypatch.setattr("pinstage._stage._target.Target.record", record)
    monkeypatch.setattr("pinstage._stage._target.Target.hand_over", lambda *_: None)
    return found


def test_a_timeout_says_who_holds_the_slabs(copies):
    loader, iterator = begin(num_workers=1, max_bytes=SLAB, depth=0, timeout=2.0)
    holder = r"worker 0 waits for a slab of .*: of its 1, 1 are being copied to the device and 0 hold .*; raise max_bytes"
    with pytest.raises(RuntimeError, match=rf"timed out after 2\.0 seconds; {holder}"):
        next(iterator)
    del iterator
    # One more may have been sent.
    wait_until(lambda: [event.finish() for event in copies] and all_back(loader))


def test_a_timeout_names_the_late_worker():
    """And not the one that waits for a slab because that batch is late."""
    stuck = multiprocessing.Event()

    def sample(index):
        assert index // 2 != 1 or stuck.wait(PATIENCE_SECONDS)  # the second batch
        return data.large(index)

    iterator = iter(make(sample, max_bytes=2 * SLAB, depth=0, timeout=2.0))
    next(iterator)
    wait_until(lambda: 0 in iterator._broker.loans.starved)
    with pytest.raises(RuntimeError, match="timed out") as raised:
        next(iterator)
    assert "; worker 1 has not sent its batch, and waits for no slab" in str(raised.value)
    assert "worker 0" not in str(raised.value)
    stuck.set()
    assert numbers(iterator) == list(range(2, 40))


def test_an_answer_on_its_way_ends_a_wait(monkeypatch):
    """A worker says that it waits, while a slab is being granted."""
    take = WorkerSlabs.take

    def take_and_note(slabs, nbytes):
        slab = take(slabs, nbytes)
        slabs._send(Waiting(nbytes, slabs._received - 1))
        return slab

    monkeypatch.setattr(WorkerSlabs, "take", take_and_note)
    _, iterator = begin(num_workers=1, depth=0)
    wait_until(lambda: len(iterator._data_queue._held) == 2)
    assert "waits for no slab" in iterator._broker.loans.waiting([0])


def test_a_datasets_own_timeout_is_its_own():
    def sample(_):
        raise RuntimeError("the server timed out after 3 seconds")

    with pytest.raises(RuntimeError, match="the server timed out") as raised:
        next(iter(make(sample)))
    assert "slab" not in str(raised.value)


def test_workers_that_wait_end_with_the_iterator():
    loader, iterator = starving()
    workers = active_children()
    del iterator
    assert_all_back(loader)
    assert [worker.exitcode for worker in workers] == [0, 0]  # not terminated


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_persistent_workers_with_one_slab_restart_midway(kind):
    options = {"num_workers": 1, "prefetch_factor": 4, "timeout": PATIENCE_SECONDS}
    given = kind(data.Mapped(data.large, 40), 2, persistent_workers=True, **options)
    loader = ps.wrap_loader(given, device="cpu", max_bytes=SLAB)
    for taken in range(8):
        assert numbers(itertools.islice(loader, taken)) == list(range(2 * taken))
    assert loader.stats().fallback_batches == 0


def test_slabs_grow_with_the_batches():
    loader = make(lambda index: torch.zeros(index * 3000), size=60, batch_size=1, max_bytes="8MiB")
    assert [batch.numel() for batch in loader] == [index * 3000 for index in range(60)]
    assert loader.stats().fallback_batches == 0


def test_a_copy_that_fails_gives_its_slab_back(monkeypatch):
    def fail(*slabs, **_):
        del slabs  # frames outside pinstage keep their locals
        raise MemoryError("none on the device")

    loader, iterator = begin(depth=0)
    with monkeypatch.context() as patched:
        patched.setattr("pinstage._stage._target.Target.copy", fail)
        kept = []
        for _ in range(5):  # more than there are slabs
            with pytest.raises(MemoryError) as caught:
                next(iterator)
            kept.append(caught)
    assert numbers(iterator) == list(range(12, 40))
    assert_all_back(loader)  # although the errors are kept


REGISTERED_IN_THE_BLOCK = """
import sys
import torch
import pinstage as ps

class Pair:
    def __init__(self, left):
        self.left = left

def collate(samples):
    return Pair(torch.stack(samples))

if __name__ == "__main__":
    ps.register_node(Pair)
    method = sys.argv[1]
    options = {"num_workers": 1, "multiprocessing_context": method, "device": "cpu"}
    for batch in ps.DataLoader(torch.zeros(4, 2), 2, collate_fn=collate, **options):
        print(batch.left.shape)
"""


def test_registering_below_the_main_block_is_explained(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(REGISTERED_IN_THE_BLOCK)

    def run(method):
        command = [sys.executable, program, method]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), check=False
        )

    forked, spawned = run("fork"), run("spawn")
    assert forked.returncode == 0, forked.stderr
    assert "LayoutError: batch holds tensors and isn't a known container" in spawned.stderr
    remedy = "register it at module level: the worker imports the module as `__mp_main__`"
    assert f"{remedy} and doesn't run that block" in spawned.stderr


# -- other processes


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run_script(script):
    script = f"import warnings\nwarnings.simplefilter('error')\n{textwrap.dedent(script)}"
    return warm.completed(script, env=environment(), timeout=PATIENCE_SECONDS * 2)


WAITING_FOR_A_SLAB = """
loader = ps.DataLoader(data.Mapped(data.large, 60), 2, num_workers=1, max_bytes=212_992, device="cpu", depth=0)
iterator = iter(loader)
next(iterator)
while not iterator._broker.loans.starved:
    pass
"""

# A normal exit waits for the queue's feeder thread, and that waits for a reader: the reading end
# stays open in the other worker. Without slabs, batches go through the queue.
WITH_A_FULL_QUEUE = """
import torch
from pinstage._loader._sending import SendingQueue
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1
silent, _ = os.pipe()
SendingQueue.fileno = lambda queue: silent
loader = ps.DataLoader(data.Mapped(data.large, 60), 2, num_workers=2, prefetch_factor=1, max_bytes="64KiB", device="cpu")
iterator = iter(loader)
for worker in active_children():
    while len(os.listdir(f"/proc/{worker.pid}/task")) == 1:
        pass
"""


@pytest.mark.parametrize(
    "script", [WAITING_FOR_A_SLAB, WITH_A_FULL_QUEUE], ids=["waiting for a slab", "a full queue"]
)
def test_workers_end_when_the_main_process_is_killed(script):
    begin = "from multiprocessing import active_children; import os, loader_data as data, pinstage as ps"
    end = (
        "print(*[worker.pid for worker in active_children()], flush=True); os.kill(os.getpid(), 9)"
    )
    # Returns when the workers have closed the output too.
    result = run_script("\n".join([begin, script, end]))
    assert result.returncode == -9, result.stderr
    wait_until(lambda: all(state_of(int(pid)) in ("", "Z") for pid in result.stdout.split()))


@pytest.mark.usefixtures("interruptible")
def test_interrupting_the_whole_group_ends_all_of_it():
    script = """
        import loader_data as data, pinstage as ps
        loader = ps.DataLoader(data.Mapped(data.sleeps_at_three, 60), 1, num_workers=2, device="cpu", depth=0)
        for batch in loader:
            print(int(batch), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, env=environment(), stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        # A worker sleeps, the loop waits.
        assert [int(process.stdout.readline()) for _ in range(3)] == [0, 1, 2]
        os.killpg(process.pid, signal.SIGINT)
        # Until the last worker has closed its output.
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode in (1, -signal.SIGINT)
    assert errors.strip().splitlines()[-1].startswith("KeyboardInterrupt")


@contextlib.contextmanager
def held_by_another_thread(*locks):
    """Hold locks, as a thread does that begins a pass while another one forks."""
    gate = Gate()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            gate.pass_through()

    thread = Background(hold)
    gate.wait_for_arrival()
    try:
        yield
    finally:
        gate.open()
        thread.result()


def test_a_forked_child_can_drop_everything_anytime():
    iterator = [begin()[1]]

    def drop():
        iterator.clear()
        gc.collect()

    with held_by_another_thread(iterator[0]._slabs.starting, iterator[0]._slabs._lock):
        claim_in_child(drop)
    assert len(list(iterator[0])) == 19


def test_a_forked_worker_can_read_the_loader():
    inner = make(data.scalar, 4, num_workers=0)
    expected = torch.cat(list(inner))
    options = {"num_workers": 1, "timeout": PATIENCE_SECONDS}
    with held_by_another_thread(inner._slabs.starting, inner._slabs._lock):
        outer = make(lambda index: torch.cat(list(inner)) + index, 3, 1, **options)
        assert [batch[0].tolist() for batch in outer] == [
            (expected + index).tolist() for index in range(3)
        ]
    assert torch.equal(torch.cat(list(inner)), expected)


def test_the_size_of_dev_shm_does_not_matter():
    # torch's sharing must not be used: it would fail.
    script = """
        import torch, loader_data as data, pinstage as ps
        def fail(*args, **kwargs):
            raise RuntimeError("no space in /dev/shm")
        torch.UntypedStorage._new_shared = classmethod(fail)
        torch.UntypedStorage.share_memory_ = fail
        torch.UntypedStorage._share_fd_cpu_ = fail
        torch.UntypedStorage._share_filename_cpu_ = fail
        for collate in (None, torch.utils.data.default_collate, lambda s: torch.utils.data.default_collate(s)):
            loader = ps.DataLoader(data.Mapped(data.mixed), 4, num_workers=1, device="cpu", collate_fn=collate)
            print(sum(int(batch["int"].sum()) for batch in loader))
        try:
            list(torch.utils.data.DataLoader(data.Mapped(data.mixed), 4, num_workers=1))
        except RuntimeError as error:
            print("no space" in str(error))
    """
    result = run_script(script)
    assert result.stdout.split() == ["253", "253", "253", "True"], result.stderr


@pytest.mark.parametrize("persistent", [False, True])
# torch raises from its signal handler, wherever the main thread is: perhaps in a finaliser.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_soak_with_killed_workers_leaves_nothing(persistent):
    """``PINSTAGE_SOAK_BATCHES=100000 pytest -k soak`` is the long one."""
    left = int(os.environ.get("PINSTAGE_SOAK_BATCHES", "500"))
    chance = random.Random(left)
    loader = make(data.random_size, 200, None, persistent_workers=persistent, max_bytes="512KiB")
    expected = [data.random_size(index) for index in range(200)]

    def one_pass(stop, kills):
        iterator = iter(loader)
        for index, batch in enumerate(iterator):
            assert data.same(batch, expected[index])
            if index == stop:
                if not kills:
                    break
                os.kill(chance.choice(active_children()).pid, signal.SIGKILL)
        return index + 1

    while left > 0:
        kills, stop = chance.random() < 0.5, chance.randrange(150)
        if kills:
            with pytest.raises(RuntimeError, match="worker"):
                one_pass(stop, kills)
            left -= stop
        else:
            left -= one_pass(stop, kills)
        if not persistent:
            gc.collect()
            assert_all_back(loader)
    assert len(list(loader)) == 200


def test_a_running_copy_keeps_its_slab(copies):
    loader, iterator = begin(size=12, num_workers=1, max_bytes=SLAB, depth=0)
    starved = iterator._broker.loans.starved
    # The only slab is still being read: the worker must not write to it.
    wait_until(lambda: starved)
    assert loader.stats().pool.leased_slabs == 1
    copies[0].finish()
    copying = iterator._broker.loans.copying
    wait_until(lambda: not copying)  # seen by the thread: this one may be waiting in next()
    assert next(iterator)[:, 0].tolist() == [2, 3]
    del iterator
    # Of the second copy, which isn't finished.
    wait_until(lambda: loader.stats().pool.in_flight_slabs == 1)
    copies[1].finish()
    assert_all_back(loader)


# -- close


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_workers_and_returns_slabs(persistent):
    with make(persistent_workers=persistent) as loader:
        iterator = iter(loader)
        next(iterator)
        assert len(active_children()) == 2
    assert not active_children()
    assert all_back(loader)
    assert loader.stats().pool.held_bytes == 0
    with pytest.raises(ClosedError, match="its loader was closed; begin another one"):
        next(iterator)
    assert numbers(loader) == list(range(40))
    for _ in range(2):
        loader.close()
    assert numbers(loader) == list(range(40))


def test_close_without_workers_keeps_a_given_pool():
    with ps.SlabPool("8MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        loader = make(num_workers=0, pool=pool)
        iterator = iter(loader)
        next(iterator)
        held = pool.stats().held_bytes
        loader.close()
        assert (pool.closed, pool.stats().held_bytes) == (False, held)
        with pytest.raises(ClosedError, match="its loader was closed"):
            next(iterator)
        assert numbers(loader) == list(range(40))


def test_close_in_another_thread_is_named():
    loader = make(lambda index: time.sleep(0.2) or torch.tensor(index))
    iterator = iter(loader)
    threading.Timer(0.5, loader.close).start()
    with pytest.raises(ClosedError, match="its loader was closed; begin another one"):
        list(iterator)


def test_slabs_are_returned_with_the_last_batch():
    loader = make()
    iterator = iter(loader)
    assert len([next(iterator) for _ in range(20)]) == 20
    assert_all_back(loader)
    assert not active_children()
    assert next(iterator, None) is None
    loader.close()
    assert next(iterator, None) is None  # the pass stays finished


def test_a_forked_child_closes_no_parent_s_worker():
    loader, iterator = begin()
    claim_in_child(loader.close)
    assert len(list(iterator)) == 19
