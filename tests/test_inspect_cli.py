"""The commands audit, doctor and trace: they teach, print plain text into pipes, and fail with one message."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from trace_maker import naive_loop

from pinstage import _cli

pytest.importorskip("typer", reason="the command's extra is not installed")
pytest.importorskip("rich", reason="the command's extra is not installed")

CODE = """
import torch
def batch(): return {"x": [torch.zeros(256) for _ in range(50)]}
def broken(): raise ValueError("no data here")
"""


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command: exit status, stdout, stderr."""
    monkeypatch.delenv(_cli.TRACEBACK_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def command(*arguments):
        with pytest.raises(SystemExit) as exit_:
            _cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return command


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "audited_code.py"
    path.write_text(CODE)
    yield path
    sys.modules.pop("audited_code", None)


@pytest.fixture
def trace(tmp_path):
    return naive_loop(steps=20).write(tmp_path / "trace.json.gz")


def test_help_names_the_three_commands_and_when_to_use_them(run):
    status, out, _ = run("--help")
    assert status == 0
    for line in ("pinstage audit train.py:make_loader", "pinstage doctor", "pinstage trace trace.json.gz"):
        assert line in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("audit", ["--bus", "--all", "--json", "module:callable", "pageable=8,pinned=55"]),
        ("doctor", ["--device", "--no-measure", "--plot", "--json", "exit status is 1"]),
        ("trace", ["--html", "--bus", "--all", "--json", "export_chrome_trace", "profiler.step()"]),
    ],
)
def test_help_of_each_command_names_every_option_and_has_examples(run, command, words):
    status, out, _ = run(command, "--help")
    assert status == 0
    for word in words:
        assert word in out


# -- audit -------------------------------------------------------------------------------------------------------------


def test_audit_prints_plain_text_into_a_pipe(run, code):
    status, out, err = run("audit", f"{code}:batch", "--bus", "pageable=8,pinned=55")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert "['x'][39]" in out
    assert "['x'][40]" not in out
    assert "50 copies, 50.00 KiB" in out


def test_audit_shows_all_leaves_when_asked(run, code):
    assert "['x'][49]" in run("audit", f"{code}:batch", "--all")[1]


def test_audit_prints_json(run, code):
    status, out, _ = run("audit", f"{code}:batch", "--json", "--bus", "pageable=8,pinned=55")
    assert status == 0
    assert json.loads(out)["to_each"]["copies"] == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "{code}:broken"], "raised ValueError: no data here"),
        (["audit", "nothing_like_this:x"], "no module 'nothing_like_this'"),
        (["audit", "{code}:batch", "--bus", "fast"], "not a bus: 'fast'"),
        (["trace", "{code}"], "is no trace"),
        (["trace", "{code}.nope"], "no file"),
        (["doctor", "--device", "gpu1"], "not a CUDA device: 'gpu1'"),
    ],
)
def test_an_error_is_one_line_and_exit_status_2(run, code, arguments, message):
    status, out, err = run(*(argument.format(code=code) for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("pinstage: ")
    assert err.count("\n") == 1


def test_the_traceback_of_the_user_s_own_error_is_there_for_those_who_ask(code, monkeypatch):
    monkeypatch.setenv(_cli.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ImportError) as raised:
        _cli.main(["audit", f"{code}:broken"])
    assert isinstance(raised.value.__cause__, ValueError)


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_doctor_reports_without_a_gpu(run):
    status, out, _ = run("doctor")
    assert status == 0
    assert "not measured: no GPU" in out
    status, out, _ = run("doctor", "--json")
    assert status == 0
    assert json.loads(out)["problem"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_doctor_says_why_it_draws_nothing(run, tmp_path):
    status, out, err = run("doctor", "--plot", tmp_path / "p.png")
    assert status == 2
    assert "bandwidth" in out
    assert "that takes a GPU" in err
    assert not (tmp_path / "p.png").exists()


def test_doctor_measures_nothing_for_a_plot_that_cannot_be_drawn(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what the import system reads as "not installed"
    status, out, err = run("doctor", "--plot", tmp_path / "p.png")
    assert (status, out) == (2, "")
    assert err == 'pinstage: matplotlib is not installed; run: pip install "pinstage[plot]"\n'


def test_doctor_exits_with_1_if_there_is_a_problem(run, monkeypatch):
    from pinstage.inspect import _checks, _doctor

    sick = _doctor.Diagnosis((_checks.Check("CUDA", "problem", "broken", "mend it"),))
    monkeypatch.setattr(_doctor, "diagnose", lambda **options: sick)
    status, out, _ = run("doctor")
    assert status == 1
    assert "CUDA: mend it" in out


# -- trace -------------------------------------------------------------------------------------------------------------


def test_trace_prints_plain_text_into_a_pipe(run, trace):
    status, out, err = run("trace", trace)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert "One slab would take" in out
    assert "the 12 of 20 steps" in out
    assert "the 12 of 20 steps" not in run("trace", trace, "--all")[1]


def test_trace_writes_the_report(run, trace, tmp_path):
    status, _, err = run("trace", trace, "--html", tmp_path / "report.html")
    assert status == 0
    assert err == f"written: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_trace_prints_json_with_the_given_bus(run, trace):
    status, out, _ = run("trace", trace, "--json", "--bus", "pageable=8,pinned=40")
    assert status == 0
    assert json.loads(out)["ranks"][0]["packing"]["bus_bytes_per_second"] == pytest.approx(40e9, rel=1e-3)


def test_a_terminal_gets_tables_with_colours(trace):
    main, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "pinstage._cli", "trace", str(trace)]
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                data = os.read(main, 1 << 16)
            except OSError:  # the other end was closed
                break
            if not data:
                break
            shown += data
        assert process.wait(60) == 0
    os.close(main)
    text = shown.decode()
    assert "\x1b[" in text
    assert "─" in text
    assert "The GPU stands still" in text
