"""The thread that does deferred work of finalisers."""

import _thread
import ctypes
import sys
import time

import pytest
import warm
from doubles import Gate, Interrupts, ManualEvent, claim_in_child, wait_until

from pinstage import _reaper
from pinstage._reaper import Reaper, UninterruptedCall, uninterrupted


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


def test_a_second_thread_ends_no_first_one():
    """Two threads that start a reaper at once may start two threads of its own."""
    reaper, gate, done = Reaper(), Gate(), []

    class Slow(Counted):
        def reap(self):
            gate.pass_through()
            return super().reap()

    reaper.start()
    reaper.tasks.put(Slow(done))
    gate.wait_for_arrival()
    _thread.start_new_thread(reaper._serve, ())
    reaper.tasks.put(Counted(done))
    gate.open()
    wait_until(lambda: len(done) == 2)
    reaper.tasks.put(Counted(done))
    wait_until(lambda: len(done) == 3)


def test_many_starts_at_once_leave_one_thread():
    reaper, before, interval = Reaper(), _thread._count(), sys.getswitchinterval()
    sys.setswitchinterval(1)  # the threads begin later
    try:
        for _ in range(50):
            reaper.start()
    finally:
        sys.setswitchinterval(interval)
    wait_until(reaper._claimed.locked)
    time.sleep(0.1)  # for the others to begin
    wait_until(lambda: _thread._count() <= before + 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_from_outside_loses_no_task():
    """As of ``PyThreadState_SetAsyncExc``, which a program may call with the id of a thread that
    has just ended.
    """
    reaper, event, done, threads = Reaper(), ManualEvent(), [], []

    class Interrupted(Counted):
        def reap(self):
            if not threads:
                threads.append(_thread.get_ident())
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(threads[0]), ctypes.py_object(KeyboardInterrupt)
                )
            return super().reap()

    reaper.start()
    reaper.tasks.put(Waiting(event))
    wait_until(lambda: event.queries)
    reaper.tasks.put(Interrupted(done))
    reaper.tasks.put(Counted(done))
    wait_until(lambda: any(type(task) is Counted for task in done))
    asked = event.queries
    wait_until(lambda: event.queries > asked + 1)
    event.finish()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_from_outside_loses_no_next_task():
    """An idle thread gets the exception when a task wakes it."""
    reaper, threads, done = Reaper(), [], []

    class First(Counted):
        def reap(self):
            threads.append(_thread.get_ident())
            return super().reap()

    reaper.start()
    reaper.tasks.put(First(done))
    wait_until(lambda: done and not _reaper.running)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threads[0]), ctypes.py_object(KeyboardInterrupt)
    )
    reaper.tasks.put(Counted(done))
    wait_until(lambda: len(done) == 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("point", range(1, 9))
def test_an_exception_from_outside_doubles_no_task(point):
    """After the n-th call of C."""
    reaper, event, points = Reaper(), ManualEvent(), []

    def interrupt(frame, kind, _):
        if kind == "c_return" and frame.f_code.co_filename == _reaper.__file__:
            points.append(frame.f_lineno)
            if len(points) == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    class Profiled:
        def reap(self):
            sys.setprofile(interrupt)
            return True

    reaper.tasks.put(Profiled())
    reaper.tasks.put(Waiting(event))
    reaper.start()
    wait_until(lambda: len(points) == point and event.queries > 1)
    began, asked = time.monotonic(), event.queries
    wait_until(lambda: time.monotonic() > began + 10 * _reaper._POLL_SECONDS)
    event.finish()
    assert event.queries - asked <= 11


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("point", range(1, 6))
def test_an_exception_from_outside_stops_no_reaper(point):
    """At the n-th call or return of its thread's first lines."""
    reaper, done, points = Reaper(), [], []

    def interrupt(frame, kind, _):
        if frame.f_code.co_filename == _reaper.__file__:
            points.append(kind)
            if len(points) == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def serve():
        sys.setprofile(interrupt)
        reaper._serve()

    _thread.start_new_thread(serve, ())
    wait_until(lambda: len(points) == point)
    reaper.tasks.put(Counted(done))
    reaper.start()
    wait_until(lambda: done)


def test_a_task_that_exits_stops_no_other():
    reaper, tries, done = Reaper(), [], []

    class Exits(Counted):
        def reap(self):
            super().reap()
            if done and len(tries) >= 4:
                return True
            raise SystemExit

    began = time.monotonic()
    reaper.tasks.put(Exits(tries))
    reaper.tasks.put(Counted(done))
    reaper.start()
    wait_until(lambda: done and len(tries) >= 4)
    assert len(tries) <= 4 + (time.monotonic() - began) / _reaper._POLL_SECONDS
    assert time.monotonic() - began > 3 * _reaper._POLL_SECONDS


def test_a_child_reaps_its_copies_of_objects():
    things, done = {True: {1}, False: {2}}, []
    for in_children, thing in things.items():
        _reaper.reaper.watch(
            thing, lambda number=in_children: done.append(number) or True, in_children=in_children
        )

    del thing

    def claim():
        things.clear()
        assert done == []
        _reaper.reaper.start()
        wait_until(lambda: done)
        assert done == [True]

    claim_in_child(claim)
    things.clear()
    wait_until(lambda: sorted(done) == [False, True])


def test_an_interrupted_wait_ends_no_call():
    begun, ended = [], []

    def work():
        begun.append(1)
        time.sleep(0.001)
        ended.append(1)

    number, was_interrupted = 1, True
    while was_interrupted:
        was_interrupted = Interrupts(number, "_reaper.py").during(lambda: uninterrupted(work))
        number += 1
    assert number > 5
    assert len(begun) > 1
    wait_until(lambda: len(begun) == len(ended))
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)


def test_a_call_without_a_reaper_never_begins(monkeypatch):
    begun = []

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Reaper, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        UninterruptedCall(lambda: begun.append(1)).begin()
    time.sleep(0.05)
    assert not begun


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
    done = warm.completed(AT_THE_END)
    assert (done.stdout, done.stderr, done.returncode) == ("True 0\n", "", 0)
