"""`make test-frameworks` installs what `constraints.txt` pins; skipped tests and warnings fail."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from processes import completed

ROOT = Path(__file__).parents[2]
(SECTION,) = re.findall(
    r"^# frameworks\n(.*?)\n\n", (ROOT / "constraints.txt").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("pin", SECTION.splitlines())
def test_a_framework_is_installed_in_its_pinned_version(pin):
    name, _, version = pin.partition("==")
    assert metadata.version(name) == version


def test_torch_is_the_pinned_one():
    assert (
        f"torch=={torch.__version__.partition('+')[0]}"
        in (ROOT / "constraints.txt").read_text().splitlines()
    )


def test_skipped_and_warned_tests_fail(tmp_path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(
        "import pytest, warnings\n"
        "def test_a(): pytest.skip('why')\n"
        "def test_b(): warnings.warn('pinstage staged no batch')\n"
        "def test_c(): warnings.warn('something else')\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", tmp_path]
    done = completed([sys.executable, "-m", "pytest", *options])
    assert "2 failed, 1 passed" in done.stdout, done.stdout
