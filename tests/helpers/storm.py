"""Storms of interrupts, in a separate process: ``python storm.py WHAT COUNT [threads]``.

The main thread works in a loop; each time that it is inside pinstage it gets a SIGINT, as if a stop
button were pressed again and again. With ``threads``, other threads work instead, and each gets an
interrupt from `PyThreadState_SetAsyncExc` when it is inside pinstage. Prints what is left after
`COUNT` interrupts, and nothing else.
"""

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import warnings

import torch
from doubles import budget_files, region_bytes
from loader_data import same

import pinstage as ps

INSIDE = os.path.dirname(ps.__file__)  # noqa: PTH120 - compared with the names in code objects


def is_inside(frame):
    """Return whether a frame was called, directly or not, by pinstage."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(INSIDE):
            return True
        frame = frame.f_back
    return False


def is_in_other_finaliser(frame):
    """Return whether a frame is in a finaliser that isn't pinstage's: Python would report an
    interrupt there, and go on.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" and not code.co_filename.startswith(INSIDE):
            return True
        frame = frame.f_back
    return False


class Storm:
    """Interrupts the main thread wherever it is inside pinstage.

    Args:
        count: number of interrupts.
    """

    persistent = True

    def __init__(self, count, pause=0.0003):
        self.left = count
        self._pause = pause
        self._work_is_done = False

    def over(self, work):
        """Repeat work until all interrupts are sent; return how often an interrupt ended it."""
        signal.signal(signal.SIGINT, self._interrupt)  # also where the parent ignores it
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        interrupted = 0
        while self.left > 0:
            try:
                work()
            except KeyboardInterrupt:
                interrupted += 1
        self._work_is_done = True
        sender.join()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return interrupted

    def prepare(self, pool):
        """Do nothing: the pool may grow at any time."""

    def read(self, loader):
        """Read a loader to its end."""
        return list(loader)

    def _send(self):
        main = threading.main_thread().ident
        while not self._work_is_done:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(random.expovariate(1 / self._pause))

    def _interrupt(self, _, frame):
        if is_inside(frame) and not is_in_other_finaliser(frame):
            self.left -= 1
            raise KeyboardInterrupt


class ThreadStorm:
    """Interrupts three other threads wherever they are inside pinstage.

    They start no threads: before Python 3.12 a new thread has the id of its parent until it begins,
    may get the parent's interrupt, and then never begins. So pools have all their slabs before, and
    loaders are not read to their end. The threads import nothing either: an import may take the
    lock of `logging`, an interrupt may leave it locked, and then no process can be forked.

    Args:
        count: number of interrupts.
    """

    persistent = False  # a persistent loader works in one thread only

    def __init__(self, count, pause=0.0003):
        self.left = self._count = count
        self._pause = pause
        self._asked = queue.SimpleQueue()
        threading.Thread(target=self._make_iterators, daemon=True).start()

    def over(self, work):
        """Repeat work until all interrupts are sent; return how often an interrupt ended it."""
        with torch.profiler.record_function(
            "the first imports a module, and a loader has one in each step"
        ):
            pass
        sys.setswitchinterval(1e-3)  # so that threads are interrupted everywhere
        threads = [threading.Thread(target=self._work, args=(work,), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while self.left > 0:
            self._interrupt(random.choice(threads))
            time.sleep(random.expovariate(1 / self._pause))
        for thread in threads:
            thread.join(30)
            if thread.is_alive():
                faulthandler.dump_traceback()
                os._exit(1)
        return self._count - self.left

    def _interrupt(self, thread):
        number, interrupt = ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
        if is_inside(sys._current_frames().get(thread.ident)) and self.left > 0:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, interrupt)

    def _work(self, work):
        while self.left > 0:
            with contextlib.suppress(KeyboardInterrupt):  # a late interrupt
                self._repeat(work)

    def _repeat(self, work):
        while self.left > 0:
            try:
                work()
            except KeyboardInterrupt:
                self.left -= 1

    def prepare(self, pool):
        """Let a pool allocate all its slabs."""
        pool.reserve(200_000, count=4)
        pool.freeze()

    def read(self, loader):
        """Read a loader, but not to its end. Another thread makes the iterator, since torch starts
        processes there.
        """
        answer = queue.SimpleQueue()
        self._asked.put((loader, answer))
        return list(itertools.islice(answer.get(), 15))

    def _make_iterators(self):
        while True:
            loader, answer = self._asked.get()
            answer.put(iter(loader))
            del answer


def left_in(pool):
    """Return what is wrong with a pool that is no longer used: a request neither ends nor fails at
    once.
    """
    gc.collect()  # an interrupt keeps frames and their locals in a cycle
    answered = threading.Event()

    def use():
        nbytes = 200_000 if pool.frozen else pool.max_bytes
        with (
            contextlib.suppress(ps.errors.BudgetExceededError),
            pool.acquire(nbytes, timeout=10),
        ):
            pass
        answered.set()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    if answered.wait(20):
        return []
    faulthandler.dump_traceback()
    return [f"a lock is held, or bytes are awaited in vain: {pool.stats()}"]


def over_pool(storm):
    pool = ps.SlabPool("1MiB", memory=ps.memory.PageableMemory())
    storm.prepare(pool)
    numbers = iter(range(10**9))

    def work():
        number = next(numbers)
        with pool.acquire(1000 + 997 * (number % 100)) as lease:
            tensor = lease.tensor()
            lease.numpy()[:] = number % 251
            assert bool((tensor == number % 251).all()), "two leases share a slab"
            del tensor
        # Three threads must wait for one another.
        leases = [pool.acquire(200_000, timeout=20) for _ in range(2)]
        for lease in leases:
            lease.release()
        if number % 50 == 0 and not pool.frozen:
            pool.trim()
            pool.reserve(5000, count=2)
        pool.stats()

    interrupted = storm.over(work)
    return interrupted, left_in(pool)


def batch():
    return {"x": torch.ones(300, 70), "y": [torch.zeros(5), torch.ones(2, 3)], "n": 3}


def check(found):
    """Fail if a batch is wrong."""
    assert same(found, batch())


def over_stager(storm):
    stager = ps.Stager("cpu", max_bytes="1MiB", timeout=20)
    storm.prepare(stager.pool)

    def work():
        check(stager.to_device(batch()))
        for found in stager.prefetch([batch()] * 5, depth=2):
            check(found)
        stager.stage(batch()).wait()["x"].add_(1)
        stager.stats()

    interrupted = storm.over(work)
    return interrupted, left_in(stager.pool)


def over_fetch(storm):
    stager = ps.Stager("cpu", max_bytes="1MiB", timeout=20)
    storm.prepare(stager.pool)
    there = batch()

    def work():
        check(stager.to_host(there))
        check(stager.fetch(there, copy=False).result())
        stager.fetch(there)

    interrupted = storm.over(work)
    return interrupted, left_in(stager.pool)


def over_loader(storm):
    numbers = torch.arange(4000.0).reshape(40, 100)
    loaders = [
        ps.DataLoader(
            torch.utils.data.TensorDataset(numbers),
            2,
            num_workers=workers,
            device="cpu",
            max_bytes="1MiB",
            **more,
        )
        for workers, more in ((1, {"persistent_workers": storm.persistent}), (0, {}), (1, {}))
    ]
    storm.prepare(loaders[1]._slabs.sender().slabs.pool)
    turns = iter(range(10**9))

    def work():
        found = [x[0, 0].item() for [x] in storm.read(loaders[next(turns) % len(loaders)])]
        assert found == list(range(0, 4000, 200))[: len(found)]

    interrupted = storm.over(work)
    wrong = []
    for loader in loaders:
        if [x[0, 0].item() for [x] in loader] != list(range(0, 4000, 200)):
            wrong.append("batches are wrong")
        loader._iterator = None
    for slabs in [loader._slabs for loader in loaders]:
        wrong += left_in(slabs.pool)
    return interrupted, wrong


def left_of(budget):
    """Return what is left after nothing uses a budget any longer."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        left = {
            "files": budget_files(),
            "mapped bytes": region_bytes(),
            "rows": [usage for usage in budget.usage() if usage.held_bytes],
        }
        wrong = [f"{name}: {what}" for name, what in left.items() if what]
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(0.05)


def over_region(storm):
    budget, turns = ps.HostBudget("1GiB", name="storm"), itertools.count()

    def work():
        is_shared = next(turns) % 2 == 0
        options = {"shared": is_shared, "budget": budget, "device": "cpu"}
        with ps.HostRegion("3MiB", chunk_bytes="1MiB", **options) as region:
            region.tensor(8).fill_(1)
            if is_shared:
                ps.HostRegion.from_handle(region.handle(), device="cpu").close()
            region.synchronize(timeout=20)

    interrupted = storm.over(work)
    return interrupted, left_of(budget)


def over_budget(storm):
    budget = ps.HostBudget("64MiB", name="storm")
    kinds = itertools.cycle([ps.memory.PageableMemory(), ps.memory.SharedMemory(register=False)])

    def work():
        with ps.SlabPool(budget=budget, memory=next(kinds)) as pool:
            pool.acquire("1MiB", timeout=20).release()
            budget.usage()
            pool.trim()

    interrupted = storm.over(work)
    return interrupted, left_of(budget)


if __name__ == "__main__":
    what, count, *threads = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(300, exit=True)  # a run takes seconds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ps.errors.UnreleasedLeaseWarning)  # of interrupted calls
    storm = (ThreadStorm if threads else Storm)(int(count))
    interrupted, wrong = globals()[f"over_{what}"](storm)
    print(json.dumps({"interrupted": interrupted, "wrong": wrong}))
