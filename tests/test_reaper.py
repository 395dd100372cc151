"""The thread that does deferred work of finalisers."""

import subprocess

import warm
from doubles import ManualEvent, wait_until

from pinstage._reaper import Reaper


class Waiting:
    """A task that is done when its event is."""

    def __init__(self, event):
        self.reap = event.query


class Counted:
    """A task that counts itself."""

    def __init__(self, done):
        self.done = done

    def reap(self):
        self.done.append(self)
        return True


def test_a_task_that_waits_holds_up_no_other():
    reaper, event, done = Reaper(), ManualEvent(), []
    reaper.start()
    reaper.tasks.put(Waiting(event))
    wait_until(lambda: event.queries)
    for _ in range(2000):  # one per poll would take 40 s
        reaper.tasks.put(Counted(done))
    wait_until(lambda: len(done) == 2000)
    event.finish()


AT_THE_END = """
import atexit, time

calls = []

def count():  # after all others, since it is registered first
    began = len(calls)
    time.sleep(0.3)
    print(began > 0, len(calls) - began)

atexit.register(count)

from pinstage._reaper import reaper

class Polled:
    def reap(self):
        calls.append(self)
        return False

reaper.start()
reaper.tasks.put(Polled())
while not calls:
    time.sleep(0.001)
"""


def test_no_task_begins_while_the_program_ends():
    """A task queries an event, and a CUDA call that returns while Python exits aborts the
    program.
    """
    done = subprocess.run(
        warm.command("-c", AT_THE_END), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True 0\n", "", 0)
