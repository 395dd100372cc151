"""What staging costs is measured, kept for traces of such a GPU, and otherwise the reference machine's."""

import dataclasses
import json

import pytest
import torch
from trace_maker import naive_loop

from pinstage.inspect import _commands
from pinstage.inspect._cost import KEPT, REFERENCE, Cost, cost_from, cost_of, keep, measure_cost
from pinstage.inspect._doctor import Diagnosis, Measured
from pinstage.inspect._gpus import Gpu
from pinstage.inspect._trace import trace_report

HERE = Cost(1e-4, 2e-6, 9e9, "here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_kept_of_a_gpu_is_taken_for_traces_of_it_and_of_no_other(cache, tmp_path):
    path = keep("NVIDIA H200", HERE)
    assert path == cache / KEPT
    keep("NVIDIA A100", REFERENCE)
    assert (cost_of("NVIDIA H200"), cost_of("NVIDIA A100")) == (HERE, REFERENCE)
    assert cost_of("NVIDIA L40S") is cost_of(None) is REFERENCE
    packing = trace_report(naive_loop().write(tmp_path / "t.json")).packing
    assert "measured on here" in packing.assumptions()[0]


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"NVIDIA H200": {"seconds": 1}}'])
def test_a_file_that_is_not_ours_is_no_reason_to_fail(cache, text):
    (cache / KEPT).parent.mkdir()
    (cache / KEPT).write_text(text)
    assert cost_of("NVIDIA H200") is REFERENCE
    assert keep("NVIDIA H200", HERE).exists()
    assert cost_of("NVIDIA H200") == HERE


@pytest.mark.parametrize("name", ["fixed_seconds", "leaf_seconds", "bytes_per_second", "source"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0, 10**400, None, [1.0]])
def test_a_kept_cost_that_cannot_be_right_is_ignored(name, value):
    assert cost_from(dataclasses.asdict(HERE) | {name: value}) is REFERENCE
    assert cost_from(dataclasses.asdict(HERE) | {"source": "x\x1b[2J"}).source == "x\ufffd[2J"


def test_the_cost_is_measured():
    found = measure_cost(torch.device("cpu"))
    assert 0 < found.leaf_seconds < 1e-3
    assert 0 < found.fixed_seconds < 0.1
    assert found.bytes_per_second > 1e6


def test_a_batch_costs_its_leaves_and_its_bytes_over_the_slower_of_packing_and_bus():
    assert HERE.seconds(100, 0, bus=1e9) == pytest.approx(1e-4 + 100 * 2e-6)
    assert HERE.seconds(0, 10**9, bus=1e6) == pytest.approx(1000, rel=1e-3)
    assert HERE.seconds(0, 9 * 10**9, bus=1e12) == pytest.approx(1, rel=1e-3)


@pytest.fixture
def measured(monkeypatch):
    from pinstage.inspect import _doctor

    found = Measured(Gpu(0, "NVIDIA H200"), (), {}, HERE)
    monkeypatch.setattr(_doctor, "diagnose", lambda **options: Diagnosis((), found))


def test_doctor_keeps_what_it_measured_and_says_where(cache, measured, capsys):
    _commands.run_doctor(device=None, measuring=True, plot=None, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cost"]["leaf_seconds"] == 2e-6
    assert str(cache / KEPT) in captured.err
    assert cost_of("NVIDIA H200") == HERE


def test_a_cache_that_cannot_be_written_is_told_and_no_failure(cache, measured, capsys):
    (cache / "pinstage").write_text("a file where a folder should be")
    assert _commands.run_doctor(device=None, measuring=True, plot=None, as_json=True) == 0
    assert "not kept, so pinstage trace takes the reference" in capsys.readouterr().err
