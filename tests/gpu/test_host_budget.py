"""One cap for the processes of a host, over memory that is really page-locked."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_processes import MIB, Truth
from torchrun import environment

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("budget_rank.py")


class Rank:
    """The program in its own process."""

    def __init__(self, folder, device, *arguments):
        command = [sys.executable, str(PROGRAM), str(device), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, env=environment(PINSTAGE_BUDGET_DIR=str(folder)), **pipes
        )

    def hear(self):
        """Return its next message."""
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}"
        return json.loads(line)


@pytest.fixture
def rank(tmp_path, cuda_device):
    """Start a program that is ended with the test."""
    ranks = []

    def start(*arguments):
        ranks.append(Rank(tmp_path / "budgets", cuda_device, *arguments))
        return ranks[-1]

    yield start
    for one in ranks:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_share_is_free_after_kills_and_releases(rank, is_killed):
    holder = rank("hold", 48 * MIB)
    assert holder.hear() == {"is_pinned": True}
    waiter = rank("want", 40 * MIB)
    assert waiter.hear() == {"ready": True}
    time.sleep(1)  # long enough to be served, if it could be
    before = time.monotonic()
    if is_killed:
        holder.process.kill()
    else:
        holder.process.stdin.write("\n")
        holder.process.stdin.flush()
    holder.process.wait()
    ended = time.monotonic()
    served = waiter.hear()
    assert served["is_pinned"] is True
    assert before < served["at"] < ended + 1
    assert waiter.hear() == {"is_right": True}


def test_two_processes_never_page_lock_beyond_the_cap(rank, tmp_path):
    truth = Truth.create(tmp_path / "truth")
    ranks = [rank("stage", tmp_path / "truth", place, 12) for place in range(2)]
    excesses, peak = 0, 0
    while any(one.process.poll() is None for one in ranks):
        excesses += truth.exceeds(64 * MIB)
        peak = max(peak, truth.held())
        time.sleep(0.002)
    found = [one.hear() for one in ranks]
    assert excesses == 0
    assert peak > 32 * MIB
    for said in found:
        assert (said["wrong"], said["excesses"]) == (0, 0)
        assert said["batches"] > 20
