"""`helpers.warm`: the process that forks programs ends with the one that started it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, multiprocessing.util, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from helpers.warm import command

server = subprocess.check_output(command("-c", "import os; print(os.getppid())"), text=True)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600], daemon=True)
worker.start()  # with copies of all descriptors, until the end of its parent
print(server.strip(), worker.pid, flush=True)
"""


@pytest.fixture
def start():
    """Return a function that starts `PROGRAM`, and a line more, and returns its process."""
    processes = []

    def start(line=""):
        command = [sys.executable, "-c", PROGRAM + line, str(Path(__file__).parents[1])]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_program_ends_beside_its_living_worker(start):
    process = start()
    _, worker = map(int, process.stdout.readline().split())
    assert process.wait(timeout=30) == 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def test_the_server_of_a_killed_program_ends(start):
    process = start("time.sleep(600)")
    server, worker = map(int, process.stdout.readline().split())
    end = os.pidfd_open(server)
    process.kill()
    assert select.select([end], [], [], 30)[0]
    os.close(end)
    os.kill(worker, signal.SIGKILL)
