"""Many threads at once: no thread starves, the cap holds, and no slab has another thread's
bytes.
"""

import ctypes
import queue
import random
import sys
import threading
import time

import pytest
from doubles import ManualEvent, outcome, wait_until

from pinstage._reaper import UninterruptedCall
from pinstage.errors import PoolClosedError

THREADS = 16
QUOTA = 100
LONGEST_WAIT_SECONDS = 20


@pytest.fixture(autouse=True)
def threads_that_switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(interval)


class Device:
    """Finishes work in order, in its own thread, and checks that its input was not overwritten."""

    def __init__(self):
        self.work = queue.SimpleQueue()

    def read_later(self, lease, byte, view=None):
        """Return the event of a read; the device releases a lease of which it gets a view."""
        event = ManualEvent()
        address, ended_there = lease.data_ptr(), None if view is None else lease
        self.work.put((event, address, lease.nbytes, byte, ended_there, view))
        return event

    def end(self):
        self.work.put(None)

    def run(self):
        read = 0
        while (item := self.work.get()) is not None:
            event, address, nbytes, byte, lease, view = item
            time.sleep(random.Random(read).choice([0, 0, 0.001]))  # work takes time
            if lease is not None:
                lease.release()
            assert ctypes.string_at(address, nbytes) == bytes([byte]) * nbytes, (
                "overwritten before the event"
            )
            read += 1
            event.finish()
            del item, lease, view
        return read


class Worker:
    """Acquires slabs of random size, fills them, and returns or forgets them."""

    def __init__(self, number, pool, device, start, largest):
        self.random = random.Random(number)
        self.pool = pool
        self.device = device
        self.start = start
        self.largest = largest
        self.kept = None

    def run(self):
        self.start.wait()
        for _ in range(QUOTA):
            self.use_one()
        self.drop_kept()

    def use_one(self):
        nbytes = self.random.randint(1, self.largest)
        byte = self.random.randrange(256)
        ending = self.random.choice(
            ["plain", "event", "view", "view and event", "in another thread", "forgotten"]
        )
        self.drop_kept()  # held while waiting, they might cause a deadlock
        lease = self.pool.acquire(nbytes, timeout=LONGEST_WAIT_SECONDS)
        ctypes.memset(lease.data_ptr(), byte, lease.capacity)
        if self.random.random() < 0.5:
            time.sleep(0)  # let others run while it is held
        assert ctypes.string_at(lease.data_ptr(), lease.capacity) == bytes([byte]) * lease.capacity
        if "view" in ending:
            self.kept = lease.tensor(), byte
        if "event" in ending:
            lease.release(after=self.device.read_later(lease, byte))
        elif ending == "in another thread":
            self.device.read_later(lease, byte, lease.tensor())
        elif ending != "forgotten":
            lease.release()

    def drop_kept(self):
        if self.kept is not None:
            view, byte = self.kept
            assert bool((view == byte).all()), "overwritten while a view was alive"
            self.kept = view = None


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
@pytest.mark.parametrize(
    ("max_bytes", "largest"),
    [(40_000, 9_000), (6_000, 6_000), (200_000, 3_000)],
    ids=["tight", "one at a time", "wide"],
)
@pytest.mark.parametrize("reserved", [False, True], ids=["growing", "frozen"])
def test_threads_neither_deadlock_nor_starve_nor_share_slabs(
    make_pool, memory, background, max_bytes, largest, reserved
):
    pool = make_pool(max_bytes)
    if reserved:
        pool.reserve(largest, count=max_bytes // 9_216 or 1)
        pool.freeze()
    device, start = Device(), threading.Barrier(THREADS)
    device_work = background(device.run)
    workers = [Worker(number, pool, device, start, largest) for number in range(THREADS)]
    futures = [background(worker.run) for worker in workers]
    try:
        for future in futures:
            outcome(future)
    finally:
        device.end()
    assert outcome(device_work) > 0
    assert memory.peak_live_bytes <= max_bytes
    stats = pool.stats()
    assert stats.hits + stats.misses == THREADS * QUOTA
    assert stats.leased_bytes == stats.in_flight_bytes == 0
    assert stats.held_bytes == stats.free_bytes == memory.live_bytes
    assert stats.peak_held_bytes <= max_bytes
    assert stats.waits > 0 or max_bytes > 100_000


def test_a_pool_can_close_while_threads_use_it(make_pool, memory, background):
    pool = make_pool(5_000)
    start = threading.Barrier(9)

    def work(number):
        start.wait()
        try:
            for step in range(10_000):
                with pool.acquire(
                    1 + (number * 577 + step * 91) % 4_000, timeout=LONGEST_WAIT_SECONDS
                ) as lease:
                    lease.numpy()[:] = number
        except PoolClosedError:
            return True
        return False

    futures = [background(work, number) for number in range(8)]
    start.wait()
    wait_until(lambda: pool.stats().hits > 100)
    pool.close()
    assert all(outcome(future) for future in futures)
    # The reaper frees the slabs of leases that outlive the pool.
    wait_until(lambda: memory.live_bytes == 0)
    assert memory.peak_live_bytes <= 5_000


@pytest.fixture
def lose_a_thread(monkeypatch):
    """Let the next thread that allocates or frees end at its first line, when it is called."""
    reap, losses = UninterruptedCall.reap, []

    def reap_or_end(call):
        if not losses:
            return reap(call)
        losses.pop()
        raise MemoryError

    monkeypatch.setattr(UninterruptedCall, "reap", reap_or_end)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    yield lambda: losses.append(True)
    assert not losses


def test_work_whose_thread_fails_is_retried(pool, lose_a_thread):
    lose_a_thread()
    pool.acquire(1000, timeout=LONGEST_WAIT_SECONDS).release()
    lose_a_thread()
    assert pool.trim() == 1000
    lose_a_thread()
    pool.reserve(400, count=2)
    assert pool.stats().free_slabs == 2
    pool.trim()
    lose_a_thread()
    fence = pool.reserve(400, count=2, background=True)
    wait_until(fence.query)
    fence.synchronize()
    assert pool.stats().free_slabs == 2


def test_growth_that_fails_early_returns_its_bytes(pool, monkeypatch):
    def fail():
        raise MemoryError

    init = UninterruptedCall.__init__
    with monkeypatch.context() as patch:
        patch.setattr(
            UninterruptedCall,
            "__init__",
            lambda self, *given: init(self, *given) or setattr(self, "_surroundings", fail),
        )
        with pytest.raises(MemoryError):
            pool.acquire(1000, timeout=LONGEST_WAIT_SECONDS)
    pool.acquire(1000, timeout=0).release()
