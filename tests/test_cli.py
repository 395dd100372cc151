"""The command: helpful texts, one message per failure, and no cost when the package is imported."""

from __future__ import annotations

import re
import sys

import pytest

import pinstage
from pinstage import _cli


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        _cli.main(arguments)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_help_teaches_the_first_lines_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--help") == 0
    text = capsys.readouterr().out
    for line in ('ps.Stager("cuda:0", max_bytes="2GiB")\n', "batch = stager.to_device(batch)\n"):
        assert line in text
    assert re.findall(r"^    (\w+)  ", text.partition("\ncommands:")[2], re.MULTILINE) == [
        "audit",
        "doctor",
        "trace",
        "top",
    ]


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main() == 2
    captured = capsys.readouterr()
    assert "audit" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("docter",), "no command 'docter' (choose from "),
        (("audit",), "missing TARGET; see pinstage audit --help"),
        (("trace",), "one of the arguments PATH --example is required; see"),
        (
            ("trace", "t.json", "--example"),
            "argument --example: not allowed with argument PATH; see",
        ),
        (
            ("trace", "t.json", "--step-ms", "fast"),
            "argument --step-ms: invalid float value: 'fast'",
        ),
        (("doctor", "--devcie", "cuda"), "unrecognized arguments: --devcie"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pinstage: {words}")
    assert captured.err.count("\n") == 1


def test_each_example_of_the_help_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_main("trace", "--help")
    examples = [line for line in capsys.readouterr().out.splitlines() if "pinstage trace" in line]
    assert [line.count("pinstage trace") for line in examples] == [1] * len(examples)
    assert len(examples) == 4  # the usage, and three examples


@pytest.mark.parametrize("arguments", [(), ("audit",), ("doctor",), ("trace",), ("top",)])
def test_sentences_of_the_help_fit_80_columns(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_main(*arguments, "-h") == 0
    text = capsys.readouterr().out
    assert "usage: pinstage" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("    ")) <= 80
    assert "\n    " in text  # examples keep their lines


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"pinstage {pinstage.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), "commands:"),
        (("audit", "torch:ones"), "missing"),
        (("doctor", "--no-measure"), "not measured"),
        (("trace", "--example"), "One slab would take"),
        (("top",), "HostBudget"),
    ],
)
def test_no_command_needs_an_extra(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("rich", "matplotlib"):
        for module in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        # The import system reads it as "not installed".
        monkeypatch.setitem(sys.modules, package, None)
    assert run_main(*arguments) == (2 if arguments[0] == "audit" else 0)
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
