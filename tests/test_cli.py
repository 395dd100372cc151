"""The command's claims: it teaches, it fails with a message, and it costs an importer of the package nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import pinstage
from pinstage import _cli

pytest.importorskip("typer", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        _cli.main(arguments)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_help_teaches_the_first_lines_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--help") == 0
    text = capsys.readouterr().out
    for line in ('ps.Stager("cuda:0", max_bytes="2GiB")\n', "batch = stager.to_device(batch)\n", "pinstage doctor "):
        assert line in text
    assert re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.MULTILINE) == [
        "audit",
        "doctor",
        "trace",
        "top",
    ]


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main() == 2
    captured = capsys.readouterr()
    assert "pinstage audit" in captured.out + captured.err


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("docter") == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "path"), [("demo", "examples/demo"), ("bench", "benchmarks/comparison")])
def test_what_is_no_longer_a_command_says_where_it_is(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(command, "--smoke") == 2
    said = f"pinstage: {command} is no longer a command; in a clone of the repository: python {path}\n"
    assert capsys.readouterr().err == said
    assert (Path(__file__).parents[1] / path / "__main__.py").is_file()


@pytest.mark.parametrize("arguments", [(), ("audit",), ("doctor",), ("trace",)])
def test_h_is_help(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(*arguments, "-h") == 0
    assert "Usage: pinstage" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_it(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_PINSTAGE_COMPLETE", f"source_{shell}")
    assert run_main() == 0
    assert "_PINSTAGE_COMPLETE" in capsys.readouterr().out


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"pinstage {pinstage.__version__}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("audit", "train.py:make_loader"), ("trace", __file__)])
def test_without_an_extra_the_remedy_is_one_line_that_names_it(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "typer"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "typer", None)  # what the import system reads as "not installed"
    assert run_main(*arguments) == 2
    assert capsys.readouterr().err == 'pinstage: typer is not installed; run: pip install "pinstage[cli]"\n'
