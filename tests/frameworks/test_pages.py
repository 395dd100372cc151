"""The snippets of the pages about frameworks run unchanged, and name existing programs."""

import re
import sys
from pathlib import Path

import pytest
from fences import blocks
from processes import output_of
from programs import EXAMPLES
from torchrun import environment

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "frameworks").glob("*.md"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem
)
def test_a_page_s_snippets_run_in_order(page, tmp_path):
    """In their own process: frameworks keep global state."""
    of_a_launcher = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # Lightning sets them.
    variables = {name: value for name, value in environment().items() if name not in of_a_launcher}
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    output_of([sys.executable, script], env=variables, cwd=tmp_path)


def test_the_pages_name_every_program():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"examples/frameworks/(train_\w+\.py)", page.read_text())
    }
    assert named == {path.name for path in EXAMPLES.glob("train_*.py")}


def test_the_first_page_s_table_is_complete():
    table = (ROOT / "docs" / "frameworks" / "index.md").read_text()
    assert all(f"]({page.name})" in table for page in PAGES if page.stem != "index")
