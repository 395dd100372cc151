"""`Stager.prefetch` in a thread: when it has one, the state that it takes from the loop, and how it
ends.
"""

import _thread
import contextlib
import contextvars
import gc
import signal
import textwrap
import threading
import time
import traceback
import weakref

import loader_data as data
import pytest
import torch
import warm
from doubles import PATIENCE_SECONDS, claim_in_child, wait_until
from torch.utils import data as torch_data
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps
from pinstage._stage._target import Target
from pinstage.errors import PinstageError, PoolClosedError


def has_thread():
    return any(thread.name == "pinstage.prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left():
    """Fail a test that leaves a thread behind."""
    yield
    gc.collect()
    wait_until(lambda: not has_thread())


def numbered(count):
    return [torch.tensor([number]) for number in range(count)]


class Held:
    """Yields numbers. From the second one on, each ``next()`` blocks until `go_on` lets it return.

    Attributes:
        calls: number of calls of ``next()``.
        threads: the threads of these calls.
        closed_in: the thread in which the generator was closed.
    """

    def __init__(self, count=10):
        self.count = count
        self.calls = 0
        self.threads = []
        self.closed_in = None
        self._may_return = threading.Semaphore(0)

    def __iter__(self):
        try:
            for number in range(self.count):
                self.calls += 1
                self.threads.append(_thread.get_ident())
                if number:
                    assert self._may_return.acquire(timeout=PATIENCE_SECONDS)
                yield torch.tensor([number])
        finally:
            self.closed_in = _thread.get_ident()

    def go_on(self, count=1):
        self._may_return.release(count)


class HeldWithState(Held):
    def state_dict(self):
        return self.calls

    def load_state_dict(self, state):
        raise AssertionError


class HeldLoader(DataLoader):
    """A loader that iterates over `held`, with a short timeout."""

    def __init__(self):
        super().__init__(range(9), num_workers=1, timeout=0.05)
        self.held = Held()

    def __iter__(self):
        return iter(self.held)

    def state_dict(self):
        return None

    load_state_dict = HeldWithState.load_state_dict


# -- when ------------------------------------------------------------------------------------------


def loader(**options):
    return DataLoader(data.Mapped(data.scalar, 8), **{"batch_size": 2, "num_workers": 1} | options)


class OwnSampler(torch_data.SequentialSampler):
    pass


class OwnIteration(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


WEIGHTED = torch_data.WeightedRandomSampler([1.0] * 8, 8)

IN_A_THREAD = {
    "workers": loader,
    "shuffled": lambda: loader(shuffle=True),
    "batch sampler": lambda: loader(
        batch_size=1, batch_sampler=torch_data.BatchSampler(WEIGHTED, 2, drop_last=False)
    ),
    "distributed": lambda: loader(
        sampler=torch_data.DistributedSampler(range(8), num_replicas=1, rank=0)
    ),
    "samples": lambda: loader(batch_size=None),
    "iterable": lambda: DataLoader(data.Streamed(data.scalar), 2, num_workers=1),
    "subclass": lambda: type("Subclass", (DataLoader,), {})(range(8), num_workers=1),
    "stateful": lambda: StatefulDataLoader(range(8), 2, num_workers=1, shuffle=True),
}
HERE = {
    "no workers": lambda: loader(num_workers=0),
    "a sampler of its own": lambda: loader(sampler=OwnSampler(range(8))),
    "a list for a sampler": lambda: loader(sampler=[1, 2]),
    "a batch sampler of its own": lambda: loader(batch_size=1, batch_sampler=[[1], [2]]),
    "a sampler of its own inside": lambda: loader(
        batch_size=1,
        batch_sampler=torch_data.BatchSampler(OwnSampler(range(8)), 2, drop_last=False),
    ),
    "an iteration of its own": lambda: OwnIteration(range(8), num_workers=1),
    "a list": lambda: [1],
    "a generator": lambda: (number for number in [1]),
    "an iterator of a loader": lambda: iter(loader(num_workers=0)),
    "ours": lambda: ps.DataLoader(range(8), 2, num_workers=1, device="cpu"),
}


@pytest.mark.parametrize("kind", IN_A_THREAD | HERE)
def test_auto_uses_a_thread_where_next_draws_nothing(stager, kind):
    batches = iter(stager.prefetch((IN_A_THREAD | HERE)[kind]()))
    next(batches)
    assert has_thread() is (kind in IN_A_THREAD)


@pytest.mark.parametrize("options", [{"depth": 0}, {"background": False}])
def test_a_thread_can_be_refused(stager, options):
    batches = iter(stager.prefetch(loader(), **options))
    next(batches)
    assert not has_thread()


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ([], {"depth": -1}, "depth must not be negative: -1; 0 sends nothing ahead"),
        (
            [],
            {"depth": 0, "background": True},
            "background=True needs a depth of 1 or more: 0 stages nothing ahead",
        ),
        *(
            ([], {"background": wrong}, f"background must be 'auto', True or False: {wrong!r}")
            for wrong in (None, 1, 0, "yes", 2.5)
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(stager, source, options, says):
    with pytest.raises(ValueError, match=says):
        stager.prefetch(source, **options)


def test_the_first_batch_is_read_in_the_caller(stager):
    begun = []

    class Source(Held):
        def __iter__(self):
            begun.append(_thread.get_ident())
            return super().__iter__()

    source = Source(4)
    source.go_on(4)
    assert len(list(stager.prefetch(source, background=True))) == 4
    here = _thread.get_ident()
    assert begun == [here]
    assert source.threads[0] == here
    assert here not in source.threads[1:]


def test_without_threads_the_caller_reads(stager, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = Held(4)
    source.go_on(4)
    assert [int(batch) for batch in stager.prefetch(source, background=True)] == [0, 1, 2, 3]
    assert set(source.threads) == {_thread.get_ident()}


# -- state of the thread ---------------------------------------------------------------------------

COLOUR = contextvars.ContextVar("colour", default="none")


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [
            (
                torch.is_autocast_enabled(kind),
                torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            )
            for kind in ("cpu", "cuda")
        ],
        "cache": torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "colour": COLOUR.get(),
    }


@contextlib.contextmanager
def coloured(colour):
    token = COLOUR.set(colour)
    yield
    COLOUR.reset(token)


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
        lambda: coloured("red"),
    ],
)
def test_the_thread_inherits_the_caller_s_state(stager, mode):
    seen = []

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            seen.append(state())
            return "a batch"

    with mode():
        expected = state()
        batches = iter(stager.prefetch(Source(), background=True))
    next(batches)
    wait_until(lambda: len(seen) == 3)
    assert seen[1:] == [expected, expected]
    assert state() == seen[0]
    batches.close()


def test_a_thread_without_the_caller_s_state_fails(stager, monkeypatch):
    def refuse(_):
        raise ZeroDivisionError

    monkeypatch.setattr("pinstage._stage._target.Target.use_own_stream", refuse)
    batches = iter(stager.prefetch(numbered(3), background=True))
    assert int(next(batches)) == 0
    with pytest.raises(ZeroDivisionError):
        next(batches)


@pytest.mark.parametrize(
    ("kind", "in_thread"),
    [
        (KeyError, False),
        *((kind, True) for kind in (KeyError, SystemExit, KeyboardInterrupt, GeneratorExit)),
    ],
)
def test_any_error_has_the_traceback_of_the_source(stager, kind, in_thread):
    def fails_here():
        raise kind

    def read():
        yield from numbered(3)
        fails_here()

    seen = []
    with pytest.raises(kind) as caught:
        seen.extend(stager.prefetch(read(), depth=5, background=in_thread))
    assert [int(batch) for batch in seen] == [0, 1, 2]
    assert "fails_here" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_the_state_before_any_batch_is_the_beginning(stager):
    source = HeldWithState()
    batches = stager.prefetch(source, background=True)
    iterator = iter(batches)
    source.calls = 7
    assert batches.state_dict() == 0
    next(iterator)
    assert batches.state_dict() == 8
    wait_until(lambda: source.calls == 9)
    assert batches.state_dict() == 8
    source.go_on()
    next(iterator)
    assert batches.state_dict() == 9
    source.go_on()


# -- page-locked batches ---------------------------------------------------------------------------


def numbered_row(index):
    return torch.full((3,), index)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize(
    ("options", "borrows"),
    [
        ({"num_workers": 1, "pin_memory": True}, True),
        ({"num_workers": 1}, False),
        ({"pin_memory": True}, True),
        ({"pin_memory": True, "collate_fn": torch.stack}, False),
        ({"pin_memory": True, "batch_size": None}, False),
        ({"num_workers": 1, "pin_memory": True, "sampler": OwnSampler(range(3))}, True),
        (None, False),
    ],
)
def test_torchs_page_locked_batches_may_be_read_later(
    prefetch, monkeypatch, slabs_for_all, options, borrows
):
    asked = set()
    monkeypatch.setattr(Target, "find_locked", lambda _, *, each: asked.add(each))
    batches = [numbered_row(number) for number in range(3)]
    source = batches
    if options is not None:
        source = DataLoader(data.Mapped(numbered_row, 3), **{"batch_size": 1, **options})
    assert [int(batch.flatten()[0]) for batch in prefetch(source)] == [0, 1, 2]
    assert asked == {borrows}


# -- leaving ---------------------------------------------------------------------------------------


def leave_by_break(batches, reached):
    for _ in batches:
        reached()
        break


def leave_by_an_exception(batches, reached):
    with contextlib.suppress(KeyError):
        for _ in batches:
            reached()
            raise KeyError


def leave_by_dropping(batches, reached):
    iterator = iter(batches)
    next(iterator)
    reached()


def leave_in_a_cycle(batches, reached):
    cycle = [iter(batches)]
    cycle.append(cycle)
    next(cycle[0])
    reached()
    del cycle
    gc.collect()


def leave_by_an_interrupt(batches, reached):
    timer = threading.Timer(0.1, signal.pthread_kill, [_thread.get_ident(), signal.SIGINT])
    timer.start()
    with contextlib.suppress(KeyboardInterrupt):
        for _ in batches:
            reached()
    timer.join()


def in_the_second(source):
    """Return a function that waits until a source is in its second ``next()``."""
    return lambda: wait_until(lambda: source.calls == 2)


LEAVE = [
    leave_by_break,
    leave_by_an_exception,
    leave_by_dropping,
    leave_in_a_cycle,
    leave_by_an_interrupt,
]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("leave", LEAVE)
def test_an_abandoned_pass_ends_when_the_source_returns(stager, leave):
    source = Held()
    leave(stager.prefetch(source, background=True), in_the_second(source))
    assert has_thread()
    assert source.closed_in is None
    source.go_on()
    returned = time.monotonic()
    wait_until(lambda: not has_thread())
    assert time.monotonic() - returned < 1
    assert source.calls == 2
    assert source.closed_in not in (None, _thread.get_ident())
    assert stager.stats().batches == 1
    assert stager.stats().pool.leased_slabs == 0


@pytest.mark.usefixtures("interruptible", "slabs_for_all")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("leave", LEAVE)
def test_an_abandoned_pass_waits_for_no_slab(leave, is_first, background):
    source, held, others = Held(), [], []

    def in_the_line():
        held.append(pool.acquire("1MiB"))
        if not is_first:
            others.append(background(pool.acquire, 1, timeout=PATIENCE_SECONDS))
            wait_until(lambda: pool.stats().waits == 1)
        source.go_on()
        wait_until(lambda: pool.stats().waits == 2 - is_first)

    with (
        ps.SlabPool("1MiB", memory=ps.memory.PageableMemory()) as pool,
        ps.Stager("cpu", pool=pool) as stager,
    ):
        leave(stager.prefetch(source, background=True), in_the_line)
        left = time.monotonic()
        wait_until(lambda: not has_thread())
        assert time.monotonic() - left < 1
        assert source.closed_in not in (None, _thread.get_ident())
        assert pool.stats().leased_slabs == 1
        held[0].release()
        for other in others:
            other.result(PATIENCE_SECONDS).release()


def test_a_waiting_thread_keeps_no_cycle_alive(stager):
    read = []

    class Reader:
        def read(self):
            for batch in numbered(100):
                read.append(batch)
                yield batch

    reader = Reader()
    reader.batches = iter(stager.prefetch(reader.read(), background=True))
    next(reader.batches)
    wait_until(lambda: stager.stats().batches == 3)
    gone = weakref.ref(reader)
    del reader
    wait_until(lambda: gc.collect() is not None and gone() is None)
    assert len(read) == 3


def test_batches_before_an_error_end_with_the_pass(stager):
    def read():
        yield from numbered(3)
        raise KeyError

    def transfers():
        return sum(isinstance(thing, ps.Transfer) for thing in gc.get_objects())

    batches = iter(stager.prefetch(read(), depth=3, background=True))
    next(batches)
    wait_until(lambda: not has_thread())  # it has passed on its error
    gc.collect()
    gc.disable()
    try:
        assert transfers() == 2
        del batches
        assert transfers() == 0
    finally:
        gc.enable()


def test_a_new_pass_waits_for_the_source(stager, background):
    source = Held()
    leave_by_break(stager.prefetch(source, background=True), in_the_second(source))
    again = background(iter, stager.prefetch(source, background=True))
    time.sleep(0.05)
    assert not again.done()
    source.go_on(20)
    assert [int(batch) for batch in again.result(PATIENCE_SECONDS)] == list(range(10))


@pytest.mark.parametrize("what", ["a pass", "a state that is loaded"])
def test_a_stuck_source_is_named_with_its_place(stager, what):
    source = HeldLoader()
    batches = stager.prefetch(source, background=True)
    leave_by_break(batches, in_the_second(source.held))
    with pytest.raises(
        PinstageError,
        match=r"cannot read the HeldLoader: .* after 0\.05 s, in .*wait .*threading\.py, line",
    ):
        iter(batches) if what == "a pass" else batches.load_state_dict(None)
    source.held.go_on()


def test_another_pass_ends_the_one_whose_thread_reads(stager):
    source = loader(num_workers=2, batch_size=1, persistent_workers=True)
    older = iter(stager.prefetch(source))
    assert int(next(older)) == 0
    newer = iter(stager.prefetch(source))
    assert int(next(newer)) == 0
    with pytest.raises(PinstageError, match="cannot continue this pass over the DataLoader: "):
        next(older)
    assert next(older, None) is None
    assert list(map(int, newer)) == list(range(1, 8))


def test_another_pass_wakes_a_loop_that_waits(stager, background):
    source = HeldLoader()
    batches = iter(stager.prefetch(source, background=True))
    next(batches)
    waiting = background(next, batches)
    in_the_second(source.held)()
    with pytest.raises(PinstageError, match="cannot read the Held"):
        iter(stager.prefetch(source))
    assert not waiting.done()
    source.held.go_on()
    with pytest.raises(PinstageError, match="cannot continue this pass over the Held"):
        waiting.result(PATIENCE_SECONDS)


def test_a_state_that_is_loaded_ends_the_pass(stager):
    batches = stager.prefetch(StatefulDataLoader(range(80), 2, num_workers=1))
    iterator = iter(batches)
    next(iterator)
    state = batches.state_dict()
    next(iterator)
    batches.load_state_dict(state)
    with pytest.raises(PinstageError, match="cannot continue this pass over the Stateful"):
        next(iterator)
    assert next(iter(batches)).tolist() == [2, 3]


@pytest.mark.usefixtures("slabs_for_all")
def test_closing_the_stager_fails_the_loop(stager):
    source = Held()
    batches = iter(stager.prefetch(source, background=True))
    next(batches)
    wait_until(lambda: source.calls == 2)
    stager.close()
    source.go_on()
    with pytest.raises(PoolClosedError):
        next(batches)


def test_a_forked_child_reports_the_missing_thread(stager):
    batches = stager.prefetch(numbered(9), background=True)
    iterator = iter(batches)
    next(iterator)

    def claim():
        with pytest.raises(
            PinstageError, match=r"pass of process \d+ in process \d+: .*; begin a pass with"
        ):
            next(iterator)
        assert not has_thread()
        iter(batches)

    claim_in_child(claim)
    assert len(list(iterator)) == 8


# -- the end of the program ------------------------------------------------------------------------

PROGRAM = """
import atexit, threading, time, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch, pinstage as ps

class Quick(torch.utils.data.Dataset):
    def __len__(self):
        return 9000

    def __getitem__(self, index):
        return torch.ones(3000)

class Slow(Quick):
    def __getitem__(self, index):
        time.sleep(index and 2)
        return torch.ones(1000)

def read():
    while True:
        yield torch.ones(1000, 100).cumsum(0)

took_some = threading.Event()

def take():
    try:
        for number, _ in enumerate(batches):
            if number == 3:
                took_some.set()
    except ps.errors.PinstageError:
        print("stopped", flush=True)

stager = ps.Stager("cpu", max_bytes="64MiB")
loader = torch.utils.data.DataLoader
"""

SOURCES = {
    "a source that goes on and on": "batches = iter(stager.prefetch(read(), background=True))",
    "a thread that waits for a slab": """
        stager = ps.Stager("cpu", max_bytes="1MiB")

        def read():
            yield [torch.ones(20_000) for _ in range(9)]
            lease = stager.pool.acquire("1MiB")
            yield [torch.ones(20_000) for _ in range(9)]

        batches = iter(stager.prefetch(read(), background=True))
        next(batches)
        while not stager.pool.stats().waits:
            time.sleep(0.001)
    """,
    "workers that are slow": """
        source = loader(Slow(), num_workers=1, prefetch_factor=1)
        batches = iter(stager.prefetch(source, background=True))
    """,
    "workers that are quick": """
        source = loader(Quick(), 4, num_workers=2, persistent_workers=True)
        batches = iter(stager.prefetch(source, background=True))
    """,
}
LOOPS = {
    "kept": "next(batches)",
    "left": "next(batches); del batches",
    "taken by a daemon": "threading.Thread(target=take, daemon=True).start(); took_some.wait()",
    "taken by a thread that has ended": """
        taking = threading.Thread(target=lambda: next(batches))
        taking.start()
        taking.join()
    """,
    "taken after the end": "atexit.register(take); next(batches)",
}


def run_to_its_end(*parts):
    """Run a program that prints "end" in its last line; return what it prints afterwards."""
    program = "\n".join(map(textwrap.dedent, (PROGRAM, *parts, 'print("end", flush=True)')))
    done = warm.completed(program, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("end\n")
    return done.stdout.removeprefix("end\n")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_program_ends_while_its_thread_waits(loop):
    found = run_to_its_end(SOURCES["a source that goes on and on"], LOOPS[loop])
    if loop != "taken by a daemon":  # which Python may end first
        assert found == ("stopped\n" if loop == "taken after the end" else "")


@pytest.mark.parametrize(
    ("source", "loop"),
    [
        ("a thread that waits for a slab", ""),
        ("workers that are slow", LOOPS["kept"]),
        ("workers that are slow", LOOPS["left"]),
        ("workers that are quick", LOOPS["kept"]),
    ],
)
def test_a_program_ends_whatever_its_source(source, loop):
    run_to_its_end(SOURCES[source], loop)


def test_a_loop_goes_on_after_the_main_thread():
    found = run_to_its_end(
        """
        def train():
            numbers = stager.prefetch(map(torch.tensor, range(50)), background=True)
            for number in numbers:
                if number == 3:
                    threading.main_thread().join()
                if number > 3:
                    time.sleep(0.01)
            print(int(number), flush=True)

        threading.Thread(target=train).start()
        """
    )
    assert found == "49\n"


def test_a_program_waits_for_its_source():
    found = run_to_its_end(
        """
        reading = threading.Event()

        def read():
            yield torch.ones(2)
            reading.set()
            threading.main_thread().join()
            print("read", flush=True)
            yield torch.ones(2)

        batches = iter(stager.prefetch(read(), background=True))
        next(batches)
        reading.wait()
        """
    )
    assert found == "read\n"
