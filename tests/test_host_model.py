"""The shares of a `HostBudget`, as processes that the test moves step by step: a model in which any of them may die."""

import json
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pinstage._pool import _host_budget, _host_ledger
from pinstage._pool._host_budget import HostBudget, HostIsFull, Share

CAP = 100


class Process:
    """A process with one pool: what it has in use, what is idle, and what it waits for."""

    def __init__(self):
        self.closed = False
        self.used = self.idle = self.wanted = 0
        self.share = Share(HostBudget(CAP, name="model"))
        self.share._pool, self.share._line = weakref.ref(self), SimpleNamespace(waits=0, seconds=0.0)

    @property
    def held(self):
        return self.used + self.idle

    def lend(self, nbytes):
        self.free(min(nbytes, self.idle))

    def free(self, nbytes):
        self.idle -= nbytes
        self.share.give(nbytes)

    def is_waited_for(self):
        return bool(self.wanted)

    def report(self, waits, wait_seconds):
        return {"free_bytes": self.idle}

    def ask(self):
        """Try to get what is waited for, from what is idle or by growing."""
        nbytes = self.wanted
        if self.idle >= nbytes:
            self.idle -= nbytes
        else:
            try:
                self.share.take(nbytes)
            except HostIsFull:
                return
        self.used += nbytes
        self.wanted = 0

    def look(self):
        """Do what its thread does when it is woken, or by itself."""
        return self.share.look(self.share._bell.read(4096) or b"")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(_host_ledger.VARIABLE, str(tmp_path / "ledger"))
    return tmp_path / "ledger"


def rows():
    with _host_ledger.transaction() as entries:
        return entries.rows()


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


class Host(RuleBasedStateMachine):
    clock = Clock()

    @initialize()
    def begin(self):
        self.living = []

    @precondition(lambda self: len(self.living) < 4)
    @rule()
    def start(self):
        self.living.append(Process())

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3), nbytes=st.integers(1, CAP))
    def want(self, which, nbytes):
        process = self.living[which % len(self.living)]
        if not process.wanted and process.used + nbytes <= CAP:
            process.wanted = nbytes
            process.ask()

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3))
    def ask_again(self, which):
        process = self.living[which % len(self.living)]
        if process.wanted:
            process.ask()

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3), nbytes=st.integers(1, CAP), is_freed=st.booleans())
    def release(self, which, nbytes, is_freed):
        process = self.living[which % len(self.living)]
        nbytes = min(nbytes, process.used)
        process.used -= nbytes
        process.idle += nbytes
        if is_freed:
            process.free(nbytes)

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3))
    def look(self, which):
        self.living[which % len(self.living)].look()

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3))
    def give_up(self, which):
        self.living[which % len(self.living)].wanted = 0

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3))
    def kill(self, which):
        self.living.pop(which % len(self.living)).share._bell.close()  # as the kernel does

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 3))
    def close(self, which):
        process = self.living.pop(which % len(self.living))
        process.idle, process.used = process.idle + process.used, 0
        process.closed = True
        process.free(process.idle)
        assert process.look()
        assert process.share._key not in {row.key for row in rows()}

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.1]))
    def wait(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: self.living)
    @rule()
    def lose_the_file(self):
        """Somebody removes it; those who wake up write themselves down anew, before anybody else comes."""
        _host_ledger._file().unlink(missing_ok=True)
        for process in self.living:
            process.look()

    @invariant()
    def nobody_exceeds_it(self):
        if not hasattr(self, "living"):
            return
        written = {row.key: row.bytes for row in rows()}
        assert sum(process.held for process in self.living) <= CAP
        assert sum(written.values()) <= CAP
        assert set(written) == {process.share._key for process in self.living}
        assert all(process.held <= written[process.share._key] for process in self.living)

    def teardown(self):
        """Whoever waits is served once the others use nothing, or give back what they get."""
        try:
            while waiting := [process for process in getattr(self, "living", ()) if process.wanted]:
                for _ in range(200):
                    self.clock.now += 0.3
                    for process in self.living:
                        process.idle, process.used = process.idle + process.used, 0
                        process.look()
                        if process.wanted:
                            process.ask()
                    if not waiting[0].wanted:
                        break
                assert not waiting[0].wanted, "never served"
        finally:
            for process in getattr(self, "living", ()):
                process.share._bell.close()
            if hasattr(self, "living"):
                assert rows() == []


@pytest.fixture
def clock(monkeypatch):
    Host.clock.now = 1e9
    monkeypatch.setattr(_host_budget, "time", Host.clock)
    return Host.clock


def test_no_interleaving_of_processes_exceeds_a_budget_or_leaves_one_waiting(clock):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Host, settings=settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)
    )


@pytest.fixture
def two():
    processes = [Process(), Process()]
    yield processes
    for process in processes:
        process.share._bell.close()


def use(process, nbytes):
    process.wanted = nbytes
    process.ask()
    return not process.wanted


def test_what_is_idle_in_one_process_is_lent_to_another_one_as_much_as_it_wants(two):
    first, second = two
    assert use(first, 80)
    first.used, first.idle = 0, 80
    assert not use(second, 60)
    second.look()  # asks the first
    first.look()
    assert first.idle == 40  # 20 were free
    first.look()
    second.look()
    second.ask()
    assert (second.used, second.wanted) == (60, 0)


def test_one_lender_after_the_other_is_asked_the_largest_first(two):
    first, second = two
    third = Process()
    assert use(first, 30)
    assert use(second, 70)
    first.used, first.idle, second.used, second.idle = 0, 30, 0, 70
    assert not use(third, 50)
    for _ in range(3):
        third.look()
        second.look()
        first.look()
    third.ask()
    assert (third.used, second.idle, first.idle) == (50, 20, 30)
    third.share._bell.close()


def test_a_large_request_has_the_room_that_comes_free_to_itself_for_a_second(two, clock):
    first, second = two
    third = Process()
    assert use(first, 90)
    assert not use(second, 50)
    clock.now += 0.9
    assert not use(third, 10)  # though there is room for it
    clock.now += 0.2
    assert use(third, 10)
    third.share._bell.close()


def test_two_that_wait_for_one_another_s_room_do_not_ring_each_other_without_end(two, clock):
    first, second = two
    assert use(first, 50)
    assert use(second, 50)
    assert not use(first, 20)
    assert not use(second, 20)
    looks = 0
    while any(process.share._bell.read(1) for process in two):
        for process in two:
            process.look()
            looks += 1
        assert looks < 20


def test_a_request_that_gave_up_makes_nobody_free_anything(two, clock):
    first, second = two
    assert use(first, 80)
    first.used, first.idle = 0, 80
    assert not use(second, 60)
    second.wanted = 0
    clock.now += 0.3
    second.look()
    first.look()
    assert first.idle == 80
    assert [row.wanted for row in rows()] == [0, 0]


def test_a_pool_says_how_it_is_when_asked_and_not_twice_in_a_second(two, clock):
    first, _ = two
    first.idle = 7
    for idle, seconds, told in ((7, 0, 7), (8, 0.5, 7), (9, 0.5, 9)):
        first.idle = idle
        clock.now += seconds
        _host_ledger.ring(first.share._pipe, b".")
        first.look()
        assert json.loads({row.key: row.told for row in rows()}[first.share._key])["free_bytes"] == told
    first.idle = 0
