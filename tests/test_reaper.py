"""The thread that does what finalisers leave."""

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
    for _ in range(2000):  # one at each poll would take 40 s
        reaper.tasks.put(Counted(done))
    wait_until(lambda: len(done) == 2000)
    event.finish()
