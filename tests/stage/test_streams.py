"""Events are recorded again only when there is no other reference to them."""

import threading

import pytest
from doubles import ManualEvent

from pinstage._stage._at_once import _MARKED_BYTES, _MARKED_COPIES, AtOnce
from pinstage._stage._events import _EVENTS_KEPT, EventCache


class Mark:
    """An event that knows where it was recorded last."""

    def record(self, stream):
        self.at = stream


@pytest.fixture
def events():
    return EventCache(Mark)


@pytest.mark.parametrize(
    "hold", [lambda event: [event], lambda event: event.record, lambda event: {"e": event}.values]
)
def test_whoever_has_it_in_whatever_way_counts(events, hold):
    holder = hold(events.record("first"))
    assert [events.record("later").at for _ in range(5)] == ["later"] * 5
    assert "first" in [event.at for event in events._made]
    del holder
    assert all(events.record("last").at == "last" for _ in range(10))
    assert "first" not in [event.at for event in events._made]


def test_running_ahead_needs_a_bounded_number_of_events(events):
    held, seen = [], set()
    for number in range(200):
        held.append(events.record(number))
        seen.add(id(held[-1]))
        del held[:-4]
    assert len(seen) <= 6


def test_events_never_returned_are_freed(events):
    kept = [events.record(number) for number in range(3 * _EVENTS_KEPT)]
    assert len(events._made) <= _EVENTS_KEPT + 1
    assert [event.at for event in kept] == list(range(3 * _EVENTS_KEPT))


def test_threads_never_get_the_same_event(events, background):
    barrier = threading.Barrier(4)

    def work(name):
        barrier.wait()
        for number in range(2000):
            event = events.record((name, number))
            assert event.at == (name, number)

    for future in [background(work, name) for name in range(4)]:
        future.result(timeout=60)


@pytest.mark.parametrize("each", [(8, 100), (1, 64 * 1024), (1, 8)])
def test_the_driver_holds_half_of_its_copies(each):
    marks = []

    def record():
        marks.append(ManualEvent())
        return marks[-1]

    at_once = AtOnce(record)
    for _ in range(2):  # the second half may be sent when the marks before it are done
        sent = 0
        while at_once.has_room():
            at_once.add(*each)
            sent += 1
        copies, nbytes = sent * each[0], sent * each[1]
        assert copies >= 2 * _MARKED_COPIES or nbytes >= 2 * _MARKED_BYTES
        assert copies <= 2 * (_MARKED_COPIES + each[0])
        assert nbytes <= 2 * (_MARKED_BYTES + each[1])
        marks[-1].finish()
        assert not at_once.has_room()  # in the order of the stream
        for mark in marks:
            mark.finish()
    assert at_once.has_room()
    assert not at_once.marks
