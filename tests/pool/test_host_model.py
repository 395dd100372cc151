"""Pools of a `HostBudget` as simulated processes that the test steps; any of them may be killed at
any time.
"""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pinstage._pool import HostBudget, _host_budget, _rows, usage_of_host
from pinstage._pool._host_budget import LimitedMemory
from pinstage._pool._rows import RefusedForNow

CAP = 100


class Blocks:
    """Memory that only counts."""

    is_pinned = is_shared = False
    granularity = 1

    def allocate(self, nbytes):
        return SimpleNamespace(nbytes=nbytes)

    def deallocate(self, block):
        pass


class Process:
    """A process with one pool: blocks in use, idle blocks, and the bytes that it waits for."""

    def __init__(self):
        self.used, self.idle, self.wanted = [], [], 0
        self.memory = LimitedMemory(Blocks(), HostBudget(CAP, name="model"))

    @property
    def held(self):
        return sum(block.nbytes for block in self.used + self.idle)

    def trim(self):
        while self.idle:
            self.memory.deallocate(self.idle.pop())

    def ask(self):
        try:
            if self.wanted and self.wanted + self.held <= self.memory.allowed:
                self.used += self.memory.allocate(self.wanted, 1, 0.0)
                self.wanted = 0
        except RefusedForNow:
            pass


class Clock:
    now = 1e9

    def monotonic(self):
        return self.now

    time = monotonic


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch):
    monkeypatch.setenv(_rows.VARIABLE, str(tmp_path / "folder"))
    monkeypatch.setattr(_host_budget, "time", Host.clock)


which_of = st.integers(0, 3)


class Host(RuleBasedStateMachine):
    clock = Clock()
    living = ()

    @initialize()
    def begin(self):
        self.living = []

    def pick(self, which):
        return self.living[which % len(self.living)]

    @precondition(lambda self: len(self.living) < 4)
    @rule()
    def start(self):
        self.living.append(Process())

    @precondition(lambda self: self.living)
    @rule(which=which_of, nbytes=st.integers(1, CAP))
    def want(self, which, nbytes):
        process = self.pick(which)
        process.wanted = process.wanted or nbytes
        process.ask()

    @precondition(lambda self: self.living)
    @rule(which=which_of, is_freed=st.booleans())
    def release(self, which, is_freed):
        process = self.pick(which)
        process.idle += process.used
        process.used = []
        if is_freed:
            process.trim()

    @precondition(lambda self: self.living)
    @rule(which=which_of)
    def ask(self, which):
        self.pick(which).ask()

    @precondition(lambda self: self.living)
    @rule(which=which_of)
    def give_up(self, which):
        self.pick(which).wanted = 0

    @precondition(lambda self: self.living)
    @rule(which=which_of)
    def kill(self, which):
        process = self.pick(which)
        self.living.remove(process)
        process.memory._row.close()  # as the kernel does

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.1]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def files_say_what_is_held_within_the_cap(self):
        written = {usage.pool: usage.held_bytes for usage in usage_of_host()}
        assert written == {process.memory._row.usage.pool: process.held for process in self.living}
        assert sum(written.values()) <= CAP

    def teardown(self):
        """Every waiting process is served, at the first attempt, once the others have trimmed."""
        try:
            for process in self.living:
                process.idle, process.used = process.idle + process.used, []
                process.trim()
            self.clock.now += 0.1
            for process in self.living:
                process.ask()
                assert not process.wanted, "never served"
                process.idle, process.used = process.used, []
                process.trim()
                self.clock.now += 0.1
        finally:
            for process in self.living:
                process.memory._row.close()


def test_no_interleaving_exceeds_the_cap_or_starves():
    examples = settings.default.max_examples // 2
    run_state_machine_as_test(
        Host, settings=settings(max_examples=examples, stateful_step_count=40)
    )
