"""The pages on audit, doctor and trace show the real output."""

import sys
import types
from pathlib import Path

import pytest
from fences import blocks, check_printed

from pinstage.__main__ import main
from pinstage.inspect._bus import REFERENCE
from pinstage.inspect._doctor import host_checks
from pinstage.inspect._trace import _analysis, _model

DOCS = Path(__file__).parents[2] / "docs"


DEFINITION = 'python title="weather.py"'


@pytest.fixture
def weather(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "weather.py").write_text(blocks(DOCS / "audit.md", DEFINITION)[0])
    yield
    sys.modules.pop("weather", None)


def test_the_audit_page_shows_what_the_command_prints(weather, capsys):
    (command,) = blocks(DOCS / "audit.md", "console")
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    (shown,) = blocks(DOCS / "audit.md", "text")
    check_printed(shown, capsys.readouterr().out)


def test_the_audit_page_s_program_runs(monkeypatch, capsys):
    (definition,) = blocks(DOCS / "audit.md", DEFINITION)
    (program,) = blocks(DOCS / "audit.md", "python")
    weather = types.ModuleType("weather")
    exec(compile(definition, "audit.md", "exec"), weather.__dict__)
    exec(compile(program, "audit.md", "exec"), {"make_batch": weather.make_batch})
    assert "weather.Sample stops it" in capsys.readouterr().out


def test_the_doctor_page_names_every_line_without_gpu(tmp_path):
    page = (DOCS / "doctor.md").read_text()
    for check in host_checks(tmp_path, {0, 1}):
        assert check.name in page, check.name


def test_the_trace_page_shows_the_example_s_output(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "--example"])
    (shown,) = blocks(DOCS / "trace.md", "text")
    assert capsys.readouterr().out.startswith(shown)


def test_the_model_s_figures_match_the_page():
    page = " ".join((DOCS / "trace.md").read_text().split())
    assert (
        f"{REFERENCE.fixed_seconds * 1e6:.0f} us, {REFERENCE.leaf_seconds * 1e6:.1f} us for each "
        "leaf" in page
    )
    assert f"its bytes at {REFERENCE.bytes_per_second / 1e9:.0f} GB/s" in page
    assert f"cost {_analysis.EVENT_UNITS} times that time, and a call of CUDA twice as much" in page
    assert f"within a factor of {_model.SPREAD:g}" in page
    assert f"at most {_model.MOST_LEAVES:,} copies and {_model.MOST_BYTES >> 20} MiB" in page
