"""The command: helpful texts, plain output into pipes, one message per failure, and no extra that it
needs.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import warm
from processes import completed, terminal
from trace_maker import naive_loop

import pinstage
from pinstage.__main__ import main

CODE = """
import torch
def batch(): return {"x": [torch.zeros(256) for _ in range(50)]}
def broken(): raise ValueError("no data here")
"""


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command: exit status, stdout, stderr."""
    monkeypatch.delenv("PINSTAGE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def command(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
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


def test_help_teaches_the_first_lines_and_the_commands(run):
    status, text, _ = run("--help")
    assert status == 0
    for line in ('ps.Stager("cuda:0", max_bytes="2GiB")\n', "batch = stager.to_device(batch)\n"):
        assert line in text
    commands = re.findall(r"^    (\w+)  ", text.partition("\ncommands:")[2], re.MULTILINE)
    assert commands == ["audit", "doctor", "trace", "top"]


def test_no_command_shows_the_help(run):
    status, out, err = run()
    assert (status, err) == (2, "")
    assert "audit" in out


def test_each_example_of_the_help_has_a_line(run):
    examples = [line for line in run("trace", "--help")[1].splitlines() if "pinstage trace" in line]
    # The usage, and three examples.
    assert [line.count("pinstage trace") for line in examples] == [1] * 4


@pytest.mark.parametrize("arguments", [(), ("audit",), ("doctor",), ("trace",), ("top",)])
def test_sentences_of_the_help_fit_80_columns(run, arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, text, _ = run(*arguments, "-h")
    assert status == 0
    assert "usage: pinstage" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("    ")) <= 80
    assert "\n    " in text  # examples keep their lines


def test_version_is_the_package_s(run):
    assert run("--version") == (0, f"pinstage {pinstage.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--help",), 0, "commands:"),
        (("audit", "torch:ones"), 2, "missing"),
        (("doctor", "--no-measure"), 0, "not measured"),
        (("trace", "--example"), 0, "One slab would take"),
        (("top",), 0, "HostBudget"),
    ],
)
def test_no_command_needs_an_extra(run, arguments, status, words, monkeypatch):
    for package in ("rich", "matplotlib"):
        for module in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        # The import system reads it as "not installed".
        monkeypatch.setitem(sys.modules, package, None)
    found, out, err = run(*arguments)
    assert found == status
    assert words in out + err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("audit", ["--bus", "--all", "--json", "module:callable", "pageable=8,pinned=55"]),
        ("doctor", ["--device", "--no-measure", "--plot", "--json", "exit status is 1"]),
        ("trace", ["--bus", "--step-ms", "--json", "export_chrome_trace", "profiler.step()"]),
    ],
)
def test_help_names_every_option_and_has_examples(run, command, words):
    status, out, _ = run(command, "--help")
    assert status == 0
    for word in words:
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "{code}:batch", "--bus", "pageable=8,pinned=55"], "50 copies, 50.00 KiB"),
        (["trace", "{trace}"], "A step cannot be shorter than its kernels"),
    ],
)
def test_plain_text_is_printed_into_a_pipe(run, code, trace, arguments, words):
    status, out, err = run(*(argument.format(code=code, trace=trace) for argument in arguments))
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert words in out


# -- audit -----------------------------------------------------------------------------------------


def test_audit_shows_all_leaves_when_asked(run, code):
    assert "['x'][49]" not in run("audit", f"{code}:batch")[1]
    assert "['x'][49]" in run("audit", f"{code}:batch", "--all")[1]


NOISY = """
import os, subprocess, sys, torch
print("imported")
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        print("worker", index)
        return torch.ones(3)
def batch():
    os.system("echo shell")
    os.write(1, b"bytes")
    return torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1)
"""


def test_audit_json_is_clean_whatever_the_target_prints(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    target = f"{tmp_path / 'noisy.py'}:batch"
    done = completed(warm.command("-m", "pinstage", "audit", target, "--json"))
    assert (done.returncode, json.loads(done.stdout)["totals"]["leaves"]) == (0, 1)
    for word in ("imported", "worker", "shell", "bytes"):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "pinstage: no command 'docter' (choose from "),
        (["audit"], "pinstage: missing TARGET; see pinstage audit --help"),
        (["trace"], "pinstage: one of the arguments PATH --example is required; see"),
        (
            ["trace", "t.json", "--example"],
            "pinstage: argument --example: not allowed with argument PATH; see",
        ),
        (
            ["trace", "t.json", "--step-ms", "fast"],
            "pinstage: argument --step-ms: invalid float value: 'fast'",
        ),
        (["doctor", "--devcie", "cuda"], "pinstage: unrecognized arguments: --devcie"),
        (["audit", "{code}:broken"], "raised ValueError: no data here"),
        (["audit", "{code}:batch", "--bus", "fast"], "not a bus: 'fast'"),
        (["audit", "{code}:batch.__doc__.x"], "has no 'batch.__doc__.x'; it has no functions"),
        (["trace", "{code}.nope"], "No such file"),
        (["trace", "--example", "--step-ms", "0"], "--step-ms must be above zero"),
        (["doctor", "--device", "gpu1"], "not a CUDA device: 'gpu1'"),
    ],
)
def test_an_error_is_one_line_and_status_2(run, code, arguments, message):
    status, out, err = run(*(argument.format(code=code) for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("pinstage: ")
    assert err.count("\n") == 1


def test_the_user_s_traceback_is_shown_on_request(code, monkeypatch):
    monkeypatch.setenv("PINSTAGE_TRACEBACK", "1")
    with pytest.raises(ImportError) as raised:
        main(["audit", f"{code}:broken"])
    assert isinstance(raised.value.__cause__, ValueError)


# -- doctor ----------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_doctor_reports_without_a_gpu(run):
    status, out, _ = run("doctor", "--json")
    assert status == 0
    assert json.loads(out)["problem"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_doctor_says_why_it_draws_nothing(run, tmp_path):
    status, out, err = run("doctor", "--plot", tmp_path / "p.png")
    assert status == 2
    assert "bandwidth" in out
    assert "that needs a GPU" in err
    assert not (tmp_path / "p.png").exists()


def test_doctor_measures_nothing_for_an_impossible_plot(run, monkeypatch, tmp_path):
    # The import system reads None as "not installed".
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run("doctor", "--plot", tmp_path / "p.png")
    assert (status, out) == (2, "")
    assert err == 'pinstage: matplotlib is not installed; run: pip install "pinstage[plot]"\n'


def test_doctor_exits_with_1_without_the_device(run):
    status, out, _ = run("doctor", "--device", "cuda:63", "--no-measure")
    assert status == 1
    assert "no cuda:63: torch sees" in out


# -- trace -----------------------------------------------------------------------------------------


def test_trace_takes_a_bus_and_a_step(run, trace):
    options = "--bus", "pageable=8,pinned=40", "--step-ms", "2.5"
    status, out, _ = run("trace", trace, "--json", *options)
    assert status == 0
    found = json.loads(out)
    assert found["schema"] == 1
    assert found["packing"]["bytes_per_second"] == pytest.approx(40e9)
    assert found["packing"]["real_seconds"] == pytest.approx(2.5e-3)
    assert found["trace"]["copies"][0]["copies"] == 1000
    assert len(found["trace"]["steps"]) == 20
    assert found["verdict"].startswith("A step cannot")


def in_terminal(trace, **environment):
    """Return the command's output to a terminal."""
    with terminal(warm.command("-m", "pinstage", "trace", trace), **environment) as (main, process):
        shown = b""
        with suppress(OSError):  # the other end was closed
            while True:
                shown += os.read(main, 1 << 16)
        assert process.wait(60) == 0
    return shown.decode()


def test_a_terminal_gets_tables_with_colours(trace):
    pytest.importorskip("rich")
    text = in_terminal(trace)
    assert "\x1b[" in text
    assert "─" in text or "+--" in text  # as the locale's encoding allows
    assert "The GPU idles" in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_no_escapes(trace, environment):
    findings = in_terminal(trace, **environment)
    assert "\x1b" not in findings
    assert "The GPU idles" in findings


def test_a_reader_that_stops_reading_gets_no_traceback(tmp_path):
    # More JSON than a pipe holds.
    trace = naive_loop(steps=2000, leaves=1).write(tmp_path / "trace.json.gz")
    command = f"{shlex.join(warm.command('-m', 'pinstage', 'trace', trace, '--json'))} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"{\n", b"")
