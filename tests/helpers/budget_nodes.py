"""Processes that share a `HostBudget`, and hold memory, fork, send handles, run other programs and
die as a test asks.

A node is forked from the test's process, or from another node, and answers its commands over a pair
of sockets, which all nodes inherit. The test holds no memory itself.
"""

import contextlib
import multiprocessing.util
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from doubles import fork, wait_until
from host_processes import MIB, state_of

import pinstage as ps

CAP = 8 * MIB


def budget():
    return ps.HostBudget(CAP, name="nodes")


class Work:
    """What a node does. A method is a command; its result is the answer."""

    def __init__(self):
        self.regions, self.leases, self.handles, self.pools = {}, {}, [], {}

    def region(self, key, nbytes, is_shared):
        options = {"shared": is_shared, "budget": budget(), "device": "cpu"}
        return self._try(self.regions, key, lambda: ps.HostRegion(nbytes, **options))

    def close(self, key):
        self.regions.pop(key).close()

    def send(self, key):
        return bytes(ForkingPickler.dumps(self.regions[key].handle()))

    def keep(self, key):
        self.handles.append(self.regions[key].handle())

    def drop(self):
        self.handles.clear()

    def receive(self, key, sent, is_kept=False):
        handle = pickle.loads(sent)
        self.regions[key] = ps.HostRegion.from_handle(handle, device="cpu")
        if is_kept:
            self.handles.append(handle)

    def acquire(self, key, nbytes, is_shared):
        memory = ps.memory.SharedMemory(register=False) if is_shared else ps.memory.PageableMemory()
        if is_shared not in self.pools:
            self.pools[is_shared] = ps.SlabPool(budget=budget(), memory=memory)
        return self._try(
            self.leases, key, lambda: self.pools[is_shared].acquire(nbytes, timeout=0.1)
        )

    def _try(self, held, key, make):
        """Return whether the budget allowed it."""
        try:
            held[key] = make()
        except (ps.errors.AcquireTimeoutError, ps.errors.BudgetExceededError):
            return False
        held[key].tensor().fill_(1)
        return True

    def release(self, key):
        self.leases.pop(key).release()
        for pool in self.pools.values():
            pool.trim()

    def insist(self, nbytes):
        self.pools[True].acquire(nbytes, timeout=0.1)

    def run_another_program(self):
        os.execv("/bin/sleep", ["sleep", "60"])


class Node:
    """A process of the test, by its pid and its end of a pair of sockets."""

    def __init__(self, nodes, number, pid):
        self._nodes, self._number, self.pid = nodes, number, pid

    def __call__(self, command, *arguments):
        """Let the node carry out a command; return its answer, or raise its error."""
        self.send(command, *arguments)
        is_well, answer = self.answer()
        if not is_well:
            raise answer
        return answer

    def send(self, command, *arguments):
        self._nodes.pairs[self._number][0].send((command, arguments))

    def answer(self):
        channel = self._nodes.pairs[self._number][0]
        assert channel.poll(20), "a node said nothing"
        return channel.recv()

    def fork(self):
        """Let the node fork; return the child."""
        number = self._nodes.take()
        child = Node(self._nodes, number, self("fork", number))
        self._nodes.nodes.append(child)
        return child

    def become_another_program(self):
        """Let the node replace itself, by ``exec``."""
        self.send("run_another_program")
        wait_until(lambda: "sleep" in Path(f"/proc/{self.pid}/comm").read_text())

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # another node's child
            os.waitpid(self.pid, 0)
        wait_until(lambda: state_of(self.pid) in ("", "Z", "X"))


class Nodes:
    """All processes of a test."""

    def __init__(self, most):
        self.pairs = [multiprocessing.Pipe() for _ in range(most)]
        self._free = list(range(most))
        self.nodes = []

    def take(self):
        return self._free.pop(0)

    def start(self):
        """Start a node that holds nothing."""
        number = self.take()
        self.nodes.append(Node(self, number, self._fork(number)))
        return self.nodes[-1]

    def end(self):
        for node in self.nodes:
            node.kill()
        for pair in self.pairs:
            for end in pair:
                end.close()

    def _fork(self, number):
        pid = fork()
        if pid == 0:
            multiprocessing.util._run_after_forkers()  # as in a child that multiprocessing forks
            self._serve(number, Work())
        return pid

    def _serve(self, number, work):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        channel = self.pairs[number][1]
        try:
            while True:
                command, arguments = channel.recv()
                try:
                    act = self._fork if command == "fork" else getattr(work, command)
                    channel.send((True, act(*arguments)))
                except Exception as error:  # noqa: BLE001 - raised by the test
                    channel.send((False, error))
        finally:
            os._exit(1)


def memory_of(pid):
    """Return the shared memory that a process has open or mapped: bytes by inode."""
    memory = {}
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:pinstage" in line:
                begin, end = line.split()[0].split("-")
                memory[int(line.split()[4])] = int(end, 16) - int(begin, 16)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if str(file.readlink()).startswith("/memfd:pinstage"):
                status = file.stat()
                memory[status.st_ino] = status.st_size
    return memory


def counted():
    """Return the bytes that count in the budget."""
    from pinstage._pool import held_bytes

    return held_bytes(budget().usage())
