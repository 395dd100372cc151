"""Interrupts, collections and kills at every possible point: no batch is wrong, no lock stays held
and nothing hangs.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import loader_data as data
import pytest
import torch
import warm
from doubles import outcome, wait_until
from processes import completed

import pinstage as ps

pytestmark = pytest.mark.usefixtures("slabs_for_all")

EVERY_NTH_LINE = int(os.environ.get("EVERY_NTH_LINE", "16"))
"""Step between the lines at which a worker is killed: with 1 the test takes a minute or two."""

USES = ["pool", "stager", "fetch", "loader"]
INSIDE = str(Path(ps.__file__).parent)
STORM = Path(__file__).parents[1] / "helpers" / "storm.py"


def storm(*arguments):
    """Run a storm in a process whose parent ignores SIGINT; return its stdout and stderr."""
    done = completed(
        warm.command(STORM, *arguments),
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("what", [*USES, "region", "budget"])
def test_nothing_hangs_after_interrupts(what):
    found, told = storm(what, 150)
    assert found["interrupted"] > 100
    assert (found["wrong"], told) == ([], "")


@pytest.mark.parametrize("what", USES)
def test_nothing_hangs_after_interrupts_of_other_threads(what):
    found, _ = storm(what, 50, "threads")
    assert found["interrupted"] >= 50
    assert found["wrong"] == []


class Collections:
    """A profiler that collects garbage at the n-th point of pinstage's own code: at a call, before
    and after.
    """

    def __init__(self, countdown):
        self.countdown = countdown

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename.startswith(INSIDE):
            self.countdown -= 1
            if self.countdown == 0:
                gc.collect(0)

    def during(self, work):
        """Do work; return its result, and whether that point was reached."""
        sys.setprofile(self)
        try:
            result = work()
        finally:
            sys.setprofile(None)
        return result, self.countdown <= 0


class Cycle:
    """Only the collector frees it."""

    def __init__(self, thing):
        self.thing = thing
        self.itself = self


def batch():
    return {"x": torch.arange(300.0), "y": [torch.ones(5), torch.zeros(2, 3)], "n": 3}


def with_lease(pool):
    with pool.acquire(700) as lease:
        yield lease.tensor()


def with_batch(stager):
    yield stager.stage(batch()).wait()


def with_stager():
    with ps.Stager("cpu", max_bytes="64KiB") as stager:
        yield stager.to_device(batch())


class House:
    """A pool, a stager and a loader, and garbage that refers to each of them."""

    def __init__(self):
        self.pool = ps.SlabPool("1MiB", memory=ps.memory.PageableMemory())
        self.stager = ps.Stager("cpu", pool=self.pool, timeout=5)
        self.loader = ps.DataLoader([batch()] * 2, None, device="cpu", max_bytes="64KiB")
        self.sizes = itertools.cycle([500, 5_000, 50_000, 700_000, 3_000])

    def leave_garbage(self):
        generators = [with_lease(self.pool), with_batch(self.stager), with_stager()]
        for generator in generators:
            next(generator)
        lease = self.pool.acquire(600)
        viewed = self.pool.acquire(800)
        iterator = iter(self.loader)
        next(iterator)
        prefetched = iter(self.stager.prefetch([batch()] * 4, depth=1))
        next(prefetched)
        things = [lease, [viewed, viewed.tensor()], iterator, prefetched, *generators]
        things += [self.stager.stage(batch()), self.stager.fetch(batch())]
        things.append(ps.Stager("cpu", max_bytes="64KiB"))
        things[-1].to_device(batch())
        for thing in things:
            Cycle(thing)

    def use_pool(self):
        with self.pool.acquire(next(self.sizes), timeout=5) as lease:
            lease.tensor().fill_(1)
        self.pool.stats()
        return batch()

    def use_stager(self):
        return self.stager.to_device(batch())

    def use_fetch(self):
        return self.stager.to_host(batch())

    def use_loader(self):
        [first, *_] = list(self.loader)
        return first

    def assert_all_back(self):
        gc.collect()
        for stats in (self.pool.stats, lambda: self.loader.stats().pool):
            wait_until(lambda stats=stats: stats().leased_slabs == stats().in_flight_slabs == 0)
        held = [self.stager.to_device(batch()) for _ in range(8)]
        assert all(data.same(found, batch()) for found in held)


@pytest.fixture
def house():
    gc.collect()
    gc.disable()
    found = House()
    yield found
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
    found.assert_all_back()


THRESHOLDS = gc.get_threshold()


@pytest.mark.filterwarnings("ignore:lease was never released")
@pytest.mark.parametrize("what", USES)
def test_our_garbage_can_be_collected_anywhere(house, what):
    use = getattr(house, f"use_{what}")
    for point in itertools.count(1, 7 if what == "loader" else 1):  # the loader has the most points
        house.leave_garbage()
        found, reached = Collections(point).during(use)
        assert data.same(found, batch())
        del found
        gc.collect(0)
        if not reached:
            break
    assert point > 20


@pytest.mark.filterwarnings("ignore:lease was never released")
@pytest.mark.parametrize("what", USES)
def test_garbage_may_be_collected_at_any_allocation(house, what):
    use = getattr(house, f"use_{what}")
    for allocations in range(1, 100):
        house.leave_garbage()
        # So that the next one is after this many allocations.
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        found = use()
        gc.disable()
        assert data.same(found, batch())
        del found
        gc.collect(0)  # where the use allocated less: garbage would fill the pool


def test_finalisers_can_ask_for_stats_anywhere(background):
    """From Python 3.12 on the collector can run between any two lines, even without an
    allocation.
    """
    asked = 0

    def work():
        def ask(frame, event, arg):
            nonlocal asked
            if not frame.f_code.co_filename.endswith("_stager.py"):
                return None
            frame.f_trace_opcodes = True
            sys.settrace(None)
            try:
                stager.stats()
                asked += 1
            finally:
                sys.settrace(ask)
            return ask

        sys.settrace(ask)
        try:
            stager.to_host(stager.to_device([torch.ones(2)]))
        finally:
            sys.settrace(None)

    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        outcome(background(work))
        stats = stager.stats()
    assert (stats.batches, stats.fetches) == (1, 1)
    assert asked > 50


@pytest.mark.filterwarnings("ignore:lease was never released")
def test_a_collected_generator_releases_only_its_own(background):
    pool = ps.SlabPool("4KiB", memory=ps.memory.PageableMemory())
    found = []

    def hold():
        with pool.acquire(4096) as lease:
            try:
                yield
            finally:
                found.append(outcome(background(pool.acquire, 4096, timeout=5)))
                with contextlib.suppress(ps.errors.LeaseError):
                    found.append(lease.tensor())

    held = hold()
    next(held)
    Cycle(held)
    del held
    gc.collect()
    [other] = found
    assert pool.stats().leased_slabs == 1
    other.release()


class Killer:
    """A worker_init_fn: worker 0 kills itself at the n-th line of pinstage that it reaches, each
    counted once.

    Args:
        nth: the number of the line; None for never: then all lines are written to a file.
        path: the path of that file.
    """

    def __init__(self, nth, path=None):
        self.nth = nth
        self.path = path
        self.seen = set()

    def __call__(self, worker):
        if worker == 0:
            threading.settrace(self.trace)  # the thread that feeds the queue is not there yet
            sys.settrace(self.trace)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(INSIDE):
            return None
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if event == "line" and line not in self.seen:
            self.seen.add(line)
            if len(self.seen) == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(f"{line}\n")
        return self.trace


def of_random_size(index):
    """Return a batch of random size; its slab may be too small, refused, or larger than the cap of
    256 KiB.
    """
    size = (1_000, 30_000, 300_000, 60_000, 2_000)[index % 5]
    return {
        "data": torch.full((size,), index % 256, dtype=torch.uint8),
        f"index {index % 2}": index,
        "text": "text",
    }


def loader_that_is_killed(killer):
    dataset = data.Mapped(of_random_size, 24)
    return ps.DataLoader(
        dataset, 1, num_workers=2, device="cpu", max_bytes="256KiB", worker_init_fn=killer
    )


def read(loader):
    """Return the number of batches, all correct and in order, and the error after them."""
    count = 0
    try:
        for count, batch in enumerate(loader, 1):
            expected = torch.utils.data.default_collate([of_random_size(count - 1)])
            assert data.same(batch, expected)
    except RuntimeError as error:
        return count, str(error)
    return count, None


def test_a_worker_may_be_killed_at_any_line(tmp_path):
    path = tmp_path / "lines"
    path.touch()
    assert read(loader_that_is_killed(Killer(None, path))) == (24, None)
    lines = path.read_text().split()
    reached = {line.partition(":")[0] for line in lines}
    assert reached >= {"_worker.py", "_collate.py", "_messages.py"}
    for nth in range(1, len(lines) + 1, EVERY_NTH_LINE):
        loader = loader_that_is_killed(Killer(nth))
        count, error = read(loader)
        assert (count, error) == (24, None) or error.startswith("DataLoader worker"), lines[nth - 1]
        # torch's error may come at any line of the main thread: the iterator is dropped, and
        # another thread closes it.
        wait_until(
            lambda stats=loader.stats: (
                stats().pool.leased_slabs == stats().pool.in_flight_slabs == 0
            )
        )
