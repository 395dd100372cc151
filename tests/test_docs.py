"""The documentation's snippets run as they stand, and its links to the changelog's names hold."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import pinstage

ROOT = Path(__file__).parents[1]


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_the_tutorial_runs_from_top_to_bottom(capsys):
    blocks = python_blocks(ROOT / "docs" / "tutorial.md")
    assert len(blocks) >= 7
    names = {"__name__": "tutorial"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"tutorial.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    shown = re.search(r"^```text\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown[1] in printed


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_of_use_run(page):
    names = {"__name__": "use", "loader": [{"x": torch.ones(3)}], "train_step": lambda batch: None}
    for block in python_blocks(ROOT / page):
        exec(compile(block.replace('"cuda:0"', '"cpu"'), page, "exec"), names)
    assert names["stager"].stats().batches == 1
    names["stager"].close()


def test_every_error_has_its_section():
    errors = (ROOT / "docs" / "errors.md").read_text()
    for name in pinstage.__all__:
        if name.endswith(("Error", "Warning")):
            assert f"\n## {name}\n" in errors, name


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_every_table_is_what_the_result_files_say(page):
    script = importlib.util.spec_from_file_location("markdown_tables", ROOT / "benchmarks" / "markdown.py")
    markdown = importlib.util.module_from_spec(script)
    script.loader.exec_module(markdown)
    text = (ROOT / page).read_text()
    assert markdown.filled(text) == text
    assert "| **pinstage** |" in text


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 100
