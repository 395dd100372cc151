"""Processes that share a `HostBudget`, for the `test_host_budget.py` of pools and of GPUs.

A file that all of them map has the bytes that each really holds: one number per process, written
before memory is allocated and after it is freed. Every process that allocates checks the sum.
"""

import json
import mmap
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pinstage as ps

MIB = 1 << 20
PLACES = 16


def state_of(pid):
    """Return a process's state in the kernel: Z for a zombie, empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Truth:
    """The bytes that each process holds, and its id."""

    def __init__(self, path):
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16 * PLACES)
        self._numbers = memoryview(self._map).cast("q")

    @staticmethod
    def create(path):
        Path(path).write_bytes(bytes(16 * PLACES))
        return Truth(path)

    def begin(self, place):
        self._numbers[2 * place] = os.getpid()
        self._numbers[2 * place + 1] = 0

    def add(self, place, nbytes):
        self._numbers[2 * place + 1] += nbytes

    def held(self):
        """Return the bytes that living processes hold."""
        held = 0
        for place in range(PLACES):
            pid, nbytes = self._numbers[2 * place], self._numbers[2 * place + 1]
            if nbytes and state_of(pid) not in ("", "Z", "X"):
                held += nbytes
        return held

    def exceeds(self, cap):
        """Return whether more than a cap is held. The kernel frees a killed process's memory with a
        delay.
        """
        return self.held() > cap and (time.sleep(0.2) or self.held() > cap)


class Truthful:
    """Adds to a kind of memory that its bytes are written to the file."""

    def __init__(self, truth, place, cap, *arguments):
        super().__init__(*arguments)
        self._truth, self._place, self._cap = truth, place, cap
        self.excesses = 0
        truth.begin(place)

    def allocate(self, nbytes):
        self._truth.add(self._place, nbytes)
        self.excesses += self._truth.exceeds(self._cap)
        block = super().allocate(nbytes)
        self._truth.add(self._place, block.nbytes - nbytes)
        return block

    def deallocate(self, block):
        super().deallocate(block)
        self._truth.add(self._place, -block.nbytes)


class TruthfulMemory(Truthful, ps.memory.PageableMemory):
    pass


def say(**what):
    print(json.dumps(what), flush=True)


def churn(truth, place, most, cap, seconds, seed):
    """Grow and shrink at random; return the results."""
    chance, end = random.Random(seed), time.monotonic() + seconds
    memory = TruthfulMemory(truth, place, most)
    pool = ps.SlabPool(**cap, memory=memory)
    leases, served, refused = [], 0, 0
    while time.monotonic() < end:
        step = chance.random()
        if step < 0.5:
            try:
                leases.append(
                    pool.acquire(chance.randrange(1, MIB), timeout=chance.choice([0, 0.02, 0.3]))
                )
                served += 1
            except ps.errors.AcquireTimeoutError:
                refused += 1
                while leases:
                    leases.pop().release()
        elif step < 0.9 and leases:
            leases.pop(chance.randrange(len(leases))).release()
        elif step < 0.95:
            pool.trim(chance.randrange(2 * MIB))
        else:
            time.sleep(chance.random() / 50)
    while leases:
        leases.pop().release()
    pool.close()
    return {
        "served": served,
        "refused": refused,
        "excesses": memory.excesses,
        "held": pool.stats().held_bytes,
    }


def crowd(folder, count, most, seconds, cap):
    """Let many processes churn, kill one now and then, and check the sum all the time; return the
    sums of their results.
    """
    end = time.monotonic() + seconds
    truth = Truth.create(folder / "truth")
    seeds = iter(range(10**6))

    def start(place):
        seed = next(seeds)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                said = churn(truth, place, most, cap, end - time.monotonic(), seed)
                (folder / f"{seed}.json").write_text(json.dumps(said))
                code = 0
            except Exception:  # noqa: BLE001 - shown with the test
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    pids = [start(place) for place in range(count)]
    excesses, peak, samples, kills, kill_at = 0, 0, 0, 0, time.monotonic()
    while time.monotonic() < end - 0.5:
        if time.monotonic() > kill_at:
            place = random.randrange(count)
            os.kill(pids[place], signal.SIGKILL)
            os.waitpid(pids[place], 0)
            pids[place] = start(place)
            kills, kill_at = kills + 1, time.monotonic() + 0.2
        excesses += truth.exceeds(most)
        peak, samples = max(peak, truth.held()), samples + 1
        time.sleep(0.002)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    sums = {key: sum(each[key] for each in said) for key in said[0]}
    sums["excesses"] += excesses
    return sums | {"kills": kills, "peak": peak, "samples": samples, "ended": ended}
