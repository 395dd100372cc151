"""The steps of staging and their times, as users and torch's profiler see them."""

import time

import pytest
import torch

import pinstage as ps
from pinstage import _native
from pinstage._steps import step

PARTS = ["walk", "describe", "acquire", "pack", "copy", "views", "unflatten"]
STEPS = {*PARTS, "stage", "hand_over"}


def batch():
    return {"a": torch.ones(400_000)[::2], "b": [torch.zeros(2)]}  # takes a slab


def test_each_step_is_timed_once_per_batch(stager):
    with ps.inspect.step_times() as steps:
        for _ in range(5):
            stager.to_device(batch())
    assert set(steps.times) == STEPS
    assert {found.calls for found in steps.times.values()} == {5}
    seconds = {name: found.seconds for name, found in steps.times.items()}
    assert all(seconds.values())
    assert sum(map(seconds.__getitem__, PARTS)) <= seconds["stage"] + seconds["hand_over"]


def test_a_small_batch_takes_no_slab(stager):
    with ps.inspect.step_times() as steps:
        stager.to_device(torch.ones(3))
    if _native.core is not None:
        assert set(steps.times) == {"walk", "stage"}
    with ps.inspect.step_times() as steps:
        stager.to_device([torch.ones(3)] * 2)  # two leaves that are the same tensor
    assert set(steps.times) == STEPS - {"acquire", "copy"}


def test_a_chunked_batch_has_one_step_per_chunk():
    with ps.Stager("cpu", pack_threads=2) as stager:
        large = torch.zeros(40 << 20, dtype=torch.uint8)
        with ps.inspect.step_times() as steps:
            transfer = stager.stage(large)
    assert transfer.copies > 1
    assert steps.times["copy"].calls == transfer.copies
    assert steps.times["pack"].calls == transfer.copies + 1  # its start, and the waits


def test_the_way_back_is_timed_too(stager):
    with ps.inspect.step_times() as steps:
        stager.to_host(batch())
    assert {"fetch", "walk", "describe", "gather", "copy", "views", "unflatten"} <= set(steps.times)


def test_steps_of_all_threads_are_timed(stager, background):
    stager.to_device(batch())
    with ps.inspect.step_times() as steps:
        background(stager.to_device, batch()).result()
    stager.to_device(batch())
    assert steps.times["stage"].calls == 1


def test_overlapping_blocks_count_what_ends_in_each(stager):
    with ps.inspect.step_times() as outer:
        with ps.inspect.step_times() as inner:
            stager.to_device(batch())
        stager.to_device(batch())
    assert (inner.times["stage"].calls, outer.times["stage"].calls) == (1, 2)


def test_a_background_thread_is_timed(stager):
    with ps.inspect.step_times() as steps:
        assert len(list(stager.prefetch([batch()] * 3, background=True))) == 3
    assert steps.times["stage"].calls == 3


def test_waiting_for_a_loaders_workers_is_timed():
    with ps.inspect.step_times() as steps:
        batches = list(ps.DataLoader(torch.arange(8), batch_size=2, num_workers=1, device="cpu"))
    assert len(batches) == 4
    assert steps.times["loader.wait"].calls == 5  # the last one ends the pass


def test_a_failing_step_is_timed_and_raises(stager):
    with ps.inspect.step_times() as steps, pytest.raises(ps.errors.BudgetExceededError):
        ps.SlabPool("1MiB", memory=ps.memory.PageableMemory()).acquire("2MiB")
    assert steps.times["acquire"].calls == 1


def test_a_profile_prints_a_table(stager):
    with ps.inspect.step_times() as steps:
        stager.to_device(batch())
    lines = str(steps).splitlines()
    assert lines[0].split() == ["step", "calls", "ms", "us", "per", "call"]
    assert {line.split()[0] for line in lines[1:]} == set(steps.times)
    assert steps.to_dict()["pack"] == {"calls": 1, "seconds": steps.times["pack"].seconds}


@pytest.mark.filterwarnings("ignore:.*clears events")
def test_torchs_profiler_shows_the_same_steps(stager):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        stager.to_device(batch())
    names = {event.name for event in profiler.events()}
    assert {f"pinstage.{name}" for name in STEPS} <= names


def test_steps_cost_next_to_nothing_while_nobody_looks():
    def seconds():
        began = time.perf_counter()
        for _ in range(10_000):
            with step("pack"):
                pass
        return time.perf_counter() - began

    assert min(seconds() for _ in range(10)) / 10_000 < 1e-6
