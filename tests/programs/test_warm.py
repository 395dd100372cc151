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
sys.stdin.read()
"""


@pytest.fixture
def running():
    """`PROGRAM`, which ends when its standard input is closed, and the ends of its server and its
    worker.
    """
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1])]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    server, worker = map(os.pidfd_open, map(int, process.stdout.readline().split()))
    yield process, server
    process.stdin.close()
    process.stdout.close()
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(worker, signal.SIGKILL)
    for end in (server, worker):
        os.close(end)


def test_a_program_ends_beside_its_living_worker(running):
    process, _ = running
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_the_server_of_a_killed_program_ends(running):
    process, server = running
    process.kill()
    assert select.select([server], [], [], 30)[0]
