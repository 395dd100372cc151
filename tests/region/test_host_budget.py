"""What counts in a `HostBudget` when processes fork, send handles, run other programs, and are
killed.
"""

import gc
from pathlib import Path

import pytest
from budget_nodes import CAP, MIB, Nodes, counted, memory_of
from doubles import wait_until
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)


@pytest.fixture(autouse=True)
def all_rows_are_removed(budget_folder):
    yield
    gc.collect()
    wait_until(lambda: counted() == 0)
    assert not list(budget_folder.iterdir())


@pytest.fixture
def nodes():
    made = Nodes(8)
    yield made
    made.end()


@pytest.fixture
def sender(nodes):
    """A node that holds a shared region."""
    node = nodes.start()
    assert node("region", "x", 5 * MIB, True)
    return node


def test_memory_counts_while_its_handle_is_unread(nodes, sender):
    other = nodes.start()
    sender("send", "x")  # and nobody reads it
    sender("close", "x")
    assert counted() == sum(memory_of(sender.pid).values()) == 5 * MIB
    assert not other("region", "y", 4 * MIB, False)
    sender.kill()
    assert other("region", "y", 4 * MIB, False)


def test_memory_counts_once_wherever_its_handle_has_arrived(nodes, sender):
    other, sent = nodes.start(), sender("send", "x")
    sender("close", "x")
    other("receive", "x", sent)
    assert counted() == 5 * MIB
    sender.kill()
    assert counted() == 5 * MIB
    other("close", "x")
    wait_until(lambda: counted() == 0)


def test_another_program_of_a_receiver_has_none(nodes, sender):
    other = nodes.start()
    other("receive", "x", sender("send", "x"), True)
    sender.kill()
    other.become_another_program()
    wait_until(lambda: counted() == 0)  # the kernel closes files a little later
    other.kill()


def test_memory_counts_while_a_handle_keeps_it(sender):
    sender("keep", "x")
    sender("close", "x")
    wait_until(lambda: "/memfd:pinstage" not in Path(f"/proc/{sender.pid}/maps").read_text())
    assert counted() == 5 * MIB
    sender("drop")
    wait_until(lambda: counted() == 0)


def test_errors_name_children_that_keep_slabs(nodes):
    parent = nodes.start()
    assert parent("acquire", "x", 5 * MIB, True)
    parent.fork()
    parent("release", "x")
    with pytest.raises(Exception, match=r"5\.00 MiB in children forked from this process"):
        parent("insist", 4 * MIB)


# -- beside a model --------------------------------------------------------------------------------


MOST = 16  # processes of an example
which_of = st.integers(0, 4)


class Memory:
    """Memory of the model: who has it, and whether that process can give it back."""

    def __init__(self, nbytes, is_shared, holder):
        self.nbytes, self.is_shared = nbytes, is_shared
        self.holders, self.kept_by = {holder}, set()

    def is_held(self):
        return bool(self.holders | self.kept_by)


class Host(RuleBasedStateMachine):
    """Up to five processes, and what they hold."""

    nodes = None

    @initialize()
    def begin(self):
        self.nodes = Nodes(MOST)
        self.living, self.memories, self.keys = (
            [self.nodes.start(), self.nodes.start()],
            {},
            iter(range(10**6)),
        )

    def held(self):
        return sum(memory.nbytes for memory in self.memories.values() if memory.is_held())

    def pick(self, which):
        return self.living[which % len(self.living)]

    def take(self, node, command, nbytes, is_shared):
        key = f"{command} {next(self.keys)}"
        fits = self.held() + nbytes <= CAP
        assert node(command, key, nbytes, is_shared) is fits
        if fits:
            self.memories[key] = Memory(nbytes, is_shared, node)

    @rule(which=which_of, size=st.integers(1, 3), is_shared=st.booleans())
    def make_a_region(self, which, size, is_shared):
        self.take(self.pick(which), "region", size * MIB, is_shared)

    @rule(which=which_of, size=st.integers(1, 3), is_shared=st.booleans())
    def lease_a_slab(self, which, size, is_shared):
        self.take(self.pick(which), "acquire", size * MIB, is_shared)

    @rule(which=which_of, turn=st.integers(0, 9))
    def give_back(self, which, turn):
        node = self.pick(which)
        own = [key for key, memory in self.memories.items() if node in memory.holders]
        if own:
            key = own[turn % len(own)]
            node("close" if key.startswith("region") else "release", key)
            self.memories[key].holders.discard(node)

    @precondition(lambda self: len(self.living) < 5 and len(self.nodes.nodes) < MOST)
    @rule(which=which_of)
    def fork(self, which):
        node = self.pick(which)
        child = node.fork()
        self.living.append(child)
        for memory in self.memories.values():
            if memory.is_shared and node in memory.holders | memory.kept_by:
                memory.kept_by.add(child)

    @rule(which=which_of, to=which_of, turn=st.integers(0, 9), arrives=st.booleans())
    def send_a_handle(self, which, to, turn, arrives):
        node, other = self.pick(which), self.pick(to)
        own = [
            key
            for key, memory in self.memories.items()
            if node in memory.holders and memory.is_shared and key.startswith("region")
        ]
        if not own or node is other:
            return
        memory = self.memories[own[turn % len(own)]]
        sent = node("send", own[turn % len(own)])
        if not arrives:
            memory.kept_by.add(node)
        elif other not in memory.holders:
            other("receive", own[turn % len(own)], sent)
            memory.holders.add(other)
        else:
            memory.kept_by.add(node)

    @precondition(lambda self: len(self.living) > 1)
    @rule(which=which_of, dies=st.booleans())
    def end(self, which, dies):
        node = self.pick(which)
        if dies:
            node.kill()
        else:
            node.become_another_program()
        self.living.remove(node)
        for memory in self.memories.values():
            memory.holders.discard(node)
            memory.kept_by.discard(node)

    @invariant()
    def what_counts_is_what_is_held(self):
        if self.nodes is not None:
            wait_until(lambda: counted() == self.held())
            shared = {}
            for node in self.living:
                shared |= memory_of(node.pid)
            assert sum(shared.values()) == sum(
                memory.nbytes
                for memory in self.memories.values()
                if memory.is_shared and memory.is_held()
            )

    def teardown(self):
        if self.nodes is not None:
            self.nodes.end()


def test_what_counts_is_what_any_living_process_holds():
    phases = [Phase.explicit, Phase.generate]  # to make a failure smaller would take minutes
    run_state_machine_as_test(
        Host, settings=settings(max_examples=12, stateful_step_count=15, phases=phases)
    )
