"""Traces recorded on an H200 by scripts/record_traces.py: one loop, its batches brought to the device in three ways."""

import json
from pathlib import Path

import pytest

from pinstage.inspect._trace import trace_report

TRACES = Path(__file__).parent / "traces"
ABOUT = json.loads((TRACES / "times.json").read_text())
LEAVES, STEPS = ABOUT["leaves"], 6


@pytest.fixture(scope="module", params=["naive", "pin_memory", "pinstage"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def rank(way):
    return trace_report(TRACES / f"{way}.json.gz").worst


def test_every_copy_of_a_recorded_trace_is_found(rank, way):
    assert len(rank.analysis.steps) == STEPS
    assert {step.copies for step in rank.analysis.steps} == {1 if way == "pinstage" else LEAVES}
    assert {step.nbytes for step in rank.analysis.steps} == {LEAVES * ABOUT["leaf_bytes"]}
    kinds = {group.kind for group in rank.analysis.groups if group.direction == "HtoD"}
    assert kinds == {"pageable" if way == "naive" else "pinned"}


def test_only_the_loop_that_waits_for_a_loader_is_told_so(rank, way):
    assert ("waits 71% of the time for its loader" in rank.verdict) == (way == "pin_memory")


def test_the_predicted_saving_is_the_measured_one_within_a_fifth():
    naive, ours = (trace_report(TRACES / f"{name}.json.gz").worst for name in ("naive", "pinstage"))
    measured = naive.analysis.middle("seconds") - ours.analysis.middle("seconds")
    assert naive.packing.saved_seconds == pytest.approx(measured, rel=0.2)
    assert ours.packing.saved_seconds == 0


def test_without_the_profiler_the_saving_is_smaller_because_its_cost_for_each_call_is_gone():
    naive = trace_report(TRACES / "naive.json.gz").worst
    seconds = ABOUT["step_seconds_without_profiler"]
    measured = seconds["naive"] - seconds["pinstage"]
    assert 0.4 * naive.packing.saved_seconds < measured < naive.packing.saved_seconds
