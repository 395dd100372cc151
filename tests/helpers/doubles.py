"""Test doubles for the pool: memory that counts and fails on request, an event that finishes on
request.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import pinstage
from pinstage._memory import Block
from pinstage._reaper import reaper
from pinstage._stage import Arrival
from pinstage._stage._target import Target
from pinstage.errors import PinstageError

PATIENCE_SECONDS = 20
"""Time after which a test that waits fails instead of hanging."""


class Gate:
    """Closed when made; threads wait at it until it is opened."""

    def __init__(self):
        self._arrivals = threading.Semaphore(0)
        self._open = threading.Event()

    def wait_for_arrival(self):
        assert self._arrivals.acquire(timeout=PATIENCE_SECONDS), "no thread reached the gate"

    def open(self):
        self._open.set()

    def pass_through(self):
        self._arrivals.release()
        assert self._open.wait(PATIENCE_SECONDS), "the gate was never opened"


class CountingMemory:
    """A memory resource over plain memory that counts.

    A block counts as live from the beginning of its allocation to the end of its deallocation: the
    strictest reading of a cap on the bytes held. Freed bytes are overwritten, and a failed
    deallocation leaves the block live.
    """

    is_pinned = False
    is_shared = False
    made: "list[CountingMemory]" = []  # noqa: RUF012 - conftest.py empties it for each test

    def __init__(self, granularity=1):
        self.granularity = granularity
        self.live_bytes = self.peak_live_bytes = 0
        self.allocations = self.deallocations = 0  # calls, including failed ones
        self.freed = []  # sizes, in the order of deallocation
        self.allocate_gate = self.deallocate_gate = None
        self._buffers = {}
        self._failures = {}
        self._lock = threading.Lock()
        CountingMemory.made.append(self)

    @property
    def live_blocks(self):
        """The blocks that were not freed, oldest first."""
        with self._lock:
            return list(self._buffers)

    def fail_allocate(self, error, *, nth=1):
        """Let the n-th allocation from now raise ``error``."""
        self._failures["allocate", self.allocations + nth] = error

    def fail_deallocate(self, error, *, nth=1):
        """Let the n-th deallocation from now raise ``error``."""
        self._failures["deallocate", self.deallocations + nth] = error

    def forget_failures(self):
        self._failures.clear()

    def allocate(self, nbytes):
        assert nbytes > 0
        assert nbytes % self.granularity == 0
        with self._lock:
            self.allocations += 1
            error = self._failures.pop(("allocate", self.allocations), None)
            self.live_bytes += nbytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        if self.allocate_gate is not None:
            self.allocate_gate.pass_through()
        if error is not None:
            with self._lock:
                self.live_bytes -= nbytes
            raise error
        buffer = ctypes.create_string_buffer(nbytes)
        block = Block(ctypes.addressof(buffer), nbytes)
        with self._lock:
            self._buffers[block] = buffer
        return block

    def deallocate(self, block):
        with self._lock:
            self.deallocations += 1
            error = self._failures.pop(("deallocate", self.deallocations), None)
            assert block in self._buffers, "not a live block"
        if self.deallocate_gate is not None:
            self.deallocate_gate.pass_through()
        if error is not None:
            raise error
        ctypes.memset(block.ptr, 0xDD, block.nbytes)
        with self._lock:
            del self._buffers[block]
            self.live_bytes -= block.nbytes
            self.freed.append(block.nbytes)


class PinnedMemory(CountingMemory):
    """Counts, and says that it is page-locked."""

    is_pinned = True


class WalledMemory(CountingMemory):
    """Limited memory, as in WSL or a container."""

    def __init__(self, wall):
        super().__init__()
        self.wall = wall
        self.refusals = 0

    def allocate(self, nbytes):
        if self.live_bytes + nbytes > self.wall:
            self.refusals += 1
            raise MemoryError(f"refused {nbytes}")
        return super().allocate(nbytes)


class ManualEvent:
    """An event that the test finishes."""

    def __init__(self):
        self.queries = 0
        self.error = None
        self.waited_for = threading.Event()
        self._done = threading.Event()

    def finish(self):
        self._done.set()

    def query(self):
        self.queries += 1
        if self.error is not None:
            raise self.error
        return self._done.is_set()

    def synchronize(self):
        self.waited_for.set()
        if self.error is not None:
            raise self.error
        assert self._done.wait(PATIENCE_SECONDS), "the event was never finished"


def fork():
    """Fork, without the warning of Python 3.12 that there are other threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        return os.fork()


def in_child(claim):
    """Run ``claim`` in a forked child; return its exit status, or minus the signal that ended
    it. An error's traceback is in the test's captured output.
    """
    pid = fork()
    if pid == 0:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_SECONDS)  # a child that hangs ends
        status = 1
        try:
            status = 0 if claim() else 2
        except BaseException:  # noqa: BLE001 - the test fails by the status
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def claim_in_child(claim):
    """Make a claim in a forked child, and fail if it fails there."""
    assert in_child(lambda: [claim()]) == 0


def refuse(call, *args, **options):
    """Check that a call is refused, in a thread that captures a graph."""
    with pytest.raises(PinstageError, match="captures a graph"):
        call(*args, **options)


def calls_of(work):
    """Return the files of the package whose Python functions `work` calls, one per call."""
    package = f"{Path(pinstage.__file__).parent}/"  # a clone's folder is named pinstage, too
    files = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return files


def is_mapped(address):
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def is_held(memory):
    """Return whether a region's memory is still mapped. Its address wouldn't tell: once it is free,
    any other mapping of this process may get it.
    """
    return memory._unmap is not None


def open_files():
    """Return the name and the inode of each file that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.append((str(link.readlink()), link.stat().st_ino))
    return found


def shared_files():
    """Return the inodes of pinstage's shared memory that this process has open.

    The numbers of all descriptors won't do: garbage of an earlier test may close some in the
    meantime.
    """
    return {inode for name, inode in open_files() if name.startswith("/memfd:pinstage")}


def region_bytes():
    """Return the bytes of regions that are mapped: files of memory, and memory that children don't
    inherit.
    """
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and " dc" in line:
            total += size
        elif "/memfd:pinstage" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def budget_files():
    """Return the files of budgets and of shared memory that this process has open."""
    ours = (os.environ["PINSTAGE_BUDGET_DIR"], "/memfd:pinstage")
    return [name for name, _ in open_files() if name.startswith(ours)]


class HeldTarget(Target):
    """A device with one stream, whose copies are in flight until the test finishes them."""

    def __init__(self):
        self.stream = ManualEvent()
        self.copies = 0

    def has_room(self):  # so that small batches take slabs, too
        return False

    def consumer(self, _):
        return self.stream

    def move_few(self, *_, **__):
        return None

    def copy(self, *args, **kwargs):
        self.copies += 1
        return super().copy(*args, **kwargs)

    def record(self, stream):
        return stream


class LoggedTarget(Target):
    """A device with named streams, which notes in `log` what is queued on each, in order."""

    stream = "for copies"

    def __init__(self):
        self.log, self.events = [], []

    def move_few(self, *_, **__):
        return None

    def consumer(self, stream):
        return stream or "current"

    def on(self, stream):
        self.log.append(("on", stream))
        return super().on(stream)

    def record(self, stream):
        self.log.append(("event", stream))
        self.events.append(ManualEvent())
        return self.events[-1]

    def copy(self, *args):
        self.log.append(("copy", args[-1]))
        return super().copy(*args[:-1], None)

    def fill(self, blocks, parts, stream):
        self.log.append(("copy", stream))
        return super().fill(blocks, parts, None)

    def hand_over(self, event, tensors, consumer):
        self.log.append((consumer, "waits for", self.events.index(event), len(tensors)))

    def finish(self):
        for event in self.events:
            event.finish()


class LateTarget(Target):
    """A device whose copies read their bytes late: after a number of later copies, or on a wait."""

    stream = "the copy stream"

    def __init__(self, lag):
        self.begun, self.done, self.pinned = [], 0, []
        self._lock = threading.Lock()
        self._lag = lag

    def copy(self, *args):
        self.begun.append(args)
        self.pinned.append(args[1].is_pinned)
        self.go_on(len(self.begun) - self._lag)
        return 1

    def go_on(self, count):
        with self._lock:
            while self.done < count:
                super().copy(*self.begun[self.done])
                self.done += 1

    def record(self, stream):
        return Behind(self, len(self.begun))

    def hand_over(self, event, tensors, consumer):
        event.synchronize()

    def sources(self):
        """Return the addresses from which copies were begun."""
        return [host.address + start for _, host, start, _, _ in self.begun]


class HeldOut(Target):
    """The stager's device; the test makes its copies to the host. Until then, their destinations
    are full of 0xEE.
    """

    def __init__(self, stager):
        self.out_stream = self.event = ManualEvent()
        self.copies = []
        fetch_from(stager, self)

    def to_host(self, copies, **_):
        for here, _, _, nbytes in copies:  # not `fill_`, which counts as a change
            ctypes.memset(here, 0xEE, nbytes)
        self.copies += copies  # now, since a test may be waiting for them
        return self.event

    def finish(self):
        super().to_host(self.copies)
        self.copies.clear()
        self.event.finish()


@dataclasses.dataclass
class Behind:
    """The event after all copies of a `LateTarget` so far."""

    target: LateTarget
    count: int

    def query(self):
        return self.target.done >= self.count

    def synchronize(self):
        self.target.go_on(self.count)


_BY_GC = ("__del__", "gc_callback")


class Interrupts:
    """A profiler that raises KeyboardInterrupt at the n-th point where Python looks for one, in
    calls by some files.

    These points are the start of a function, which then does nothing, and the end of a call, whose
    result is lost.
    """

    def __init__(self, countdown, *files):
        self.countdown = countdown
        self._files = files

    def __call__(self, frame, event, _):
        caller = (
            frame if event == "c_return" else frame.f_back if event in ("call", "return") else None
        )
        # Not in functions that the garbage collector calls: an interrupt there is swallowed, or
        # belongs to hypothesis.
        if (
            caller is not None
            and caller.f_code.co_filename.endswith(self._files)
            and frame.f_code.co_name not in _BY_GC
        ):
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt

    def during(self, work):
        """Do work; return whether it was interrupted. Restores autograd after an interrupted
        `torch.no_grad`.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            sys.setprofile(self)
            try:
                work()
            except KeyboardInterrupt:
                return True
            finally:
                sys.setprofile(None)
            return False


def interrupts(*files, step=1, at_least=1):
    """Yield what does work with an interrupt at each possible point in turn; fail if there are
    hardly any points.
    """
    for number in itertools.count(1, step):
        interrupt = Interrupts(number, *files)
        yield interrupt.during
        if interrupt.countdown > 0:
            break
    assert number >= at_least


def wait_until(condition):
    """Return when another thread has made a condition true; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.0005)


def wait_for_waiters(pool, count):
    """Return when `count` requests have had to wait since the pool was made."""
    wait_until(lambda: pool.stats().waits == count)


def wait_for_reaper():
    """Return when the reaper has run the tasks that it has now, each at least once."""
    last = Gate()
    gone = weakref.ref(last)
    reaper.bury(last)
    del last
    wait_until(lambda: gone() is None)


def stays_blocked(future):
    """Return whether a call in the background is still blocked after a moment."""
    return not concurrent.futures.wait([future], timeout=0.05).done


def outcome(future):
    """Return what a call in the background returned, or raise what it raised; fail if it never
    returns.
    """
    return future.result(PATIENCE_SECONDS)


@contextlib.contextmanager
def switching_often():
    """Let Python switch between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def use_target(stager, target):
    """Let a stager send to another device; return that device."""
    stager._target = target
    stager._sender = dataclasses.replace(stager._sender, target=target)
    return target


def fetch_from(stager, target):
    """Let a stager fetch from another device."""
    stager._fetcher.targets._made[target.device] = target


@contextlib.contextmanager
def guarded(nbytes):
    """Yield a slab of used memory inside a larger buffer, and fail if bytes around it are
    written.
    """
    guard, used = 4096, 0xEE
    memory = torch.full((nbytes + 2 * guard,), used, dtype=torch.uint8)
    yield memory[guard : guard + nbytes]
    assert memory[:guard].eq(used).all(), "something was written before the slab"
    assert memory[guard + nbytes :].eq(used).all(), "something was written behind the slab"


def slabs_for_all(monkeypatch):
    """Let small batches take a slab too, instead of being copied from pageable memory."""
    monkeypatch.setattr("pinstage._stage._sender.AT_ONCE_BYTES", 0)
    monkeypatch.setattr("pinstage._stage._target.Target.move_few", lambda *_, **__: None)


def record_work(monkeypatch):
    """Let the CPU target mark the loop's stream as a GPU does, and copy on another one; return the
    marks made, and the marks waited for.
    """
    made, waited = [], []

    class Work:
        def query(self):
            return False

        def synchronize(self):
            waited.append(self)

    def record(_, stream):
        if stream == "the loop's":
            made.append(Work())
            return made[-1]
        return None

    slabs_for_all(monkeypatch)
    monkeypatch.setattr("pinstage._stage._sender.SMALL_BYTES", 0)
    monkeypatch.setattr(
        "pinstage._stage._target.Target.consumer", lambda _, stream: stream or "the loop's"
    )
    monkeypatch.setattr("pinstage._stage._target.Target.record", record)
    return made, waited


class Background(threading.Thread):
    """Calls a function in a thread that ends with it.

    A function that forks must not run in an executor's thread: the forked process ends with code 1,
    since `concurrent.futures` tries to join that thread at exit (Python 3.11), and torch's handler
    reports this.
    """

    def __init__(self, function, *args):
        super().__init__()
        self._function, self._args = function, args
        self._outcome = concurrent.futures.Future()
        self.start()

    def run(self):
        try:
            self._outcome.set_result(self._function(*self._args))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._outcome.set_exception(error)

    def result(self):
        """Return what the function returned, or raise what it raised, when the thread has ended."""
        self.join(3 * PATIENCE_SECONDS)
        return self._outcome.result(0)


@dataclasses.dataclass(eq=False)
class _QueuedCopy:
    """A copy of a `QueuedTarget`, and the event after it."""

    target: "QueuedTarget"
    queue: list
    after: object
    copy: object

    def query(self):
        return self.copy is None

    def synchronize(self):
        self.target.run(self)

    def wait(self, stream):
        raise AssertionError("the target waits for its events")

    def run(self):
        if self.after is not None:
            self.target.run(self.after)
        if self.copy is not None:
            self.copy()
        self.copy = self.after = None  # only now: another thread may look


class QueuedTarget(Target):
    """Plain memory, with copies that are done late: when a stream waits for them, or more copies
    are queued.

    Until then, destinations are full of 0xFF. `lost` counts copies whose memory was freed before
    they ran.

    Args:
        out: copies to the host that queue up before the oldest is done.
        back: copies from there.
    """

    def __init__(self, out, back):
        self.lost = 0
        self._lags = out, back
        self._out, self._back = [], []
        self._lock = threading.RLock()
        self.out_stream = self

    def query(self):
        return not self._out

    def synchronize(self):
        self.run_all()

    def to_host(self, copies, *, after=None, **_):
        for copy in copies:
            here, there, nbytes = copy.memory()
            event = self._queued(self._out, copy.there, (here, there), nbytes, after)
        return event

    def bring_back(self, here, after):
        there = torch.full((here.numel(),), 0xFF, dtype=torch.uint8)
        ends = there.data_ptr(), here.data_ptr()
        return Arrival(there, self._queued(self._back, there, ends, here.numel(), after), None)

    def hand_over(self, event, tensors, consumer):
        self.run(event)

    def wait(self, event, stream):
        self.run(event)

    def run(self, event):
        """Do the copies of a queue, up to and including one."""
        with self._lock:
            queue = event.queue
            while event in queue:
                queue.pop(0).run()

    def run_all(self):
        with self._lock:
            for queue in (self._out, self._back):
                while queue:
                    queue.pop(0).run()

    def _queued(self, queue, there, ends, nbytes, after):
        # A reference to the tensor would be cleared too soon.
        memory = weakref.ref(there.untyped_storage())

        def copy():
            if memory() is None:
                self.lost += 1
            else:
                ctypes.memmove(*ends, nbytes)

        with self._lock:
            event = _QueuedCopy(self, queue, after, copy)
            queue.append(event)
            while len(queue) > self._lags[queue is self._back]:
                queue.pop(0).run()
        return event


def assert_idle(pool, target=None):
    """Check that no slab is in use, after all copies of a `QueuedTarget` have run."""
    if target is not None:
        target.run_all()
    stats = pool.stats()
    assert (stats.leased_slabs, stats.in_flight_slabs) == (0, 0)
