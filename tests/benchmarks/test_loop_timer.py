"""A loop's figure is its whole time over its steps, also where batches come in bursts."""

import pytest
import torch

from comparison import harness, loop_timer
from comparison.harness import Size, Variant
from comparison.loop_timer import LoopTimer

CPU = torch.device("cpu")


class Clock:
    """A clock that moves when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(loop_timer, "perf_counter", lambda: self.now)

    def batches(self, *waits):
        """Yield batches, each after the next of some waits, which are repeated."""
        number = 0
        while True:
            self.now += waits[number % len(waits)]
            yield number
            number += 1

    def step(self, batch):
        self.now += 0.001

    def outcome(self, waits, *options, said="", **named):
        """Time a loop whose steps take 1 ms; return its outcome."""
        timer = LoopTimer(CPU, *options, **named)
        timer.run(self.batches(*waits), self.step)
        return timer.outcome(said)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_loop_with_two_peaks_has_its_mean(clock):
    waits = [0.0] * 7 + [0.080]  # the median step takes 1 ms
    assert clock.outcome(waits, 8, repeats=160)["total"] == [pytest.approx(0.001 + 0.080 / 8)]


def test_the_wait_for_the_first_timed_batch_counts(clock):
    outcome = clock.outcome([0.004], 0, repeats=4, said="said")
    assert outcome["total"] == [pytest.approx(0.005)]
    assert outcome["detail"] == "GPU idle 80.0% of 4 timed steps; said"


def test_as_much_is_timed_as_workers_hold_ready(clock):
    timer = LoopTimer(CPU, 3)
    taken = []

    def step(batch):
        taken.append(timer.timing)
        clock.now += 1.0 if len(taken) <= 6 else 0.001

    timer.run(clock.batches(0.0), step)

    assert taken == [False] * 6 + [True] * 6
    assert timer.steps == 12
    assert timer.outcome()["total"] == [pytest.approx(0.001)]


@pytest.mark.parametrize(
    ("workers", "limits", "steps"),
    [
        (8, {"seconds": 0.105, "repeats": 160}, 11),
        (8, {"seconds": 0.0}, 4),
        (0, {"repeats": 50}, 50),
    ],
)
def test_timing_ends_after_seconds_and_steps(clock, workers, limits, steps):
    outcome = clock.outcome([0.009], workers, **limits)
    assert f"of {steps} timed steps" in outcome["detail"]


def test_few_steps_of_a_slow_loop_are_untimed(clock):
    timer = LoopTimer(CPU, 8, seconds=0.055)
    taken = []

    def step(batch):
        taken.append(timer.timing)
        clock.now += 0.01

    timer.run(clock.batches(0.0), step)
    assert taken == [False] * 6 + [True] * 6


def test_the_first_seconds_are_untimed(clock):
    timer = LoopTimer(CPU, 1, settle_seconds=1.0)
    began = []

    def step(batch):
        began.extend([batch] * (timer.timing and not began))
        clock.now += 0.01

    timer.run(clock.batches(0.0), step)

    assert 99 <= began[0] <= 101
    assert timer.steps == loop_timer.SETTLED + 4  # a dataset needs no more


def test_on_a_gpu_events_are_the_clock(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")
            self.milliseconds = 2.0 * len(log)

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(str(device)))
    timer = LoopTimer(torch.device("cuda:0"), 1, repeats=20)

    timer.run(iter(range(1000)), lambda batch: None)
    assert set(log) == {"record"}
    outcome = timer.outcome()

    assert log[-1] == "cuda:0"
    assert outcome["total"] == [pytest.approx(0.004)]
    assert outcome["detail"] == "GPU idle 50.0% of 20 timed steps"


def test_a_loop_that_ends_early_has_no_figure(clock):
    timer = LoopTimer(CPU, 1)
    timer.run(iter(range(4)), clock.step)
    with pytest.raises(
        RuntimeError, match=r"^the loop ended after 4 steps, before timing started$"
    ):
        timer.outcome()


def test_a_row_has_its_median_pass_and_spread():
    variant = Variant("way", None, "a way")
    outcomes = [
        {"status": "ok", "detail": f"pass {number}", "total": [seconds]}
        for number, seconds in enumerate((0.005, 0.001, 0.003))
    ]
    row = harness._row("loops", variant, Size("a", 0), outcomes, "ms")
    assert (row.median, row.minimum, row.maximum) == (3.0, 1.0, 5.0)
    assert (row.detail, row.repeats) == ("pass 2", 3)
